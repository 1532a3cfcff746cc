"""Two commands: simulate a run, and write it as a run folder with its truth.

`synth` draws the load, runs every engine over time, and has its log written as spans; equal options give an equal run.
`write_run` writes the trace as a collector would, the server's configuration beside it, and the law with the truth tables.
"""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import yaml

from tracefit.errors import UsageError
from tracefit.synth.clock import Draws, EngineClock, Streams
from tracefit.synth.emit import export
from tracefit.synth.logs import EpochLog, requests_frame, steps_frame
from tracefit.synth.options import arrivals
from tracefit.synth.spans import framed_protobuf, json_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from tracefit.synth.laws import StepLaw
    from tracefit.synth.options import SynthOptions
    from tracefit.synth.spans import ExportBatch, GeneratedSpan

Format: TypeAlias = Literal["json", "protobuf"]
Compression: TypeAlias = Literal["gz", "zst"]

# A fixed start, in September 2026: with the time of day in them, equal options would give other bytes.
_UNIX_START_NS = 1_790_000_000_000_000_000
# Around a life of the engine nothing happens for seconds, so that epochs are apart on the clock as restarts are.
_WARM_UP_NS = 5_000_000_000
_SHUTDOWN_NS = 7_000_000_000
_RESTART_NS = 20_000_000_000
_GZIP_LEVEL = 6  # gzip's own default


@dataclass(frozen=True, slots=True)
class SynthRun:
    """A simulated run: what a collector received, and the truth.

    Attributes:
        options: The options of the run.
        law: The step-time law with its coefficients.
        batches: Export requests in the order a collector received them.
        truth_steps: One row per step, columns as in `STEP_COLUMNS`.
        truth_requests: One row per request, columns as in `REQUEST_COLUMNS`.
    """

    options: SynthOptions
    law: StepLaw
    batches: tuple[ExportBatch, ...]
    truth_steps: pl.DataFrame
    truth_requests: pl.DataFrame

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
    epochs = [life for number, rng in enumerate(servers) for life in _server(options, law, number, rng)]
    return SynthRun(
        options=options,
        law=law,
        batches=tuple(export(options, epochs, emission)),
        truth_steps=steps_frame(epochs),
        truth_requests=requests_frame(epochs),
    )


def write_run(
    run: SynthRun, out: Path, *, formats: Sequence[Format] = ("json",), compress: Compression | None = None
) -> Path:
    """Write a run folder `out/<name>`: trace, server config, model config, and the truth beside it.

    A run folder must not hold a span twice: with both formats, the protobuf one goes to a folder
    of its own, `<name>-proto`.

    Args:
        run: The run.
        out: Folder in which the run folder is made.
        formats: How to write the trace.
        compress: Compression of the trace; None for none.

    Returns:
        The run folder, of several the first.

    Raises:
        UsageError: A format or compression is unknown, no format is given, or a folder cannot be written.
    """
    kinds = list(dict.fromkeys(formats))
    if not kinds or any(kind not in ("json", "protobuf") for kind in kinds):
        raise UsageError(f"cannot write {list(formats)!r}", where="formats", hint="known: json, protobuf")
    folders = []
    for kind in kinds:
        suffix = "-proto" if kind == "protobuf" and len(kinds) > 1 else ""
        folder = out / f"{run.options.name}{suffix}"
        files = {_trace_name(kind, compress): _trace(run, kind, compress), **_sidecars(run)}
        _write(folder, files)
        folders.append(folder)
    return folders[0]


