"""Two commands: simulate a run, and write it as a run folder with its truth.

`synth` draws the load, runs every engine over time, and has its log written as spans; equal options give an
equal run. `write_run` writes the trace as a collector would, with the server's configuration, the law and
the truth tables in the same folder.
"""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import yaml

from tracefit.errors import UsageError
from tracefit.synth.fpm import fpm_lines
from tracefit.synth.iteration_log import iteration_lines
from tracefit.synth.requests import client_lines, request_log_lines
from tracefit.synth.scheduler import QueueState
from tracefit.synth.simulation import EpochLog, StepLog, simulate_server
from tracefit.synth.spans import export, framed_protobuf, json_lines

if TYPE_CHECKING:
    from tracefit.synth.laws import StepLaw
    from tracefit.synth.options import SynthOptions
    from tracefit.synth.scheduler import Request
    from tracefit.synth.spans import ExportBatch, GeneratedSpan

Format: TypeAlias = Literal["json", "protobuf"]
TraceSuffix: TypeAlias = Literal["gz", "zst"]

_GZIP_LEVEL = 6  # gzip's default


class SynthRun(msgspec.Struct, frozen=True):
    """A simulated run: the spans or records, and the truth."""

    options: SynthOptions
    law: StepLaw  # with its coefficients
    batches: tuple[ExportBatch, ...]  # in the order a collector received them; empty for a record form
    recorded_lines: tuple[bytes, ...]  # lines of a record form, in the order they were written
    truth_steps: pl.DataFrame  # one row per step, columns as in `TRUE_STEP_COLUMNS`
    truth_requests: pl.DataFrame  # one row per request, columns as in `TRUE_REQUEST_COLUMNS`

    @property
    def spans(self) -> tuple[GeneratedSpan, ...]:
        """All spans, in the order they were sent."""
        return tuple(span for batch in self.batches for span in batch.spans)


def synth(options: SynthOptions) -> SynthRun:
    """Simulate a run.

    Args:
        options: The run; equal options give an equal run.

    Raises:
        UsageError: An option is out of range or unknown.
    """
    options.check()
    law = options.step_law()
    root = np.random.default_rng(options.seed)
    emission, *servers = root.spawn(1 + options.servers)
    epochs = [life for number, rng in enumerate(servers) for life in simulate_server(options, law, number, rng)]
    _, record = _RECORDED.get(options.form, ("", None))
    return SynthRun(
        options=options,
        law=law,
        batches=() if record else tuple(export(options, epochs, emission)),
        recorded_lines=tuple(record(epochs, emission)) if record else (),
        truth_steps=_frame(_STEP_FIELDS, [(epoch, step) for epoch in epochs for step in epoch.steps]),
        truth_requests=_frame(_REQUEST_FIELDS, [(epoch, one) for epoch in epochs for one in epoch.requests]),
    )


_RECORDED: Mapping[str, tuple[str, Callable[[Sequence[EpochLog], np.random.Generator], list[bytes]]]] = {
    "fpm": ("fpm.jsonl", lambda epochs, _: fpm_lines(epochs)),
    "log": ("vllm.log", lambda epochs, _: iteration_lines(epochs, is_fine=True)),
    "log_seconds": ("vllm.log", lambda epochs, _: iteration_lines(epochs, is_fine=False)),
    "request_log": ("requests.jsonl", lambda epochs, _: request_log_lines(epochs)),
    "bench": ("bench.json", lambda epochs, rng: client_lines(epochs, rng, form="bench")),
    "guidellm": ("guidellm.json", lambda epochs, rng: client_lines(epochs, rng, form="guidellm")),
}
"""Record forms, which have lines instead of spans: their files, and the functions that write the lines."""


