"""Excerpts of rejected records: the parts shown, and those never shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefit.inputs.rejects import MAX_EXCERPT_CHARS, excerpt


def test_structure_and_keys_are_shown_and_values_are_not():
    text = b'{"resourceSpans": [{"n": 12, "ok": true, "name": "a \\"b\\" {c}"}]}'
    assert excerpt(text, "json") == '{"resourceSpans":[{"n":…,"ok":…,"name":"…"}]}'


def test_a_string_that_is_cut_is_not_shown():
    assert excerpt(b'{"name":"secr', "json") == '{"name":"…"'


@pytest.mark.parametrize(
    "text",
    [
        b'"stringValue":"alice":',  # a comma that became a colon
        b'"stringValue":{"alice":"x"}',
        b'alice","value":{"alice":"alice" :',
    ],
)
def test_in_damaged_text_only_the_keys_of_otlp_are_keys(text):
    assert '"spans":' in excerpt(b'{"spans":[{' + text, "json")
    assert "alice" not in excerpt(text, "json")


@pytest.mark.parametrize(
    "key", ["alice@example.com", "sk-live-4242", "sk_live_4242", "a b", "é", "x" * 41, "42"]
)
def test_a_key_that_could_be_a_value_is_not_shown(key):
    assert excerpt(json.dumps({"spans": {key: 1}}).encode(), "json") == '{"spans":{"…":…}}'


def test_binary_encodings_show_their_size():
    assert excerpt(b"\x0a\x03abc", "protobuf") == "<binary, 5 bytes>"
    assert excerpt(b"\x0a\x03abc", "msgpack") == "<binary, 5 bytes>"


def test_values_are_shown_on_request():
    assert excerpt(b'{"name": "al\tice"}', "json", show_values=True) == '{"name": "al\\tice"}'
    assert excerpt(b"\x0a\x03abc\xff", "protobuf", show_values=True) == "\\n\\x03abcÿ"
    assert len(excerpt(b"x" * 5000, "json", show_values=True)) == MAX_EXCERPT_CHARS


@given(
    st.lists(st.text('secret{}:,"\\ \n', max_size=30), max_size=30), st.integers(0, 300), st.integers(0, 300)
)
def test_no_piece_of_a_record_shows_a_value(values, start, stop):
    marked = [f"SECRET{value}SECRET" for value in values]
    text = json.dumps({"key": marked}).encode()
    shown = excerpt(text[start : len(text) - stop], "json")
    assert "SECRET" not in shown
    assert len(shown) <= MAX_EXCERPT_CHARS
