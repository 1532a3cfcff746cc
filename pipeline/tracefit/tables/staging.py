"""Decoded rows on disk, so that an unchanged trace file is not decoded again.

`TABLES/.stage/<part>/` holds one Arrow IPC file per frame of `SpanRows`. It is tracefit's own store, not a
published table: the manifest says which parts are valid, and a part of another tool version is decoded again.
Small files share a part, also those of several runs, but the rows of each stay separate: they count as long as
the manifest names the part for the file. The name of a part ends in a hash of its files, so that damage is detected
before the part is read.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING

import polars as pl

from tracefit.errors import DataError
from tracefit.tables.disk import create
from tracefit.tables.storage import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefit.tables.rows import SpanRows
    from tracefit.tables.storage import Storage

STAGE_NAME = ".stage"
_BATCH_ROWS = 64 * 1024
_PART_HASH_DIGITS = 16


def write_staged(rows: SpanRows, storage: Storage) -> str:
    """Write rows as a new part, and return its name once all of it is written.

    Raises:
        OSError: It cannot be written.
        UsageError: The bucket cannot be written.
    """
    with storage.scratch() as scratch:
        paths = {kind: scratch / f"{kind}.arrow" for kind in rows.frames()}
        for kind, frame in rows.frames().items():
            with create(paths[kind]) as stream:
                frame.write_ipc(stream, compression="lz4", record_batch_size=_BATCH_ROWS)
        # Random before the hash: two decodings of a file may exist at once, and the manifest names only one.
        part = uuid.uuid4().hex[:-_PART_HASH_DIGITS] + _hash_of({p.name: digest_of(p) for p in paths.values()})
        storage.put({_name(part, kind): path for kind, path in paths.items()})
    return part


def is_whole(storage: Storage, part: str) -> bool:
    """Return whether a part is unchanged since it was written; a bucket checks its own objects.

    Raises:
        UsageError: The part is, or holds, a symbolic link.
    """
    if not storage.has_lock:
        return True
    digests = {}
    try:
        for name in storage.children(f"{STAGE_NAME}/{part}"):
            with storage.fetched(f"{STAGE_NAME}/{part}/{name}") as path:
                digests[name] = digest_of(path)
    except OSError:
        return False
    return part.endswith(_hash_of(digests))


def _hash_of(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:_PART_HASH_DIGITS]


def read_staged(storage: Storage, part: str, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read one frame of a part, or some of its columns.

    Raises:
        DataError: The part is damaged.
        UsageError: The bucket cannot be read.
    """
    name = _name(part, kind)
    try:
        with storage.fetched(name) as path:
            return pl.read_ipc(path, columns=list(columns) if columns else None)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(
            "is damaged",
            where=str(storage.root / name),
            hint=f"remove {storage.root / STAGE_NAME} and ingest the traces again",
        ) from error


def _name(part: str, kind: str) -> str:
    return f"{STAGE_NAME}/{part}/{kind}.arrow"


def staged_parts(storage: Storage) -> set[str]:
    """Return the names of the existing parts, finished or not.

    Raises:
        UsageError: The folder of parts is a symbolic link, or the bucket cannot be read.
    """
    return storage.children(STAGE_NAME)


def staged_bytes(storage: Storage, parts: Iterable[str]) -> list[int]:
    """Return the size of each part as stored."""
    return storage.sizes(f"{STAGE_NAME}/{part}" for part in parts)
