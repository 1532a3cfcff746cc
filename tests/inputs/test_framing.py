"""Where records lie: whatever is cut, mutated or inserted, the records that are whole survive."""

from __future__ import annotations

from itertools import accumulate

import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, example, given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tracefit.inputs import framing
from tracefit.inputs.framing import Record, next_record, records, whole_records

SHAPES = ["lines", "framed", "bare"]


def wrap(shape, payload):
    """Return a payload as a file holds it."""
    if shape == "framed":
        return len(payload).to_bytes(4, "big") + payload
    return payload + b"\n" if shape == "lines" else payload


def good(block, shape):
    return [item.payload for item in records(block, shape) if not item.fault]


def salvaged(block, shape):
    """Return good records as who decodes them has to: one that fails can have swallowed others, which are inside it."""
    for payload in good(block, shape):
        try:
            TracesData.FromString(b"" if shape == "lines" else payload)
            yield payload
        except DecodeError:
            if (inside := next_record(payload, shape, 1)) >= 0:
                yield from salvaged(payload[inside:], shape)


def damage(block, shape):
    return [item for item in records(block, shape) if item.fault]


def payloads(otlp, shape, sizes):
    make = otlp.text if shape == "lines" else otlp.message
    return [make(number + 1, name="x" * size) for number, size in enumerate(sizes)]


def in_order(expected, found):
    """Return whether `expected` is a subsequence of `found`."""
    found = iter(found)
    return all(any(item == other for other in found) for item in expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_records_have_offsets_and_payloads(otlp, shape):
    parts = payloads(otlp, shape, [1, 300, 20_000, 5])
    data = b"".join(wrap(shape, part) for part in parts)
    found = list(records(data, shape))
    assert [item.payload for item in found] == parts
    assert all(data[item.offset :].startswith(item.payload) for item in found)


def test_lines_lose_their_ends_and_blank_ones_are_left_out():
    data = b"\xef\xbb\xbf{a}\r\n\r\n \n\xef\xbb\xbf{b}\n\n  {c}"
    assert list(records(data, "lines")) == [Record(3, b"{a}"), Record(15, b"{b}"), Record(22, b"{c}")]


def test_a_document_is_one_record():
    assert list(records(b"{\n}\n", "document")) == [Record(0, b"{\n}\n")]
    assert whole_records(b"{\n}\n", "document", is_last=False) == 0


@given(
    shape=st.sampled_from(SHAPES),
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=12),
    step=st.integers(1, 900),
)
def test_any_split_of_whole_records_gives_the_same_records(otlp, shape, sizes, step):
    parts = payloads(otlp, shape, sizes)
    data = b"".join(wrap(shape, part) for part in parts)
    found, buffer, position = [], b"", 0
    while position < len(data) or buffer:
        buffer += data[position : position + step]
        position += step
        size = whole_records(buffer, shape, is_last=position >= len(data))
        found += good(buffer[:size], shape)
        assert damage(buffer[:size], shape) == []
        buffer = buffer[size:]
    assert found == parts


@st.composite
def mutations(draw):
    """Return what to do to one record: overwrite, insert, delete or cut, somewhere in it."""
    how = draw(st.sampled_from(["overwrite", "insert", "delete", "cut"]))
    return how, draw(st.floats(0, 0.999)), draw(st.binary(min_size=1, max_size=12))


def mutate(part, mutation):
    how, share, junk = mutation
    at = int(len(part) * share)
    if how == "overwrite":
        return part[:at] + junk[: len(part) - at] + part[at + len(junk) :]
    if how == "insert":
        return part[:at] + junk + part[at:]
    return part[:at] + (part[at + len(junk) :] if how == "delete" else b"")


@given(
    shape=st.sampled_from(SHAPES),
    sizes=st.lists(st.integers(0, 300), min_size=3, max_size=8),
    which=st.integers(0, 7),
    mutation=mutations(),
    step=st.integers(200, 5000),
)
@example(shape="framed", sizes=[1, 206, 48, 12, 0], which=2, mutation=("cut", 0.34375, b"\x00"), step=200)
def test_good_records_survive_any_damage_to_another(otlp, shape, sizes, which, mutation, step):
    parts = payloads(otlp, shape, sizes)
    which %= len(parts)
    wrapped = [wrap(shape, part) for part in parts]
    wrapped[which] = mutate(wrapped[which], mutation)
    if shape == "lines" and not wrapped[which].endswith(b"\n"):
        wrapped[which] += b"\n"  # what glues two lines together is the business of who decodes them
    # A record that lost just as many bytes as the next ones have cannot be distinguished from a longer one.
    lost = len(wrap(shape, parts[which])) - len(wrapped[which])
    assume(lost not in accumulate(map(len, wrapped[which + 1 :])))
    data = b"".join(wrapped)
    expected = parts[:which] + parts[which + 1 :]
    assert in_order(expected, salvaged(data, shape))
    lost = sum(len(item.payload) for item in damage(data, shape))
    assert lost <= len(wrapped[which])
    # The same in pieces.
    found, buffer, position = [], b"", 0
    while position < len(data) or buffer:
        buffer += data[position : position + step]
        position += step
        size = whole_records(buffer, shape, is_last=position >= len(data))
        found += salvaged(buffer[:size], shape)
        buffer = buffer[size:]
    assert in_order(expected, found)


