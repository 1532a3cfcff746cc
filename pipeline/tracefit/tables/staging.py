"""Decoded rows on disk, so that an unchanged trace file is not decoded again.

`TABLES/.stage/<part>/` holds one Arrow IPC file per frame of `SpanRows`. It is tracefit's own store, not a published table:
the manifest says which parts are valid, and a part of another tool version is decoded anew. Small files share a part,
but the rows of each stay separate: they count as long as the manifest names the part for the file.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from tracefit.errors import DataError
from tracefit.tables.disk import create

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.tables.manifest import ReadFile
    from tracefit.tables.places import Place
    from tracefit.tables.rows import SpanRows

STAGE_NAME = ".stage"
_BATCH_ROWS = 64 * 1024
_FILES = {"file": pl.UInt32, "place": pl.UInt32, "source_file": pl.String}


def write_staged(rows: SpanRows, place: Place) -> str:
    """Write rows as a new part. Its name is returned when all of it is there.

    Raises:
        OSError: It cannot be written.
        UsageError: The bucket cannot be written.
    """
    # Random: two decodings of a file may be there at once, and only one is named by the manifest.
    part = uuid.uuid4().hex
    files = {}
    with place.scratch() as scratch:
        for kind, frame in rows.frames().items():
            files[_name(part, kind)] = path = scratch / f"{kind}.arrow"
            with create(path) as stream:
                frame.write_ipc(stream, compression="lz4", record_batch_size=_BATCH_ROWS)
        place.put(files)
    return part


def read_staged(place: Place, part: str, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read one frame of a part, or some of its columns.

    Raises:
        DataError: The part is damaged.
        UsageError: The bucket cannot be read.
    """
    name = _name(part, kind)
    try:
        with place.fetched(name) as path:
            return pl.read_ipc(path, columns=list(columns) if columns else None)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(
            "is damaged",
            where=str(place.root / name),
            hint=f"remove {place.root / STAGE_NAME} and ingest the traces again",
        ) from error


def _name(part: str, kind: str) -> str:
    return f"{STAGE_NAME}/{part}/{kind}.arrow"


def staged_parts(place: Place) -> set[str]:
    """Return the names of the parts that are there, finished or not.

    Raises:
        UsageError: The folder of parts is a symbolic link, or the bucket cannot be read.
    """
    return place.children(STAGE_NAME)


def staged_bytes(place: Place, parts: Iterable[str]) -> list[int]:
    """Return the size of each part as stored."""
    return place.sizes(f"{STAGE_NAME}/{part}" for part in parts)


@dataclass(frozen=True, slots=True)
class RunPart:
    """A staged part of a run.

    Attributes:
        name: Its name.
        files: file (number in the part), place (order of the file in the run), source_file. SpanRows of other files do not
            count.
    """

    name: str
    files: pl.DataFrame

    def of_files(self, rows: pl.DataFrame, column: str) -> pl.DataFrame:
        """Return the rows that count, with `place` or `source_file` in place of `file`."""
        named = self.files.select("file", column)
        return rows.join(named, on="file", how="inner", maintain_order="left").drop("file")


def parts_of(files: Sequence[ReadFile]) -> list[RunPart]:
    """Return the parts of a run's files; the order of the files decides which of two equal spans counts."""
    rows: dict[str, list[tuple[int, int, str]]] = {}
    for place, (file, part) in enumerate((f, part) for f in files for part in f.parts):
        rows.setdefault(part.name, []).append((part.file, place, file.path))
    return [RunPart(name, pl.DataFrame(of, schema=_FILES, orient="row")) for name, of in rows.items()]
