"""The shapes of coefficient files in the notation of `tracefit/evaluator.py`, from the JSON Schema that the package
publishes.

`python tests/shapes.py` prints them, to replace `SHAPES` there.
"""

from __future__ import annotations

import pprint
import sys
from typing import Any

from tracefit.evaluator import MAX_FORMULA_CHARS, MAX_NAME_CHARS, NAME_PATTERN

_WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "bool", "null": "null"}
_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": f"^{NAME_PATTERN.pattern}$"}
_ABOUT = {"title", "description", "default"}


def shapes_of(schema: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the keys of each object with the kinds of their values; `?` marks a key that may be missing.

    Raises:
        NotImplementedError: The notation has no word for something in the schema.
    """
    objects = {"File": schema, **schema["$defs"]}
    return {
        name: {key if key in one.get("required", ()) else f"{key}?": _kind(value) for key, value in one["properties"].items()}
        for name, one in sorted(objects.items())
    }  # fmt: skip


def _kind(schema: dict[str, Any]) -> str:  # noqa: C901, PLR0911, PLR0912 - a case for each kind
    match {key: value for key, value in schema.items() if key not in _ABOUT}:
        case {"$ref": str(place), **rest} if not rest:
            return place.rpartition("/")[2]
        case {"anyOf": [*options], **rest} if not rest:
            return "|".join(map(_kind, options))
        case {"discriminator": {"propertyName": "form"}, **_rest}:
            return "model"
        case {"const": str() | int() as value, **_rest}:
            return repr(value)
        case {"enum": [*values], **_rest}:
            return "|".join(map(repr, values))
        case {
            "type": "array",
            "prefixItems": [{"type": "number"}, {"type": "number"}],
            "minItems": 2,
            "maxItems": 2,
            **rest,
        } if not rest:
            return "bounds"
        case {"type": "array", "items": items, **rest} if rest.keys() <= {"minItems", "maxItems"}:
            sizes = f"{rest.get('minItems', 0)}-{rest.get('maxItems', '')}" if rest else ""
            return f"[{_kind(items)}]{sizes}"
        case {"type": "object", "propertyNames": {"maxLength": 200}, "patternProperties": kinds, **rest} if (
            rest.keys() <= {"maxProperties"}
        ):
            ((pattern, kind),) = kinds.items()
            assert pattern == _NAME["pattern"]
            return f"{{name:{_kind(kind)}}}0-{rest['maxProperties']}"
        case {"type": "object", "additionalProperties": dict() as kind, **rest} if rest.keys() <= {"propertyNames"}:
            keys = _kind(rest["propertyNames"]) if rest else "text"
            return f"{{{keys}:{_kind(kind)}}}"
        case {"type": "number", "minimum": 0, "maximum": 1, **rest} if not rest:
            return "share"
        case {"type": "string", "maxLength": most, **rest} if not rest and most == MAX_FORMULA_CHARS:
            return "formula"
        case {"type": str(word), **rest} if not rest and word in _WORDS:
            return _WORDS[word]
        case plain if plain == _NAME:
            return "name"
        case other:
            raise NotImplementedError(f"no word of evaluator.SHAPES says {other}")


if __name__ == "__main__":
    from tracefit.coefficients.documents import CoefficientFile

    shapes = shapes_of(CoefficientFile.model_json_schema())
    sys.stdout.write(pprint.pformat(shapes, width=128, sort_dicts=False) + "\n")