@pytest.mark.parametrize("size", [0, 1, 77, 500, 0x0A000000, 2**31, 2**32 - 1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_length_costs_its_record_alone(otlp, size, which):
    messages = otlp.messages(3)
    parts = [otlp.framed([message]) for message in messages]
    parts[which] = size.to_bytes(4, "big") + messages[which]
    data = b"".join(parts)
    assert good(data, "framed") == messages[:which] + messages[which + 1 :]
    assert sum(len(item.payload) for item in damage(data, "framed")) == len(parts[which])


@pytest.mark.parametrize("first", [b"{", b"["])
def test_a_frame_that_begins_like_json_costs_itself(otlp, first):
    messages = otlp.messages(3)
    data = first + otlp.framed(messages)[1:]
    assert good(data, "framed") == messages[1:]
    long = otlp.message(9, name="x" * 0x5B00)  # its length has a bracket in it
    assert good(otlp.framed([long, *messages]), "framed") == [long, *messages]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 40])
def test_a_cut_last_frame_is_one_damage(otlp, size):
    messages = otlp.messages(2)
    whole = otlp.framed(messages[:1])
    first, last = records(whole + otlp.framed(messages[1:])[:size], "framed")
    assert first.payload == messages[0]
    assert (last.offset, len(last.payload)) == (len(whole), size)
    assert "cut" in last.fault


def test_a_cut_bare_message_keeps_its_whole_resources(otlp):
    messages = otlp.messages(2)
    for size in range(1, len(messages[1])):
        first, last = records(messages[0] + messages[1][:size], "bare")
        assert first.payload == messages[0]
        assert (last.offset, len(last.payload)) == (len(messages[0]), size)


def test_junk_in_a_bare_message_costs_one_record(otlp):
    messages = otlp.messages(5)
    for at in range(len(messages[0])):
        data = messages[0] + messages[1][:at] + b"\x07\xff" + messages[1][at:] + b"".join(messages[2:])
        assert in_order([messages[0], *messages[2:]], good(data, "bare"))


TINY = {"framed": b"\0\0\0\2\x0a\0", "bare": b"\x0a\0", "lines": b"{}\n"}


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("shape", ["framed", "bare"])
def test_tiny_messages_by_the_million_are_few_records(otlp, shape):
    one = wrap(shape, otlp.message())
    tiny = TINY[shape] * 250_000
    data = one + tiny + one + tiny
    assert whole_records(data, shape, is_last=False) > len(data) - 32
    found = good(data, shape)
    assert found.count(otlp.message()) == 2
    assert len(found) < 100
    assert b"".join(found) == (otlp.message() + b"\x0a\0" * 250_000) * 2
    assert damage(data, shape) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "unit"),
    [
        ("framed", b"\0\0\0\1\x0a"),
        ("framed", b"\0\0\0\0"),
        ("framed", b"\x0a"),
        ("framed", b"\0\0\0\x28\x0a\x20"),
        ("framed", b"\x00\x7f\xff\xff\x0a\x02\x0a\x00"),
        ("bare", b"\x0a\x7f\x0a\x01"),
        ("bare", b"\xff"),
        ("bare", b"\x0a\x80\x80\x40\x12\x02"),
        ("lines", b"x\n"),
    ],
)
def test_false_lengths_are_skipped_in_linear_time(otlp, grows_linearly, shape, unit):
    def prepare(n):
        data = wrap(shape, otlp.message()) + unit * (n // len(unit))

        def read():
            for is_last in (False, True):
                whole_records(data, shape, is_last=is_last)
            assert sum(1 for _ in records(data, shape)) >= 1

        return read

    grows_linearly(prepare, 8_000)


def test_guesses_are_bounded(otlp):
    lies = b"\xff" + b"\0\0\0\x28\x0a\x20" * 100
    data = lies + otlp.framed([otlp.message()])
    assert next_record(data, "framed", 0, max_guesses=50) == -1
    assert next_record(data, "framed", 0) == len(lies)


def test_the_shortest_span_is_not_in_a_run_of_tiny_messages(otlp):
    span = b"\x0a\x10" + b"\1" * 16 + b"\x12\x08" + b"\1" * 8
    scope = b"\x12" + bytes([len(span)]) + span
    resource = b"\x12" + bytes([len(scope)]) + scope
    record = b"\x0a" + bytes([len(resource)]) + resource
    assert len(resource) == framing.wire.SHORTEST_RESOURCE_SPANS
    tiny = b"\x0a\0" * 30_000
    found = [item for item in records(tiny + record + tiny, "bare") if item.payload == record]
    assert [item.offset for item in found] == [len(tiny)]
