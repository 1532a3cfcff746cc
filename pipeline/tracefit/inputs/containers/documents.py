"""Pretty JSON documents one after another, as `jq .` or `cat` of several files leaves them: each becomes a line, for
any reader of JSON.
"""

from __future__ import annotations

import re

from tracefit.inputs.containers.base import PRETTY, Container, register
from tracefit.inputs.containers.elements import first_end, items
from tracefit.inputs.rejects import is_json

_BEGIN = re.compile(rb"(?<=\n)[\[{]")


def _find(head: bytes) -> bool:
    if not PRETTY.match(head):
        return False
    end = first_end(head)
    return end > 0 and head[end:].lstrip()[:1] in (b"{", b"[")


def _line(text: bytes) -> list[bytes]:
    if not is_json(text) and _BEGIN.search(text, 1):
        raise ValueError
    # A raw line end is never inside a string.
    return [text.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"]


FORMAT = register(
    Container(
        name="documents",
        title="JSON documents one after another",
        holds="all",
        version="any",
        source="https://www.rfc-editor.org/rfc/rfc8259",
        find=_find,
        read=lambda content, most_bytes: items(content, 0, _BEGIN, most_bytes, _line),
    )
)
