"""Batches of KV-cache events to rows, one per event. Token ids are what users wrote: they are passed over, never read."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import polars as pl

from tracefit.otlp.rejects import Rejects
from tracefit.sources.kv_frames import SHORTEST_EVENT
from tracefit.sources.records import Frame, Reject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAX_UNIX_S = 9e9
_MAX_TRACKED_BLOCKS = 4_000_000
_CHUNK_ROWS = 1 << 16
_HASH_MASK = (1 << 64) - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
TransferId = Annotated[int, msgspec.Meta(ge=0)]
Hash = int | bytes
"""Builds write block hashes as numbers of 64 bits, or as bytes (base64 in JSON)."""


class KvEvent(msgspec.Struct, array_like=True, tag=True, gc=False):
    """An event: its name, then its fields by position. Trailing ones may be missing; more of them are passed over."""


class BlockStored(KvEvent):
    """Blocks are in the prefix cache."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    block_size: Count | None = None
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None


class BlockRemoved(KvEvent):
    """Blocks are no longer in the prefix cache."""

    block_hashes: list[Hash]
    medium: str | None = None


class AllBlocksCleared(KvEvent):
    """The prefix cache is empty."""


class TransferInitiated(KvEvent):
    """Blocks are on their way from one medium to another."""

    transfer_id: TransferId
    request_id: str | None = None
    source_medium: str | None = None
    dest_medium: str | None = None
    block_count: Count | None = None
    scheduler_step: Count | None = None


class TransferCompleted(KvEvent):
    """A transfer has ended; its scheduler step is the one it was initiated in."""

    transfer_id: TransferId
    request_id: str | None = None
    source_medium: str | None = None
    dest_medium: str | None = None
    block_count: Count | None = None
    success: bool | None = None
    scheduler_step: Count | None = None


class RemoteTransferInitiated(KvEvent):
    """Blocks are on their way from one server to another."""

    transfer_id: TransferId
    request_id: str | None = None
    connector_type: str | None = None
    source_rank: Rank | None = None
    dest_rank: Rank | None = None
    block_count: Count | None = None


class RemoteTransferCompleted(KvEvent):
    """A transfer between servers has ended."""

    transfer_id: TransferId
    request_id: str | None = None
    connector_type: str | None = None
    source_rank: Rank | None = None
    dest_rank: Rank | None = None
    block_count: Count | None = None
    success: bool | None = None


class CacheLoadCommitted(KvEvent):
    """The scheduler has decided to load blocks of a request."""

    request_id: str
    medium: str | None = None
    block_count: Count | None = None
    scheduler_step: Count | None = None


class CacheStoreCommitted(KvEvent):
    """The scheduler has decided to store blocks of a request; the transfer is submitted a step later."""

    request_id: str
    medium: str | None = None
    block_count: Count | None = None
    scheduler_step: Count | None = None


class CacheEviction(KvEvent):
    """A medium has dropped blocks to make room."""

    medium: str | None = None
    blocks_evicted: Count | None = None
    eviction_reason: str | None = None
    scheduler_step: Count | None = None
    block_hashes: list[Hash] | None = None


AnyEvent = (
    BlockStored
    | BlockRemoved
    | AllBlocksCleared
    | TransferInitiated
    | TransferCompleted
    | RemoteTransferInitiated
    | RemoteTransferCompleted
    | CacheLoadCommitted
    | CacheStoreCommitted
    | CacheEviction
)


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: Rank | None = None
    scheduler_step: Count | None = None


class _Name(msgspec.Struct, array_like=True):
    name: str


ROW_COLUMNS: dict[str, type[pl.DataType]] = {
    "event": pl.String,
    "unix_ns": pl.Int64,
    "data_parallel_rank": pl.Int64,
    "own_step": pl.Int64,
    "batch_step": pl.Int64,
    "request_id": pl.String,
    "transfer_id": pl.String,
    "source_medium": pl.String,
    "dest_medium": pl.String,
    "medium": pl.String,
    "source_rank": pl.Int64,
    "dest_rank": pl.Int64,
    "block_count": pl.Int64,
    "block_size": pl.Int64,
    "success": pl.Boolean,
    "eviction_reason": pl.String,
    "lifetime_us": pl.Float64,
    "source_file": pl.String,
    "source_offset": pl.Int64,
}
"""Columns of decoded events: `own_step` is the step the event names, `batch_step` that of its batch."""

_FIELDS = tuple(ROW_COLUMNS)


