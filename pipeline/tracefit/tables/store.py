"""Tables on disk: `TABLES/<table>/run_id=<run>/part-<content hash>.parquet`."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tracefit.errors import DataError, UsageError
from tracefit.tables import schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROW_GROUP_ROWS = 128 * 1024


class TableStore:
    """A folder of tables. Parts appear whole or not at all: they are written beside and renamed."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def write_run(self, run_id: str, frames: Mapping[str, pl.DataFrame]) -> list[Path]:
        """Replace all parts of a run in the given tables.

        Everything is written to a temporary folder first; nothing of the run is touched before that succeeded.

        Args:
            run_id: A cleaned run id.
            frames: Table name to its conformed frame.

        Raises:
            UsageError: The folder cannot be written.
        """
        with _disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.root))
            try:
                parts = {n: _write_part(frame, schema.TABLES[n], scratch) for n, frame in frames.items()}
                return [self._publish(name, run_id, part) for name, part in parts.items()]
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def _publish(self, name: str, run_id: str, part: Path) -> Path:
        folder = self.root / name / f"run_id={run_id}"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / part.name
        part.replace(target)
        for old in folder.glob("part-*.parquet"):
            if old != target:
                old.unlink()
        return target

    def runs(self) -> list[str]:
        """Return the ids of the runs that are here, in order."""
        return sorted(p.name.removeprefix("run_id=") for p in (self.root / "runs").glob("run_id=*"))

    def read(self, name: str, run_ids: list[str] | None = None) -> pl.DataFrame:
        """Read a whole table, or the part of it that belongs to some runs.

        Raises:
            DataError: A part is not a readable Parquet file.
        """
        table = schema.TABLES[name]
        parts = sorted((self.root / name).glob("run_id=*/part-*.parquet"))
        if run_ids is not None:
            parts = [p for p in parts if p.parent.name.removeprefix("run_id=") in run_ids]
        frames = [_read_part(part) for part in parts]
        if not frames:
            return table.empty()
        return pl.concat(frames, how="diagonal_relaxed")

    def require(self) -> TableStore:
        """Return the store if it holds ingested runs.

        Raises:
            UsageError: It does not.
        """
        if not self.runs():
            raise UsageError(
                "holds no tables", where=str(self.root), hint="run `tracefit ingest` into it first"
            )
        return self


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot be written ({error.strerror or error})", where=str(root)) from error


def _write_part(frame: pl.DataFrame, table: schema.Table, scratch: Path) -> Path:
    unfinished = scratch / f"{table.name}.parquet"
    pq.write_table(
        _to_arrow(frame, table),
        unfinished,
        compression="zstd",
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=[c.name for c in table.columns if c.kind == "string"],
    )
    digest = hashlib.sha256(unfinished.read_bytes()).hexdigest()[:16]
    return unfinished.rename(scratch / f"part-{digest}.parquet")


def _to_arrow(frame: pl.DataFrame, table: schema.Table) -> pa.Table:
    """Give each column the published Arrow type; lists of key and value become maps."""
    kinds = {c.name: c for c in table.columns}
    arrow = frame.to_arrow()
    columns = []
    for field, column in zip(arrow.schema, arrow.columns, strict=True):
        known = kinds.get(field.name)
        combined = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if known is None:
            columns.append(combined)
        elif known.kind == "map":
            columns.append(_to_map(combined))
        else:
            columns.append(combined.cast(known.arrow))
    return pa.Table.from_arrays(columns, names=arrow.schema.names)


def _to_map(lists: pa.Array) -> pa.Array:
    lists = lists.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    pairs = lists.flatten()
    present = [0, *(int(n or 0) for n in lists.value_lengths().to_pylist())]
    offsets = pa.array(_running_sum(present), pa.int32())
    return pa.MapArray.from_arrays(offsets, pairs.field("key"), pairs.field("value"))


def _running_sum(lengths: list[int]) -> list[int]:
    total = 0
    return [total := total + n for n in lengths]


def _read_part(part: Path) -> pl.DataFrame:
    try:
        frame = pl.from_arrow(pq.read_table(part, partitioning=None))
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            "is not a readable Parquet file", where=str(part), hint="ingest the run again"
        ) from error
    if not isinstance(frame, pl.DataFrame):
        raise DataError("holds no table", where=str(part))
    return frame
