"""CONTRIBUTING says what is there: rooms, files, targets of the Makefile, commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tracefit.features.sets import BUILT_IN
from tracefit.fit.alpha import FORMS
from tracefit.models.describe import STEP_COLUMNS
from tracefit.models.targets import TARGETS
from tracefit.tables.schema import REQUESTS, TIMELINE

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGE = ROOT / "pipeline/tracefit"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_it_opens_with_five_lines():
    assert re.findall(r"^(\d)\. ", TEXT.partition("\n## ")[0], re.MULTILINE) == list("12345")


def test_every_room_is_in_the_layout():
    assert set(re.findall(r"^\| `(\w+)/` \|", TEXT, re.MULTILINE)) == ROOMS


def test_every_room_is_in_the_picture():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    (picture,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert {room for room in ROOMS if not re.search(rf"\b{room}\b", picture)} == set()


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:pipeline|docs|tests|fixtures)/[\w./-]*)`", TEXT)))
)
def test_the_files_it_names_are_there(path):
    assert (ROOT / path).exists()


def test_the_files_a_json_line_passes_are_there():
    (sentence,) = re.findall(r"A JSON line becomes rows in (.*?), in this order", TEXT, re.DOTALL)
    files = re.findall(r"`([\w/]+\.py)`", sentence)
    assert len(files) > 3
    assert [file for file in files if not (PACKAGE / file).exists()] == []


def test_the_make_targets_it_names_are_there():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in re.findall(r"`make ([a-z -]+)", TEXT) for word in words.split()}
    assert named - targets == set()


def test_what_a_target_declares_is_in_the_files_named_beside_it():
    for target in TARGETS:
        assert target.feature_set in BUILT_IN
        assert set(target.forms) <= FORMS.keys()
        assert {target.column, target.begins, target.step} <= set(REQUESTS.names)


def test_columns_of_a_described_step_are_declared():
    assert set(STEP_COLUMNS) - set(TIMELINE.names) == set()


# -- an example of each row of the table, really added ---------------------------------------------------

EXAMPLES = {
    "a feature": {
        "pipeline/tracefit/features/sets.py": (
            "| prefill is bound by compute per token\n",
            "+ ended_twice | request | an example | 2 * num_finished\n",
        )
    },
    "a dialect": {
        "pipeline/tracefit/tables/dialects.py": (
            '    *_stock("vllm.llm_engine"),\n',
            """
    Spelling("acme", "acme", "generate", None, "acme.id", "requests", "request_id"),
    Spelling("acme", "acme", "generate", None, None, "requests", "arrival_ns", "start"),
    Spelling("acme", "acme", "generate", None, "acme.prompt", "requests", "api_prompt_tokens"),
    Spelling("acme", "acme", "generate", None, "acme.first_ms", "requests", "ttft_us", factor=1e3),
""",
        )
    },
    "a recording": {
        "pipeline/tracefit/recordings/ticks.py": (
            "",
            """
import json

import polars as pl

from tracefit.inputs.formats import Recording, register
from tracefit.tables.rows import RECORDED_STEPS


def decode(block, payload, *, show_values, max_rejects):
    found = [json.loads(line) for line in payload.splitlines()]
    rows = [{"server": "s", "step_id": r["tick"], "cycle_us": r["us"], "cycle_source": "ticks"} for r in found]
    return pl.DataFrame(rows, {n: t for n, t in RECORDED_STEPS.items() if n != "file"}), [], None, list


def find(head):
    return ("lines", "json") if head.startswith(b'{\"tick\"') else None


register(Recording("ticks", "ticks", find, "steps", "us", "none", decode=decode))
""",
        )
    },
    "a consumer": {
        "pipeline/tracefit/consumers/names.py": (
            "",
            """
from tracefit.consumers.base import Export


def to_names(source):
    return Export({"names.txt": " ".join(source.models.models)}, ())
""",
        ),
        "pipeline/tracefit/consumers/__init__.py": (
            "from tracefit.consumers.llmd_sim import to_llmd_sim\n",
            "from tracefit.consumers.names import to_names\n",
            "CONSUMERS: Mapping[str, Callable[[Source], Export]] = {\n",
            '    "names": to_names,\n',
        ),
    },
    "a target": {
        "pipeline/tracefit/models/targets.py": (
            "TARGETS: tuple[Target, ...] = (\n",
            """
    Target("execution", "execution", "time in the engine", "first SCHEDULED to FIRST_TOKEN", "prefill_us",
           "first_scheduled_ns", "first_scheduled_step", "execution", adds_to="ttft"),
