"""Detect the format of a file from its content alone: a file name proves nothing.

`detect_format` examines the first bytes of the content. Damage there does not decide: good records after a junk line,
message or gzip member are found, so that most of the head decides the format.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

from tracefit.inputs import otlp_wire as wire
from tracefit.inputs.compression import USUAL, Compression, Expansion, Gap, compression_of, decompressed
from tracefit.inputs.files import read_fully
from tracefit.inputs.framing import BOM, Record, Shape, next_record, records
from tracefit.inputs.rejects import Encoding, is_json

if TYPE_CHECKING:
    from tracefit.inputs.files import TraceFile
    from tracefit.inputs.otlp_wire import Signal

HEAD_BYTES = 4 << 20
"""Bytes examined. A file with a longer first record is recognised by its JSON keys, or not at all."""

JUNK_EDGE_BYTES = 64 << 10
"""Of a part that is junk, how much is looked at again: a record may begin in it."""

_TRACES_KEY = re.compile(rb'"(?:resourceSpans|resource_spans|batches)"\s*:')
_RECORD_START = re.compile(rb'\{\s*"(?:trace"\s*:\s*\{\s*")?(?:resourceSpans|resource_spans|batches)"\s*:')
_OTHER_SIGNAL = re.compile(rb'(?:\xef\xbb\xbf)?[\s\[]*\{\s*"resource_?(logs|metrics)"\s*:', re.IGNORECASE)
_EMPTY_JSON = re.compile(rb"(?:\xef\xbb\xbf)?(?:\s*(?:\{\s*\}|\[\s*\]))+\s*")
_MAX_LINES = 1000

_SHAPE_WORDS: dict[Shape, str] = {
    "empty": "empty",
    "lines": "{} lines",
    "document": "one {} document",
    "bare": "one {} message",
    "framed": "length-prefixed {}",
    "unknown": "not OTLP traces",
}
_ENCODING_WORDS: dict[Encoding | None, str] = {"json": "OTLP JSON", "protobuf": "OTLP protobuf", None: "OTLP"}


@dataclass(frozen=True, slots=True)
class Contents:
    """The format of a file, as far as its head shows.

    Attributes:
        shape: How the file lays out its records; `unknown` if nothing looks like OTLP.
        encoding: How the records are encoded; None if there are none.
        compression: Compression of its first bytes.
        signal: Signal of the first record.
    """

    shape: Shape
    encoding: Encoding | None
    compression: Compression | None = None
    signal: Signal = "traces"

    @property
    def is_traces(self) -> bool:
        """Whether the file holds OTLP traces, as far as the head shows."""
        return self.shape not in ("unknown", "empty") and self.signal == "traces"

    def __str__(self) -> str:
        """Return the shape in words, and the signal if it is not traces."""
        encoding = _ENCODING_WORDS[self.encoding]
        words = _SHAPE_WORDS[self.shape].format(encoding)
        if self.compression == "framed zstd" and self.encoding:
            words = f"length-prefixed zstd of {encoding}"
        return words if self.signal == "traces" else f"{words}, {self.signal}"


def inspect_file(file: TraceFile, bounds: Expansion = USUAL) -> Contents:
    """Return the format of a file, from its first few MiB; `bounds` says how many are read where these show nothing.

    Raises:
        UsageError: If it cannot be read.
    """
    with file.open() as raw:
        stored = read_fully(raw, HEAD_BYTES)
        compression = compression_of(stored[:8])
        head, gaps = _head(io.BytesIO(stored))
        is_whole = len(stored) < HEAD_BYTES and len(head) < HEAD_BYTES
        if gaps and not head:
            found = Contents("unknown", None, compression)
        else:
            found = detect_format(head, is_whole=is_whole, compression=compression)
        if found.shape != "unknown" or is_whole:
            return found
    return _behind_junk(file, found, bounds)


def _head(stream: BinaryIO) -> tuple[bytes, int]:
    """Return the first bytes of content, and how many gaps are in them."""
    head, gaps = bytearray(), 0
    for chunk in decompressed(stream):
        if isinstance(chunk, Gap):
            gaps += 1
        else:
            head += chunk
        if len(head) >= HEAD_BYTES:
            break
    return bytes(head), gaps


def _behind_junk(file: TraceFile, found: Contents, bounds: Expansion) -> Contents:
    """Look for records behind a head that is all junk, a part of the content at a time.

    JSON and framed records are found wherever a part is cut; so is all protobuf that comes in one message per resource.
    """
    with file.open() as raw:
        part, looked_at = bytearray(), 0
        for chunk in decompressed(cast("BinaryIO", _Beginning(raw, bounds.most_junk_bytes))):
            if not isinstance(chunk, Gap):
                part += chunk
            if len(part) >= HEAD_BYTES:
                behind = detect_format(bytes(part), is_whole=False, compression=found.compression)
                looked_at += len(part)
                if behind.shape != "unknown" or looked_at >= bounds.most_junk_bytes:
                    return behind
                del part[:-JUNK_EDGE_BYTES]
    behind = detect_format(bytes(part), is_whole=False, compression=found.compression)
    return behind if part.strip() else found


class _Beginning(io.RawIOBase):
    """The first bytes of an open file: damaged compression is searched for its next unit, to the end of the file."""

    def __init__(self, raw: BinaryIO, size: int) -> None:
        super().__init__()
        self._raw = raw
        self._size = size

    def seekable(self) -> bool:
        return self._raw.seekable()

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self.tell(), 0)
        return self._raw.read(left if size < 0 else min(size, left))


def detect_format(head: bytes, *, is_whole: bool, compression: Compression | None = None) -> Contents:
    """Return the format of content that begins with `head`.

    Args:
        head: The beginning, decompressed.
        is_whole: Whether `head` is the whole content.
        compression: How the file is compressed.
    """
    if not head.removeprefix(BOM).strip():
        return Contents("empty" if is_whole else "lines", None, compression)
    # Keys alone prove nothing: a string in protobuf can hold JSON. But a length that begins with the byte of a bracket
    # would be larger than any file.
    is_json_text = head.removeprefix(BOM).lstrip()[:1] in (b"{", b"[") and _TRACES_KEY.search(head)
    if not is_json_text and (binary := _binary_shape(head, is_whole=is_whole)):
        first = next((item for item in records(head, binary) if isinstance(item, Record)), None)
        return Contents(binary, "protobuf", compression, wire.signal_of(first.payload if first else head))
    other = None if _TRACES_KEY.search(head) else _OTHER_SIGNAL.match(head)
    if not (other or _TRACES_KEY.search(head) or _EMPTY_JSON.fullmatch(head)):
        return Contents("unknown", None, compression)
    signal: Signal = "traces"
    if other:
        signal = "logs" if other[1].lower() == b"logs" else "metrics"
    return Contents("document" if _is_document(head) else "lines", "json", compression, signal)


def _binary_shape(head: bytes, *, is_whole: bool) -> Shape | None:
    if _begins_bare(head):
        return "bare"
    if next_record(head, "framed", 0, 1, is_last=is_whole) == 0 or next_record(head, "framed", 0) >= 0:
        return "framed"
    return "bare" if next_record(head, "bare", 0) >= 0 else None


def _begins_bare(head: bytes) -> bool:
    field = wire.read_field(head, 0)
    if head[0] != wire.RESOURCE_SPANS_TAG or field is None:
        return False
    is_followed = field[3] >= len(head) or head[field[3]] == wire.RESOURCE_SPANS_TAG
    return is_followed and wire.is_resource_spans(head, field[2], field[3]) is not False


def _is_document(head: bytes) -> bool:
    """Return whether JSON is one document over many lines rather than a record per line.

    The first conclusive line decides: one that is whole JSON is a record; one that ends in a bracket, a colon or a comma
    is part of a document, unless a record was cut there and the next line begins another.
    """
    texts = (record.payload.strip() for record in records(head, "lines") if isinstance(record, Record))
    line = next(texts, b"")
    for _, following in zip(range(_MAX_LINES), texts, strict=False):
        if line.startswith((b"{", b"[")) and is_json(line):
            return False
        if line[-1:] in b"{[,:" and (line.startswith(b"[") or not _RECORD_START.match(following)):
            return True
        line = following
    return False
