from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tracefit.sources.excerpt import MAX_EXCERPT_CHARS, excerpt


def test_structure_and_keys_are_shown_and_values_are_not():
    text = b'{"resourceSpans": [{"n": 12, "ok": true, "name": "a \\"b\\" {c}"}]}'
    assert excerpt(text, "json") == '{"resourceSpans":[{"n":…,"ok":…,"name":"…"}]}'


def test_a_string_that_is_cut_is_not_shown():
    assert excerpt(b'{"name":"secr', "json") == '{"name":"…"'


def test_protobuf_shows_its_size():
    assert excerpt(b"\x0a\x03abc", "protobuf") == "<protobuf, 5 bytes>"


@given(
    st.lists(st.text('secret{}:,"\\ \n', max_size=30), max_size=30), st.integers(0, 300), st.integers(0, 300)
)
def test_no_piece_of_a_record_shows_a_value(values, start, stop):
    marked = [f"SECRET{value}SECRET" for value in values]
    text = json.dumps({"key": marked}).encode()
    shown = excerpt(text[start : len(text) - stop], "json")
    assert "SECRET" not in shown
    assert len(shown) <= MAX_EXCERPT_CHARS
