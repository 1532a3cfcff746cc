"""Decoded rows on disk: what a stretch of a trace file held, so that it need not be decoded again.

`TABLES/.stage/<part>/` holds one Arrow IPC file per frame of `Rows`. It is tracefit's own store, not a published table:
the manifest says which parts are valid, and a part of another tool version is decoded anew.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import polars as pl

from tracefit.errors import DataError
from tracefit.tables.disk import create
from tracefit.tables.rows import Rows, no_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STAGE_NAME = ".stage"
_BLOCK_ROWS = 64 * 1024


def write_staged(rows: Rows, scratch: Path, stage: Path) -> str:
    """Write rows as a new part; it appears whole or not at all.

    Args:
        rows: What was decoded.
        scratch: A folder on the same disk to write in.
        stage: The folder of parts.

    Returns:
        The part's name.
    """
    name = uuid.uuid4().hex
    unfinished = scratch / name
    unfinished.mkdir()
    for kind, frame in rows.frames().items():
        if frame.height:
            with create(unfinished / f"{kind}.arrow") as stream:
                frame.write_ipc(stream, compression="lz4", record_batch_size=_BLOCK_ROWS)
    stage.mkdir(exist_ok=True)
    unfinished.rename(stage / name)
    return name


def read_staged(stage: Path, name: str, kind: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read one frame of a part, or some of its columns.

    Raises:
        DataError: The part is damaged.
    """
    path = stage / name / f"{kind}.arrow"
    empty: pl.DataFrame = getattr(no_rows(), kind)
    if not path.exists():
        return empty.select(columns or pl.all())
    try:
        return pl.read_ipc(path, columns=list(columns or empty.columns))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(
            "is damaged", where=str(path), hint=f"remove {stage} and ingest the traces again"
        ) from error
