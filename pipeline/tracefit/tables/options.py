"""Options of an ingest: which part of the traces is kept, and how much of them is in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tracefit.inputs.blocks import ReadOptions
from tracefit.tables import dialects


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """How much of a run is in memory while its tables are built.

    Attributes:
        window_bytes: Bytes on disk of the staged parts that are read together; in memory they take several
            times as much.
        sorted_bytes: Bytes of rows that wait to be sorted; beyond it they are spilled to disk.
        small_run_rows: Steps, journey events and snapshots of a run up to which its tables stay in memory
            until they are written, and its timeline is built from them. The timeline of a larger run is left
            to `train`, which has more memory: about 1 KiB for each step.
    """

    window_bytes: int = 8 << 20
    sorted_bytes: int = 48 << 20
    small_run_rows: int = 100_000


@dataclass(frozen=True, slots=True)
class IngestOptions(ReadOptions):
    """Which part of the traces is kept. Traces are private data: text of users is not kept, except on request.

    Attributes:
        show_values: Show the beginning of a rejected record as it is, not only its structure and keys.
        max_document_mib: MiB of the longest record; a record is in memory as a whole.
        max_rejects: Bad records of a file after which reading it stops.
        block_bytes: Bytes of a file that are decoded at once; with more, a worker takes more memory.
        all_spans: Keep spans of other services and scopes too, in the `spans` table alone.
        keep_attributes: Keys of span attributes to keep beside the usual ones (ids, counts, routes, the model, sampling
            parameters).
        bytes_per_worker: Bytes that are worth another process: it takes about as long to start as to decode 64 MiB.
        fetched_bytes: Most bytes of bucket files on disk at a time, unless one file is larger.
        build: How much of a run is in memory while its tables are built.
    """

    all_spans: bool = False
    keep_attributes: tuple[str, ...] = ()
    bytes_per_worker: int = 64 << 20
    fetched_bytes: int = 1 << 30
    build: BuildLimits = field(default_factory=BuildLimits)

    @property
    def attributes(self) -> frozenset[str]:
        """Keys of the span attributes that go into `spans.attributes`."""
        return frozenset(dialects.SPAN_ATTRIBUTES).union(self.keep_attributes)

    @property
    def sha256(self) -> str:
        """The hash of the options that decide which part of a span is kept."""
        kept = (sorted(self.attributes), self.all_spans, self.show_values, self.max_rejects)
        return hashlib.sha256(repr(kept).encode()).hexdigest()
