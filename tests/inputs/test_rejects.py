"""Excerpts of rejected records: the parts shown, and those never shown; and how many rejects a file may have."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefit.inputs.rejects import MAX_EXCERPT_CHARS, Reject, Rejects, TooManyRejectsError, excerpt
from tracefit.options import IngestOptions


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


@pytest.mark.parametrize("key", ["alice@example.com", "sk-live-4242", "sk_live_4242", "a b", "é", "x" * 41, "42"])
def test_a_key_that_could_be_a_value_is_not_shown(key):
    assert excerpt(json.dumps({"spans": {key: 1}}).encode(), "json") == '{"spans":{"…":…}}'


def test_binary_encodings_show_their_size():
    assert excerpt(b"\x0a\x03abc", "protobuf") == "<binary, 5 bytes>"
    assert excerpt(b"\x0a\x03abc", "msgpack") == "<binary, 5 bytes>"


def test_values_are_shown_on_request():
    assert excerpt(b'{"name": "al\tice"}', "json", show_values=True) == '{"name": "al\\tice"}'
    assert excerpt(b"\x0a\x03abc\xff", "protobuf", show_values=True) == "\\n\\x03abcÿ"
    assert len(excerpt(b"x" * 5000, "json", show_values=True)) == MAX_EXCERPT_CHARS


@given(st.lists(st.text('secret{}:,"\\ \n', max_size=30), max_size=30), st.integers(0, 300), st.integers(0, 300))
def test_no_piece_of_a_record_shows_a_value(values, start, stop):
    marked = [f"SECRET{value}SECRET" for value in values]
    text = json.dumps({"key": marked}).encode()
    shown = excerpt(text[start : len(text) - stop], "json")
    assert "SECRET" not in shown
    assert len(shown) <= MAX_EXCERPT_CHARS


def test_a_block_s_rejects_have_places_in_the_file_and_end_at_the_limit():
    rejects = Rejects(IngestOptions(max_rejects=2), "f", 100, "json")
    rejects.add(5, b'{"name": "alice"}', "bad")
    assert rejects.take() == [Reject("f", 105, 17, "bad", '{"name":"…"}')]
    assert not rejects.is_full
    with pytest.raises(TooManyRejectsError):
        rejects.add(30, b"", "long", shown=b"[1]", length=7)
    # Taken ones still count, and are not given again.
    assert rejects.is_full
    assert rejects.take() == [Reject("f", 130, 7, "long", "[…]")]


def test_rejects_that_are_listed_elsewhere_count_and_the_rest_is_one_reject():
    rejects = Rejects(IngestOptions(max_rejects=3), "f")
    rejects.count(2)
    with pytest.raises(TooManyRejectsError, match=r"`IngestOptions.max_rejects` sets the limit"):
        rejects.include(Reject("f", 1, 1, "bad"))
    # In a file of the tables the option is a flag, whoever called.
    why = "more than 3 rejects: the rest of the file is not read (--max-rejects sets the limit)"
    assert rejects.rest(40) == Reject("f", 40, 0, why)


def test_a_full_file_stays_full():
    """Blocks that are on their way when the limit is reached count too."""
    rejects = Rejects(IngestOptions(max_rejects=1))
    for _ in range(2):
        with pytest.raises(TooManyRejectsError):
            rejects.count(1)
    rejects.count(0)
    assert rejects.is_full
