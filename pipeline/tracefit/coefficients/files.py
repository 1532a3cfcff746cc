"""Reading and writing the published JSON files: same content, same bytes; damaged or hostile content, one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tracefit.coefficients.evaluation import Evaluation
from tracefit.coefficients.model import CoefficientFile
from tracefit.errors import UsageError

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_PLACE_CHARS = 200
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
    try:
        plain = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        detail = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"is not valid JSON: {detail}", where=where) from error
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])[:MAX_PLACE_CHARS] or "document"
        schema = kind.model_fields["schema_"].default.removeprefix("tracefit/")
        raise UsageError(
            f"{place}: {first['msg']}", where=where, hint=f"see schemas/{schema}.schema.json"
        ) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("an object has the same key twice")
    return keys


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number JSON knows")
