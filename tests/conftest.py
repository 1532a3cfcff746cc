"""Traces written by hand: OTLP spans as a vLLM server would export them, one request or step at a time.

Independent of the project's own generator: what a test expects of a trace can be read off the test.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from msgspec.structs import replace

# One thread per worker of the suite: on two cores, threads that wait for each other cost more than the tests.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
os.environ["OPENBLAS_NUM_THREADS"] = os.environ.get("OPENBLAS_NUM_THREADS", "1")
os.environ["POLARS_MAX_THREADS"] = os.environ.get("POLARS_MAX_THREADS", "1")

import numpy as np
import polars as pl
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings

from containers import to_protobuf
from together import Tables, composed_by
from tracefit.cli import main
from tracefit.commands.ingest import ingest
from tracefit.commands.train import run
from tracefit.errors import TracefitError
from tracefit.options import BuildLimits, IngestOptions, TrainOptions
from tracefit.server.architecture import Attention, Experts, Layer, LayerState, ModelArchitecture
from tracefit.server.hardware import Gpu
from tracefit.server.model_config import parse_architecture
from tracefit.tables.store import TableStore

BOOT_UNIX_NS = 1_700_000_000_000_000_000
"""Wall-clock time at which the engine's monotonic clock is 0."""

CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}
"""Llama 2 7B: 6.74e9 parameters."""

RUN_CONFIG = "model: meta-llama/Llama-2-7b-hf\ntensor_parallelism: 1\nmax_num_seqs: 64\nmax_num_batched_tokens: 2048\n"

QUICK_CPU_S = 3.0
"""A test that takes longer is named at the end of a run unless it is marked slow."""

