"""A JSON document too large to be held, as many small ones: each has some of its spans, and their resource and scope.

A document is walked from its outermost bracket inwards, and only into what is too large: what fits into a piece is cut
out as it stands. So memory does not depend on the document, and a damaged one keeps all spans before the damage.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, cast

from tracefit.sources.excerpt import is_json
from tracefit.sources.json_cursor import SPACE, JsonCursor, JsonDamageError
from tracefit.sources.json_scan import Scanner, scan_contents
from tracefit.sources.limits import MAX_ORIGIN_BYTES, MAX_SPAN_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.records import Frame, Reject, Source
    from tracefit.sources.window import Window

_RESOURCES, _SCOPES, _SPANS = 0, 1, 2
"""Levels of arrays, by what their items are."""
_RESOURCE_KEYS = frozenset(["resourceSpans", "resource_spans", "batches"])
_SCOPE_KEYS = frozenset(
    ["scopeSpans", "scope_spans", "instrumentationLibrarySpans", "instrumentation_library_spans"]
)
_SCOPE_NAMES = frozenset(["scope", "instrumentationLibrary", "instrumentation_library"])
_OTHER_SIGNALS = frozenset(["resourceLogs", "resource_logs", "resourceMetrics", "resource_metrics"])

_NOTHING = b"{}"

_MAX_ENVELOPES = 100
_SMALLEST_GUESS_BYTES = 64 << 10
_MAX_STRETCHES = 200
"""Good and bad stretches that are told apart in a piece."""
_MAX_WALKS = 10
"""Items of a document that could be held, but are walked into for what is good of them."""
_SHOWN_BYTES = 4096
_OPENER = re.compile(rb'\{\s*"[^"\\]{0,64}"\s*:')
"""How an object begins: others of its kind do so too."""


def object_pieces(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the spans of an object in pieces.

    Args:
        window: The text, at the object's brace.
        source: The file, for frames and rejects.

    Yields:
        Frames of at most a few MiB. The window is left behind the object; at its end if the object is damaged, which is
        a reject.
    """
    with ExitStack() as files:
        walk = _Walk(JsonCursor(window), source, files)
        try:
            yield from walk.envelope()
        except JsonDamageError as damage:
            yield from walk.release()
            begins = window.peek(0, _SHOWN_BYTES)
            yield source.reject(window.offset, window.drain(), damage.what, begins)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Items that came before their resource or scope: on disk until these are known."""

    level: int
    offset: int
    size: int
    scope: int


@dataclass(slots=True)
class _Walk:
    """Goes over one document."""

    cursor: JsonCursor
    source: Source
    files: ExitStack
    resource: bytes | None = None
    scope: bytes | None = None
    scopes: list[bytes | None] = field(default_factory=list)
    waiting: list[_Waiting] = field(default_factory=list)
    disk: BinaryIO | None = None
    walks_left: int = _MAX_WALKS

    @property
    def window(self) -> Window:
        """The text."""
        return self.cursor.window

    def envelope(self, depth: int = 0) -> Iterator[Frame | Reject]:
        """Walk into a request, or what Tempo puts around one."""
        start, begins = self.window.offset, self.window.peek(0, _SHOWN_BYTES)
        is_known, others = False, set[str]()
        for key in self.cursor.object_keys():
            if key in _RESOURCE_KEYS:
                is_known = True
                yield from self._list(key, _RESOURCES)
            elif key == "trace" and self.cursor.next() == b"{" and depth < _MAX_ENVELOPES:
                is_known = True
                yield from self.envelope(depth + 1)
            else:
                others.add(key if key in _OTHER_SIGNALS else "")
                self.cursor.value(0)
        if is_known or not others:
            return
        if signal := max(others):
            yield self.source.frame(start, b'{"%b":[]}' % signal.encode(), "json")
        else:
            yield self.source.reject(start, self.window.offset - start, "it has no resourceSpans", begins)

    def _resource_spans(self) -> Iterator[Frame | Reject]:
        self.resource = None
        for key in self.cursor.object_keys():
            if key == "resource":
                yield from self._origin(key)
            elif key in _SCOPE_KEYS:
                yield from self._list(key, _SCOPES)
            else:
                self.cursor.value(0)
        yield from self.release()

    def _scope_spans(self) -> Iterator[Frame | Reject]:
        self.scope = None
        for key in self.cursor.object_keys():
            if key in _SCOPE_NAMES:
                yield from self._origin(key)
            elif key == "spans":
                yield from self._list(key, _SPANS)
            else:
                self.cursor.value(0)
        self.scopes.append(self.scope)

    def _origin(self, key: str) -> Iterator[Reject]:
        """Read the resource or the scope; of two the first counts, for spans may be under way with it."""
        self.cursor.next()
        start = self.window.offset
        text = self.cursor.value(MAX_ORIGIN_BYTES)
        size = self.window.offset - start
        text = _NOTHING if text == b"null" else text
        if text is None:
            yield self.source.reject(start, size, f"{key} too large", b"")
        elif key == "resource" and self.resource in (None, _NOTHING):
            self.resource = text
        elif key != "resource" and self.scope in (None, _NOTHING):
            self.scope = text
        elif text != _NOTHING:
            yield self.source.reject(start, size, f"{key} is there twice", text)

    def _list(self, key: str, level: int) -> Iterator[Frame | Reject]:
        if self.cursor.next() != b"[":
            start = self.window.offset
            value = self.cursor.value(_SHOWN_BYTES)
            if value != b"null":
                size = self.window.offset - start
                yield self.source.reject(start, size, f"{key} is not an array", value or b"")
            return
        self.window.skip(1)
        if self.cursor.next() == b"]":
            self.window.skip(1)
            return
        yield from self._items(level)
        while not self.cursor.ends(b"]"):
            yield from self._items(level)

    def _items(self, level: int) -> Iterator[Frame | Reject]:
        """Take as many whole items as make a piece, or walk into one that makes more."""
        self.cursor.next()
        if size := self._guessed_size():
            yield from self._hand_on(level, self.window.offset, self.window.take(size))
        elif size := self._size():
            yield from self._checked(level, size)
        else:
            yield from self._item(level)

    def _item(self, level: int) -> Iterator[Frame | Reject]:
        """Walk into an item that is no span; take one that is."""
        if level != _SPANS and self.cursor.next() == b"{":
            yield from self._scope_spans() if level else self._resource_spans()
        else:
            yield from self._large_item(level)

    def _large_item(self, level: int) -> Iterator[Frame | Reject]:
        contents = scan_contents(self.window, MAX_SPAN_BYTES, count=1)
        if len(contents.ends):
            yield from self._checked(level, int(contents.ends[0]))
        elif contents.stop >= 0:
            raise JsonDamageError("not JSON")
        elif self.window.fill(MAX_SPAN_BYTES):
            raise JsonDamageError("record too large")
        else:
            raise JsonDamageError(self.window.damage or "document is cut")

    def _guessed_size(self) -> int:
        """Return the length of whole items that begin alike, or 0: cheaper than to follow every bracket."""
        self.window.fill(PIECE_BYTES)
        text = self.window.peek(0, PIECE_BYTES)
        opener, limit = _OPENER.match(text), PIECE_BYTES
        while opener and limit >= _SMALLEST_GUESS_BYTES:
            items = text[: max(text.rfind(opener[0], 1, limit), 0)].rstrip(SPACE).removesuffix(b",")
            if items and _is_good(items):
                return len(items)
            limit //= 4
        return 0

    def _size(self) -> int:
        """Return the length of the items that end within a piece, or 0."""
        contents = scan_contents(self.window, PIECE_BYTES)
        if contents.stop >= 0:
            return len(self.window.peek(0, contents.stop).rstrip(SPACE))
        return int(contents.ends[-1]) if len(contents.ends) else 0

    def _checked(self, level: int, size: int) -> Iterator[Frame | Reject]:
        """Hand on items of which it is known only where they end."""
        if _is_good(items := self.window.peek(0, size)):
            yield from self._hand_on(level, self.window.offset, self.window.take(size))
            return
        for stretch, is_good in _told_apart(items):
            if is_good:
                offset, text = self.window.offset, self.window.take(len(stretch)).lstrip(SPACE + b",")
                yield from self._hand_on(level, offset + len(stretch) - len(text), text)
            elif level != _SPANS and self.walks_left:
                # What is not bad of it is found inside.
                self.walks_left -= 1
                self.window.skip(len(stretch) - len(stretch.lstrip(SPACE + b",")))
                yield from self._item(level)
                return
            else:
                yield self.source.reject(self.window.offset, len(stretch), "not JSON", stretch)
                self.window.skip(len(stretch))

    def _hand_on(self, level: int, offset: int, items: bytes) -> Iterator[Frame]:
        """Yield items as a document, once it is known what they belong to."""
        missing = (level > _RESOURCES and self.resource is None) or (level > _SCOPES and self.scope is None)
        if not missing:
            yield self.source.frame(offset, _document(level, items, self.resource, self.scope), "json")
            return
        if self.disk is None:
            disk = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the walk
            self.disk = cast("BinaryIO", self.files.enter_context(disk))
        self.disk.write(items)
        self.waiting.append(_Waiting(level, offset, len(items), len(self.scopes)))

    def release(self) -> Iterator[Frame]:
        """Yield what waited, with the resource and the scopes as they are known now."""
        scopes = [*self.scopes, self.scope]
        if self.disk is not None:
            self.disk.seek(0)
            for each in self.waiting:
                items = self.disk.read(each.size)
                document = _document(each.level, items, self.resource, scopes[each.scope])
                yield self.source.frame(each.offset, document, "json")
            self.disk.seek(0)
            self.disk.truncate()
        self.waiting, self.scopes, self.scope = [], [], None


def _document(level: int, items: bytes, resource: bytes | None, scope: bytes | None) -> bytes:
    """Return a request of some items of one level."""
    if level == _SPANS:
        items = b'{%b"spans":[%b]}' % (b'"scope":%b,' % scope if scope else b"", items)
    if level != _RESOURCES:
        items = b'{%b"scopeSpans":[%b]}' % (b'"resource":%b,' % resource if resource else b"", items)
    return b'{"resourceSpans":[%b]}' % items


def _is_good(items: bytes) -> bool:
    """Return whether the text is values with commas between them."""
    return is_json(b"[%b]" % items) and _is_utf8(items)


def _is_utf8(text: bytes) -> bool:
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def _split(items: bytes) -> Iterator[bytes]:
    """Yield values each with the comma before it; what follows the last bracket is one more."""
    ends = Scanner().ends(items).ends.tolist()
    for start, stop in zip([0, *ends], [*ends, len(items)], strict=True):
        if start < stop:
            yield items[start:stop]


def _told_apart(items: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield stretches of values that are all good, or all bad; of very many the rest counts as bad."""
    held: list[bytes] = []
    was_good, told = True, 0
    for item in _split(items):
        is_good = told < _MAX_STRETCHES and _is_good(item.strip(SPACE).removeprefix(b","))
        if held and is_good != was_good:
            yield b"".join(held), was_good
            held = []
            told += 1
        held.append(item)
        was_good = is_good
    yield b"".join(held), was_good
