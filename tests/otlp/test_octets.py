from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracefit.otlp.octets import Octets


def varint(number):
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def read(texts):
    octets, starts, stops = Octets.of(texts)
    good, numbers = octets.varints(starts, stops - starts, octets.words[starts])
    return good.tolist(), numbers.tolist()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_varints_of_every_size(numbers):
    assert read([varint(number) for number in numbers]) == ([True] * len(numbers), numbers)


@given(st.lists(st.binary(max_size=12), min_size=1))
def test_a_varint_ends_where_its_size_says_or_is_not_good(texts):
    for text, good in zip(texts, read(texts)[0], strict=True):
        ends_right = text != b"" and all(byte >= 0x80 for byte in text[:-1]) and text[-1] < 0x80
        assert good == (ends_right and (len(text) < 10 or (len(text) == 10 and text[-1] < 2)))


def test_nine_bytes_are_one_number_or_none():
    ends_early = b"\xff" * 3 + b"\x01" + b"\xff" * 4 + b"\x01"
    assert read([b"\xff" * 8 + b"\x01", ends_early])[0] == [True, False]
    assert read([ends_early + b"\xff"])[0] == [False]


@given(st.lists(st.binary(max_size=300), min_size=1))
def test_stretches_are_cut_out_as_they_are(texts):
    octets, starts, stops = Octets.of(texts)
    assert octets.cut(starts, stops - starts).tobytes() == b"".join(texts)
