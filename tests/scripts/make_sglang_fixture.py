"""Write `fixtures/sglang/` again: spans that SGLang's own tracing module makes, of requests and steps that are planned
here.

`python tests/scripts/make_sglang_fixture.py WHEEL FOLDER`, with WHEEL the unpacked wheel of SGLang 0.5.23 (`pip
download --no-deps sglang==0.5.23`, unzipped). `sglang.srt.observability.trace` and `.req_time_stats` run as they are,
on a clock of the plan, in one process per role, with the OpenTelemetry SDK; what else they import of SGLang (settings,
forward modes, metrics) is stood in for. They are called where SGLang's tokenizer manager and scheduler call them. The
plan is in `truth.json` of each run.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import random
import shutil
import sys
import types
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

EPOCH_S = 1_800_000_000.0
START_S = 1000.0
"""Wall clock and monotonic clock at which the plan begins."""
CHUNK_TOKENS = 512
HOST_S = 0.0003
PER_RESULT_S = 0.00002
"""Time that the scheduler takes for the result of each request of a batch."""


@dataclass
class Request:
    """A planned request, times in seconds on the monotonic clock."""

    rid: str
    arrival: float
    prompt: int
    cached: int
    output: int
    dispatched: float = 0.0
    received: float = 0.0
    queued: float = 0.0
    scheduled: float = 0.0
    chunks: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    calls: list[tuple[str, float, dict[str, object]]] = field(default_factory=list)


@dataclass
class Step:
    """A planned step: when its last result is there, the time since that of the step before it, and its batch.

    The time of a step after idling is that since its request was queued; the first step has no time.
    """

    end: float
    cycle: float | None
    prefill: list[tuple[str, int, int]]
    decode: list[tuple[str, int]]


def requests(count: int, seed: int) -> list[Request]:
    """Plan arrivals and lengths; one prompt in four takes several chunks."""
    rng = random.Random(seed)
    at, found = START_S, []
    for number in range(count):
        at += rng.expovariate(20.0) + (0.5 if number == count // 2 else 0.0)
        prompt = rng.choice([900, 200, 320, 64])
        one = Request(f"{rng.getrandbits(128):032x}", at, prompt, rng.choice([0, 32]), rng.randint(1, 12))
        one.dispatched, one.received = at + 0.002, at + 0.003
        one.queued = one.received + 0.0005
        found.append(one)
    return found


def serve(planned: list[Request], slots: int = 6) -> list[Step]:
    """Plan the steps of an engine that prefers prompts, one chunk of one request at a time, and decodes all others
    together."""
    now, last = START_S, None
    waiting, running, steps = list(planned), [], []
    while waiting or running:
        ready = [r for r in waiting if r.queued <= now]
        if not ready and not running:
            now = waiting[0].queued + HOST_S
            continue
        batch, running_before = f"{len(steps):08x}", bool(running)
        if ready and len(running) < slots:
            one = ready[0]
            done = one.cached + CHUNK_TOKENS * len(one.chunks)
            tokens = min(CHUNK_TOKENS, one.prompt - done)
            is_last = done + tokens == one.prompt
            one.scheduled = one.scheduled or now
            one.calls.append(("set_forward_entry_time", now, {}))
            one.calls.append(("schedule", now, {"bid": batch, "batch_size": 1, "forward_mode": "prefill"}))
            end = now + 0.004 + 0.00002 * tokens
            one.chunks.append(end)
            if is_last:
                one.calls.append(("set_prefill_finished_time", end, {}))
                one.tokens.append(end)
                waiting.remove(one)
                running += [one] if one.output > 1 else []
            else:
                one.calls.append(("set_last_chunked_prefill_finish_time", end, {}))
            members = Step(end, None, [(one.rid, tokens, done)], [])
        else:
            end = now + 0.006 + 0.0002 * len(running)
            for place, one in enumerate(running):
                one.calls.append(
                    ("schedule", now, {"bid": batch, "batch_size": len(running), "forward_mode": "decode"})
                )
                one.calls.append(("set_last_decode_finish_time", end + PER_RESULT_S * place, {}))
            members = Step(
                end + PER_RESULT_S * (len(running) - 1),
                None,
                [],
                [(r.rid, r.prompt + len(r.tokens) - 1) for r in running],
            )
            for place, one in enumerate(running):
                one.tokens.append(end + PER_RESULT_S * place)
            running = [r for r in running if len(r.tokens) < r.output]
        if last is not None:
            idle_until = one.queued if members.prefill and not running_before else last
            members.cycle = members.end - max(last, idle_until)
        steps.append(members)
        last = members.end
        now = members.end + HOST_S
    return steps


# -- SGLang's own module ---------------------------------------------------------------------------------


class Clock:
    """A clock that stands where the plan is."""

    now = START_S

    def time(self) -> float:
        return EPOCH_S + self.now

    def perf_counter(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return round((EPOCH_S + self.now) * 1e9)


class DisaggregationMode(Enum):
    """As in `sglang.srt.disaggregation.utils`."""

    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


class ForwardMode(Enum):
    """As far as tracing asks a batch for its mode."""

    PREFILL = "prefill"
    DECODE = "decode"

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


def load(wheel: Path, level: int, clock: Clock, seed: float) -> tuple[types.ModuleType, types.ModuleType]:
    """Import the two modules of tracing, with stand-ins for the rest of SGLang."""

    def stand_in(name: str, **names: object) -> None:
        module = types.ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module

    value = types.SimpleNamespace
    for package in ("sglang", "sglang.srt", "sglang.srt.observability", "sglang.srt.disaggregation"):
        stand_in(package, __path__=[str(wheel / package.replace(".", "/"))])
    stand_in("sglang.srt.model_executor", __path__=[])
    settings = {
        "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": 500,
        "SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE": 64,
        "SGLANG_TRACE_ASYNC": False,
    }
    resources = value(trace_level=level)
    envs = value(**{name: value(get=lambda v=v: v) for name, v in settings.items()})
    stand_in("sglang.srt.environ", envs=envs)
    stand_in("sglang.srt.runtime_context", get_resources=lambda: resources)
    stand_in("sglang.srt.utils", get_int_env_var=int, get_bool_env_var=lambda *_: False, __path__=[])
    stand_in("sglang.srt.utils.poll_timer", PollTimer=object)
    stand_in("sglang.srt.disaggregation.utils", DisaggregationMode=DisaggregationMode)
    stand_in("sglang.srt.model_executor.forward_batch_info", ForwardMode=ForwardMode)
    collectors = ("EncoderMetricsCollector", "SchedulerMetricsCollector", "TokenizerMetricsCollector")
    stand_in("sglang.srt.observability.metrics_collector", **dict.fromkeys(collectors, object))
    stand_in(
        "sglang.srt.observability.trace_async",
        TraceReqContextAsync=object,
        is_async_tracing_available=lambda: False,
    )
    from sglang.srt.observability import req_time_stats, trace  # noqa: PLC0415 - of the wheel

    clock.now = START_S + seed / 1e6
    trace.time, req_time_stats.time = clock, clock
    trace.get_cur_time_ns = clock.time_ns
    trace._get_host_id = lambda: "0123456789abcdef"
    req_time_stats.calibrate_time_diff()
    return trace, req_time_stats


def exporter(path: Path) -> object:
    """Return an exporter that writes OTLP JSON lines, as the Collector's file exporter does."""
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult  # noqa: PLC0415

    class ToFile(SpanExporter):
        def export(self, spans):
            request = encode_spans(spans)
            record = MessageToDict(request)
            for sent, shown in zip(request.resource_spans, record["resourceSpans"], strict=True):
                for scope, plain in zip(sent.scope_spans, shown["scopeSpans"], strict=True):
                    for span, one in zip(scope.spans, plain["spans"], strict=True):
                        _hex(span, one)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            return SpanExportResult.SUCCESS

    return ToFile()


