"""Small files in bundles, as large as a stretch of a large file: whatever is decoded together costs about 40 ms once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracefit.sources import stretches
from tracefit.verbs.decoding import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.sources import Encoding
    from tracefit.verbs.file_plans import FilePlan

_EXPANSION = 10
"""Bytes that a compressed byte is taken for."""


@dataclass(slots=True)
class _Bundle:
    pieces: dict[str, Piece] = field(default_factory=dict)
    size: int = 0

    def takes(self, piece: Piece, size: int) -> bool:
        return piece.file.name not in self.pieces and self.size + size <= stretches.STRETCH_BYTES

    def add(self, piece: Piece, size: int) -> None:
        self.pieces[piece.file.name] = piece
        self.size += size


def pieces_of(plan: FilePlan) -> tuple[Piece, ...]:
    """Return what is to be decoded of a file."""
    if plan.layout is None:
        return ()
    whole, shape = plan.input.size_bytes, plan.layout.shape
    return tuple(
        Piece(plan.input.file, s, shape, max((whole if s.end is None else s.end) - s.begin, 0))
        for s in plan.layout.stretches
    )


def bundled(plans: Iterable[FilePlan]) -> Iterator[tuple[Piece, ...]]:
    """Yield what is to be decoded in bundles: whole small files of one encoding together, everything else alone."""
    waiting: dict[Encoding | None, _Bundle] = {}
    for plan in plans:
        pieces = pieces_of(plan)
        if plan.layout is None or len(pieces) > 1:
            yield from ((piece,) for piece in pieces)
            continue
        contents = plan.layout.contents
        size = pieces[0].size_bytes * (_EXPANSION if contents.compression else 1)
        bundle = waiting.setdefault(contents.encoding, _Bundle())
        if bundle.pieces and not bundle.takes(pieces[0], size):
            yield tuple(bundle.pieces.values())
            bundle = waiting[contents.encoding] = _Bundle()
        bundle.add(pieces[0], size)
    yield from (tuple(bundle.pieces.values()) for bundle in waiting.values())
