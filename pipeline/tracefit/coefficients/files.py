"""Read and write the published JSON files: same content, same bytes; a damaged file is one line."""

from __future__ import annotations

import json
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from tracefit.coefficients.documents import CoefficientFile, Evaluation
from tracefit.errors import UsageError
from tracefit.evaluator import MAX_FILE_BYTES, VERSIONS, check
from tracefit.inputs.buckets import location_of
from tracefit.options import RunOutOption, flag_of
from tracefit.server.documents import parse_json_object, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

COEFFICIENT_FILES = ("alpha.json", "beta.json")
"""Files of a models folder: the models of requests and those of steps."""

MAX_KEY_CHARS = 200
MAX_MESSAGE_CHARS = 300
DIGITS = 9
"""Significant digits a file keeps: more than the 1e-6 on which machines agree."""

_RANGES = {"training_range", "input_ranges"}
"""Keys of what the training rows reach."""
_FORMULA_ROUNDING = 1e-11
"""Share by which what a formula of a file gives may be off: its numbers have twelve digits."""
_DOWN, _UP = (Context(prec=DIGITS, rounding=way) for way in (ROUND_FLOOR, ROUND_CEILING))

_Document = TypeVar("_Document", bound=BaseModel)


def rounded(value: float) -> float:
    """Return `value` to the digits a file keeps."""
    return float(f"{value:.{DIGITS}g}")


def outwards(low: float, high: float) -> list[float]:
    """Return ends that hold a range to the digits a file keeps: rounded inwards, the largest row of the training would
    be outside.
    """
    return [
        end if rounded(end) == end else float(way.create_decimal(end + slack * abs(end)))
        for end, way, slack in ((low, _DOWN, -_FORMULA_ROUNDING), (high, _UP, _FORMULA_ROUNDING))
    ]


def to_json(document: BaseModel) -> str:
    """Return the document as JSON text, keys in declared order, floats to `DIGITS` digits, newline at the end."""
    # Nulls are written: a reader sees that a value is unknown, not that a key was forgotten.
    plain = document.model_dump(mode="json", by_alias=True, exclude_none=False)
    text = json.dumps(_round_floats(plain), ensure_ascii=False, allow_nan=False)
    # `json` indents in Python, which takes three times as long.
    return msgspec.json.format(text, indent=2) + "\n"


def published(document: _Document) -> tuple[str, _Document]:
    """Return the text of the document, and the document with its numbers rounded as there."""
    text = to_json(document)
    return text, type(document).model_validate_json(text)


def _round_floats(value: Any, *, is_range: bool = False) -> Any:
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, dict):
        return {key: _round_floats(item, is_range=is_range or key in _RANGES) for key, item in value.items()}
    if isinstance(value, list):
        return outwards(*value) if is_range else [_round_floats(item) for item in value]
    return value


def has_models(folder: Path) -> bool:
    """Say whether a folder holds a coefficient file."""
    return any((folder / name).is_file() for name in COEFFICIENT_FILES)


def find_models(path: str | Path) -> Path:
    """Return the coefficient file or the folder of them that a path stands for: itself, or `models/` below it."""
    path = location_of(path)
    below = path / "models"
    # A file in the folder itself wins over `models/`: users may have copied models out of it.
    return below if path.is_dir() and not has_models(path) and has_models(below) else path


def coefficient_paths(path: str | Path) -> list[Path]:
    """Return the coefficient files that a path stands for.

    Raises:
        UsageError: The folder has no coefficient file.
    """
    file = find_models(path)
    if not file.is_dir():
        return [file]
    files = [file / name for name in COEFFICIENT_FILES if (file / name).is_file()]
    if not files:
        raise UsageError(
            f"holds neither {' nor '.join(COEFFICIENT_FILES)}",
            where=str(path),
            hint=f"`tracefit run RUNS {flag_of(RunOutOption)} OUT` or `tracefit train TABLES` makes them",
        )
    return files


def read_coefficients(path: str | Path) -> CoefficientFile:
    """Read a coefficient file.

    Raises:
        UsageError: The file is missing, too large, not JSON, or not of the published shape.
    """
    plain = read_plain(path, CoefficientFile)
    file = _as_model(plain, path, CoefficientFile)
    try:
        check(plain)  # pydantic takes "5" for a number, and some contradictions show only here
    except ValueError as error:
        message = str(error)[:MAX_MESSAGE_CHARS]
        raise UsageError(message, where=str(path), hint=_schema_hint(CoefficientFile)) from None
    return file


def read_evaluation(path: str | Path) -> Evaluation:
    """Read an evaluation file.

    Raises:
        UsageError: The file is missing, too large, not JSON, or not of the published shape.
    """
    return _as_model(read_plain(path, Evaluation), path, Evaluation)


def read_plain(path: str | Path, kind: type[BaseModel]) -> dict[str, Any]:
    """Read a published file as plain JSON, its values not checked.

    Args:
        path: The file.
        kind: `CoefficientFile` or `Evaluation`.

    Raises:
        UsageError: The file is missing, too large, not JSON, of another kind or of an unknown version.
    """
    where = str(path)
    content = read_bytes(location_of(path), limit_bytes=MAX_FILE_BYTES)
    plain = dict(parse_json_object(content, where=where, strict=True))
    # Before anything else: in a file of another version, no key is an error of the user.
    _check_version(plain, kind, where)
    return plain


def _as_model(plain: dict[str, Any], path: str | Path, kind: type[_Document]) -> _Document:
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        # One fault in a damaged file often causes dozens of errors: show the first.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])[:MAX_KEY_CHARS] or "document"
        message = f"{key}: {first['msg'][:MAX_MESSAGE_CHARS]}"
        raise UsageError(message, where=str(path), hint=_schema_hint(kind)) from error


def _schema_hint(kind: type[BaseModel]) -> str:
    return f"see schemas/{kind.model_fields['schema_'].default.removeprefix('tracefit/')}.schema.json"


def _check_version(plain: dict[str, Any], kind: type[BaseModel], where: str) -> None:
    """Raise a clear error for a file of another kind or version, before its fields are checked."""
    fields, hint = kind.model_fields, _schema_hint(kind)
    name, version = plain.get("schema"), plain.get("version")
    if name != fields["schema_"].default:
        what = str(name)[:MAX_KEY_CHARS] if isinstance(name, str) else "not given"
        raise UsageError(f"schema: is {what}, not {fields['schema_'].default}", where=where, hint=hint)
    if type(version) is not int or version not in VERSIONS:
        raise UsageError(
            (
                f"version: {str(version)[:MAX_KEY_CHARS]!r} is not {' or '.join(map(str, VERSIONS))}, which this "
                "tracefit reads"
            ),
            where=where,
            hint=f"use the tracefit that wrote it; {hint}",
        )