def _hex(span: object, shown: dict[str, object]) -> None:
    names = {"traceId": "trace_id", "spanId": "span_id", "parentSpanId": "parent_span_id"}
    for key, name in names.items():
        if key in shown:
            shown[key] = getattr(span, name).hex()
    for link, one in zip(getattr(span, "links", ()), shown.get("links", ()), strict=True):
        _hex(link, one)


def tokenizer(run: Run, planned: list[Request], queues: list[object], label: str, path: Path) -> None:
    """Do what SGLang's tokenizer manager does for each request."""
    from opentelemetry import trace as otel  # noqa: PLC0415

    clock = Clock()
    trace, stats = load(run.wheel, run.level, clock, run.seed + len(label))
    trace.get_otlp_span_exporter = lambda _: exporter(path)
    trace.process_tracing_init("", None, None)
    trace.trace_set_thread_info(label)
    names, live = trace.SpanAttributes, []
    for number, one in enumerate(planned):
        clock.now = one.arrival
        mine = stats.APIServerReqTimeStats(disagg_mode=run.mode_of(label))
        header = {"traceparent": f"00-{number + 1:032x}-{1:016x}-01"} if run.is_apart else None
        mine.init_trace_ctx(one.rid, 17 + number if run.is_apart else None, header)
        mine.set_created_time(one.arrival)
        mine.set_tokenize_finish_time(one.arrival + 0.0015)
        mine.set_api_server_dispatch_time(one.arrival + 0.0015)
        for queue in queues:
            queue.put(mine.encode_json())
        mine.set_api_server_dispatch_finish_time(one.dispatched)
        live.append(mine)
    for one, mine in zip(planned, live, strict=True):
        if not one.tokens:
            continue
        mine.set_first_token_time(one.tokens[0] + 0.001)
        attributes = {
            names.GEN_AI_USAGE_COMPLETION_TOKENS: len(one.tokens),
            names.GEN_AI_USAGE_PROMPT_TOKENS: one.prompt,
            names.GEN_AI_USAGE_CACHED_TOKENS: one.cached,
            names.GEN_AI_REQUEST_ID: one.rid,
            names.GEN_AI_REQUEST_MAX_TOKENS: one.output,
            names.GEN_AI_RESPONSE_MODEL: "Qwen/Qwen3-8B",
            names.GEN_AI_RESPONSE_FINISH_REASONS: '["length"]',
        }
        mine.set_finished_time(one.tokens[-1] + 0.001, attributes)
    otel.get_tracer_provider().shutdown()