# `quick` is what `make test` runs, `full` what `make test-all` and CI run. The examples of `whole-files` make and read
# files: they are not shrunk, for a smaller example is not worth the minutes that takes.
_WHOLE_FILES = settings(phases=[Phase.explicit, Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples properties try, before the test modules read it."""
    quick = "not slow" in config.option.markexpr
    settings.register_profile("quick", deadline=None, max_examples=20)
    settings.register_profile("full", deadline=None, max_examples=80)
    settings.register_profile("whole-files", _WHOLE_FILES, max_examples=6 if quick else 20)
    if not config.getoption("hypothesis_profile", None):
        settings.load_profile("quick" if quick else "full")


CASES = pytest.StashKey[dict[tuple[str, str], int]]()
"""How many cases of a test have been collected, by kind of mark and test."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark all but every n-th case of a test as slow where it is marked `mostly_slow(every=n)`; likewise those of a
    campaign.

    Cases are collected in their order; later pytest-randomly shuffles them, and other ones would be quick each time.
    """
    cases = item.config.stash.setdefault(CASES, {})
    for mark in ("slow", "campaign"):
        if marker := item.get_closest_marker(f"mostly_{mark}"):
            test = (mark, item.nodeid.partition("[")[0])
            cases[test] = cases.get(test, -1) + 1
            if cases[test] % marker.kwargs["every"]:
                item.add_marker(mark)


def pytest_collection(session: pytest.Session) -> None:
    """Collect without the collector of garbage: all that is made stays until the end."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest tests start first: at the end, no worker is left with one while the others have none."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the collector look at what tests make, and never again at what the collection made."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that is marked `flaky(reason=...)` a second time if it fails, and say so in its reports."""
    marker = item.get_closest_marker("flaky")
    if marker is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        item.session._setupstate.teardown_exact(None)  # fixtures too: a server that did not start is one
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            report.user_properties.append(("retried", marker.kwargs["reason"]))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count a test that passed the second time in the closing line as retried, not as passed."""
    retried = any(name == "retried" for name, _ in getattr(report, "user_properties", ()))
    return ("retried", "R", "RETRIED") if retried and report.when == "call" and report.passed else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Note a test that takes long and is not marked as slow; processor time does not depend on what else the machine
    does."""
    began = _cpu_s()
    try:
        return (yield)
    finally:
        took = _cpu_s() - began
        if took > QUICK_CPU_S and item.get_closest_marker("slow") is None:
            item.user_properties.append(("cpu_s", took))


def _cpu_s() -> float:
    """Return the processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that passed the second time, with the reasons of their marks, and the quick ones that are not
    quick."""
    for report in terminalreporter.getreports("retried"):
        terminalreporter.write_line(f"retried: {report.nodeid}: {dict(report.user_properties)['retried']}")
    for report in terminalreporter.getreports("passed"):
        if took := dict(report.user_properties).get("cpu_s"):
            terminalreporter.write_line(
                f"{took:.1f} s of processor time, more than {QUICK_CPU_S:.0f}, and not marked slow: {report.nodeid}"
            )


def _value(value: object) -> dict[str, object]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def _attributes(values: dict[str, object]) -> list[dict[str, object]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


@dataclass
class Traces:
    """Spans composed by hand. All times are microseconds on the engine's monotonic clock.

    `server` is the service.instance.id of what follows; `spelling` is `dotted` as the server writes it or `plain` as
    written specifications have it; `clock` says how core events carry their time: in seconds and in whole `ns`, in
    seconds with `zero` ns, or only in seconds (`s`).
    """

    server: str = "engine"
    spelling: str = "dotted"
    clock: str = "ns"
    records: list[dict[str, Any]] = field(default_factory=list)
    step_spans: int = 0

    def span(self, scope, name, ids, events, *, attributes=None, server=None, kind=1, dropped=0) -> Traces:
        """Add a span; `ids` are trace, span and parent numbers."""
        trace, span, parent = ids
        times = [int(e["timeUnixNano"]) for e in events] or [BOOT_UNIX_NS]
        resource = {"service.name": "vllm", "service.instance.id": server or self.server}
        one = {
            "traceId": f"{trace:032x}",
            "spanId": f"{span:016x}",
            "parentSpanId": f"{parent:016x}" if parent else "",
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(min(times)),
            "endTimeUnixNano": str(max(times)),
            "attributes": _attributes(attributes or {}),
            "events": events,
            "droppedEventsCount": dropped,
        }
        scopes = [{"scope": {"name": scope}, "spans": [one]}]
        self.records.append({"resource": {"attributes": _attributes(resource)}, "scopeSpans": scopes})
        return self

    def event(self, name, at_us, attributes) -> dict[str, Any]:
        """Return an event at a time, for `span`."""
        unix_ns = BOOT_UNIX_NS + round(at_us * 1000)
        return {"name": name, "timeUnixNano": str(unix_ns), "attributes": _attributes(attributes)}

    def api(self, number, times, *, server=None, prompt=100, **attributes) -> Traces:
        """Add the API span of request `number`: event name without prefix to time."""
        prefix = "" if self.spelling == "plain" else "api."
        events = [self.event(prefix + n, at, {"event.ts.monotonic": at / 1e6}) for n, at in times.items()]
        facts = {"gen_ai.request.id": f"cmpl-{number}", "gen_ai.usage.prompt_tokens": prompt, **attributes}
        ids = (number, 2 * number, 0)
        return self.span("vllm.api", "llm_request", ids, events, attributes=facts, server=server, kind=2)

    def core(self, number, times, *, child=0, prompt=100, parent=True, **common) -> Traces:
        """Add a core span of request `number`: a list of (event name without prefix, time, step, more attributes)."""
        name = f"cmpl-{number}-{child}-0000000{child}"
        events = [self._journey(*one, prompt=prompt, **common) for one in times]
        ids = (number, 2 * number + 1 + (child << 32), 2 * number if parent else 0)
        return self.span("vllm.scheduler", "llm_core", ids, events, attributes={"gen_ai.request.id": name})

    def _journey(self, event, at_us, step, more=None, *, prompt, preemptions=0) -> dict[str, Any]:
        joint = "." if self.spelling == "dotted" else "_"
        facts = {
            "event.type": event,
            "ts.monotonic": at_us / 1e6,
            "ts.monotonic_ns": {"ns": round(at_us * 1000), "zero": 0, "s": None}[self.clock],
            "scheduler.step": step,
            "phase": "WAITING" if event == "QUEUED" else "DECODE",
            f"prefill{joint}done_tokens": prompt if event in ("FIRST_TOKEN", "FINISHED") else 0,
            f"prefill{joint}total_tokens": prompt,
            "num_preemptions": preemptions,
        }
        facts |= {key.replace("decode.", f"decode{joint}"): value for key, value in (more or {}).items()}
        return self.event(f"journey.{event}", at_us, facts)

    def request(self, number, at_us, *, step, tokens_at=(), output=5, prompt=100, departs=300, **api) -> Traces:
        """Add both spans of a request that nothing disturbs: ARRIVED at `at_us`, QUEUED 1,000 us later, SCHEDULED
        in `step` after another 200, a token per step from that step on; `tokens_at` are first and last, by default
        10,000 us after SCHEDULED and as long per token.
        """
        queued = at_us + 1000
        scheduled = queued + 200
        first, finished = tokens_at or (scheduled + 10_000, scheduled + output * 10_000)
        done = {"finish.status": "length", "decode.done_tokens": output}
        self.api(number, {"ARRIVED": at_us, "DEPARTED": finished + departs}, prompt=prompt, **api)
        events = [
            ("QUEUED", queued, step - 1),
            ("SCHEDULED", scheduled, step, {"schedule.kind": "FIRST"}),
            ("FIRST_TOKEN", first, step),
            ("FINISHED", finished, step + output - 1, done),
        ]
        return self.core(number, events, prompt=prompt)

    def summary(self, step, at_us, **changes) -> dict[str, Any]:
        """Return the BATCH_SUMMARY of a step of one decoding request that starts at `at_us`, for `steps`."""
        facts = {
            "step.id": step,
            "step.ts_start_ns": round(at_us * 1000),
            "step.ts_end_ns": round(at_us * 1000) + 100_000,
            "step.duration_us": 100,
            "queue.running_depth": 1,
            "queue.waiting_depth": 0,
            "batch.num_prefill_reqs": 0,
            "batch.num_decode_reqs": 1,
            "batch.scheduled_tokens": 1,
            "batch.prefill_tokens": 0,
            "batch.decode_tokens": 1,
            "batch.num_finished": 0,
            "batch.num_preempted": 0,
            "kv.usage_gpu_ratio": 0.25,
            "kv.blocks_total_gpu": 1000,
            "kv.blocks_free_gpu": 750,
        }
        facts |= {k: changes.pop(k.rpartition(".")[2]) for k in tuple(facts) if k.rpartition(".")[2] in changes}
        assert not changes, f"no such attribute: {changes}"
        return self.event("step.BATCH_SUMMARY", at_us + 100, facts)

    def snapshot(self, step, at_us, request_id, **changes) -> dict[str, Any]:
        """Return a REQUEST_SNAPSHOT of a decoding request, for `steps`."""
        facts = {
            "step.id": step,
            "request.id": request_id,
            "request.phase": "DECODE",
            "request.num_prompt_tokens": 100,
            "request.num_computed_tokens": 100,
            "request.num_output_tokens": 1,
            "request.scheduled_tokens_this_step": 1,
        }
        facts |= {f"request.{key}": value for key, value in changes.items()}
        return self.event("step.REQUEST_SNAPSHOT", at_us, facts)

    def steps(self, *events, server=None, dropped=0) -> Traces:
        """Add a step span with the given events."""
        self.step_spans += 1
        ids = (1 << 64, (1 << 40) + self.step_spans, 0)
        return self.span("vllm.scheduler.step", "scheduler_steps_1", ids, list(events), server=server, dropped=dropped)

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The spans added so far, one in each record."""
        return [record["scopeSpans"][0]["spans"][0] for record in self.records]

    def events(self, name="") -> list[dict[str, Any]]:
        """Return the events of a name, or all, in the order they were added."""
        return [event for span in self.spans for event in span["events"] if name in ("", event["name"])]

    @staticmethod
    def change(events, how, *keys) -> None:
        """Replace the numbers of attributes with these keys by what `how` makes of each; None takes it away."""
        for event in events:
            for attribute in [a for a in event["attributes"] if a["key"] in keys]:
                ((kind, value),) = attribute["value"].items()
                changed = how(int(value) if kind == "intValue" else value)
                if changed is None:
                    event["attributes"].remove(attribute)
                else:
                    attribute["value"] = _value(changed)

    def lines(self) -> list[str]:
        """Return the records as OTLP JSON lines."""
        return [json.dumps({"resourceSpans": [record]}) for record in self.records]

    def protobuf(self) -> bytes:
        """Return the records as one protobuf message."""
        return to_protobuf({"resourceSpans": self.records})

    def write(self, folder: Path, *, name="traces.json", config=True) -> Path:
        """Write a run folder: traces, and its configuration files unless they are not wanted."""
        folder.mkdir(parents=True, exist_ok=True)
        if name.endswith(".pb"):
            (folder / name).write_bytes(self.protobuf())
        else:
            (folder / name).write_text("".join(f"{line}\n" for line in self.lines()))
        if config:
            (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
            (folder / "exp-config.yaml").write_text(RUN_CONFIG)
        return folder

    def load(
        self, *, steps=240, requests=90, covered=0.05, noise=0.01, lag=0, seed=0, decode_us=50, late=1.0
    ) -> Traces:
        """Add a busy engine whose step time is 2,000 + 10 per prefill token + `decode_us` per decode token, and
        relative noise.

        `covered` is the share of the step time that step.duration_us claims. With `lag` 1 a step executes after the
        next one began: its composition drives the cycle of the next, and its tokens come a cycle later. The last 30 %
        of the steps take `late` times as long.
        """
        rng = np.random.default_rng(seed)
        start, executing = 1_000_000.0, []
        events, starts = [], []
        for step in range(1, (steps or 240) + 1):
            starts.append(start)
            prefill, decode = int(rng.integers(0, 200)) * int(rng.random() < 0.5), int(rng.integers(1, 30))
            machine = (late if step > 0.7 * steps else 1.0) * (1 + noise * rng.standard_normal())
            executing.append((2000 + 10 * prefill + decode_us * decode) * machine)
            cycle = executing[max(step - 1 - lag, 0)]
            changes = {
                "num_prefill_reqs": int(prefill > 0),
                "num_decode_reqs": decode,
                "prefill_tokens": prefill,
                "decode_tokens": decode,
                "scheduled_tokens": prefill + decode,
                "running_depth": decode + int(prefill > 0),
                "waiting_depth": int(rng.integers(0, 5)),
                "duration_us": round(covered * cycle),
                "usage_gpu_ratio": float(rng.random()),
            }
            events.append(self.summary(step, start, **changes))
            start += cycle
        if steps:
            self.steps(*events)
        for number in range(1, requests + 1):
            step = 2 + (number - 1) * (len(starts) - 12) // requests
            prompt, output = int(rng.integers(10, 500)), int(rng.integers(2, 8))
            self.request(
                number,
                starts[step - 1] - 1100,
                step=step,
                prompt=prompt,
                output=output,
                tokens_at=(starts[step + lag] - 50, starts[step + lag + output - 1] - 50),
                departs=300 + 20 * float(rng.standard_normal()),
            )
        return self


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    """Make `os.fsync` return at once, in this process, until the session ends.

    Autouse, because every command that writes syncs, and waiting takes a tenth of the suite's time; no test outlives a
    crash of the machine. Tests of the syncs themselves put their own in its place (`on_sync` in tests/receive).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _light_pages():
    """Let a page of a report hold a line instead of plotly's four megabytes, and compile its templates once, until the
    session ends.

    Autouse, because every training draws a page. That of `trained` is whole, and so are those of tests that use
    `whole_pages`.
    """
    try:
        from jinja2 import BytecodeCache, Environment  # noqa: PLC0415 - of an extra

        from tracefit.reports import page  # noqa: PLC0415
    except (ImportError, TracefitError):
        yield
        return

    class InMemory(BytecodeCache):
        compiled: ClassVar[dict[str, Any]] = {}

        def load_bytecode(self, bucket):
            bucket.code = self.compiled.get(bucket.checksum)

        def dump_bytecode(self, bucket):
            self.compiled[bucket.checksum] = bucket.code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "Environment", partial(Environment, bytecode_cache=InMemory()))
        patch.setattr(page, "get_plotlyjs", lambda: "/* plotly.js v0 */")
        yield


@contextmanager
def _with_plotly():
    """Draw pages with all of plotly, as users get them."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError, TracefitError):
            from plotly.offline import get_plotlyjs  # noqa: PLC0415

            # As it is imported: a test that imports it again leaves another one in the package.
            patch.setattr(import_module("tracefit.reports.page"), "get_plotlyjs", get_plotlyjs)
        yield


@pytest.fixture
def whole_pages():
    """Draw pages as users get them, and as that of `trained` is."""
    with _with_plotly():
        yield


@pytest.fixture
def grows_linearly():
    """Return a check that eight times the input takes about eight times as long, not sixty-four times.

    It compares CPU times with one another, so that it holds on any machine. `prepare` makes what is timed, of a size.
    """

    def cpu_s(job):
        gc.collect()
        gc.disable()  # its passes over what is alive are not the job's
        try:
            began = time.process_time()
            job()
            return time.process_time() - began
        finally:
            gc.enable()

    def check(prepare, size):
        job = prepare(size)
        small_s = min(cpu_s(job) for _ in range(3))
        # The quickest of three counts: one that is quick enough is enough.
        job = prepare(8 * size)
        assert any(cpu_s(job) < 40 * max(small_s, 0.001) for _ in range(3)), f"{small_s:.4f} s for an eighth"

    return check


@pytest.fixture
def tracefit(monkeypatch, capsys):
    """Return a function that runs the entry point: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tracefit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return call


@pytest.fixture(scope="session")
def small_pieces() -> IngestOptions:
    """Return options that cut files, windows and sorts so small that a small run has many of each."""
    limits = BuildLimits(window_bytes=60_000, sorted_bytes=4_000)
    return IngestOptions(block_bytes=40_000, build=limits, bytes_per_worker=1)


@pytest.fixture
def files_in():
    """Return a function that lists every file below a folder, if it is there."""
    return lambda folder: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def traces() -> Traces:
    """Return an empty set of spans to compose a trace of."""
    return Traces()


@pytest.fixture(scope="session")
def new_traces() -> type[Traces]:
    """Return the builder itself, for tests that need several traces or longer-lived ones."""
    return Traces


@pytest.fixture(scope="session")
def config_json() -> dict[str, Any]:
    """Return the model configuration that run folders hold."""
    return CONFIG_JSON


@pytest.fixture
def tables_of(tmp_path):
    """Ingest a trace; return a function from a table's name to its frame."""

    def of(trace: Traces, *, run_id: str = "run", name: str = "traces.json"):
        folder = trace.write(tmp_path / "runs" / run_id, name=name)
        ingest([folder], tmp_path / "tables")

        def table(which: str) -> pl.DataFrame:
            return TableStore(tmp_path / "tables").read(which, [run_id])

        return table

    return of


@pytest.fixture(scope="session")
def ingested_together(request, once):
    """Return a function from a test that yields its run to the generator, which has yielded, and the tables of the
    run."""
    starts = {item.nodeid: start for item in request.session.items if (start := composed_by(item, Traces)) is not None}
    names = {test: f"run-{number}" for number, test in enumerate(sorted(starts))}

    def fill(root):
        for test, start in starts.items():
            with suppress(pytest.skip.Exception):
                next(start()).write(root / "runs" / names[test])
        ingest([root / "runs"], root / "tables")

    store = TableStore(once("together", fill) / "tables")

    def found(item):
        composed = starts[item.nodeid]()
        next(composed)
        return composed, Tables(store, names[item.nodeid])

    return found


@pytest.fixture
def quick() -> TrainOptions:
    """Return options that spare a test half of the training: the search for a feature set and the boosted reference."""
    return TrainOptions(fast=True, features="batch")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return a function that fills the folder of a name, once for all workers of a run; tests only read it."""
    folder = tmp_path_factory.getbasetemp()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared"

    def filled(name, fill):
        root = shared / name
        root.mkdir(parents=True, exist_ok=True)
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers wait
            if not (shared / f"{name}.done").exists():
                fill(root)
                (shared / f"{name}.done").touch()
        return root

    return filled


@pytest.fixture(scope="session")
def trained(once) -> Path:
    """Return what the main job leaves of one busy run: tables, models, evaluation, report."""

    def fill(root):
        with _with_plotly():
            run([Traces().load().write(root / "busy")], root / "out")

    return once("trained", fill) / "out"


CONFIGS = Path(__file__).parent / "server" / "configs"


class Load(Protocol):
    def __call__(self, name: str) -> ModelArchitecture: ...


class Parse(Protocol):
    def __call__(self, *, without: tuple[str, ...] = (), **changes: Any) -> ModelArchitecture: ...


@pytest.fixture
def load() -> Load:
    """Read one of the published configs by name."""
    return lambda name: parse_architecture((CONFIGS / f"{name}.json").read_bytes(), where=name)


@pytest.fixture
def config_of():
    """Return a published config as a dictionary to change."""
    return lambda name: json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.fixture
def parse() -> Parse:
    """Parse a small llama config with some keys changed and others left out."""

    def parse_changed(*, without: tuple[str, ...] = (), **changes: Any) -> ModelArchitecture:
        config: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 100,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        }
        config.update(changes)
        for key in without:
            config.pop(key)
        return parse_architecture(json.dumps(config), where="config.json")

    return parse_changed


@pytest.fixture
def dense() -> ModelArchitecture:
    """2 layers of attention 8·(16 + 8) = 192 and FFN 3·8·16 = 384 parameters; embeddings 2·80."""
    return ModelArchitecture(
        name="tiny",
        model_type="llama",
        hidden=8,
        stack=(Layer(attentions=(Attention(heads=2, kv_heads=1, head_dim=4),), ffns=(16,)),) * 2,
        ffn=16,
        vocabulary=10,
    )


@pytest.fixture
def moe(dense: ModelArchitecture) -> ModelArchitecture:
    """3 layers of attention 256; 1 dense FFN 384; 2 MoE: 4 experts of 144, shared 96, router 32; embedding 80."""
    attentions = (Attention(heads=2, kv_heads=2, head_dim=4),)
    experts = Experts(count=4, per_token=2, ffn=6, shared_ffn=4)
    first, other = Layer(attentions=attentions, ffns=(16,)), Layer(attentions=attentions, experts=experts)
    return replace(dense, stack=(first, other, other), tied_embeddings=True)


class WithAttention(Protocol):
    def __call__(
        self, arch: ModelArchitecture, *, windows: tuple[int | None, ...] = ..., **changes: Any
    ) -> ModelArchitecture: ...


@pytest.fixture
def with_attention() -> WithAttention:
    """Change the attention of every layer, and make one layer for each of several windows; 0 is a state of as many
    parameters."""

    def changed(
        arch: ModelArchitecture, *, windows: tuple[int | None, ...] = (None, None), **changes: Any
    ) -> ModelArchitecture:
        first = arch.stack[0]
        attention = replace(first.attentions[0], **changes)
        state = LayerState("linear", attention.parameters(arch.hidden), 0)
        of_window = {
            n: replace(first, attentions=(), state=state)
            if n == 0
            else replace(first, attentions=(replace(attention, window=n),))
            for n in windows
        }
        return replace(arch, stack=tuple(of_window[n] for n in windows))

    return changed


@pytest.fixture
def gpu() -> Gpu:
    """1000 FLOP/us, 1000 bytes/us of memory and, one way, of link."""
    return Gpu(
        name="toy",
        compute_tflops_fp16=0.001,
        memory_gb=1.0,
        memory_bandwidth_gb_s=1.0,
        link_gb_s=2.0,
    )


@pytest.fixture
def step() -> pl.DataFrame:
    """One step: 20 prompt tokens of 2 requests with 10 computed before, 3 decodes with 30 tokens cached."""
    return pl.DataFrame(
        {
            "num_prefill_reqs": [2],
            "num_decode_reqs": [3],
            "prefill_tokens": [20],
            "decode_tokens": [3],
            "context_tokens": [30],
            "prefill_context_tokens": [10],
        }
    )


@pytest.fixture
def config_names() -> list[str]:
    """Names of the published configs."""
    return [path.stem for path in CONFIGS.glob("*.json")]
