"""Reading and writing the published JSON files: same content, same bytes; damaged or hostile content, one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tracefit.coefficients.evaluation import Evaluation
from tracefit.coefficients.model import CoefficientFile
from tracefit.errors import UsageError

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Thousands of models fit; what Python makes of so much JSON at worst still fits in memory."""

MAX_VALUES = 500_000
"""Values a file may hold, keys and brackets not counted."""

MAX_NESTING = 64
MAX_PLACE_CHARS = 200
MAX_MESSAGE_CHARS = 300
DIGITS = 9
"""Significant digits a file keeps: more than the 1e-6 on which machines agree."""

_Document = TypeVar("_Document", bound=BaseModel)


def rounded(value: float) -> float:
    """Return `value` to the digits a file keeps."""
    return float(f"{value:.{DIGITS}g}")


def to_json(document: BaseModel) -> str:
    """Return the document as JSON text, keys in declared order, floats to `DIGITS` digits, newline at the end."""
    plain = document.model_dump(mode="json", by_alias=True, exclude_none=False)
    return json.dumps(_round_floats(plain), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_published(document: _Document) -> _Document:
    """Return the document with the numbers its file has."""
    return type(document).model_validate_json(to_json(document))


def _round_floats(value: Any) -> Any:
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, dict):
        return {key: _round_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round_floats(item) for item in value]
    return value


def read_coefficients(path: str | Path) -> CoefficientFile:
    """Read a coefficient file.

    Raises:
        UsageError: The file is missing, too large, not JSON, or not of the published shape.
    """
    return _read(Path(path), CoefficientFile)


def read_evaluation(path: str | Path) -> Evaluation:
    """Read an evaluation file.

    Raises:
        UsageError: The file is missing, too large, not JSON, or not of the published shape.
    """
    return _read(Path(path), Evaluation)


def _read(path: Path, kind: type[_Document]) -> _Document:
    where = str(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"larger than {MAX_FILE_BYTES >> 20} MiB", where=where)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", where=where) from error
    except UnicodeDecodeError as error:
        raise UsageError("is not UTF-8 text", where=where) from error
    _check_size(text, where)
    try:
        plain = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        detail = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"is not valid JSON: {detail}", where=where) from error
    schema = kind.model_fields["schema_"].default
    hint = f"see schemas/{schema.removeprefix('tracefit/')}.schema.json"
    _check_version(plain, kind, where, hint)
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:MAX_PLACE_CHARS] or "document"
        raise UsageError(f"{place}: {first['msg'][:MAX_MESSAGE_CHARS]}", where=where, hint=hint) from error


def _check_size(text: str, where: str) -> None:
    """Refuse what would cost too much to parse, from counts of characters alone."""
    if max(text.count(mark) for mark in ",[{") > MAX_VALUES:
        raise UsageError(f"holds more than {MAX_VALUES:,} values", where=where)
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += 1 if match[0] in "[{" else -1 if match[0] in "]}" else 0
        if depth > MAX_NESTING:
            raise UsageError("is not valid JSON: nested too deep", where=where)


_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""Brackets; strings are matched whole, so that what is in them does not count."""


def _check_version(plain: object, kind: type[BaseModel], where: str, hint: str) -> None:
    """Say first what most likely is the matter with a file of another kind or of a later tracefit."""
    fields = kind.model_fields
    if not isinstance(plain, dict):
        raise UsageError("document: is no JSON object", where=where, hint=hint)
    name, version = plain.get("schema"), plain.get("version")
    known = fields["version"].default
    if name != fields["schema_"].default:
        what = str(name)[:MAX_PLACE_CHARS] if isinstance(name, str) else "not given"
        raise UsageError(f"schema: is {what}, not {fields['schema_'].default}", where=where, hint=hint)
    if isinstance(version, bool) or not isinstance(version, int) or version != known:
        said = str(version)[:MAX_PLACE_CHARS]
        raise UsageError(
            f"version: {said!r} is not one this tracefit reads ({known})",
            where=where,
            hint=f"use the tracefit that wrote it; {hint}",
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("an object has the same key twice")
    return keys


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number JSON knows")
