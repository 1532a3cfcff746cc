"""Decode batches of KV-cache events, as vLLM writes them in JSON or msgpack, into rows, one per event.

Token ids encode what users wrote: they are skipped and never decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import msgspec
import polars as pl

from tracefit.inputs.rejects import Reject, excerpt
from tracefit.recordings.blocks import UNREADABLE_RECORD, fault_of
from tracefit.tables import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

MessageEncoding = Literal["json", "msgpack"]
Hash = int | bytes
"""Builds write block hashes as numbers of 64 bits, or as bytes (base64 in JSON)."""

MAX_LOOSE_BYTES = 8 << 20
"""A larger batch is read only if all its events are good: separating them takes some 60 bytes each, even for one-byte
events."""
MAX_TRACKED_BLOCKS = 2_000_000
"""Most blocks whose age is tracked, at about 130 bytes each; the caches of a server have a tenth of that."""
MAX_TRACKED_RANKS = 1 << 12
"""Most ranks whose blocks are tracked; hostile files name more."""

# The bounds of the same values in traces: within them, sums and products fit 64 bits.
_BlockCount = Annotated[int, msgspec.Meta(ge=0, le=schema.MOST_KV_BLOCKS)]
_TOKENS = Annotated[int, msgspec.Meta(ge=0, le=schema.MOST_TOKENS)]
_StepId = Annotated[int, msgspec.Meta(ge=0, le=schema.MOST_STEP)]
_Rank = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_UNIX_S = Annotated[float, msgspec.Meta(ge=0, lt=9e9)]  # later times do not fit 64 bits of nanoseconds
_OTHER_TYPES: dict[str, Any] = {
    "block_hashes": list[Hash],
    "transfer_id": Annotated[int, msgspec.Meta(ge=0)],
    "block_count": _BlockCount,
    "block_size": _TOKENS,
    "event_step": _StepId,
    **dict.fromkeys(("source_rank", "dest_rank"), _Rank),
    **dict.fromkeys(("parent_block_hash", "token_ids", "lora_id"), msgspec.Raw),
    "success": bool,
}
"""Types of fields that are not text. `Raw` is not parsed."""

_EVENT_FIELDS = {
    # Blocks enter a prefix cache, leave it, or all leave it.
    "BlockStored": ("block_hashes", "parent_block_hash token_ids block_size lora_id medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": ("", ""),
    # Blocks go from one medium to another; the step of both is the one the transfer was initiated in.
    "TransferInitiated": ("transfer_id", "request_id source_medium dest_medium block_count event_step"),
    "TransferCompleted": (
        "transfer_id",
        "request_id source_medium dest_medium block_count success event_step",
    ),
    # Blocks go from one server to another; the medium is the type of the connector.
    "RemoteTransferInitiated": ("transfer_id", "request_id medium source_rank dest_rank block_count"),
    "RemoteTransferCompleted": ("transfer_id", "request_id medium source_rank dest_rank block_count success"),
    # The scheduler decides to load or store blocks of a request.
    "CacheLoadCommitted": ("request_id", "medium block_count event_step"),
    "CacheStoreCommitted": ("request_id", "medium block_count event_step"),
    # A medium drops blocks to make room.
    "CacheEviction": ("", "medium block_count eviction_reason event_step block_hashes"),
}
"""Event to its fields by position: the required one, and those that builds may omit at the end."""


def _event_type(name: str, required: str, optional: str) -> Any:
    fields: list[Any] = [(field, _OTHER_TYPES.get(field, str)) for field in required.split()]
    for field in optional.split():
        kind = _OTHER_TYPES.get(field, str)
        fields.append((field, kind if kind is msgspec.Raw else kind | None, None))
    return msgspec.defstruct(name, fields, array_like=True, tag=True, gc=False)


_AnyEvent: Any = Union[tuple(_event_type(name, *fields) for name, fields in _EVENT_FIELDS.items())]  # noqa: UP007


class Batch(msgspec.Struct, array_like=True):
    """Events published together at `ts`, unix time in s. Each is decoded by itself, as some may be bad."""

    ts: _UNIX_S
    events: list[msgspec.Raw]
    data_parallel_rank: _Rank | None = None
    scheduler_step: _StepId | None = None


class WholeBatch(Batch, array_like=True):
    """A batch of good events."""

    events: list[_AnyEvent]


class _Name(msgspec.Struct, array_like=True):
    name: str


_DECODE: dict[MessageEncoding, Any] = {"json": msgspec.json.decode, "msgpack": msgspec.msgpack.decode}


def decode_batch(payload: bytes, encoding: MessageEncoding) -> Batch | str:
    """Return the batch in a payload, or the reason for its rejection."""
    decode = _DECODE[encoding]
    try:
        batch: Batch = decode(payload, type=WholeBatch)
    except UNREADABLE_RECORD:
        if len(payload) > MAX_LOOSE_BYTES:
            return "not a batch of KV-cache events, or a large one with bad events"
        try:
            batch = decode(payload, type=Batch)
        except UNREADABLE_RECORD as error:
            return f"not a batch of KV-cache events ({fault_of(error)})"
    return batch


def _decode_event(raw: msgspec.Raw, encoding: MessageEncoding) -> Any:
    """Return an event, or the reason for its rejection as text."""
    decode = _DECODE[encoding]
    try:
        return decode(raw, type=_AnyEvent)
    except UNREADABLE_RECORD as error:
        try:
            name = decode(raw, type=_Name).name
        except UNREADABLE_RECORD:
            return "not a KV-cache event"
        # An unknown name may be anything, and the error quotes it.
        if name not in _EVENT_FIELDS:
            return "KV-cache event of an unknown kind"
        return f"{name} event cannot be read ({fault_of(error)})"


_COPIED = (
    *("request_id", "source_medium", "dest_medium", "medium", "source_rank", "dest_rank"),
    *("block_size", "success", "eviction_reason", "event_step"),
)
"""Columns that are fields of events by the same name."""
_DERIVED = (
    *("event", "unix_ns", "data_parallel_rank", "batch_step", "transfer_id"),
    *("block_count", "lifetime_us", "source_file", "source_offset"),
)
_KV_TYPES = schema.KV_EVENTS.types
KV_ROW_COLUMNS = {name: _KV_TYPES.get(name, pl.Int64()) for name in (*_DERIVED, *_COPIED)}
"""Columns of rows: `event_step` is the step an event names, `batch_step` that of its batch."""


class KvRows(msgspec.Struct, frozen=True):
    """Events of some recordings, columns as `KV_ROW_COLUMNS`, in input order, and the rejects."""

    rows: pl.DataFrame
    rejects: list[Reject]


def event_rows(
    batch: Batch, encoding: MessageEncoding, source_file: str, source_offset: int, ages: BlockAges
) -> Iterator[tuple[Any, ...] | Reject]:
    """Yield the values of `KV_ROW_COLUMNS` for each event of a batch, and a reject for each that cannot be read."""
    rank, unix_ns = batch.data_parallel_rank, round(batch.ts * 1e9)
    for one in batch.events:
        event: Any = _decode_event(one, encoding) if isinstance(one, msgspec.Raw) else one
        if isinstance(event, str):
            raw = bytes(one)
            yield Reject(source_file, source_offset, len(raw), event, excerpt(raw, encoding))
            continue
        name = type(event).__name__
        hashes = getattr(event, "block_hashes", None) or []
        count, lifetime_us = getattr(event, "block_count", None), None
        if name == "BlockStored":
            ages.store(rank, event.medium, hashes, batch.ts)
        elif name == "AllBlocksCleared":
            ages.clear(rank)
        else:
            lifetime_us = ages.remove(rank, getattr(event, "medium", None), hashes, batch.ts)
        yield (
            *(name, unix_ns, rank, batch.scheduler_step),
            str(event.transfer_id) if hasattr(event, "transfer_id") else None,  # some do not fit 64 bits
            *(len(hashes) if name.startswith("Block") else count, lifetime_us, source_file, source_offset),
            *[getattr(event, column, None) for column in _COPIED],
        )


class BlockAges:
    """Store times of the blocks in the caches, by rank, medium and hash.

    All are dropped once there are more than a server can have: then removals are missing in the recording.
    """

    def __init__(self, most_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self._stored: dict[int | None, dict[str | None, dict[int, float]]] = {}
        self._count = 0
        self._most = most_blocks

    def store(self, rank: int | None, medium: str | None, hashes: list[Hash], ts: float) -> None:
        """Record the store time of blocks, unix time in s; a block that is already stored keeps its first time."""
        cache = self._stored.setdefault(rank, {}).setdefault(medium, {})
        before = len(cache)
        for one in hashes[-self._most :]:
            cache.setdefault(hash_number(one), ts)
        self._count += len(cache) - before
        if self._count > self._most or len(self._stored) > MAX_TRACKED_RANKS:
            self._stored.clear()
            self._count = 0

    def remove(self, rank: int | None, medium: str | None, hashes: list[Hash], ts: float) -> float | None:
        """Drop blocks; return their mean age in us, or null without a store time."""
        cache = self._stored.get(rank, {}).get(medium, {})
        stored = (cache.pop(hash_number(one), None) for one in hashes)
        lived = [(ts - since) * 1e6 for since in stored if since is not None]
        self._count -= len(lived)
        return sum(lived) / len(lived) if lived else None

    def clear(self, rank: int | None) -> None:
        """Drop the blocks of a rank in every medium."""
        self._count -= sum(map(len, self._stored.pop(rank, {}).values()))


def hash_number(block_hash: Hash) -> int:
    """Return a block hash as a number of 64 bits: vLLM's integer hashes are the last eight bytes of its byte hashes."""
    number = block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash, "big")
    return number & (1 << 64) - 1