@dataclass(slots=True)
class DecodedKv:
    """Rows of some files, columns as `ROW_COLUMNS`, in the order they were read, and what could not be read."""

    rows: pl.DataFrame
    rejects: list[Reject]


@dataclass(slots=True)
class _Lifetimes:
    """When the blocks that are in a cache were stored; the oldest are forgotten when they are too many.

    A cache that is cleared begins a new round. Blocks of an older one are gone; they are taken out when they are more than
    the others, so that clearing takes no time.
    """

    stored: OrderedDict[tuple[str | None, int | None, int], tuple[float, int]] = field(
        default_factory=OrderedDict
    )
    rounds: Counter[int | None] = field(default_factory=Counter)
    counts: Counter[int | None] = field(default_factory=Counter)
    gone: int = 0

    def store(self, medium: str | None, rank: int | None, hashes: list[Hash], at: float) -> None:
        for one in hashes:
            key = (medium, rank, hash_number(one))
            known = self.stored.get(key)
            if known is None or known[1] != self.rounds[rank]:
                self._forget(key)
                self.stored[key] = (at, self.rounds[rank])
                self.counts[rank] += 1
        while len(self.stored) > _MAX_TRACKED_BLOCKS:
            self._forget(next(iter(self.stored)))

    def _forget(self, key: tuple[str | None, int | None, int]) -> float | None:
        """Take out a block; return when it was stored, if it is there."""
        at, number = self.stored.pop(key, (None, None))
        if number == self.rounds[key[1]]:
            self.counts[key[1]] -= 1
            return at
        self.gone -= number is not None
        return None

    def remove(self, medium: str | None, rank: int | None, hashes: list[Hash], at: float) -> float | None:
        """Mean time in us since the blocks were stored; None where none of them was seen."""
        since = [self._forget((medium, rank, hash_number(one))) for one in hashes]
        known = [(at - begin) * 1e6 for begin in since if begin is not None]
        return sum(known) / len(known) if known else None

    def clear(self, rank: int | None) -> None:
        self.gone += self.counts.pop(rank, 0)
        self.rounds[rank] += 1
        if 2 * self.gone > len(self.stored):
            rounds = self.rounds
            there = [(key, value) for key, value in self.stored.items() if value[1] == rounds[key[1]]]
            self.stored, self.gone = OrderedDict(there), 0


def hash_number(block_hash: Hash) -> int:
    """Return a block hash as a number of 64 bits: vLLM's own numbers are the last eight bytes of the others."""
    number = block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash, "big")
    return number & _HASH_MASK


def decode_kv(items: Iterable[Frame | Reject]) -> DecodedKv:
    """Decode batches of KV-cache events.

    An event that cannot be read costs nothing beside itself; of a line that another was glued to, what is whole is kept.

    Args:
        items: Frames and rejects of any number of files.

    Returns:
        The rows of all events, and all rejects.
    """
    reader = _Reader()
    rejects: list[Reject] = []
    for item in items:
        if isinstance(item, Reject):
            rejects.append(item)
        else:
            reader.read(item)
    return reader.finish(rejects)


