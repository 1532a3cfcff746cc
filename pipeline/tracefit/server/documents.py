"""Read the small JSON and YAML files that a user provides, within bounds, and validate their contents.

The files come from anywhere, so size, nesting and types are checked before a value is used; no other module
of `server/` and `features/` opens files. Shapes are declared as annotated types where they belong (settings,
GPU, feature set) and applied by `validated`. Every fault is one `UsageError` line: file, key, the fault, and
the nearest known key where a key is wrong.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    Field,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from tracefit.errors import UsageError, did_you_mean
from tracefit.evaluator import MAX_VALUES
from tracefit.inputs.buckets import location_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pydantic_core import ErrorDetails

Scalar: TypeAlias = str | int | float | bool | None
"""A fact or a setting after validation."""

Document: TypeAlias = Mapping[str, object]
"""A decoded file: names to values that are not validated yet."""

# Published config.json files have tens of KiB.
MAX_DOCUMENT_BYTES = 8 * 1024 * 1024
# Far above what a configuration needs, far below where Python's recursion ends.
MAX_NESTING = 64

_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""Brackets; strings are matched whole, so that brackets in them do not count."""

MAX_INTEGER = 2**53  # beyond this a JSON number is no longer exact for other readers
_EXCERPT_CHARS = 40  # an error is one line, which also names file and key
# Python refuses to print integers of more than 4,300 digits, in any base they were read.
_MAX_INTEGER_CHARS = 300

_T = TypeVar("_T")


# -- reading ---------------------------------------------------------------------------------------------


