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
from tracefit.fit.alpha import ALPHA_FORMS
from tracefit.models.describe import STEP_VALUES
from tracefit.models.targets import TARGETS
from tracefit.tables.schema import REQUESTS, TIMELINE

ROOT = Path(__file__).parents[1]
TEXT = "\n".join((ROOT / page).read_text() for page in ("CONTRIBUTING.md", "docs/maintaining.md"))
PACKAGE = ROOT / "pipeline/tracefit"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_it_opens_with_five_lines():
    assert re.findall(r"^(\d)\. ", TEXT.partition("\n## ")[0], re.MULTILINE) == list("12345")


def test_every_room_is_in_the_layout():
    assert set(re.findall(r"^\| `(\w+)/` \|", TEXT, re.MULTILINE)) == ROOMS


def test_every_room_is_in_the_picture():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    picture, *_ = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert {room for room in ROOMS if not re.search(rf"\b{room}\b", picture)} == set()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:pipeline|docs|tests|fixtures)/[\w./-]*)`", TEXT))))
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
        assert set(target.forms) <= ALPHA_FORMS.keys()
        assert {target.column, target.begins, target.step} <= set(REQUESTS.names)


def test_columns_of_a_described_step_are_declared():
    assert set(STEP_VALUES) - set(TIMELINE.names) == set()


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
    "a container": {
        "pipeline/tracefit/inputs/containers/boxes.py": (
            "",
            """
from tracefit.inputs.containers.base import Container, register
from tracefit.inputs.containers.elements import joined, lines_in


def _read(content, most_bytes):
    return joined(line.removeprefix(b"box: ") + b"\\n" for line in lines_in(content, most_bytes))


FORMAT = register(
    Container(
        name="boxes",
        title="boxes",
        holds="all",
        version="1",
        source="https://example.org",
        find=lambda head: head.startswith(b"box: "),
        read=_read,
    )
)
""",
        ),
        "pipeline/tracefit/inputs/containers/__init__.py": ('for _name in ("lines", ', '"boxes", '),
    },
    "a recording": {
        "pipeline/tracefit/recordings/calls.py": (
            "",
            """
import json

import polars as pl

from tracefit.inputs.formats import Recording, register
from tracefit.inputs.framing import records
from tracefit.recordings.blocks import RecordedBlock
from tracefit.recordings.requests import as_spans
from tracefit.tables.dialects import LOG_SCOPE
from tracefit.tables.rows import RECORDED_STEPS


def decode(block, payload, rejects):
    calls = []
    for line in records(payload, "lines"):
        try:
            call = json.loads(line.payload)
            calls.append((block.offset + line.offset, call["call"], call["at_ns"], call["took_ns"], call["prompt"]))
        except (ValueError, KeyError, TypeError):
            rejects.add(line.offset, line.payload, "no call")
    names = ("source_offset", "gen_ai.request.id", "start_unix_ns", "took_ns", "gen_ai.usage.prompt_tokens")
    requests = pl.DataFrame(calls, names, orient="row").with_columns(
        end_unix_ns=pl.col("start_unix_ns") + pl.col("took_ns"), error=pl.lit(value=False)
    )
    spans = as_spans(requests, LOG_SCOPE, (names[1], names[4]))
    return RecordedBlock(pl.DataFrame(schema=RECORDED_STEPS).drop("file"), spans)


def find(head):
    return ("lines", "json") if head.startswith(b'{"call"') else None


register(Recording("calls", "calls", find, "requests", "ns", "the wall clock", decode=decode))
""",
        )
    },
    "a recording of steps": {
        "pipeline/tracefit/recordings/ticks.py": (
            "",
            """
import json

import polars as pl

from tracefit.inputs.formats import Recording, register
from tracefit.recordings.blocks import RecordedBlock
from tracefit.tables.rows import RECORDED_STEPS
from tracefit.tables.sources import CycleSource, declare

STEPS = declare(
    CycleSource(
        name="ticks", recorder="ticks of an engine", interval="a tick to the next", error="3 us", evidence="ticks",
        sd_us=3.0, notes=("ticks are an example",),
    )
)


def decode(block, payload, rejects):
    rows = [json.loads(line) for line in payload.splitlines()]
    columns = {name: kind for name, kind in RECORDED_STEPS.items() if name != "file"}
    steps = pl.DataFrame(rows, columns).with_columns(server=pl.lit("s"), cycle_source=pl.lit(STEPS.name))
    return RecordedBlock(steps)


def find(head):
    return ("lines", "json") if head.startswith(b'{"step_id"') else None


register(Recording("ticks", STEPS.recorder, find, "steps", "us", "none", decode=decode, sources=(STEPS.name,)))
""",
        )
    },
    "a GPU": {
        "pipeline/tracefit/server/hardware.py": (
            "MI355X               sheet    2517    5033  10066  288  8000  1075  256  mi355x / oam vf hbm3e 288\n",
            "ACME-X1              sheet    4000    8000      -  100  9000     -  200  acmex1 / 100\n",
        )
    },
    "a server setting": {
        "pipeline/tracefit/server/settings.py": (
            "    max_num_seqs: OptionalCount = None\n",
            "    max_num_partial_prefills: OptionalCount = None\n",
            "        max_num_seqs: Most requests in one step.\n",
            "        max_num_partial_prefills: An example.\n",
            """ALIASES: Mapping[str, str] = {\n""",
            """    "partial_prefills": "max_num_partial_prefills",\n""",
        ),
        "pipeline/tracefit/server/server_log.py": (
            """_OF_ENGINE = (\n""",
            """    "max_num_partial_prefills",\n""",
        ),
    },
    "a command": {
        "pipeline/tracefit/commands/count.py": (
            "",
            """
from tracefit.coefficients.models import load
from tracefit.results.count import ModelCount


def count(models):
    return ModelCount(len(load(models).deployment_ids))
""",
        ),
        "pipeline/tracefit/results/count.py": (
            "",
            """
from dataclasses import dataclass

from tracefit.errors import EXIT_DONE


@dataclass(frozen=True)
class ModelCount:
    models: int

    @property
    def exit_code(self):
        return EXIT_DONE
""",
        ),
        "pipeline/tracefit/__init__.py": (
            '    "compare": "tracefit.commands.compare",\n',
            '    "count": "tracefit.commands.count",\n',
            '    "compare",\n',
            '    "count",\n',
        ),
        "pipeline/tracefit/cli/commands.py": (
            "help and completion must not wait for polars.\n",
            """

@command("count {models}")
def count(terminal: Terminal, models: ModelsArgument) -> tuple[object, str]:
    \"\"\"Count models.\"\"\"
    from tracefit.reports.terminal_results import count_text

    result = tracefit.count(models)
    return result, count_text(result)
""",
        ),
        "pipeline/tracefit/reports/terminal_results.py": (
            "from __future__ import annotations\n",
            """

def count_text(result):
    return f"{result.models} models"


""",
        ),
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
from tracefit import ServerOptions, ingest, run
from tracefit.coefficients.files import read_evaluation
from tracefit.options import TrainOptions
from tracefit.diagnostics.deployment import diagnose
from tracefit.reports.figures.deployment import deployment_figures
from tracefit.server.settings import read_settings
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

acme, boxes, calls, ticks, out = map(Path, sys.argv[1:])
busy = write_run(synth(SynthOptions(requests=150)), out)
with (busy / "run.yaml").open("a") as stream:
    stream.write("partial-prefills: 4\\n")
server = ServerOptions(gpu="Acme X1 100GB")
run([busy], out, server=server, options=TrainOptions(fast=True, features="batch"))
ingest([acme], out / "acme")
ingest([boxes], out / "boxes")
called = ingest([calls], out / "calls")
run([ticks], out / "ticks", options=TrainOptions(fast=True, features="batch"))
Path("server.log").write_text(
    "INFO non-default args: {'model': 'm', 'max_num_partial_prefills': 5}\\n"
    "INFO Initializing a V1 LLM engine (v0.32.0) with config: model='m', max_num_partial_prefills=6, dtype=torch.float16\\n"
)
Path("serve.sh").write_text("vllm serve m --max-num-partial-prefills 7")
(beta,) = json.loads((out / "ticks/models/beta.json").read_text())["models"]
(own,) = [one for one in json.loads((out / "models/beta.json").read_text())["models"] if one["name"] == "beta.cycle_time"]
facts = own["deployment"]
store = TableStore(out / "tables")
(deployment,) = read_evaluation(out / "evaluation.json").deployments
figures = deployment_figures(diagnose(deployment, (), store), points=10).by_name()
print(json.dumps({
    "a feature": "ended_twice" in store.read("beta_training").columns,
    "a dialect": TableStore(out / "acme").read("requests").select("prompt_tokens", "ttft_us").rows(),
    "a container": TableStore(out / "boxes").read("requests").select("prompt_tokens", "ttft_us").rows(),
    "a recording": TableStore(out / "calls").read("requests").select("request_id", "prompt_tokens").rows(),
    "its rejects": called.runs[0].rejects,
    "a recording of steps": TableStore(out / "ticks/tables").read("timeline").select(
        "step_id", "cycle_us", "cycle_source", "cycle_sd_us").head(2).rows(),
    "its model": [
        beta["target"]["definition"], beta["notes"], {term["feature"]: term["value"] for term in beta["terms"]}],
    "a GPU": facts["hardware"],
    "a server setting": [facts["settings"]["max_num_partial_prefills"], *(
        read_settings(Path(name)).max_num_partial_prefills for name in ("server.log", "serve.sh"))],
    "a target": [model["name"] for model in json.loads((out / "models/alpha.json").read_text())["models"]],
    "its figure": [bars["name"] for bars in figures["first-token"].traces],
    "a step column": store.read("timeline")["num_finished"].sum(),
}))
"""


def _ticks(number):
    """Return records of steps whose time is a line in their prompt tokens and requests."""
    steps = [(n, (n * 37) % 29 * 16 if n % 3 == 0 else 0, 1 + (n * 11) % 23) for n in range(1, number + 1)]
    return [
        {
            "step_id": n,
            "unix_ns": 1_700_000_000 * 10**9 + n * 10**7,
            "cycle_us": 5_000.0 + 20.0 * prefill + 30.0 * decodes,
            "num_prefill_reqs": int(prefill > 0),
            "prefill_tokens": prefill,
            "num_decode_reqs": decodes,
            "decode_tokens": decodes,
            "scheduled_tokens": prefill + decodes,
            "running_depth": decodes + int(prefill > 0),
            "waiting_depth": 0,
            "context_tokens": 100 * decodes,
            "prefill_context_tokens": 0,
        }
        for n, prefill, decodes in steps
    ]


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

    (written,) = (tmp_path / "acme").glob("traces*")
    boxed = "".join(f"box: {line}\n" for line in written.read_text().splitlines())
    (tmp_path / "boxes").write_text(boxed)

    times = {"at_ns": 1_700_000_000 * 10**9, "took_ns": 10**9, "prompt": 70}
    lines = [json.dumps({"call": f"c{number}", **times}) for number in range(3)]
    (tmp_path / "calls").write_text("\n".join([*lines[:2], '{"call": 7}', lines[2], ""]))
    (tmp_path / "ticks").write_text("".join(f"{json.dumps(tick)}\n" for tick in _ticks(600)))

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

    found = json.loads(call("-c", JOB, "acme", "boxes", "calls", "ticks", "out").splitlines()[-1])
    assert found["a feature"]
    assert found["a dialect"] == found["a container"] == [[70, 55_000.0]]
    assert found["a recording"] == [[f"c{number}", 70] for number in range(3)]
    assert found["its rejects"] == 1
    ticks = found["a recording of steps"]
    assert ticks == [[tick["step_id"], tick["cycle_us"], "ticks", 3.0] for tick in _ticks(2)]
    definition, notes, terms = found["its model"]
    assert definition == "a tick to the next"
    assert "ticks are an example" in notes
    assert terms["prefill_tokens"] == pytest.approx(20.0, rel=0.01)
    assert "a tick to the next" in (tmp_path / "out/ticks/report.html").read_text()
    assert re.search(r"step times? .*\b600 ticks", call("-m", "tracefit.cli", "inspect", "ticks"), re.DOTALL)
    assert found["a GPU"]["gpu"] == "ACME-X1"
    assert found["a GPU"]["memory_bandwidth_gb_s"] == 9000
    assert found["a server setting"] == [4, 5, 7]
    call("-m", "tracefit.cli", "export", "out", "--to", "blis", "--out", "blis")
    assert json.loads((tmp_path / "blis/hardware_config.json").read_text()).keys() == {"ACME-X1"}
    assert call("-m", "tracefit.cli", "count", "out/ticks") == "1 models\n"
    assert json.loads(call("-m", "tracefit.cli", "count", "out/ticks", "--json"))["models"] == 1
    assert "alpha.execution" in found["a target"]
    assert "execution" in found["its figure"]
    assert found["a step column"] > 0
    call("-m", "tracefit.cli", "export", "out", "--to", "names", "--out", "names")
    predict = ("-m", "tracefit.cli", "predict", "out", "--prompt", "50", "--output", "9")
    assert json.loads(call(*predict, "--json"))["overheads"]["execution"]["value_us"] > 0
    assert re.search(r"^execution +\d", call(*predict), re.MULTILINE)
    assert "alpha.execution" in (tmp_path / "names/names.txt").read_text()
    assert "ended_twice" in call("-m", "tracefit.cli", "features")
