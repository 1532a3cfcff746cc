"""Limits of what is read from a file, and of the values in it."""

from __future__ import annotations

import pytest

from tracefit.errors import UsageError
from tracefit.server.documents import (
    MAX_INTEGER,
    MAX_NESTING,
    as_text,
    checked_flag,
    checked_integer,
    checked_number,
    checked_text,
    excerpt,
    kind_of,
    parse_yaml_object,
    read_bytes,
)


def test_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")

    assert read_bytes(path, limit_bytes=5) == b"12345"
    with pytest.raises(UsageError, match="is larger than 4 bytes; this is not a configuration file"):
        read_bytes(path, limit_bytes=4)


@pytest.mark.parametrize("content", ["12345", b"12345", "\ufeff2345", b"\xef\xbb\xbf45"])
def test_text_is_taken_up_to_its_limit(content):
    assert as_text(content, where="x", limit_bytes=5) in {"12345", "2345", "45"}
    with pytest.raises(UsageError, match="x: is larger than 4 bytes"):
        as_text(content, where="x", limit_bytes=4)


def test_yaml_is_nested_up_to_its_limit():
    deepest = MAX_NESTING - 1

    parse_yaml_object("a: " + "[" * deepest + "]" * deepest, where="x")
    with pytest.raises(UsageError, match="x: is nested too deeply"):
        parse_yaml_object("a: " + "[" * (deepest + 1) + "]" * (deepest + 1), where="x")


def test_whole_numbers_within_bounds():
    assert [checked_integer(n, key="k", where="x", least=2, most=4) for n in (2, 3.0, 4)] == [2, 3, 4]
    assert checked_integer(MAX_INTEGER, key="k", where="x") == MAX_INTEGER == 9_007_199_254_740_992
    for bad in (1, 5, 2.5):
        with pytest.raises(UsageError, match=r"x: k must be a whole number from 2 to 4, not \d"):
            checked_integer(bad, key="k", where="x", least=2, most=4)


def test_numbers_within_bounds():
    assert checked_number(0, key="k", where="x") == 0
    assert checked_number(1, key="k", where="x", above=0, most=1) == 1
    with pytest.raises(UsageError, match="x: k must be a number above 0 and at most 1, not 0"):
        checked_number(0, key="k", where="x", above=0, most=1)
    with pytest.raises(UsageError, match=r"x: k must be a number at least 2, not 1\.5"):
        checked_number(1.5, key="k", where="x", least=2)


def test_flags_are_true_or_false():
    assert checked_flag(True, key="k", where="x") is True
    with pytest.raises(UsageError, match="x: k must be true or false, not a number '1'"):
        checked_flag(1, key="k", where="x")


def test_text_is_printable_and_short():
    assert checked_text(" a b ", key="k", where="x") == "a b"
    assert checked_text("a" * 512, key="k", where="x") == "a" * 512
    for bad in ("", " ", "a" * 513, "a\x00b", "a\nb", "\ud800"):
        with pytest.raises(UsageError, match="x: k must be printable text of 1 to 512 characters"):
            checked_text(bad, key="k", where="x")


def test_excerpts_are_short_and_printable():
    assert excerpt("a" * 40) == "a" * 40
    assert excerpt("a" * 41) == "a" * 40 + "…"
    assert excerpt("a\nb\x00\ud800") == "a b  "
    assert excerpt([1, "a"]) == "[1, 'a']"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "true/false"),
        (1, "a number"),
        (1.5, "a number"),
        ("", "text"),
        ([], "a list"),
        ({}, "an object"),
    ],
)
def test_kinds_are_named_in_words_of_json(value, kind):
    assert kind_of(value) == kind
