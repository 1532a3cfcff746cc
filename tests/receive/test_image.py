"""The container image and the compose example, as far as they can be checked without a builder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from tracefit.cli import app
from tracefit.server import settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
STAGES = [stage.splitlines() for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]]


def words(stage, instruction):
    return [line.partition(" ")[2] for line in stage if line.startswith(f"{instruction} ")]


def test_one_stage_builds_the_wheel_and_a_slim_one_runs_it():
    build, final = STAGES
    assert build[0].endswith("AS build")
    assert all("-slim" in stage[0] for stage in STAGES)
    assert any("pip wheel" in run for run in words(build, "RUN"))
    assert any("--from=build" in copy for copy in words(final, "COPY"))
    assert words(final, "ENTRYPOINT") == ['["tracefit"]']


def test_it_does_not_run_as_root():
    final = STAGES[-1]
    (user,) = words(final, "USER")
    assert int(user) > 0
    lines = [line.split(" ")[0] for line in final]
    assert lines.index("USER") > max(n for n, word in enumerate(lines) if word in ("RUN", "COPY"))


def test_what_is_copied_is_there_and_in_the_context():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for stage in STAGES:
        for copy in words(stage, "COPY"):
            if "--from" not in copy:
                for source in copy.split()[:-1]:
                    assert (ROOT / source).exists()
                    assert source in allowed


def test_the_versions_of_the_image_are_those_of_the_lock_file():
    """The image's own sed line, run on the lock file."""
    (line,) = (run for run in words(STAGES[-1], "RUN") if "requirements.lock" in run)
    command = line.partition(" > ")[0].replace("/tmp/requirements.lock", str(ROOT / "requirements.lock"))  # noqa: S108
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) > 30
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", version) for version in found)
    names = {version.partition("==")[0] for version in found}
    assert {"grpcio", "h11", "googleapis-common-protos", "polars", "opentelemetry-proto"} <= names


def test_the_receiver_of_the_example_takes_its_command_line():
    """As the shell of compose fills in its variables."""
    service = COMPOSE["services"]["receive"]
    command, *arguments = service["command"]
    values = {"MODEL:?the model to serve": "some/model", "GPU:-H100": "H100"}
    arguments = [re.sub(r"\$\{(.*?)\}", lambda found: values[found[1]], one) for one in arguments]
    context = get_command(app).commands[command].make_context(command, arguments)
    assert (context.params["model"], context.params["gpu"]) == ("some/model", "H100")
    assert "ports" not in service, "without TLS, it is only for the server beside it"
    assert COMPOSE["networks"]["traces"]["internal"]


def test_image_can_write_to_the_documented_mounts():
    """A named volume begins as the image's folder, with its owner; a folder of the host needs the host's user."""
    (install,) = re.findall(r"install --directory --owner=(\w+) (\S+)", DOCKERFILE)
    (user,) = re.findall(r"useradd --create-home --uid (\d+) (\w+)", DOCKERFILE)
    final = STAGES[-1]
    assert (user[1], words(final, "USER"), words(final, "WORKDIR")) == (install[0], [user[0]], [install[1]])
    service = COMPOSE["services"]["receive"]
    assert "user" not in service
    assert [mount.split(":")[1:] for mount in service["volumes"]] == [[install[1]]]
    assert {mount.split(":")[0] for mount in service["volumes"]} == set(COMPOSE["volumes"])
    pages = [ROOT / "Dockerfile", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    mounting = [c for page in pages for c in re.findall(r"docker run [^`\n]*-v [^`\n]*", page.read_text())]
    assert mounting
    assert all('--user "$(id -u):$(id -g)"' in command for command in mounting)


@pytest.mark.slow
def test_health_check_of_the_example_needs_a_receiver(start, tmp_path):
    service = COMPOSE["services"]["receive"]
    receiver = start(tmp_path)
    _, python, *arguments = service["healthcheck"]["test"]
    assert python == "python"
    check = [sys.executable, *(a.replace(":4318/", f":{receiver.http_port}/") for a in arguments)]
    assert subprocess.run(check, check=False).returncode == 0
    receiver.end()
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0
    assert service["restart"] == "unless-stopped"


def test_example_server_uses_stock_flags_alone():
    """Stock vLLM refuses to start with flags of its fork; it sends one span per request, which the endpoint turns
    on."""
    service = COMPOSE["services"]["vllm"]
    assert service["image"].startswith("vllm/vllm-openai:")
    flags = {argument.partition("=")[0]: argument.partition("=")[2] for argument in service["command"]}
    of_the_fork = set(f"{settings.STEP_FLAGS} {settings.JOURNEY_FLAGS} {settings.SNAPSHOT_FLAG}".split())
    assert flags.keys().isdisjoint(of_the_fork)
    assert flags[settings.ENDPOINT_FLAG] == "http://receive:4317"
    assert service["environment"]["OTEL_EXPORTER_OTLP_TRACES_INSECURE"] == "true"


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))])
def test_serve_lines_in_docs_mark_flags_of_the_fork(page):
    before, *blocks = re.split(r"```bash\n", (ROOT / page).read_text())
    for block in blocks:
        code, _, after = block.partition("```")
        if "--step-tracing" in code or "--enable-journey-tracing" in code:
            assert "inference-sim" in before[-600:]
        before = after


@pytest.mark.slow
def test_the_image_is_built_and_speaks():
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no container builder here")
    subprocess.run(["docker", "build", "-t", "tracefit-test", ROOT], check=True)
    said = subprocess.run(
        ["docker", "run", "--rm", "tracefit-test", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("tracefit ")
