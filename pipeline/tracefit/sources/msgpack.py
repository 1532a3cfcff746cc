"""Just enough of msgpack to tell where a message ends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tracefit.sources.wire import Buffer

MORE = -1
INVALID = 0

_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),  # nil, false, true
    0xCA: 4,
    0xCB: 8,
    **{0xCC + i: 1 << i for i in range(4)},  # unsigned integers
    **{0xD0 + i: 1 << i for i in range(4)},  # integers
    **{0xD4 + i: 1 + (1 << i) for i in range(5)},  # extensions of fixed size, with their type
}
"""First byte of a value to the bytes that follow it."""
_SIZED = {
    **{0xC4 + i: (1 << i, 0) for i in range(3)},  # bytes
    **{0xC7 + i: (1 << i, 1) for i in range(3)},  # extensions
    **{0xD9 + i: (1 << i, 0) for i in range(3)},  # text
}
"""First byte to the bytes of the length that follows, and what the content has beyond that length."""
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte to the bytes of the count that follows, and the values per item: arrays and maps."""


_FIRST_BYTES = 256
_RAW = msgspec.msgpack.Decoder(msgspec.Raw)
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


def message_size(buffer: Buffer, stop: int) -> int:
    """Return the length of the message a buffer begins with.

    Args:
        buffer: Bytes that begin with it.
        stop: How many of them to look at.

    Returns:
        Its length; `MORE` if it goes on behind `stop`, `INVALID` if the bytes are not msgpack.
    """
    looked = min(_FIRST_BYTES, stop)
    while True:
        try:
            _RAW.decode(bytes(memoryview(buffer)[:looked]))
        except RecursionError:
            return INVALID  # nobody could decode it either
        except msgspec.DecodeError as error:
            # The parser's message tells: to walk over the values takes much longer.
            if found := _TRAILING.search(str(error)):
                return int(found[1])
            if "truncated" not in str(error):
                return walked_size(buffer, stop)
            if looked >= stop:
                return MORE
            looked = min(8 * looked, stop)
        else:
            return looked


def walked_size(buffer: Buffer, stop: int) -> int:
    """Return the same, value by value."""
    position, left = 0, 1
    while left:
        if position >= stop:
            return MORE
        first = buffer[position]
        position += 1
        left -= 1
        if first < 0x80 or first >= 0xE0:
            continue
        if first < 0x90:
            left += 2 * (first & 0x0F)
        elif first < 0xA0:
            left += first & 0x0F
        elif first < 0xC0:
            position += first & 0x1F
        elif first in _FIXED:
            position += _FIXED[first]
        elif first in _SIZED:
            width, more = _SIZED[first]
            position += width + more + int.from_bytes(buffer[position : position + width], "big")
        elif first in _COUNTED:
            width, values = _COUNTED[first]
            left += values * int.from_bytes(buffer[position : position + width], "big")
            position += width
        else:
            return INVALID
    return position if position <= stop else MORE
