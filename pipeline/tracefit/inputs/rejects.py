"""The record of unreadable input: a `Reject` with its position and reason, and an excerpt without private data.

`Rejects` collects those of a file, or of a block of it, and says when there are too many: readers and decoders ask it,
and know neither the limit nor what an excerpt may show.

An excerpt shows the structure of a record and its keys. Strings and numbers, which can hold prompts, appear only if
the user asks for values.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Literal

import msgspec

from tracefit.errors import TracefitError
from tracefit.options import IngestOptions, flag_of, named

if TYPE_CHECKING:
    from collections.abc import Iterator

Encoding = Literal["json", "protobuf", "msgpack", "csv", "text"]

MAX_EXCERPT_CHARS = 200
_SCANNED_BYTES = 4096
_MOST_SHOWN_KEYS, _MOST_SHOWN_LEVELS = 32, 4
_ATTRIBUTE_NAME = re.compile(r"[A-Za-z_][A-Za-z_.]{0,59}")
_TOKEN = re.compile(
    r'"(?P<key>[A-Za-z_][A-Za-z_.]{0,39})"(?=\s*:)|(?P<string>"(?:[^"\\]|\\.)*+"?)'
    r'|(?P<mark>[{}\[\]:,])|(?P<bare>[^\s"{}\[\]:,]+)',
    re.DOTALL,
)
_OTLP_KEYS = frozenset(
    """trace batches resourceSpans resource attributes key value stringValue intValue doubleValue boolValue bytesValue
    arrayValue kvlistValue values schemaUrl scopeSpans instrumentationLibrarySpans instrumentationLibrary scope name
    version spans traceId spanId parentSpanId traceState flags kind startTimeUnixNano endTimeUnixNano events
    timeUnixNano links status code message droppedAttributesCount droppedEventsCount droppedLinksCount entityRefs
    resourceLogs resourceMetrics scopeLogs scopeMetrics logRecords metrics body""".split()  # noqa: SIM905 - a list of them fills a page
)
_KNOWN_KEYS = _OTLP_KEYS | {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", key) for key in _OTLP_KEYS}


class Reject(msgspec.Struct, frozen=True):
    """Bytes of a file that could not be read.

    Attributes:
        source_file: The file, as the user knows it.
        source_offset: Where they begin in the decompressed file.
        length: How many bytes of the decompressed file they are.
        reason: The fault.
        excerpt: Structure and keys of the record; values only if the user asks for them.
        count: How many rejects it stands for, if there are too many to list.
    """

    source_file: str
    source_offset: int
    length: int
    reason: str
    excerpt: str = ""
    count: int = 1


class TooManyRejectsError(TracefitError):
    """A file has as many rejects as are listed: the rest of it is not read."""


class Rejects:
    """The rejects of one file, or of one block of it, up to the limit.

    A file is read to its end, or to as many rejects as `IngestOptions.max_rejects`. Blocks are decoded apart, each to
    as many at
    most, and the reader of their file counts them in its order: the result is the same in one process and in several.

    Args:
        options: The limit, and whether excerpts show values.
        source_file: The file, as the user knows it.
        offset: Where the block begins in the decompressed file.
        encoding: The expected encoding of its records.
    """

    def __init__(
        self, options: IngestOptions, source_file: str = "", offset: int = 0, encoding: Encoding = "json"
    ) -> None:
        self._most = options.max_rejects
        self._show_values = options.show_values
        self._file, self._offset, self._encoding = source_file, offset, encoding
        self._count = 0
        self._listed: list[Reject] = []

    @property
    def is_full(self) -> bool:
        """Whether there are as many as are listed: no more is read."""
        return self._count >= self._most

    def add(
        self,
        offset: int,
        record: bytes,
        reason: str,
        *,
        shown: bytes | None = None,
        length: int | None = None,
    ) -> None:
        """List a record.

        Args:
            offset: Where it begins in the block.
            record: Its bytes.
            reason: The fault.
            shown: The bytes that the excerpt is of, if not the record.
            length: Its length, if the bytes are only a part of it.

        Raises:
            TooManyRejectsError: It is the last reject that is listed.
        """
        text = self.excerpt(record if shown is None else shown)
        size = len(record) if length is None else length
        self.include(Reject(self._file, self._offset + offset, size, reason, text))

    def include(self, reject: Reject) -> None:
        """List a reject that is made already.

        Raises:
            TooManyRejectsError: It is the last one that is listed.
        """
        self._listed.append(reject)
        self.count(1)

    def count(self, rejects: int) -> None:
        """Count rejects that are listed elsewhere, as those of a decoded block are.

        Raises:
            TooManyRejectsError: There are now as many as are listed.
        """
        self._count += rejects
        if rejects and self.is_full:
            raise TooManyRejectsError(self._rest_is_not_read(named(IngestOptions, "max_rejects")))

    def take(self) -> list[Reject]:
        """Return the listed rejects since the last call; they still count."""
        taken, self._listed = self._listed, []
        return taken

    @property
    def offsets(self) -> frozenset[int]:
        """Where the listed ones begin in the decompressed file."""
        return frozenset(reject.source_offset for reject in self._listed)

    def excerpt(self, payload: bytes) -> str:
        """Return the outline of a record, or its beginning if the user asks for values."""
        return excerpt(payload, self._encoding, show_values=self._show_values)

    def rest(self, offset: int = 0) -> Reject:
        """Return the reject that stands for the part of a file, from an offset on, that is not read."""
        reason = self._rest_is_not_read(flag_of(IngestOptions, "max_rejects"))
        return Reject(self._file, offset, 0, reason)

    def _rest_is_not_read(self, limit: str | None) -> str:
        return f"more than {self._most} rejects: the rest of the file is not read ({limit} sets the limit)"


def excerpt(payload: bytes, encoding: Encoding, *, show_values: bool = False) -> str:
    """Return the outline of a rejected record.

    In text that is not whole JSON, an apparent key may be part of a string. So only keys of OTLP itself are
    shown there.

    Args:
        payload: The record, or any piece of it.
        encoding: The expected encoding of the payload.
        show_values: Whether to show the beginning of the payload as it is.

    Returns:
        At most `MAX_EXCERPT_CHARS` characters. Strings and numbers of JSON are shown as `…`; of other
        encodings only the size is shown.
    """
    if show_values:
        return _shortened(_escaped(payload[: 4 * MAX_EXCERPT_CHARS], encoding))
    if encoding != "json":
        return f"<{'text' if encoding in ('csv', 'text') else 'binary'}, {len(payload)} bytes>"
    text = payload[:_SCANNED_BYTES].decode("utf-8", errors="replace")
    is_whole = len(payload) <= _SCANNED_BYTES and is_json(payload)
    return _shortened("".join(_outline(token, is_whole=is_whole) for token in _TOKEN.finditer(text)))


def keys_in(record: bytes) -> list[str]:
    """Return the keys of a JSON object, and of the objects in it after a dot, in their order; empty for other content.

    A list stands for its first item. Keys that do not look like names may be data, and are left out.
    """
    try:
        return list(islice(_dotted(msgspec.json.decode(record), ""), _MOST_SHOWN_KEYS))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _dotted(value: object, prefix: str, depth: int = 0) -> Iterator[str]:
    while isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict) or depth == _MOST_SHOWN_LEVELS:
        if prefix:
            yield prefix
        return
    for key, item in value.items():
        if is_name(key):
            yield from _dotted(item, f"{prefix}.{key}".removeprefix("."), depth + 1)


def is_name(key: str) -> bool:
    """Return whether a key looks like a name that a program gave, not like data."""
    return _ATTRIBUTE_NAME.fullmatch(key) is not None


def is_json(text: bytes) -> bool:
    """Return whether the text is one whole JSON value."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _escaped(payload: bytes, encoding: Encoding) -> str:
    """Return the payload as text, with every character escaped that a terminal does not print as itself."""
    text = payload.decode("utf-8" if encoding == "json" else "latin-1", errors="replace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_EXCERPT_CHARS else f"{text[: MAX_EXCERPT_CHARS - 1]}…"


def _outline(token: re.Match[str], *, is_whole: bool) -> str:
    if token.lastgroup == "mark":
        return token[0]
    if token.lastgroup == "key" and (is_whole or token["key"] in _KNOWN_KEYS):
        return token[0]
    return "…" if token.lastgroup == "bare" else '"…"'