def _server(options: SynthOptions, law: StepLaw, server: int, rng: np.random.Generator) -> list[EpochLog]:
    """Simulate all lives of one server on its clock."""
    # Monotonic clocks count from each host's boot: those of two servers do not compare.
    boot_ns = (2_000 + 1_777 * server) * 1_000_000_000 + int(rng.integers(0, 1_000_000_000))
    offset_ns = _UNIX_START_NS - boot_ns
    bounds = np.linspace(0, options.requests, options.epochs + 1).round().astype(int).tolist()
    lives: list[EpochLog] = []
    started_ns = boot_ns
    for epoch, child in enumerate(rng.spawn(options.epochs)):
        load_rng, id_rng, *stream_rngs = child.spawn(5)
        load = arrivals(
            options,
            load_rng,
            count=bounds[epoch + 1] - bounds[epoch],
            first_number=bounds[epoch] + 1,
            start_ns=started_ns + _WARM_UP_NS,
        )
        core_ids = [arrival.core_id(server, id_rng.bytes(4).hex()) for arrival in load]
        clock = EngineClock(options, law, Streams(*map(Draws, stream_rngs)), load, core_ids)
        clock.run()
        stopped_ns = _last_ns(clock, started_ns) + _SHUTDOWN_NS
        pool = clock.scheduler.pool
        lives.append(
            EpochLog(
                server=server,
                epoch=epoch,
                unix_offset_ns=offset_ns,
                started_ns=started_ns,
                stopped_ns=stopped_ns,
                steps=tuple(clock.steps),
                requests=tuple(clock.requests),
                blocks_total=pool.total,
                blocks_free_at_end=pool.free,
            )
        )
        started_ns = stopped_ns + _RESTART_NS
    return lives


def _last_ns(clock: EngineClock, started_ns: int) -> int:
    ends = [log.departed_ns for log in clock.requests] + [step.end_ns for step in clock.steps[-1:]]
    return max(ends, default=started_ns)


def _trace_name(kind: Format, compress: Compression | None) -> str:
    name = "traces.json" if kind == "json" else "traces.binpb"
    return f"{name}.{compress}" if compress else name


def _trace(run: SynthRun, kind: Format, compress: Compression | None) -> bytes:
    data = json_lines(run.batches) if kind == "json" else framed_protobuf(run.batches)
    if compress is None:
        return data
    if compress == "gz":
        return gzip.compress(data, compresslevel=_GZIP_LEVEL, mtime=0)
    if compress == "zst":
        return bytes(pa.Codec("zstd").compress(data, asbytes=True))
    raise UsageError(f"unknown compression {compress!r}", where="compress", hint="known: gz, zst")


def _sidecars(run: SynthRun) -> dict[str, bytes]:
    """Return what lies beside the trace; no name here may look like a trace."""
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


def _exp_config(options: SynthOptions) -> dict[str, str | int | float | bool | None]:
    """Return the server's settings under the names real runs use."""
    limit = options.span_event_limit
    config: dict[str, str | int | float | bool | None] = {
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
        "journey_tracing_sample_rate": options.journey_sampling,
        "step_tracing_sample_rate": options.step_sampling,
        "step_tracing_rich_subsample_rate": options.rich_sampling,
        "step_tracing_closure_interval": options.steps_per_span,
        "otel_span_event_count_limit": 1_000_000 if limit is None else limit,
    }
    if options.gpu is not None:
        config["gpu"] = options.gpu
    config["note"] = "synthetic run: simulated engine with a known step-time law"
    return config


def _truth(run: SynthRun) -> dict[str, object]:
    """Return the law with its coefficients and all options, ready for JSON."""
    # A law of the caller's own that is no dataclass is written as its repr.
    coefficients: object = repr(run.law)
    if is_dataclass(run.law) and not isinstance(run.law, type):
        coefficients = asdict(run.law)
    options = {**asdict(run.options), "law": type(run.law).__name__}
    return {
        "law": type(run.law).__name__,
        "coefficients": coefficients,
        "seed": run.options.seed,
        "options": options,
    }


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files or none: each is drafted in a folder of its own before any takes its place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as drafts:
            for name, data in files.items():
                (Path(drafts) / name).write_bytes(data)
            for name in files:
                (Path(drafts) / name).replace(folder / name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot write: {reason}", where=str(folder), hint="choose another folder"
        ) from error
