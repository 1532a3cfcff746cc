"""Detect the format of a file only from its content: a file name proves nothing.

OTLP is recognised here; every other format is declared and registered by a module of `recordings`.

`detect_format` examines the first bytes of the content. Damage there does not decide: good records after a junk line,
message or gzip member are found, so that most of the head decides the format.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs import otlp_wire as wire
from tracefit.inputs.framing import BOM, RECORD_START, Shape, next_record, records
from tracefit.inputs.rejects import Encoding, is_json
from tracefit.inputs.unread import known_as

if TYPE_CHECKING:
    from collections.abc import Callable

    import polars as pl

    from tracefit.inputs.compression import Compression
    from tracefit.inputs.otlp_wire import Signal

FORMAT_HEAD_BYTES = 4 << 20
"""Bytes examined. A file with a longer first record is recognised by its JSON keys, or not at all."""

JUNK_EDGE_BYTES = 64 << 10
"""Bytes at the end of a junk part that are scanned again with the next read: a record may begin in them."""

_TRACES_KEY = re.compile(rb'"(?:resourceSpans|resource_spans|batches)"\s*:')
_OTHER_SIGNAL = re.compile(rb'(?:\xef\xbb\xbf)?[\s\[]*\{\s*"resource_?(logs|metrics)"\s*:', re.IGNORECASE)
_EMPTY_JSON = re.compile(rb"(?:\xef\xbb\xbf)?(?:\s*(?:\{\s*\}|\[\s*\]))+\s*")
_BESIDE_SUFFIX = re.compile(r"\.(jsonl|json|msgpack|bin)(\.(gz|zst))?$")
_MAX_LINES = 1000

_SHAPE_WORDS: dict[Shape, str] = {
    "empty": "empty",
    "lines": "{} lines",
    "document": "one {} document",
    "bare": "one {} message",
    "framed": "length-prefixed {}",
    "messages": "{} messages",
    "unknown": "not OTLP traces",
}
_ENCODING_WORDS: dict[Encoding | None, str] = {"json": "OTLP JSON", "protobuf": "OTLP protobuf", None: "OTLP"}


class Recording(msgspec.Struct, frozen=True, eq=False):
    """A format of recordings beside spans, as one module of `recordings` declares it.

    Attributes:
        name: Its name in blocks.
        title: Its name in words.
        find: Returns how decompressed content that begins with some bytes lays out and encodes its records;
            null if it is something else.
        fills: The tables and columns that it fills.
        units: The units of its values.
        clock: Its clock, and how that compares with others.
        message_start: Pattern of the beginning of a message, if its shape is `messages`.
        header: Returns the last line of some content that names the columns, for tables; empty if no line does.
        decode: Decodes a block and its bytes, given the `Rejects` that receive the records which cannot be read, into
            rows of steps (columns as `tables.rows.RECORDED_STEPS` without `file`), requests as spans, if it has any,
            and a function that returns the keys of its first request. Null if its files are read when the run's
            tables are built.
        read: Reads such files of a run, given the `IngestOptions`.
        fill: Adds what `read` returned to the run's tables, given those by name, `run_id` and `block_size`; returns the
            tables that change.
        sources: The sources of the times of its steps, as `tables.sources` declares them.
        asked: A file of it in words, for a user who has none.
        file_name: The beginning of the names of its files, where names count.
        stamped: Parts of lines whose time counts: the one that a container gives such a line is put before it.
        lacks: The values that its requests never have, of those that `tables.unread` counts.
        versions: The versions of the program that write it, as far as they were read.
        parts_in: Name of a folder beside its file that has, for each part of the run, a folder with a file of the same
            name: only this part, which the file beside it holds too.
    """

    name: str
    title: str
    find: Callable[[bytes], tuple[Shape, Encoding] | None]
    fills: str
    units: str
    clock: str
    message_start: re.Pattern[bytes] | None = None
    header: Callable[[bytes], bytes] | None = None
    decode: Callable[..., tuple[pl.DataFrame, pl.DataFrame | None, Callable[[], list[str]]]] | None = None
    lacks: tuple[str, ...] = ()
    read: Callable[..., Any] | None = None
    fill: Callable[..., dict[str, pl.DataFrame]] | None = None
    sources: tuple[str, ...] = ()
    asked: str = ""
    file_name: str = ""
    stamped: tuple[bytes, ...] = ()
    versions: str = ""
    parts_in: str = ""


RECORDINGS: dict[str, Recording] = {}
"""Formats of recordings by name, in the order they are tried."""


def asked_for() -> str:
    """Return the files of recordings in words, each once."""
    *most, last = sorted({recording.asked for recording in RECORDINGS.values() if recording.asked})
    return f"{', '.join(most)} or {last}"


def holds_parts(folder: str) -> bool:
    """Return whether a folder has the name of one that holds the parts of a run once more."""
    return any(folder == recording.parts_in for recording in RECORDINGS.values() if recording.parts_in)


def is_beside(name: str) -> bool:
    """Return whether a file has the name of a recording that is read when the run's tables are built."""
    names = (recording.file_name for recording in RECORDINGS.values() if not recording.decode)
    return any(name.startswith(begin) and _BESIDE_SUFFIX.search(name) for begin in names if begin)


