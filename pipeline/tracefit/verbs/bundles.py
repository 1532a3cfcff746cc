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


@dataclass(slots=True)
class _Bundle:
    pieces: dict[str, Piece] = field(default_factory=dict)
    size: int = 0

    def takes(self, piece: Piece) -> bool:
        fits = self.size + piece.bytes_to_decode <= stretches.STRETCH_BYTES
        return fits and piece.file.name not in self.pieces

    def add(self, piece: Piece) -> None:
        self.pieces[piece.file.name] = piece
        self.size += piece.bytes_to_decode


def pieces_of(plan: FilePlan) -> tuple[Piece, ...]:
    """Return what is to be decoded of a file."""
    if plan.layout is None:
        return ()
    whole, shape = plan.input.size_bytes, plan.layout.shape
    is_compressed = plan.layout.contents.compression is not None or shape == "framed zstd"
    return tuple(
        Piece(plan.input.file, s, shape, max((whole if s.end is None else s.end) - s.begin, 0), is_compressed)
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
        encoding = plan.layout.contents.encoding
        bundle = waiting.setdefault(encoding, _Bundle())
        if bundle.pieces and not bundle.takes(pieces[0]):
            yield tuple(bundle.pieces.values())
            bundle = waiting[encoding] = _Bundle()
        bundle.add(pieces[0])
    yield from (tuple(bundle.pieces.values()) for bundle in waiting.values())