def write_run(
    run: SynthRun, out: Path, *, formats: Sequence[Format] = ("json",), compress: TraceSuffix | None = None
) -> Path:
    """Write a run folder `out/<name>`: trace, server config, model config and truth.

    A run folder must not hold a span twice: with both formats, the protobuf one goes to a second
    folder, `<name>-proto`.

    Args:
        run: The run.
        out: Folder in which the run folder is made.
        formats: How to write the trace.
        compress: Compression of the trace; None for none.

    Returns:
        The run folder; the first if there are several.

    Raises:
        UsageError: A format or compression is unknown, no format is given, or a folder cannot be written.
    """
    kinds = list(dict.fromkeys(formats))
    if not kinds or any(kind not in ("json", "protobuf") for kind in kinds):
        raise UsageError(f"cannot write {list(formats)!r}", where="formats", hint="known: json, protobuf")
    recorded, _ = _RECORDED.get(run.options.form, ("", None))
    if recorded and kinds != ["json"]:
        raise UsageError("records are written only as lines", where="formats", hint="leave formats at json")
    folders = []
    for kind in kinds:
        suffix = "-proto" if kind == "protobuf" and len(kinds) > 1 else ""
        folder = out / f"{run.options.name}{suffix}"
        name = recorded or ("traces.json" if kind == "json" else "traces.binpb")
        name += f".{compress}" if compress else ""
        _write(folder, {name: _trace(run, kind, compress), **_sidecars(run)})
        folders.append(folder)
    return folders[0]


def _trace(run: SynthRun, kind: Format, compress: TraceSuffix | None) -> bytes:
    spans = json_lines if kind == "json" else framed_protobuf
    data = b"".join(run.recorded_lines) or spans(run.batches)
    if compress is None:
        return data
    if compress == "gz":
        return gzip.compress(data, compresslevel=_GZIP_LEVEL, mtime=0)
    if compress == "zst":
        return bytes(pa.Codec("zstd").compress(data, asbytes=True))
    raise UsageError(f"unknown compression {compress!r}", where="compress", hint="known: gz, zst")


def _sidecars(run: SynthRun) -> dict[str, bytes]:
    """Return the other files of the folder; their names must not look like a trace."""
    model = run.options.architecture
    return {
        "exp-config.yaml": yaml.safe_dump(_exp_config(run.options), sort_keys=False).encode(),
        "config.json": (json.dumps(model.config(), indent=2) + "\n").encode(),
        "truth.json": (json.dumps(_truth(run), indent=2, default=str) + "\n").encode(),
        "truth_steps.csv.gz": _csv(run.truth_steps),
        "truth_requests.csv.gz": _csv(run.truth_requests),
    }