def read_bytes(path: Path, *, limit_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a whole file that must be small.

    Raises:
        UsageError: The file cannot be read or is larger than `limit_bytes`.
    """
    try:
        with location_of(path).open("rb") as file:
            # Read one byte beyond the limit: the size on disk is useless for a pipe or a growing file.
            content = file.read(limit_bytes + 1)
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise UsageError(reason, where=str(path), hint="check the path") from None
    if len(content) > limit_bytes:
        raise UsageError(
            f"is larger than {limit_bytes:,} bytes", where=str(path), hint="this is not a configuration file"
        )
    return content


def as_text(content: bytes | str, *, where: str) -> str:
    """Return content as text, without a byte order mark.

    Raises:
        UsageError: The bytes are not UTF-8.
    """
    if isinstance(content, str):
        return content.removeprefix("\ufeff")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 text (byte {error.start})", where=where) from None


# -- decoding --------------------------------------------------------------------------------------------


def parse_json_object(content: bytes | str, *, where: str, strict: bool = False) -> Document:
    """Decode a JSON file whose top level is an object.

    `NaN` and `Infinity` are accepted here, because published configs carry them in keys that are not used; a
    number that is used is validated to be finite.

    `strict` also refuses `NaN` and `Infinity`.

    Raises:
        UsageError: The content is not JSON, is nested too deeply, has too many values or a duplicate key, or
            is not an object.
    """
    text = as_text(content, where=where)
    _check_json_size(text, where=where)
    try:
        constant = _no_constant if strict else None
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=constant)
    except RecursionError:
        raise UsageError("is nested too deeply", where=where) from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise UsageError(f"is not JSON ({excerpt(str(error))})", where=where) from None
    if not isinstance(value, dict):
        raise UsageError(f"holds {kind_of(value)} where an object was expected", where=where)
    return value


def _check_json_size(text: str, *, where: str) -> None:
    """Refuse text that is too costly to parse, by counts of its characters."""
    # Every value but the first follows one of these.
    if max(text.count(mark) for mark in ",[{") > MAX_VALUES:
        raise UsageError(f"is not JSON of fewer than {MAX_VALUES:,} values", where=where)
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(text):
        depth += 1 if match[0] in "[{" else -1 if match[0] in "]}" else 0
        if depth > MAX_NESTING:
            raise UsageError("is nested too deeply", where=where)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Readers differ in which of two equal keys they take: a file must mean the same to all of them.
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("an object has the same key twice")
    return keys


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number JSON knows")


def parse_yaml_object(content: bytes | str, *, where: str) -> Document:
    """Decode a YAML file whose top level is a mapping, see `parse_yaml`; an empty file is an empty mapping.

    Raises:
        UsageError: As `parse_yaml`, or not a mapping.
    """
    return _mapping(parse_yaml(content, where=where), where=where)


def parse_yaml_objects(content: bytes | str, *, where: str) -> list[Document]:
    """Decode the documents of a YAML file, each a mapping, see `parse_yaml`; empty ones are left out.

    Raises:
        UsageError: As `parse_yaml`, except for several documents; or one is not a mapping.
    """
    return [_mapping(value, where=where) for value in _documents(content, where=where) if value is not None]


def _mapping(value: object, *, where: str) -> Document:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"holds {kind_of(value)} where a mapping was expected", where=where)
    return {str(key): item for key, item in value.items()}


def parse_yaml(content: bytes | str, *, where: str) -> object:
    """Decode one YAML document; every YAML text of a user, file or option, is decoded as here.

    Aliases are refused: no run description needs them, and a few lines of them expand without bound. Tags are refused
    too: they construct values that are not JSON (sets, bytes), and a tag whose text does not fit it makes the library
    fail in ways it does not declare.

    Raises:
        UsageError: The content is not YAML, has several documents, aliases or tags, or is nested too deeply.
    """
    documents = _documents(content, where=where)
    if len(documents) > 1:
        raise UsageError("holds several YAML documents", where=where, hint="give one file per run")
    return documents[0] if documents else None


def _documents(content: bytes | str, *, where: str) -> list[object]:
    text = as_text(content, where=where)
    try:
        # Events are a flat stream: aliases and deep nesting are refused before anything is built.
        _check_yaml_events(text, where=where)
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise UsageError(f"is not YAML{line} ({excerpt(str(problem))})", where=where) from None
    except (ValueError, OverflowError, RecursionError) as error:  # impossible dates, `0x_`
        raise UsageError(f"is not YAML ({excerpt(str(error))})", where=where) from None


# libyaml's loader where PyYAML was built with it (ten times faster), the same safe subset either way.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that refuses duplicate keys in a mapping, and integers of more than 300 characters.

    The library would take the last of two equal keys. Python's limit covers printing such integers, but not reading
    hexadecimal and binary ones.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            ((text, _),) = Counter(str(key.value) for key, _ in node.value).most_common(1)
            *_, again = (key for key, _ in node.value if str(key.value) == text)
            raise yaml.MarkedYAMLError(problem=f"{text} is there twice", problem_mark=again.start_mark)
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_INTEGER_CHARS:
            raise ValueError(f"an integer of {len(node.value):,} characters")
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _check_yaml_events(text: str, *, where: str) -> None:
    """Refuse aliases, tags and deep nesting before anything is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise UsageError("uses YAML aliases", where=where, hint="write the values out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise UsageError(f"uses the YAML tag {excerpt(tag)!r}", where=where, hint="write the value without it")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise UsageError("is nested too deeply", where=where)


# -- validating ------------------------------------------------------------------------------------------


def _integral(value: object) -> object:
    """Let `32.0` count as 32; text and true/false are left for the strict check to refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def printable_text(text: str) -> str:
    """Refuse text with control characters; for `AfterValidator`."""
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


# Strict: pydantic would accept "32" and true as numbers, which other readers of the file would not.
WholeNumber = Annotated[int, Strict(), BeforeValidator(_integral)]
"""An integer; `32.0` counts as 32, `"32"` and `true` do not."""

FiniteNumber = Annotated[float, Strict(), AllowInfNan(allow_inf_nan=False)]
"""A finite number; text and true/false are refused."""

Text = Annotated[
    str,
    Strict(),
    StringConstraints(strip_whitespace=True, min_length=1, max_length=512),
    AfterValidator(printable_text),
]
"""Printable text of 1 to 512 characters, without the white space around it."""


FLAG = TypeAdapter(Annotated[bool, Strict()])
TEXT = TypeAdapter(Text)


@cache  # making one takes longer than a check
def whole_number(least: int = 1, most: int = MAX_INTEGER) -> TypeAdapter[int]:
    """Return the type of integers from `least` to `most`."""
    return TypeAdapter(Annotated[WholeNumber, Field(ge=least, le=most)])


_adapter: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)  # making one takes longer than a check


def validated(
    shape: type[_T] | TypeAdapter[_T],
    value: object,
    *,
    where: str,
    key: str | None = None,
    spellings: Mapping[str, str] | None = None,
) -> _T:
    """Return a decoded value as its declared type.

    Args:
        shape: The declared type.
        value: The decoded value.
        where: Name of the source, for the error.
        key: The key of the value, for the error; null for a whole document.
        spellings: Field name to the key the document has it under, for the error.

    Raises:
        UsageError: The value is not of that type; the line names the first wrong key.
    """
    adapter: TypeAdapter[_T] = _adapter(shape) if isinstance(shape, type) else shape
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        # One line names one fault; the next one appears once it is fixed.
        first = error.errors(include_url=False)[0]
        raise _usage_error(first, shape, where=where, key=key, spellings=spellings or {}) from None


_ERROR_WORDS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "dataclass_type": "must be an object",
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    **dict.fromkeys(("string_too_short", "too_short"), "must have {min_length} or more {unit}"),
    **dict.fromkeys(("string_too_long", "too_long"), "must have at most {max_length} {unit}"),
}
"""Kinds of faults in the terms of JSON; all others have pydantic's wording."""


def _usage_error(
    error: ErrorDetails, shape: object, *, where: str, key: str | None, spellings: Mapping[str, str]
) -> UsageError:
    steps = [spellings.get(str(step), step) for step in error["loc"]]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{excerpt(step)}" for step in steps)
    path = f"{key or ''}{path}".removeprefix(".") or "document"
    keys = _keys_at(shape, error["loc"])
    listed = f"keys: {', '.join(sorted(keys))}"
    value = error["input"]
    match error["type"]:
        case "missing":
            unknown = [str(name) for name in value if name not in keys] if isinstance(value, Mapping) else []
            close = difflib.get_close_matches(str(steps[-1]), unknown, n=1)
            written = f"the file has {excerpt(close[0])}; " if close else ""
            return UsageError(f"{path} is missing", where=where, hint=f"{written}{listed}")
        case "extra_forbidden" | "unexpected_keyword_argument":
            hint = f"{did_you_mean(str(steps[-1]), keys) or ''} {listed}".strip()
            return UsageError(f"{path} is not a known key", where=where, hint=hint)
        case kind:
            text = error["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
            if kind in _ERROR_WORDS:
                unit = "characters" if isinstance(value, str) else "items"
                text = _ERROR_WORDS[kind].format(**error.get("ctx", {}), unit=unit)
            # Validators of this package give the whole message; a length needs no excerpt.
            whole = kind == "value_error" or kind.endswith(("_long", "_short"))
            return UsageError(f"{path} {text if whole else f'{text}, not {_shown(value)}'}", where=where)


def _shown(value: object) -> str:
    if value is None or isinstance(value, Mapping | list | tuple):
        return kind_of(value)
    if isinstance(value, bool):
        return str(value).lower()
    return excerpt(value) if isinstance(value, int | float) else f"{kind_of(value)} {excerpt(value)!r}"


def _keys_at(kind: object, path: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the object at a path may have; empty unless it is a dataclass."""
    for step in path[:-1]:
        kind = get_args(kind)[0] if isinstance(step, int) else get_type_hints(kind).get(step)
    return [field.name for field in fields(kind)] if isinstance(kind, type) and is_dataclass(kind) else []


# -- words for errors ------------------------------------------------------------------------------------


def kind_of(value: object) -> str:
    """Return the kind of a decoded value, in JSON terms."""
    return _TYPE_TEXTS.get(type(value), type(value).__name__)


_TYPE_TEXTS = {
    bool: "true/false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def excerpt(value: object) -> str:
    """Return a value as short printable text for an error line."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(char if char.isprintable() else " " for char in text[: _EXCERPT_CHARS * 4])
    return text if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]}…"