class _Reader:
    def __init__(self) -> None:
        self._rejects = Rejects(part="events")
        self._frames: list[pl.DataFrame] = []
        self._rows: list[tuple[Any, ...]] = []
        self._lifetimes = _Lifetimes()
        kinds = (_Batch, AnyEvent, _Name)
        self._decoders: dict[str, tuple[Callable[[Any], Any], ...]] = {
            "json": tuple(msgspec.json.Decoder(kind).decode for kind in kinds),
            "msgpack": tuple(msgspec.msgpack.Decoder(kind).decode for kind in kinds),
        }

    def read(self, frame: Frame) -> None:
        """Read one batch."""
        decoders = self._decoders.get(frame.encoding)
        if decoders is None:
            self._reject(frame, "not a batch of KV-cache events")
            return
        of_batch, of_event, of_name = decoders
        batch, reason = _decoded(of_batch, frame.payload)
        if batch is None:
            frame, batch = self._glued(frame, reason, of_batch)
        if batch is None:
            return
        if not math.isfinite(batch.ts) or not 0 <= batch.ts < _MAX_UNIX_S:
            self._reject(frame, "KV-cache events without a unix time")
            return
        events = batch.events
        if not self._rejects.left(frame.source_file):
            events = [raw for raw in events if len(raw) >= SHORTEST_EVENT]
            if len(events) < len(batch.events):
                self._rejects.count(frame, len(batch.events) - len(events))
        for raw in events:
            event, reason = _decoded(of_event, raw)
            if event is None:
                name, _ = _decoded(of_name, raw)
                self._reject(frame, _why(name, reason), raw)
            else:
                self._rows.append(self._row(event, batch, frame))
            if len(self._rows) >= _CHUNK_ROWS:
                self._flush()

    def finish(self, rejects: list[Reject]) -> DecodedKv:
        """Return everything that was read, and the rejects behind those of the files."""
        self._flush()
        return DecodedKv(pl.concat(self._frames), [*rejects, *self._rejects.all()])

    def _flush(self) -> None:
        self._frames.append(pl.DataFrame(self._rows, schema=ROW_COLUMNS, orient="row"))
        self._rows = []

    def _reject(self, frame: Frame, reason: str, part: msgspec.Raw | None = None) -> None:
        """Report a batch, or one of its events; what is in it is never shown."""
        if part is not None and not self._rejects.left(frame.source_file):
            self._rejects.count(frame, 1)
            return
        hidden = Frame(frame.source_file, frame.offset, frame.payload, frame.encoding)
        shown = hidden if part is None else replace(hidden, payload=bytes(part))
        self._rejects.add(hidden, partial(shown.reject, reason), is_part=part is not None)

    def _glued(
        self, frame: Frame, reason: str, decode: Callable[[bytes], _Batch]
    ) -> tuple[Frame, _Batch | None]:
        """Look for a whole batch at the end of a line that a cut one is at the beginning of."""
        lines = _LINE_START.finditer(frame.payload, 1) if frame.encoding == "json" else ()
        starts = [m.start() for m in lines]
        for start in reversed(starts[-_MAX_GUESSES:]):
            batch, _ = _decoded(decode, frame.payload[start:])
            if batch is not None:
                self._reject(
                    Frame(frame.source_file, frame.offset, frame.payload[:start], "json"),
                    "record cut: another begins inside",
                )
                return Frame(frame.source_file, frame.offset + start, frame.payload[start:], "json"), batch
        self._reject(frame, f"not a batch of KV-cache events ({reason})")
        return frame, None

    def _row(self, event: AnyEvent, batch: _Batch, frame: Frame) -> tuple[Any, ...]:
        rank = batch.data_parallel_rank
        lifetime, count = None, getattr(event, "block_count", None)
        if isinstance(event, BlockStored):
            count = len(event.block_hashes)
            self._lifetimes.store(event.medium, rank, event.block_hashes, batch.ts)
        elif isinstance(event, BlockRemoved):
            count = len(event.block_hashes)
            lifetime = self._lifetimes.remove(event.medium, rank, event.block_hashes, batch.ts)
        elif isinstance(event, AllBlocksCleared):
            self._lifetimes.clear(rank)
        elif isinstance(event, CacheEviction):
            count = event.blocks_evicted
            lifetime = self._lifetimes.remove(event.medium, rank, event.block_hashes or [], batch.ts)
        own = {
            "event": type(event).__name__,
            "unix_ns": round(batch.ts * 1e9),
            "data_parallel_rank": rank,
            "own_step": getattr(event, "scheduler_step", None),
            "batch_step": batch.scheduler_step,
            "transfer_id": _text(getattr(event, "transfer_id", None)),
            # Where blocks cross servers the connector is what they go through.
            "medium": getattr(event, "medium", None) or getattr(event, "connector_type", None),
            "block_count": count,
            "lifetime_us": lifetime,
            "source_file": frame.source_file,
            "source_offset": frame.offset,
        }
        return tuple(own[name] if name in own else getattr(event, name, None) for name in _FIELDS)


_LINE_START = re.compile(rb"\[\s*\d{9,10}(?:\.\d*)?\s*,\s*\[")
_MAX_GUESSES = 100


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _decoded(decode: Callable[[Any], Any], payload: Any) -> tuple[Any, str]:
    """Decode, or return None and why not; the reason names types and places, no values."""
    try:
        return decode(payload), ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        return None, text if isinstance(
            error, msgspec.ValidationError
        ) and "Invalid value" not in text else "malformed"


_KINDS = frozenset(kind.__name__ for kind in KvEvent.__subclasses__())


def _why(name: _Name | None, reason: str) -> str:
    if name is None:
        return f"not a KV-cache event ({reason})"
    if name.name in _KINDS:
        return f"{name.name} event cannot be read ({reason})"
    return "KV-cache event of an unknown kind"