def scheduler(run: Run, planned: list[Request], queue: object, label: str, rank: int, path: Path) -> None:
    """Do what SGLang's scheduler does for each request, on one rank."""
    from opentelemetry import trace as otel  # noqa: PLC0415

    clock = Clock()
    trace, stats = load(run.wheel, run.level, clock, run.seed + 100 + len(label) + rank)
    trace.get_otlp_span_exporter = lambda _: exporter(path)
    trace.process_tracing_init("", None, None)
    trace.trace_set_thread_info(label, rank)
    for one in planned:
        state = queue.get()
        clock.now = one.received
        received = stats.APIServerReqTimeStats()
        received.decode_json(state)
        mine = stats.SchedulerReqTimeStats.new_from_obj(received, disagg_mode=run.mode_of(label))
        mine.set_scheduler_recv_time(one.received)
        for name, at, facts in one.calls:
            clock.now = at
            if name == "schedule":
                mine.set_last_scheduled_time(ForwardMode(facts["forward_mode"]), at, facts)
            else:
                getattr(mine, name)(at)
    otel.get_tracer_provider().shutdown()


# -- the runs --------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run of the fixture."""

    wheel: Path
    name: str
    level: int
    seed: int
    count: int
    is_apart: bool = False
    ranks: int = 1

    def mode_of(self, label: str) -> DisaggregationMode:
        """Return the role of a process."""
        first = label.split(maxsplit=1)[0].removesuffix("Tokenizer").lower()
        return DisaggregationMode(first) if self.is_apart and first else DisaggregationMode.NULL


