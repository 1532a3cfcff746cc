"""Lines of a file, where millions of them may be too short to hold anything."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from tracefit.sources.limits import MAX_SHORT_LINES
from tracefit.sources.records import Reject
from tracefit.sources.shape import BOM

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.sources.records import Frame, Source

_SHORTEST_ID_TEXTS = 22 + 11  # base64 without padding
SHORTEST_RECORD = (
    len(b'{"batches":[{"scopeSpans":[{"spans":[{"traceId":"","spanId":""}]}]}]}') + _SHORTEST_ID_TEXTS
)
"""Bytes of the shortest record that has a span."""

_DENSE = 128
"""Bytes of a line on average, below which lines are many."""

_MANY = 256
"""Lines of a block up to which each is handed on, whatever it is."""

_MAX_KINDS = 10_000
"""Different short lines that are remembered."""


@dataclass(frozen=True, slots=True)
class ShortLines:
    """What is known of the short lines of a kind of file.

    Attributes:
        longest: Lines below this many bytes hold nothing.
        harmless: Those of them that match are not worth a word.
        what: What the others lack.
    """

    longest: int
    harmless: re.Pattern[bytes]
    what: str


_SCOPES = rb'"(?:scopeSpans|scope_spans)"\s*:\s*\[\s*(?:\{\s*\}\s*)?\]'
_RESOURCE = rb'\{\s*(?:"resource"\s*:\s*\{\s*\}\s*,\s*)?(?:%b\s*)?\}\s*' % _SCOPES
_RECORD = (
    rb'\{\s*(?:"(?:resourceSpans|resource_spans|batches)"\s*:\s*(?:null|\[\s*(?:%b(?:,\s*%b)*)?\])\s*)?\}\s*'
    % (_RESOURCE, _RESOURCE)
)
TRACE_LINES = ShortLines(
    SHORTEST_RECORD,
    re.compile(rb"\s*(?:%b|\[\s*(?:%b(?:,\s*%b)*)?\]\s*)?" % (_RECORD, _RECORD, _RECORD)),
    "spans",
)
"""Of files of traces; an export without spans does no harm."""


class LineReader:
    """Makes frames of whole lines."""

    def __init__(self, source: Source, short: ShortLines) -> None:
        self._source = source
        self._short = short
        self._left = MAX_SHORT_LINES
        self._harmless: dict[bytes, bool] = {}
        self._count = 0
        self._begin = self._end = -1

    def read(self, offset: int, block: bytes) -> Iterator[Frame]:
        """Yield a frame for each line of a block that is not blank; those too short for anything as long as they are few.

        Args:
            offset: Where the block is in the file.
            block: Lines, each with its end.
        """
        lines = block.split(b"\n")
        lines.pop()
        starts = accumulate((len(line) + 1 for line in lines), initial=offset)
        if len(lines) < _MANY or len(lines) * _DENSE < len(block):
            yield from self._frames(zip(starts, lines, strict=False))
            return
        longest = self._short.longest
        kinds = Counter(line for line in lines if len(line) < longest)
        bad = {line: count for line, count in kinds.items() if not self._is_harmless(line)}
        count = sum(bad.values())
        if not count and kinds.total() == len(lines):
            return
        every = zip(starts, lines, strict=False)
        for start, line in every:
            is_short = len(line) < longest
            if is_short and line not in bad:
                continue
            if is_short and not self._left:
                self._begin = start if self._begin < 0 else self._begin
                break
            if is_short:
                self._left -= 1
                count -= 1
            yield from self._frames([(start, line)])
        if count:
            self._count += count
            self._end = offset + len(block)
        if count and kinds.total() < len(lines):
            yield from self._frames((start, line) for start, line in every if len(line) >= longest)

    def rest(self) -> Iterator[Reject]:
        """Yield a reject for those that were only counted."""
        if self._count:
            what = f"{self._count} more short lines without {self._short.what}"
            size = self._end - self._begin
            yield Reject(self._source.name, self._begin, size, what, count=self._count)

    def _is_harmless(self, line: bytes) -> bool:
        known = self._harmless.get(line)
        if known is None:
            known = self._short.harmless.fullmatch(line.removeprefix(BOM)) is not None
            if len(self._harmless) < _MAX_KINDS:
                self._harmless[line] = known
        return known

    def _frames(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[Frame]:
        for start, line in lines:
            text = line.removeprefix(BOM)
            if text and not text.isspace():
                yield self._source.frame(start + len(line) - len(text), text, "json")
