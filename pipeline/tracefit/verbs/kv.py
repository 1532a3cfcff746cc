"""The files of KV-cache events of a run, read beside its traces."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import polars as pl

from tracefit.otlp.batch import reject_frame
from tracefit.sources.kv_frames import read_kv_frames
from tracefit.tables import schema
from tracefit.tables.kv_batches import decode_kv
from tracefit.tables.kv_events import build_kv_events
from tracefit.tables.kv_requests import with_kv_requests
from tracefit.tables.kv_runs import with_kv_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.sources import TraceFile
    from tracefit.sources.records import Frame, Reject
    from tracefit.tables.store import TableStore

_CHUNK = 1 << 20


def hash_of(files: Iterable[TraceFile]) -> str:
    """Hash files, so that their names and order do not matter.

    Raises:
        UsageError: A file cannot be read.
    """
    digests = []
    for file in files:
        digest = hashlib.sha256()
        with file.open() as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def kv_tables(
    store: TableStore, run_id: str, files: Sequence[TraceFile], *, block_size: int | None
) -> dict[str, pl.DataFrame]:
    """Read a run's files of KV-cache events into its tables.

    Memory grows with the number of events, about a hundred bytes each, not with what they carry.

    Args:
        store: The tables, with those of the run's traces.
        run_id: The run.
        files: The files; there may be none.
        block_size: Tokens of a block, where the events do not tell.

    Returns:
        `kv_events`, and the tables that change with it.

    Raises:
        UsageError: A file cannot be opened.
    """
    if not files:
        return {"kv_events": schema.KV_EVENTS.empty()}
    decoded = decode_kv(_frames(files))
    steps, journeys = store.read("steps", [run_id]), store.read("journey_events", [run_id])
    built = build_kv_events(decoded.rows, steps, journeys, run_id=run_id)
    requests = schema.REQUESTS.shape(store.read("requests", [run_id]))
    bad = reject_frame(decoded.rejects).with_columns(run_id=pl.lit(run_id))
    runs = with_kv_counts(
        store.read("runs", [run_id]),
        built.events,
        requests,
        duplicates=built.duplicates,
        rejects=int(bad["count"].sum()),
    )
    rejects = pl.concat([store.read("rejects", [run_id]), schema.REJECTS.shape(bad)])
    return {
        "kv_events": built.events,
        "requests": schema.REQUESTS.conform(
            with_kv_requests(requests, built.events, journeys, block_size=block_size)
        ),
        "rejects": schema.REJECTS.conform(rejects),
        "runs": runs,
    }


def _frames(files: Sequence[TraceFile]) -> Iterator[Frame | Reject]:
    for file in files:
        yield from read_kv_frames(file)