def _csv(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_csv(buffer)
    return gzip.compress(buffer.getvalue(), compresslevel=_GZIP_LEVEL, mtime=0)


def _exp_config(options: SynthOptions) -> dict[str, str | int | float | bool]:
    """Return the server's settings under the names real runs use."""
    return {
        "model": options.architecture.served_name,
        "model_config": "config.json",
        "tensor_parallelism": options.tp,
        "pipeline_parallelism": 1,
        "max_model_len": options.longest_sequence_tokens,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.max_num_seqs,
        "block_size": options.block_size,
        "dtype": options.architecture.dtype,
        "enable_prefix_caching": options.prefix_fraction > 0,
        "enable_chunked_prefill": options.chunked_prefill,
        "async_scheduling": False,
        "num_gpu_blocks_override": options.num_blocks,
        **(_tracing(options) if options.form == "instrumented" else {}),
        **({} if options.gpu is None else {"gpu": options.gpu}),
        "note": "synthetic run: simulated engine with a known step-time law",
    }


def _tracing(options: SynthOptions) -> dict[str, int | float]:
    """Return the settings of the instrumented server's traces, which an unmodified one does not have."""
    limit = options.span_event_limit
    return {
        "journey_tracing_sample_rate": options.journey_sampling,
        "step_tracing_sample_rate": options.step_sampling,
        "step_tracing_rich_subsample_rate": options.rich_sampling,
        "step_tracing_closure_interval": options.steps_per_span,
        "otel_span_event_count_limit": 1_000_000 if limit is None else limit,
    }


def _truth(run: SynthRun) -> dict[str, object]:
    """Return the law with its coefficients and all options, ready for JSON."""
    # A law of the caller that has no fields is written as its repr.
    coefficients = msgspec.to_builtins(run.law, enc_hook=repr)
    law = type(run.law).__name__
    options = {**msgspec.to_builtins(run.options, enc_hook=str), "law": law}
    return {"law": law, "coefficients": coefficients, "seed": run.options.seed, "options": options}


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files or none: every file is complete in a temporary folder before the first one is moved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as drafts:
            for name, data in files.items():
                Path(drafts, name).write_bytes(data)
            for name in files:
                Path(drafts, name).replace(folder / name)
    except OSError as error:
        refusal = f"cannot write: {error.strerror or error}"
        raise UsageError(refusal, where=str(folder), hint="choose another folder") from error


# -- truth -----------------------------------------------------------------------------------------------

_T = TypeVar("_T")
_Columns: TypeAlias = Mapping[str, tuple[type[pl.DataType], Callable[[EpochLog, _T], object]]]


def _fields(kind: type[pl.DataType], *names: str, part: str = "") -> _Columns[Any]:
    """Return columns that have the name of a field of the step or request, or of a part of it."""

    def column(name: str) -> Callable[[EpochLog, object], object]:
        value = attrgetter(f"{part}.{name}" if part else name)
        return lambda _, row: value(row)

    return {name: (kind, column(name)) for name in names}


def _event(name: str, event: str) -> _Columns[Request]:
    """Return the time and the step of a request's first event of a kind; null without such an event."""
    return {
        f"{name}_ns": (pl.Int64, lambda _, request: getattr(request.first(event), "ts_ns", None)),
        f"{name}_step": (pl.Int64, lambda _, request: getattr(request.first(event), "step_id", None)),
    }


_LIFE: _Columns[Any] = {
    "server": (pl.Int64, lambda epoch, _: epoch.server),
    "epoch": (pl.Int64, lambda epoch, _: epoch.epoch),
}
_BATCH_FIELDS = (
    *("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens", "recompute_tokens"),
    *("scheduled_tokens", "context_tokens", "prefill_context_tokens", "attention_pairs"),
)
_STEP_FIELDS: _Columns[StepLog] = {
    **_LIFE,
    **_fields(pl.Int64, "step_id", "start_ns", "end_ns"),
    "cycle_us": (pl.Float64, lambda _, step: step.cycle_ns / 1e3),
    **_fields(pl.Float64, "law_us"),
    "schedule_us": (pl.Float64, lambda _, step: step.schedule_ns / 1e3),
    **_fields(pl.Boolean, "is_hiccup"),
    **_fields(pl.Int64, *_BATCH_FIELDS, part="composition"),
    "running": (pl.Int64, lambda _, step: step.running_depth),
    "waiting": (pl.Int64, lambda _, step: step.waiting_depth),
    **_fields(pl.Int64, "waiting_tokens", "blocks_free", "num_finished", "num_preempted"),
    **_fields(pl.Boolean, "is_sampled"),
}
_REQUEST_FIELDS: _Columns[Request] = {
    **_LIFE,
    "request_id": (pl.String, lambda _, request: request.api_id),
    "core_request_id": (pl.String, lambda _, request: request.request_id),
    **_fields(pl.String, "load_phase"),
    **_fields(pl.Boolean, "is_chat", "is_streaming"),
    **_fields(pl.Int64, "prompt_tokens", "max_tokens"),
    "output_tokens": (pl.Int64, lambda _, request: request.done_tokens),
    **_fields(pl.Int64, "cached_prompt_tokens", "arrival_ns"),
    **_fields(pl.Float64, "api_work_us"),
    **_fields(pl.Int64, "socket_ns"),
    **_event("queued", "QUEUED"),
    **_fields(pl.Int64, *QueueState._fields, part="queue_state"),
    **_event("first_scheduled", "SCHEDULED"),
    **_event("first_token", "FIRST_TOKEN"),
    **_event("finished", "FINISHED"),
    "finish_status": (pl.String, lambda _, request: request.points[-1].detail),
    **_fields(pl.Int64, "departed_ns", "num_preemptions"),
    "batch_reqs": (pl.Int64, lambda _, request: request.batch_reqs or None),
    "finishing_reqs": (pl.Int64, lambda _, request: request.finishing_reqs or None),
    **_fields(pl.Int64, "abort_ns"),
    "abort_stage": (pl.String, lambda _, request: request.abort_stage.value or None),
}

TRUE_STEP_COLUMNS = {name: kind for name, (kind, _) in _STEP_FIELDS.items()}
"""Columns of the steps' truth; times monotonic, `law_us` is `cycle_us` without noise and hiccups."""

TRUE_REQUEST_COLUMNS = {name: kind for name, (kind, _) in _REQUEST_FIELDS.items()}
"""Columns of the requests' truth; queue state is that at its QUEUED."""


def _frame(columns: _Columns[_T], rows: Sequence[tuple[EpochLog, _T]]) -> pl.DataFrame:
    return pl.DataFrame(
        [pl.Series(name, [value(*row) for row in rows], kind) for name, (kind, value) in columns.items()]
    )
