"""Everything the command line takes and prints is described: in its help, in the reference pages, in schemas."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.main import get_command

from scripts.make_docs import PAGES
from scripts.make_schemas import RESULTS
from tracefit.cli import app

ROOT = Path(__file__).parents[2]
GROUP = get_command(app)
PARAMS = [(name, p) for name, c in GROUP.commands.items() for p in c.params]


@pytest.mark.parametrize(("command", "param"), PARAMS, ids=lambda v: getattr(v, "name", v))
def test_every_argument_and_option_has_help(command, param):
    assert param.help
    assert param.help.strip()


@pytest.mark.parametrize(("command", "param"), PARAMS, ids=lambda v: getattr(v, "name", v))
def test_every_argument_and_option_is_in_the_reference(command, param):
    page = (ROOT / "docs/reference/cli.md").read_text()
    sections = page.split("\n## tracefit ")
    (section,) = (
        (s for s in sections if s.startswith(f"{command}\n"))
        if param.name not in ("config", "log_level")
        else sections[:1]
    )
    wanted = f"`{param.opts[0]}`" if param.param_type_name == "option" else f"| {param.name.upper()}"
    assert wanted in section


@pytest.mark.parametrize("page", sorted(PAGES))
def test_reference_pages_are_what_make_docs_writes(page):
    assert (ROOT / "docs/reference" / page).read_text() == PAGES[page](), "run `make docs`"


@pytest.mark.parametrize(
    "code",
    [
        "0 done",
        "1 the data cannot support",
        "2 wrong usage",
        "3 done, but some data are missing or were left out",
    ],
)
def test_exit_code_is_in_the_help(code):
    assert code in " ".join(GROUP.help.split())


def test_every_command_that_prints_json_has_a_schema():
    printing = {name for name, p in PARAMS if "--json" in p.opts}
    assert printing == set(GROUP.commands)
    assert set(RESULTS) == printing


@pytest.fixture(scope="module")
def runs(tmp_path_factory, new_traces):
    root = tmp_path_factory.mktemp("runs")
    new_traces().load(steps=120, requests=60).write(root / "busy")
    return root


COMMANDS = {
    "run": ("{runs}", "--out", "{out}"),
    "inspect": ("{runs}",),
    "ingest": ("{runs}", "--out", "{out}/tables"),
    "train": ("{out}/tables", "--out", "{out}"),
    "report": ("{out}",),
    "requests": ("{out}/tables",),
    "requests --each": ("{out}/tables", "--each"),
    "ingest --dry-run": ("{runs}", "--out", "{out}/tables", "--dry-run"),
    "predict --prompt": ("{shipped}", "--deployment", "llama-3.1-8b", "--prompt", "800", "--output", "9"),
    "predict --rows": ("{shipped}/beta.json", "--deployment", "llama-3.1-8b", "--rows", "{out}/rows.csv"),
    "receive": ("--out", "{out}/traces", "--grpc-port", "0", "--http-port", "0", "--stop-after", "0.1s"),
    "features": ("batch",),
    "synth": ("--out", "{out}", "--requests", "3"),
    "predict": ("{shipped}", "--deployment", "llama-3.1-8b", "--batch", "32", "--context", "1500"),
    "compare": ("{shipped}", "{shipped}"),
    "replay": ("{trained}",),
    "plan": (
        "{trained}",
        "--rate",
        "30",
        "--servers",
        "2",
        "--slo",
        "ttft_p99=500",
        "--set",
        "num_gpu_blocks=4096",
    ),
    "plan --arrivals": ("{trained}", "--arrivals", "{out}/day.csv", "--slo", "e2e_p99=9000"),
    "transfer": (
        *(
            "{out}/tables",
            "--model-config",
            "{shipped}/../generated/llama-8b-linear/config.json",
            "--gpu",
            "H200",
            "--force",
        ),
        *("--out", "{out}/new"),
    ),
    "verify": ("{out}/beta.json", "--tables", "{out}/tables"),
    "export": ("{shipped}", "--to", "csv", "--deployment", "llama-3.1-8b", "--out", "{out}"),
}

_SLOW = {"run", "train", "report", "verify"}


def test_every_command_is_among_them():
    assert {name.split()[0] for name in COMMANDS} == set(GROUP.commands)


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] if c in _SLOW else []) for c in COMMANDS],
)
def test_json_is_what_its_schema_says(tracefit, tmp_path, runs, quick, trained, command):
    def call(name):
        arguments = [
            a.format(runs=runs, out=tmp_path, shipped=ROOT / "fixtures/models", trained=trained) for a in COMMANDS[name]
        ]
        return tracefit(name.split()[0], *arguments, *(quick if name in ("run", "train") else ()), "--json")

    (tmp_path / "rows.csv").write_text(
        "num_prefill_reqs,prefill_tokens,num_decode_reqs,decode_tokens,context_tokens,prefill_context_tokens\n0,0,3,3,1500,0\n"
    )
    (tmp_path / "day.csv").write_text("timestamp,prompt_tokens,output_tokens\n1,50,9\n9000,50,9\n9001,,9\n")
    if command == "report":
        call("run")
    if command in ("train", "verify", "requests", "requests --each"):
        call("ingest")
    if command == "verify":
        call("train")
    if command == "transfer":
        tracefit("ingest", ROOT / "fixtures/generated/llama-8b-linear", "--out", tmp_path / "tables")
    code, out, _ = call(command)
    said = json.loads(out)
    schema = json.loads((ROOT / f"schemas/results/{command.split()[0]}.schema.json").read_text())
    jsonschema.Draft202012Validator(schema, format_checker=None).validate(said)
    if isinstance(said, dict) and "exit_code" in said:
        assert said["exit_code"] == code
        del said["exit_code"]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(said, schema)
