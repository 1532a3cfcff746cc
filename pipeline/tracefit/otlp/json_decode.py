"""JSON records to spans, and what can be had of records that are damaged."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tracefit.otlp.json_fast import decode_fast
from tracefit.otlp.json_general import decode_general
from tracefit.otlp.model import Decoded
from tracefit.sources.json_records import object_end
from tracefit.sources.shape import RECORD_START

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.records import Frame

_PUNCTUATION = b" \t\r\n,[]}"
"""What an array or an envelope leaves between its good records."""

_Stretch = tuple[int, int, Decoded | str]
"""Start and stop in a payload, and the spans there or the reason why there are none."""


def decode_json(frame: Frame, *, check_events: bool) -> Decoded:
    """Decode a JSON record.

    A restarted exporter glues its next record onto a cut one. No string of JSON can hold the beginning of a record
    unescaped, so a bad record is cut where others begin, and each piece tried by itself.

    Args:
        frame: A JSON frame.
        check_events: Whether to read the attributes of events here too, where what is wrong with them costs no more
            than their span or record. Else the column builder may find it.

    Returns:
        The good spans, and rejects with the offset and length of what is bad.
    """
    whole = _decode(frame, check_events)
    if isinstance(whole, Decoded):
        return whole
    decoded = Decoded()
    for start, stop, part in _joined(frame.payload, list(_stretches(frame, check_events))):
        if isinstance(part, Decoded):
            decoded.extend(part)
        else:
            decoded.rejects.append(frame.reject(part, start, stop))
    return decoded


def _decode(frame: Frame, check_events: bool) -> Decoded | str:
    """Return what is in a record, or the reason why it cannot be read at all."""
    if (usual := decode_fast(frame, check_events=check_events)) is not None:
        return usual
    try:
        return decode_general(frame)
    except RecursionError:
        return "JSON is nested too deep"
    except UnicodeDecodeError:
        return "JSON is not UTF-8"
    except ValueError as error:  # msgspec's messages name a byte or a path, not a value
        return f"not JSON ({error})"


def _stretches(frame: Frame, check_events: bool) -> Iterator[_Stretch]:
    text = frame.payload
    starts = {found.start() for found in RECORD_START.finditer(text)}
    for start, stop in pairwise(sorted({0, len(text)} | starts)):
        part = _decode(_piece(frame, start, stop), check_events)
        if isinstance(part, str):
            end = start + object_end(text[start:stop])
            if start < end < stop and isinstance(
                head := _decode(_piece(frame, start, end), check_events), Decoded
            ):
                yield start, end, head
                yield end, stop, "not a record"
                continue
        yield start, stop, part


def _piece(frame: Frame, start: int, stop: int) -> Frame:
    return replace(frame, offset=frame.offset + start, payload=frame.payload[start:stop])


def _joined(text: bytes, stretches: list[_Stretch]) -> list[_Stretch]:
    """Join bad stretches that touch: they are one damage. Drop those of mere punctuation, unless there is no more."""
    joined: list[_Stretch] = []
    for start, stop, part in stretches:
        if joined and isinstance(part, str) and isinstance(joined[-1][2], str):
            joined[-1] = (joined[-1][0], stop, joined[-1][2])
        else:
            joined.append((start, stop, part))
    return [
        stretch
        for stretch in joined
        if len(joined) == 1
        or isinstance(stretch[2], Decoded)
        or text[slice(*stretch[:2])].strip(_PUNCTUATION)
    ]
