"""The wheel in an environment of its own, outside the checkout: the main job runs and leaves its report."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tracefit import evaluator
from tracefit._version import __version__

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_{kind}(sys.argv[1]))"


def _run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the source distribution of the checkout, and from that alone the wheel."""
    root = tmp_path_factory.mktemp("dist")
    tracked = _run("git", "ls-files", "-z", "pipeline", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT)
    for name in tracked.rstrip("\0").split("\0"):
        (root / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "tree" / name).write_bytes((ROOT / name).read_bytes())
    _run(sys.executable, "-c", BUILD.format(kind="sdist"), root, cwd=root / "tree")
    (packed,) = root.glob("*.tar.gz")
    _run("tar", "xzf", packed, cwd=root)
    _run(sys.executable, "-c", BUILD.format(kind="wheel"), root, cwd=root / packed.name.removesuffix(".tar.gz"))
    (built,) = root.glob("*.whl")
    return built


def test_all_distributions_have_one_version_and_the_changelog_begins_with_it():
    stated = {
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["version"]
        for folder in ("pipeline/tracefit-evaluator", "pipeline/tracefit-vllm")
    }
    assert stated == {__version__}
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert changes.startswith(f"# Changelog\n\n## {__version__}\n")
    assert len(changes) < 5_000, "a page"


@pytest.mark.slow
def test_the_evaluator_is_a_distribution_of_its_own(tmp_path):
    """One module without dependencies, of 20 kB, that evaluates a file as tracefit does."""
    source = shutil.copytree(
        ROOT / "pipeline/tracefit-evaluator",
        tmp_path / "tree/tracefit-evaluator",
        ignore=shutil.ignore_patterns("tracefit_evaluator.py", "build", "*.egg-info"),
    )
    assert not any(path.is_symlink() for path in source.rglob("*")), "an archive of the tree may lose a link"
    original = tmp_path / "tree/tracefit/evaluator.py"
    original.parent.mkdir()
    shutil.copy(ROOT / "pipeline/tracefit/evaluator.py", original)
    _run(sys.executable, "-c", BUILD.format(kind="sdist"), tmp_path, cwd=source)
    shutil.rmtree(tmp_path / "tree")
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        archive.extractall(tmp_path / "unpacked")  # noqa: S202 - it was packed here
    (source,) = (tmp_path / "unpacked").iterdir()
    _run(sys.executable, "-c", BUILD.format(kind="wheel"), tmp_path, cwd=source)
    (built,) = tmp_path.glob("*.whl")
    assert built.stat().st_size < 20_000
    with zipfile.ZipFile(built) as packed:
        names = packed.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        assert "Requires-Dist" not in message_from_bytes(packed.read(metadata))
        assert [name for name in names if name.endswith(".py")] == ["tracefit_evaluator.py"]
        packed.extractall(tmp_path / "lib")  # noqa: S202 - a wheel built here
    code = """if True:
        from tracefit_evaluator import load, predict
        model = load("beta.json", "beta.cycle_time", deployment="codellama-34b")
        print(predict(model, {"num_decode_reqs": 80, "num_prefill_reqs": 0, "prefill_tokens": 0}))"""
    shutil.copy(ROOT / "models/beta.json", tmp_path / "lib")
    printed = _run(sys.executable, "-S", "-c", code, cwd=tmp_path / "lib")
    model = evaluator.load(ROOT / "models/beta.json", "beta.cycle_time", deployment="codellama-34b")
    batch = {"num_decode_reqs": 80, "num_prefill_reqs": 0, "prefill_tokens": 0}
    assert float(printed) == evaluator.predict(model, batch)


def _opens(page, folder):
    """Open the page in a browser where there is one, and else read it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    text = page.read_text()
    if browser is not None:
        options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}")
        text = _run(browser, *options, "--dump-dom", page.as_uri(), cwd=folder)
    assert "codellama-34b" in text
    assert "</html>" in text


@pytest.mark.slow
def test_the_wheel_runs_the_main_job_outside_the_checkout(tmp_path, wheel):
    """Libraries come from the environment of the tests, so that no index is needed; tracefit comes only from the
    wheel."""
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    _run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    libraries = Path(sysconfig.get_path("purelib"))
    own = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    for library in libraries.iterdir():
        if "tracefit" not in library.name and not library.name.endswith(".pth") and not (own / library.name).exists():
            (own / library.name).symlink_to(library)
    tool = tmp_path / "venv/bin/tracefit"
    where = _run(python, "-c", "import tracefit; print(tracefit.__file__)", cwd=tmp_path)
    assert where.startswith(str(own))
    assert _run(tool, "--version", cwd=tmp_path).split() == ["tracefit", wheel.name.split("-")[1]]
    _run(tool, "run", ROOT / "fixtures/runs/h100-codellama-34b-tp2-general", "--out", "out", cwd=tmp_path)
    (model,) = json.loads((tmp_path / "out/models/beta.json").read_text())["models"]
    (shipped,) = (
        m for m in json.loads((ROOT / "models/beta.json").read_text())["models"] if "codellama" in m["deployment_id"]
    )
    assert model["intercept"]["value"] == pytest.approx(shipped["intercept"]["value"], rel=1e-6)
    _opens(tmp_path / "out/report.html", tmp_path)


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tracked = _run("git", "ls-files", "pipeline/tracefit", cwd=ROOT).split()
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {name.removeprefix("pipeline/") for name in tracked}
    assert "tracefit/py.typed" in inside


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    said = message_from_bytes(archive.read(name))
    assert said["Requires-Python"] == ">=3.11"
    assert {line.split(", ")[0] for line in said.get_all("Project-URL")} >= {"Tracing fork of vLLM"}
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert {"report", "receive", "all"} <= set(said.get_all("Provides-Extra"))
