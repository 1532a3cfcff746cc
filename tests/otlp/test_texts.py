from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracefit.otlp.texts import Texts


@given(st.lists(st.integers(0, 10**19 - 1), min_size=1))
def test_digits_are_read_up_to_what_is_no_digit(numbers):
    texts = Texts.of([f'{number}"'.encode() for number in numbers])
    sizes, found = texts.digits(texts.begins, 20)
    assert found.tolist() == numbers
    assert sizes.tolist() == [len(str(number)) for number in numbers]


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1))
def test_no_byte_but_a_digit_is_one(strings):
    texts = Texts.of(strings)
    sizes, _ = texts.digits(texts.begins, 32)
    for text, size in zip(strings, sizes.tolist(), strict=True):
        inside = min(size, len(text))
        assert text[:inside] == b"" or (text[:inside].isdigit() and text[:inside].isascii())
        assert size >= len(text) or not text[size : size + 1].isdigit()


@given(st.lists(st.binary(max_size=40), min_size=1))
def test_strings_end_at_quotes_backslashes_and_control_characters(strings):
    texts = Texts.of([text + b'"' for text in strings])
    sizes = texts.sizes_of_strings(texts.begins, 64)
    expected = [next(i for i, c in enumerate(text + b'"') if c in b'"\\' or c < 0x20) for text in strings]
    assert sizes.tolist() == expected


@given(st.lists(st.binary(max_size=40), min_size=1))
def test_bare_values_end_at_punctuation_and_space(strings):
    texts = Texts.of([text + b"}" for text in strings])
    sizes = texts.sizes_of_bare(texts.begins, 64)
    expected = [next(i for i, c in enumerate(text + b"}") if c in b",}]" or c <= 0x20) for text in strings]
    assert sizes.tolist() == expected


@given(
    st.lists(st.sampled_from([b"abc", b"abd", b"Abc", b"abcabc"]), min_size=1),
    st.sampled_from([b"abc", b"abd"]),
)
def test_a_literal_is_found_where_it_is(strings, literal):
    texts = Texts.of(strings)
    assert texts.octets.equal(texts.begins, literal).tolist() == [
        text.startswith(literal) for text in strings
    ]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_stretches_are_cut_out_as_they_are(strings):
    texts = Texts.of([text.encode() for text in strings])
    assert texts.cut(texts.begins, texts.ends - texts.begins).to_list() == strings


def test_what_is_not_utf8_is_no_column():
    texts = Texts.of([b"ok", b"\xff"])
    assert texts.cut(texts.begins, texts.ends - texts.begins) is None
