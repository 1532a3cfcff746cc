"""One block, decoded by a format of recordings: its rows and its rejects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tracefit.inputs.rejects import Reject, Rejects
from tracefit.options import IngestOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    import polars as pl

    from tracefit.inputs.blocks import Block


class DecodedBlock(NamedTuple):
    steps: pl.DataFrame
    spans: pl.DataFrame | None
    keys: Callable[[], list[str]]
    rejects: list[Reject]


def decoded_block(decode: Callable[..., Any], block: Block, content: bytes, **options: Any) -> DecodedBlock:
    """Decode some content as one block; `options` are those of `IngestOptions`."""
    rejects = Rejects(IngestOptions(**options), block.source_file, block.offset, block.encoding)
    return DecodedBlock(*decode(block, content, rejects), rejects.take())