def write(run: Run, folder: Path) -> None:
    """Write a run: its traces, its plan and the settings of its server."""
    planned = requests(run.count, run.seed)
    steps = serve(planned)
    folder.mkdir(parents=True)
    spawn = multiprocessing.get_context("fork")
    roles = [("prefill", "Prefill"), ("decode", "Decode")] if run.is_apart else [("", "")]
    files: list[Path] = []
    for role, prefix in roles:
        own = [_part(one, role) for one in planned]
        queues = [spawn.SimpleQueue() for _ in range(run.ranks)]
        files.append(folder / f"{prefix}Tokenizer.json")
        jobs = [spawn.Process(target=tokenizer, args=(run, own, queues, f"{prefix}Tokenizer", files[-1]))]
        for rank, queue in enumerate(queues):
            label = f"{prefix} Scheduler".strip()
            files.append(folder / f"{label} {rank}.json")
            jobs.append(spawn.Process(target=scheduler, args=(run, own, queue, label, rank, files[-1])))
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
            assert job.exitcode == 0
    truth = {"requests": [asdict(one) for one in planned], "steps": [asdict(one) for one in steps]}
    for one in truth["requests"]:
        del one["calls"]
    (folder / "truth.json").write_text(json.dumps(truth) + "\n", encoding="utf-8")
    (folder / "exp-config.yaml").write_text(
        f"# SGLang 0.5.23, --enable-trace, SGLANG_TRACE_LEVEL={run.level}: spans of SGLang's module, of a plan\n"
        f"model: Qwen/Qwen3-8B\ntensor_parallelism: {run.ranks}\n",
        encoding="utf-8",
    )
    whole = b"".join(file.read_bytes() for file in files)
    (folder / "traces.json.gz").write_bytes(gzip.compress(whole, mtime=0))
    for file in files:
        file.unlink()


def _part(one: Request, role: str) -> Request:
    """Return the part of a request that a server does: all of it, only the prompt, or what comes after the prompt."""
    queued = ("set_wait_queue_entry_time", one.queued, {})
    done = ("set_completion_time", one.tokens[-1] + 0.0001, {})
    calls = [queued, *one.calls, done]
    if role == "prefill":
        end = one.tokens[0]
        early = ("set_prefill_bootstrap_queue_entry_time", one.received + 0.0002, {})
        sent = [
            ("set_prefill_transfer_queue_entry_time", end, {}),
            ("set_prefill_kv_transfer_finish_time", end + 0.002, {}),
        ]
        mine = [call for call in one.calls if call[1] <= end]
        calls = [early, queued, *mine, *sent, ("set_completion_time", end + 0.0021, {})]
        return Request(**{**vars(one), "tokens": one.tokens[:1], "calls": calls})
    if role == "decode":
        first = one.tokens[0] + 0.003
        calls = [
            ("set_decode_prealloc_queue_entry_time", one.received + 0.0002, {}),
            ("set_decode_transfer_queue_entry_time", one.received + 0.0004, {}),
            ("set_wait_queue_entry_time", one.tokens[0] + 0.002, {}),
            ("set_forward_entry_time", first, {}),
            ("set_decode_prebuilt_finish_time", first + 0.0001, {}),
            *(("set_last_decode_finish_time", at + 0.003, {}) for at in one.tokens[1:]),
            ("set_completion_time", one.tokens[-1] + 0.0031, {}),
        ]
        return Request(**{**vars(one), "tokens": [at + 0.003 for at in one.tokens], "calls": calls})
    return Request(**{**vars(one), "calls": calls})


def main(wheel: Path, folder: Path) -> None:
    """Write all runs below `folder`, which is removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    for run in (
        Run(wheel, "sglang-level1", level=1, seed=1, count=6),
        Run(wheel, "sglang-level2", level=2, seed=1, count=6),
        Run(wheel, "sglang-level3-tp2", level=3, seed=2, count=30, ranks=2),
        Run(wheel, "sglang-apart", level=3, seed=3, count=6, is_apart=True),
    ):
        write(run, folder / run.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
