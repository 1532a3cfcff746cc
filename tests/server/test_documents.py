"""Limits of what is read from a file, and of the values in it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from pydantic import ConfigDict, Field, TypeAdapter

from tracefit.errors import UsageError
from tracefit.server.documents import (
    FLAG,
    MAX_INTEGER,
    MAX_NESTING,
    TEXT,
    FiniteNumber,
    excerpt,
    kind_of,
    parse_json_object,
    parse_yaml,
    parse_yaml_object,
    read_bytes,
    validated,
    whole_number,
)


def test_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")

    assert read_bytes(path, limit_bytes=5) == b"12345"
    with pytest.raises(UsageError, match="is larger than 4 bytes; this is not a configuration file"):
        read_bytes(path, limit_bytes=4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3 (a is there twice)"),
        ("a: 1\n'a': 1\n", "line 2 (a is there twice)"),
        ("x:\n  - {b: 1, b: 2}\n", "line 2 (b is there twice)"),
        ("1: a\n0x1: b\n", "is there twice"),
    ],
)
def test_a_repeated_key_is_refused(text, says):
    """Which of the two counts, readers of YAML do not agree on."""
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_yaml(text, where="x.yaml")


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_repeated_json_key_is_refused(is_strict):
    with pytest.raises(UsageError, match=r"x\.json: is not JSON \(an object has the same key twice\)"):
        parse_json_object('{"a": {"b": 1, "b": 1}}', where="x.json", strict=is_strict)


@pytest.mark.parametrize("content", ["a: 1", b"a: 1", "\ufeffa: 1", b"\xef\xbb\xbfa: 1"])
def test_a_byte_order_mark_is_no_part_of_the_text(content):
    assert parse_yaml_object(content, where="x") == {"a": 1}


def test_yaml_is_nested_up_to_its_limit():
    deepest = MAX_NESTING - 1

    parse_yaml_object("a: " + "[" * deepest + "]" * deepest, where="x")
    with pytest.raises(UsageError, match="x: is nested too deeply"):
        parse_yaml_object("a: " + "[" * (deepest + 1) + "]" * (deepest + 1), where="x")


BAD_YAML = [
    "!!timestamp x",
    "!!timestamp ''",
    '!!int ""',
    "!!int _",
    "!!int 0b_",
    "!!bool x",
    "!!float x",
    "!!float ''",
    "!!binary x",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!python/name:os.system",
    "!<tag:yaml.org,2002:int> x",
    "! x",
    "[a, !!bool x]",
    "0x" + "f" * 500_000,
    "9" * 500_000,
    "0b1" + "1" * 20_000,
    "0" + "7" * 20_000,
    "1" + ":59" * 20_000,
    "0x_",
    "2020-13-45",
    "1" + ":59" * 20_000 + ".5",
    "[" * 2000 + "]" * 2000,
    "&a [*a]",
    "--- a\n--- b",
    "{? [1]: 2}",
    "{<<: 1}",
    "=",
]


@pytest.mark.parametrize("text", BAD_YAML)
def test_yaml_that_cannot_be_read_is_one_short_line(text):
    with pytest.raises(
        UsageError, match=r"^x: (is not YAML|uses the YAML tag|uses YAML aliases|holds several|is nested)"
    ) as caught:
        parse_yaml(text, where="x")

    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0x1F", 31),
        ("0b101", 5),
        ("9" * 300, int("9" * 300)),
        ("1.5", 1.5),
        ("true", True),
        ("~", None),
        ("", None),
        ("'!!int x'", "!!int x"),
        ("org/name-7b", "org/name-7b"),
    ],
)
def test_plain_yaml_values(text, value):
    assert parse_yaml(text, where="x") == value


def test_whole_numbers_within_bounds():
    read = whole_number(2, 4)

    assert [validated(read, n, key="k", where="x") for n in (2, 3.0, 4)] == [2, 3, 4]
    assert validated(whole_number(), MAX_INTEGER, where="x") == MAX_INTEGER == 9_007_199_254_740_992


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (1, "greater than or equal to 2, not 1"),
        (5, "less than or equal to 4, not 5"),
        (2.5, r"a whole number, not 2\.5"),
        (True, "a whole number, not true"),
        ("3", "a whole number, not text '3'"),
    ],
)
def test_other_values_are_no_whole_numbers(bad, fault):
    with pytest.raises(UsageError, match=f"^x: k must be {fault}$"):
        validated(whole_number(2, 4), bad, key="k", where="x")


SHARE = TypeAdapter(Annotated[FiniteNumber, Field(gt=0, le=1)])


def test_numbers_within_bounds():
    assert validated(SHARE, 1, key="k", where="x") == 1


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (0, "greater than 0, not 0"),
        (1.5, r"less than or equal to 1, not 1\.5"),
        (math.nan, "a finite number, not nan"),
        (10**400, "a number, not 1000"),
        ("1", "a number, not text '1'"),
        (None, "a number, not null"),
    ],
)
def test_other_values_are_no_share(bad, fault):
    with pytest.raises(UsageError, match=f"^x: k must be {fault}"):
        validated(SHARE, bad, key="k", where="x")


def test_flags_are_true_or_false():
    assert validated(FLAG, True, key="k", where="x") is True
    with pytest.raises(UsageError, match=r"^x: k must be true or false, not 1$"):
        validated(FLAG, 1, key="k", where="x")


def test_text_is_printable_and_short():
    assert validated(TEXT, " a b ", key="k", where="x") == "a b"
    assert validated(TEXT, "a" * 512, key="k", where="x") == "a" * 512


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ("", "have 1 or more char"),
        (" ", "have 1 or more char"),
        ("a" * 513, "have at most 512 char"),
        ("a\x00b", "be printable text"),
        ("a\nb", "be printable text"),
        ("\ud800", "be "),
    ],
)
def test_long_or_unprintable_text_is_refused(bad, fault):
    with pytest.raises(UsageError, match=f"^x: k must {fault}"):
        validated(TEXT, bad, key="k", where="x")


@dataclass(frozen=True)
class Item:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    weight: FiniteNumber
    name: str = ""


@dataclass(frozen=True)
class Shape:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    items: Annotated[tuple[Item, ...], Field(min_length=1, max_length=2)]


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({}, "items is missing; keys: items"),
        ({"itms": []}, "items is missing; the file has itms; keys: items"),
        ({"items": []}, "items must have 1 or more items"),
        ({"items": [{}] * 3}, "items[0].weight is missing; keys: name, weight"),
        ({"items": 3}, "items must be a list, not 3"),
        ({"items": [3]}, "items[0] must be an object, not 3"),
        (
            {"items": [{"weight": 1}, {"wieght": 2}]},
            "items[1].weight is missing; the file has wieght; keys: name, weight",
        ),
        (
            {"items": [{"weight": 1, "nmae": "a"}]},
            "items[0].nmae is not a known key; did you mean name? keys: name, weight",
        ),
        ({"items": [{"weight": [1]}]}, "items[0].weight must be a number, not a list"),
        ([], "document must be an object, not a list"),
    ],
)
def test_a_fault_names_file_key_and_nearest_key(document, line):
    with pytest.raises(UsageError) as caught:
        validated(Shape, document, where="f.json")

    assert str(caught.value) == f"f.json: {line}"


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