""",
        ),
        "pipeline/tracefit/features/sets.py": (
            "_BUILT_IN = (",
            'FeatureSet("execution", _features("prompt_tokens | token | an example")), ',
        ),
    },
    "a step column": {
        "pipeline/tracefit/tables/schema.py": (
            '        _n("running_after", "requests still running once the step\'s outputs are processed"),\n',
            '        _i("num_finished", "an example"),\n',
        ),
        "pipeline/tracefit/models/describe.py": (
            '    "waiting_depth": "waiting",\n',
            '    "num_finished": "batch / 100",\n',
        ),
    },
}
"""Row of the table to the files that the example edits: pieces of their text, each with what is put behind it."""

JOB = """
import json, sys
from pathlib import Path
from tracefit import ingest, run
from tracefit.coefficients.files import read_evaluation
from tracefit.options import TrainOptions
from tracefit.diagnostics.deployment import diagnose
from tracefit.reports.figures.deployment import deployment_figures
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

acme, ticks, out = map(Path, sys.argv[1:])
busy = write_run(synth(SynthOptions(requests=150)), out)
run([busy], out, options=TrainOptions(fast=True, features="batch"))
ingest([acme], out / "acme")
ingest([ticks], out / "ticks")
store = TableStore(out / "tables")
(deployment,) = read_evaluation(out / "evaluation.json").deployments
figures = deployment_figures(diagnose(deployment, (), store), points=10).by_name()
print(json.dumps({
    "a feature": "ended_twice" in store.read("beta_training").columns,
    "a dialect": TableStore(out / "acme").read("requests").select("prompt_tokens", "ttft_us").rows(),
    "a recording": TableStore(out / "ticks").read("timeline").select("step_id", "cycle_us", "cycle_source").rows(),
    "a target": [model["name"] for model in json.loads((out / "models/alpha.json").read_text())["models"]],
    "its figure": [bars["name"] for bars in figures["first-token"].traces],
    "a step column": store.read("timeline")["num_finished"].sum(),
}))
"""


def test_each_row_of_the_table_has_an_example():
    rows = dict(re.findall(r"^\| (an? [\w ]+?) \|(.*?)\|", TEXT, re.MULTILINE))
    assert rows.keys() == EXAMPLES.keys()
    for task, files in EXAMPLES.items():
        named = tuple(re.findall(r"`(pipeline/[\w./]+)`", rows[task]))
        assert [path for path in files if not path.startswith(named)] == []


@pytest.mark.slow
def test_the_files_named_are_enough_to_add_one_of_each(tmp_path, traces):
    shutil.copytree(PACKAGE, tmp_path / "pipeline/tracefit", ignore=shutil.ignore_patterns("__pycache__"))
    for files in EXAMPLES.values():
        for name, edits in files.items():
            path = tmp_path / name
            for piece, added in zip(edits[::2], edits[1::2], strict=True):
                text = path.read_text() if piece else ""
                assert text.count(piece) == 1, f"{name}: the example is put behind a text that is there once"
                path.write_text(text.replace(piece, piece + added))
    facts = {"acme.id": "r1", "acme.prompt": 70, "acme.first_ms": 55.0}
    traces.span("acme", "generate", (1, 1, 0), [], attributes=facts).write(tmp_path / "acme", config=False)

    (tmp_path / "ticks").write_text('{"tick": 1, "us": 70.0}\n{"tick": 2, "us": 80.0}\n')

    def call(*command):
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "pipeline")}
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = json.loads(call("-c", JOB, "acme", "ticks", "out").splitlines()[-1])
    assert found["a feature"]
    assert found["a dialect"] == [[70, 55_000.0]]
    assert found["a recording"] == [[1, 70.0, "ticks"], [2, 80.0, "ticks"]]
    assert "alpha.execution" in found["a target"]
    assert "execution" in found["its figure"]
    assert found["a step column"] > 0
    call("-m", "tracefit.cli", "export", "out", "--to", "names", "--out", "names")
    predict = ("-m", "tracefit.cli", "predict", "out", "--prompt", "50", "--output", "9")
    assert json.loads(call(*predict, "--json"))["overheads"]["execution"]["value_us"] > 0
    assert re.search(r"^execution +\d", call(*predict), re.MULTILINE)
    assert "alpha.execution" in (tmp_path / "names/names.txt").read_text()
    assert "ended_twice" in call("-m", "tracefit.cli", "features")
