from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefit.otlp import decode_frames
from tracefit.sources import read_frames
from tracefit.sources.excerpt import MAX_EXCERPT_CHARS, excerpt


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


def test_protobuf_shows_its_size():
    assert excerpt(b"\x0a\x03abc", "protobuf") == "<binary, 5 bytes>"


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


def _private(otlp):
    """Return a record full of secrets: in names, values, keys of key-value lists, bytes, and text that looks like JSON."""
    secrets = ["SECRET", '{"SECRET": "SECRET"}', '"SECRET":', "SECRET\n", '\\"SECRET\\":{"SECRET":']
    attributes = [otlp.attribute("SECRET", stringValue=text) for text in secrets]
    attributes.append(
        otlp.attribute("x", kvlistValue={"values": [otlp.attribute("SECRET", stringValue="SECRET")]})
    )
    span = otlp.span(
        1,
        name="SECRET",
        attributes=attributes,
        events=[otlp.event("SECRET", attributes)],
        status={"message": "SECRET"},
    )
    return otlp.record(span)


@pytest.mark.parametrize(
    "shape", ["lines", "pretty object", "framed protobuf", "bare protobuf", "framed zstd of JSON"]
)
def test_no_damage_to_a_record_shows_what_is_private(otlp, shape):
    """Every cut from either side, and every byte replaced, of a record full of secrets."""
    data = otlp.SHAPES[shape]([_private(otlp)])
    step = max(len(data) // 40, 1)
    damaged = [data[:cut] for cut in range(1, len(data), step)]
    damaged += [data[cut:] for cut in range(1, len(data), step)]
    damaged += [
        data[:at] + mark + data[at + 1 :]
        for at in range(0, len(data), step)
        for mark in (b'"', b":", b"\xff")
    ]
    rejects = 0
    for text in damaged:
        for batch in decode_frames(read_frames("-", stdin=io.BytesIO(text))):
            for reject in batch.rejects:
                rejects += 1
                assert "SECRET" not in reject.excerpt, text
                assert "SECRET" not in reject.reason, text
    assert rejects > 60


@pytest.mark.parametrize("shape", ["lines", "framed protobuf", "framed zstd of JSON"])
def test_what_is_private_is_shown_on_request_alone(otlp, shape):
    record = _private(otlp)
    record["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] = "SECRET" * 9
    record["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] = "00"
    data = otlp.SHAPES[shape]([record])

    def excerpts(show_values):
        frames = read_frames("-", stdin=io.BytesIO(data), show_values=show_values)
        return [reject.excerpt for batch in decode_frames(frames) for reject in batch.rejects]

    assert "SECRET" not in str(excerpts(show_values=False))
    (shown,) = excerpts(show_values=True)
    assert "SECRETSECRET" in shown
    assert len(shown) <= MAX_EXCERPT_CHARS
