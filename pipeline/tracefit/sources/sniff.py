"""What a file holds, told from its head alone: for the choice of files, and to say what would be read."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefit.sources.compression import Gap, compression_of, decompressed, read_fully
from tracefit.sources.frames import records_of, signal_of
from tracefit.sources.limits import HEAD_BYTES
from tracefit.sources.records import Encoding, Frame, Source
from tracefit.sources.shape import TRACES_KEY, Shape, other_signal_of, tell_shape
from tracefit.sources.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.files import TraceFile
    from tracefit.sources.wire import Signal

SNIFF_BYTES = 4 << 20
"""Decompressed bytes looked at. A file whose first record is longer is known by its keys, or not at all."""

_WORDS: dict[Shape, str] = {
    "empty": "empty",
    "lines": "{} lines",
    "document": "one {} document",
    "bare": "one {} message",
    "framed": "length-prefixed {}",
    "framed zstd": "length-prefixed zstd of {}",
    "unknown": "not OTLP traces",
}
_ENCODING_WORDS: dict[Encoding | None, str] = {"json": "OTLP JSON", "protobuf": "OTLP protobuf", None: "OTLP"}


@dataclass(frozen=True, slots=True)
class Contents:
    """What the head of a file shows.

    Attributes:
        shape: How records are laid out; `unknown` if nothing looks like OTLP.
        encoding: Of the first record; None if there is none.
        compression: `gzip` or `zstd`, of the file as a whole.
        signal: What the first record holds.
    """

    shape: Shape
    encoding: Encoding | None
    compression: str | None
    signal: Signal

    @property
    def is_traces(self) -> bool:
        """Whether there are OTLP traces in it, as far as the head shows."""
        return self.shape not in ("unknown", "empty") and self.signal == "traces"

    def __str__(self) -> str:
        """Return the shape in words, and the signal if it is another."""
        words = _WORDS[self.shape].format(_ENCODING_WORDS[self.encoding])
        return words if self.signal == "traces" else f"{words}, {self.signal}"


def sniff(file: TraceFile) -> Contents:
    """Look into a file.

    Args:
        file: The file; at most a few MiB of it are read.

    Returns:
        What it holds.

    Raises:
        UsageError: If it cannot be read.
    """
    with file.open() as raw:
        # A stream from a store cannot go back, and is not to be read to its end for this.
        beginning = raw if raw.seekable() else io.BytesIO(read_fully(raw, SNIFF_BYTES))
        compression = compression_of(beginning.read(8))
        beginning.seek(0)
        window = Window(_beginning(decompressed(beginning)))
        shape = tell_shape(window)
        if shape in ("lines", "document"):
            head = window.peek(0, HEAD_BYTES)
            other = None if TRACES_KEY.search(head) else other_signal_of(head)
            return Contents(shape, "json", compression, other or "traces")
        first = next(
            (item for item in records_of(window, Source(file.name), shape) if isinstance(item, Frame)), None
        )
    if first is None:
        return Contents(shape, None, compression, "traces")
    return Contents(shape, first.encoding, compression, signal_of(first))


def _beginning(chunks: Iterator[bytes | Gap]) -> Iterator[bytes]:
    left = SNIFF_BYTES
    for chunk in chunks:
        if isinstance(chunk, Gap):
            return
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            return
