"""Bounded reading of the small JSON and YAML files a user hands over, and typed access to what they say.

These files come from anywhere, so sizes, nesting and types are checked before anything is believed. Every
fault is one `UsageError` line that names the file and, where there is one, the key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import yaml

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

Scalar: TypeAlias = str | int | float | bool | None
"""What a fact or a setting may be once it has been checked."""

Document: TypeAlias = Mapping[str, object]
"""A decoded file: names to values that nobody has checked yet."""

MAX_DOCUMENT_BYTES = 8 * 1024 * 1024
MAX_NESTING = 64
MAX_JSON_VALUES = 500_000
"""Values a JSON file may hold: what Python makes of so many still fits in memory."""

_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""Brackets; strings are matched whole, so that what is in them does not count."""

MAX_INTEGER = 2**53  # beyond this a JSON number is no longer exact for other readers
_EXCERPT_CHARS = 40

# libyaml's loader where PyYAML was built with it (ten times faster), the same safe subset either way.
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_bytes(path: Path, *, limit_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a whole file that must be small.

    Args:
        path: The file.
        limit_bytes: Largest size accepted, in bytes.

    Returns:
        The file's content.

    Raises:
        UsageError: The file cannot be read or is larger than `limit_bytes`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise UsageError(reason, where=str(path), hint="check the path") from None
    if len(content) > limit_bytes:
        raise UsageError(
            f"is larger than {limit_bytes:,} bytes", where=str(path), hint="this is not a configuration file"
        )
    return content


def as_text(content: bytes | str, *, where: str, limit_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Return content as text, without a byte order mark.

    Args:
        content: UTF-8 bytes or text.
        where: Name of the source, for the error.
        limit_bytes: Largest size accepted, in bytes (characters for text).

    Raises:
        UsageError: The bytes are not UTF-8, or there are too many of them.
    """
    if len(content) > limit_bytes:
        raise UsageError(f"is larger than {limit_bytes:,} bytes", where=where)
    if isinstance(content, str):
        return content.removeprefix("\ufeff")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 text (byte {error.start})", where=where) from None


def parse_json_object(
    content: bytes | str, *, where: str, limit_bytes: int = MAX_DOCUMENT_BYTES, strict: bool = False
) -> Document:
    """Decode a JSON file whose top level is an object.

    `NaN` and `Infinity` are let through here, since published configs carry them in keys nobody reads; a
    value that is used is checked to be finite where it is used.

    Args:
        content: JSON text.
        where: Name of the source, for the error.
        limit_bytes: Largest size accepted, in bytes (characters for text).
        strict: Also refuse `NaN`, `Infinity` and a key that an object has twice.

    Raises:
        UsageError: Not JSON, nested too deeply, too large, or not an object.
    """
    text = as_text(content, where=where, limit_bytes=limit_bytes)
    _check_json_size(text, where=where)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates if strict else None,
            parse_constant=_no_constant if strict else None,
        )
    except RecursionError:
        raise UsageError("is nested too deeply", where=where) from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise UsageError(f"is not JSON ({excerpt(str(error))})", where=where) from None
    if not isinstance(value, dict):
        raise UsageError(f"holds {kind_of(value)} where an object was expected", where=where)
    return value


def _check_json_size(text: str, *, where: str) -> None:
    """Refuse what would cost too much to parse, from counts of characters alone."""
    if max(text.count(mark) for mark in ",[{") > MAX_JSON_VALUES:
        raise UsageError(f"is not JSON of fewer than {MAX_JSON_VALUES:,} values", where=where)
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += 1 if match[0] in "[{" else -1 if match[0] in "]}" else 0
        if depth > MAX_NESTING:
            raise UsageError("is nested too deeply", where=where)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("an object has the same key twice")
    return keys


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number JSON knows")


def parse_yaml_object(content: bytes | str, *, where: str) -> Document:
    """Decode a YAML file whose top level is a mapping with text keys.

    Aliases are refused: no run description needs them, and a few lines of them expand without bound.

    Args:
        content: YAML text.
        where: Name of the source, for the error.

    Returns:
        The mapping; empty for an empty file.

    Raises:
        UsageError: Not YAML, with aliases, nested too deeply, too large, or not a mapping.
    """
    text = as_text(content, where=where)
    try:
        _check_yaml_events(text, where=where)
        value = yaml.load(text, Loader=_YAML_LOADER)  # noqa: S506 - a safe loader either way
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise UsageError(f"is not YAML{line} ({excerpt(str(problem))})", where=where) from None
    except (ValueError, OverflowError, RecursionError) as error:  # impossible dates, endless integers
        raise UsageError(f"is not YAML ({excerpt(str(error))})", where=where) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"holds {kind_of(value)} where a mapping was expected", where=where)
    return {str(key): item for key, item in value.items()}


def _check_yaml_events(text: str, *, where: str) -> None:
    """Refuse aliases, second documents and deep nesting before anything is built."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_YAML_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise UsageError("uses YAML aliases", where=where, hint="write the values out")
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise UsageError("is nested too deeply", where=where)
    if documents > 1:
        raise UsageError("holds several YAML documents", where=where, hint="give one file per run")


def kind_of(value: object) -> str:
    """Name the kind of a decoded value, in the words a reader of JSON uses."""
    names: tuple[tuple[type, str], ...] = (
        (bool, "true/false"),
        (int, "a number"),
        (float, "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "an object"),
    )
    if value is None:
        return "null"
    return next((name for kind, name in names if isinstance(value, kind)), type(value).__name__)


def excerpt(value: object) -> str:
    """Return a value as short printable text for an error line."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(char if char.isprintable() else " " for char in text[: _EXCERPT_CHARS * 4])
    return text if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]}…"


def checked_integer(value: object, *, key: str, where: str, least: int = 1, most: int = MAX_INTEGER) -> int:
    """Return a whole number within bounds; `32.0` counts as 32.

    Raises:
        UsageError: The value is not a whole number from `least` to `most`.
    """
    wanted = f"{key} must be a whole number from {least:,} to {most:,}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{wanted}, not {kind_of(value)} {excerpt(value)!r}".rstrip(), where=where)
    if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        raise UsageError(f"{wanted}, not {excerpt(value)}", where=where)
    if not least <= value <= most:
        raise UsageError(f"{wanted}, not {excerpt(value)}", where=where)
    return int(value)


def checked_number(
    value: object,
    *,
    key: str,
    where: str,
    above: float | None = None,
    least: float = 0.0,
    most: float = math.inf,
) -> float:
    """Return a finite number within bounds.

    Args:
        value: What the file says.
        key: Name of the value, for the error.
        where: Name of the source, for the error.
        above: The number must be larger than this; takes the place of `least`.
        least: Smallest number accepted.
        most: Largest number accepted.

    Raises:
        UsageError: The value is not such a number.
    """
    low = f"above {above:g}" if above is not None else f"at least {least:g}"
    wanted = f"{key} must be a number {low}" + (f" and at most {most:g}" if most < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{wanted}, not {kind_of(value)} {excerpt(value)!r}", where=where)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside = number > above if above is not None else number >= least
    if not (math.isfinite(number) and inside and number <= most):
        raise UsageError(f"{wanted}, not {excerpt(value)}", where=where)
    return number


def checked_flag(value: object, *, key: str, where: str) -> bool:
    """Return true or false.

    Raises:
        UsageError: The value is neither.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{key} must be true or false, not {kind_of(value)} {excerpt(value)!r}", where=where)
    return value


def checked_text(value: object, *, key: str, where: str, most_chars: int = 512) -> str:
    """Return printable text that is not empty and not longer than `most_chars`.

    Raises:
        UsageError: The value is not such text.
    """
    if not isinstance(value, str):
        raise UsageError(f"{key} must be text, not {kind_of(value)} {excerpt(value)!r}", where=where)
    text = value.strip()
    if not text or len(text) > most_chars or not text.isprintable():
        raise UsageError(f"{key} must be printable text of 1 to {most_chars} characters", where=where)
    return text