def register(recording: Recording) -> Recording:
    """Register a format of recordings."""
    RECORDINGS[recording.name] = recording
    return recording


class Contents(msgspec.Struct, frozen=True):
    """The format of a file, as far as its head shows.

    Attributes:
        shape: How the file lays out its records; `unknown` if nothing looks like OTLP.
        encoding: How the records are encoded; None without records.
        compression: Compression of its first bytes.
        signal: Signal of the first record.
        recording: Name of the recording format, if the file does not hold spans.
        known: Name of a file that is not read, and the way from there.
        containers: Names in words of the containers around the records, the outermost first.
    """

    shape: Shape
    encoding: Encoding | None
    compression: Compression | None = None
    signal: Signal = "traces"
    recording: Recording | None = None
    containers: tuple[str, ...] = ()
    known: str = ""

    @property
    def is_traces(self) -> bool:
        """Whether the file holds OTLP traces, as far as the head shows."""
        is_known = self.shape not in ("unknown", "empty")
        return is_known and self.signal == "traces" and self.recording is None

    def __str__(self) -> str:
        """Return the shape in words, and the signal if it is not traces."""
        encoding = _ENCODING_WORDS.get(self.encoding, "")
        if self.recording is not None:
            encoding = f"{self.recording.title} ({str(self.encoding).upper()})"
        words = _SHAPE_WORDS[self.shape].format(encoding)
        if self.recording is not None and self.encoding == "text":
            words = self.recording.title  # lines of text, as it says
        if self.compression == "framed zstd" and self.encoding:
            words = f"length-prefixed zstd of {encoding}"
        if self.known:
            words = f"{words}: {self.known}"
        if self.containers:
            words = f"{' with '.join(self.containers)}, as {words}"
        return words if self.signal == "traces" else f"{words}, {self.signal}"


def detect_format(head: bytes, *, is_whole: bool) -> Contents:
    """Return the format of decompressed content that begins with `head`, or, if `is_whole`, is that."""
    if not head.removeprefix(BOM).lstrip():
        return Contents("empty" if is_whole else "lines", None)
    has_traces = _TRACES_KEY.search(head) is not None
    if not begins_json_traces(head) and (binary := _binary_shape(head, is_whole=is_whole)):
        first = next((item for item in records(head, binary) if not item.fault), None)
        return Contents(binary, "protobuf", signal=wire.signal_of(first.payload if first else head))
    other = None if has_traces else _OTHER_SIGNAL.match(head)
    if not (other or has_traces or _EMPTY_JSON.fullmatch(head)):
        for recording in RECORDINGS.values():
            if layout := recording.find(head):
                return Contents(*layout, recording=recording)
        return Contents("unknown", None, known=known_as(head))
    signal: Signal = "traces"
    if other:
        signal = "logs" if other[1].lower() == b"logs" else "metrics"
    return Contents("document" if _is_document(head) else "lines", "json", signal=signal)


def begins_json_traces(head: bytes) -> bool:
    """Return whether content that begins with `head` is JSON of traces, whatever follows."""
    # Keys alone prove nothing: a string in protobuf can hold JSON. But a length that begins with the byte of a bracket
    # would be larger than any file.
    return head.removeprefix(BOM).lstrip().startswith((b"{", b"[")) and bool(_TRACES_KEY.search(head))


def _binary_shape(head: bytes, *, is_whole: bool) -> Shape | None:
    field = wire.read_field(head, 0)
    if head[0] == wire.RESOURCE_SPANS_TAG and field is not None:
        is_followed = field[3] >= len(head) or head[field[3]] == wire.RESOURCE_SPANS_TAG
        if is_followed and wire.is_resource_spans(head, field[2], field[3]) is not False:
            return "bare"
    if next_record(head, "framed", 0, 1, is_last=is_whole) == 0 or next_record(head, "framed", 0) >= 0:
        return "framed"
    return "bare" if next_record(head, "bare", 0) >= 0 else None


def _is_document(head: bytes) -> bool:
    """Return whether JSON is one document over many lines rather than a record per line.

    The first conclusive line decides: one that is whole JSON is a record; one that ends in a bracket, a colon
    or a comma is part of a document, unless a record was cut there and the next line begins another.
    """
    texts = (record.payload.strip() for record in records(head, "lines"))
    line = next(texts, b"")
    for _, following in zip(range(_MAX_LINES), texts, strict=False):
        if line.startswith((b"{", b"[")) and is_json(line):
            return False
        if line[-1:] in b"{[,:" and (line.startswith(b"[") or not RECORD_START.match(following)):
            return True
        line = following
    return False
