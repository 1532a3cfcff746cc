"""JSON records to spans, and what can be had of records that are damaged."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from tracefit.otlp.json_fast import decode_fast
from tracefit.otlp.json_general import decode_general
from tracefit.otlp.json_spans import SHORTEST_SPAN
from tracefit.sources.json_records import object_end
from tracefit.sources.records import Frame
from tracefit.sources.shape import RECORD_START

if TYPE_CHECKING:
    from tracefit.otlp.model import Decoded, SpanGroup
    from tracefit.otlp.rejects import Rejects

_PUNCTUATION = b" \t\r\n,[]}"
"""What an array or an envelope leaves between its good records."""

_NOT_UTF8 = "JSON is not UTF-8"
_NOT_A_RECORD = "not a record"
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_MAX_KNOWN = 1000
"""Different short stretches of a record that are looked at; none of them can hold a span."""

_Stretches = list[tuple[int, str | None]]
"""Where each stretch of a text ends, and the reason why there are no spans in it; None if it is good."""


def decode_json(frame: Frame, groups: list[SpanGroup], rejects: Rejects, *, check_events: bool) -> None:
    """Decode a JSON record.

    A restarted exporter glues its next record onto a cut one. No string of JSON can hold the beginning of a record
    unescaped, so a bad record is cut where others begin, and each piece tried by itself.

    Args:
        frame: A JSON frame.
        groups: Takes the good spans.
        rejects: Take the offset and length of what is bad.
        check_events: Whether to read the attributes of events here too, where what is wrong with them costs no more
            than their span or record. Else the column builder may find it.
    """
    _Record(frame, groups, rejects, check_events=check_events).read()


class _Record:
    """One record, and what becomes of it."""

    def __init__(
        self, frame: Frame, groups: list[SpanGroup], rejects: Rejects, *, check_events: bool
    ) -> None:
        self._frame = frame
        self._groups = groups
        self._rejects = rejects
        self._check_events = check_events
        self._known: dict[bytes, _Stretches] = {}
        self._bad: tuple[int, int, str] | None = None

    def read(self) -> None:
        text = self._frame.payload
        why = self._decode(self._frame)
        if why is None:
            return
        starts = [found.start() for found in RECORD_START.finditer(text)]
        if starts in ([], [0]):
            self._add(0, self._behind_head(self._frame, why))
        else:
            for start, stop in pairwise(sorted({0, len(text), *starts})):
                self._add(start, self._piece(start, stop))
        self._settle()

    def _piece(self, start: int, stop: int) -> _Stretches:
        text = self._frame.payload[start:stop]
        if len(text) >= SHORTEST_SPAN:
            return self._stretches(self._part(start, text))
        if text not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                return [(len(text), _NOT_A_RECORD)]
            self._known[text] = self._short_stretches(self._part(start, text))
        return self._known[text]

    def _short_stretches(self, part: Frame) -> _Stretches:
        """Tell what of a text that can hold no span is bad. Nothing is taken: the text may be there again."""
        size = len(part.payload)
        why = _why_bad(part)
        if why is None:
            return [(size, None)]
        end = head_end(part.payload, why)
        if 0 < end < size and _why_bad(replace(part, payload=part.payload[:end])) is None:
            return [(end, None), (size, _NOT_A_RECORD)]
        return [(size, why)]

    def _part(self, start: int, text: bytes) -> Frame:
        frame = self._frame
        return Frame(frame.source_file, frame.offset + start, text, frame.encoding, frame.show_values)

    def _stretches(self, part: Frame) -> _Stretches:
        why = self._decode(part)
        return [(len(part.payload), None)] if why is None else self._behind_head(part, why)

    def _behind_head(self, part: Frame, why: str) -> _Stretches:
        """Look for a whole object that a bad text begins with."""
        size = len(part.payload)
        end = head_end(part.payload, why)
        if 0 < end < size and self._decode(replace(part, payload=part.payload[:end])) is None:
            return [(end, None), (size, _NOT_A_RECORD)]
        return [(size, why)]

    def _decode(self, frame: Frame) -> str | None:
        """Take what is in a record, or return the reason why it cannot be read at all."""
        if (usual := decode_fast(frame, check_events=self._check_events)) is not None:
            self._groups += usual.groups
            return None
        found = _general(frame, self._rejects.left(frame.source_file))
        if isinstance(found, str):
            return found
        self._groups += found.groups
        self._rejects.add_spans(frame, found)
        return None

    def _add(self, start: int, stretches: _Stretches) -> None:
        """Take the stretches of a piece that begins there; bad ones that touch are one damage."""
        begin = start
        for end, why in stretches:
            stop = start + end
            if why is None:
                self._settle()
            else:
                self._bad = (self._bad[0], stop, self._bad[2]) if self._bad else (begin, stop, why)
            begin = stop

    def _settle(self) -> None:
        """Report the damage before here; not mere punctuation, unless there is no more."""
        if self._bad is None:
            return
        start, stop, why = self._bad
        self._bad = None
        text = self._frame.payload[start:stop]
        if len(text) == len(self._frame.payload) or text.strip(_PUNCTUATION):
            self._rejects.add(self._part(start, text), partial(self._frame.reject, why, start, stop))


def _general(frame: Frame, listed: int) -> Decoded | str:
    try:
        return decode_general(frame, listed=listed)
    except RecursionError:
        return "JSON is nested too deep"
    except UnicodeDecodeError:
        return _NOT_UTF8
    except ValueError as error:  # msgspec's messages name a byte or a path, not a value
        return f"not JSON ({error})"


def _why_bad(frame: Frame) -> str | None:
    """Return the first reason why a record is bad, or a part of it."""
    found = _general(frame, 1)
    if isinstance(found, str):
        return found
    return found.rejects[0].reason if found.rejects else None


def head_end(text: bytes, why: str) -> int:
    """Return where the object ends that a text begins with which is bad as a whole, or -1 if it is cut or bad itself.

    The parser's message tells most of the time: counting brackets takes longer than to parse.
    """
    if text[:1] != b"{":
        return -1
    if why == _NOT_UTF8:
        text = _utf8_of(text)
        why = _why_not_json(text)
    if found := _TRAILING.search(why):
        return len(text[: int(found[1]) - 1].rstrip())
    if "truncated" in why or "malformed" in why:
        return -1
    return object_end(text)


def _utf8_of(text: bytes) -> bytes:
    """Return what is before the first byte that is not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def _why_not_json(text: bytes) -> str:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error)
    return ""
