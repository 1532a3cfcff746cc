"""Evaluate coefficient files (alpha.json, beta.json) with the Python standard library alone.

This file depends on nothing else: copy it, or read it as the description of how a consumer evaluates a model.

    from evaluator import load, predict

    model = load("beta.json", "beta.cycle_time")
    predict(model, {"prefill_tokens": 512, "decode_tokens": 24, ...})

`features` are values by name: columns of the tables, or features as the file names them. A value that is given wins over
its formula; None and NaN are unknown: a comparison with it does not hold, and a sum with it is None. A name that is neither
given nor computable is a KeyError, also in a condition that another comparison decides. A formula that tracefit does not
accept is a ValueError. All predictions are in us and not below 0.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import sys
from pathlib import Path
from typing import Any

_OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_TYPESET = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u2212": "-", "\u00f7": "/"})

# A file may come from anywhere: a formula is short, and what Python reads beyond these (0x1f, 1_000, strings, other scripts)
# never gets to its parser.
_MAX_FORMULA_CHARS = 400
_MAX_NESTED_CALLS = 4
_MAX_EXPONENT = 4
_LEXICON = re.compile(
    r"(?:(?>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])|[A-Za-z_]\w*+|[-+*/(), ])*+", re.ASCII
)


def load(path: str | Path, name: str, scope: str = "") -> dict[str, Any]:
    """Return the model of this name from a file, as plain JSON.

    Args:
        path: alpha.json or beta.json, of version 2.
        name: The name of the model, for example `beta.cycle_time`.
        scope: A part of its scope_id, where the file holds several.
    """
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if document["schema"] != "tracefit/coefficients" or document["version"] != 2:
        raise ValueError(f"{path}: not a coefficient file of version 2")
    found = [m for m in document["models"] if m["name"] == name and scope in (m.get("scope_id") or "")]
    if len(found) != 1:
        there = ", ".join(f"{m['name']} of {m.get('scope_id')}" for m in document["models"])
        raise ValueError(
            f"{path}: {len(found)} models, not one, are {name} of scope {scope!r}; there are: {there}"
        )
    model: dict[str, Any] = found[0]
    return model


def predict(
    model: dict[str, Any],
    features: dict[str, Any],
    step_starts: list[float] | None = None,
    api_wait_us: float = 0.0,
) -> float | None:
    """Return a prediction in us; None where a feature is unknown.

    Args:
        model: A model of a coefficient file.
        features: Values by name.
        step_starts: For form `boundary`: when the next steps start, in us after the event, in order; empty when the
            engine is idle. None if unknown: then `without_clock` is evaluated.
        api_wait_us: For form `boundary` with a `queue`: work left on the events before this one.
    """
    values = _Values(model, features)
    if model["form"] == "linear":
        return _line(model, values)
    if model["form"] == "regimes":
        return _line(_active(model["regimes"], values), values)
    if step_starts is None:
        return _line(model["without_clock"], values)
    done = _line(model["work"], values)
    if done is None:
        return None
    if model.get("queue"):
        done += api_wait_us
    for start in step_starts:
        if start >= done:
            return max(float(start + model["offset"]["value"]), 0.0)
    return done


def _line(form: dict[str, Any], values: _Values) -> float | None:
    """Return intercept + sum of value * feature, not below 0; None where a feature is unknown."""
    total: float = form["intercept"]["value"]
    for term in form["terms"]:
        value = values.get(term["feature"])
        if value is None:
            return None
        total += term["value"] * value
    return max(total, 0.0)


def _active(regimes: list[dict[str, Any]], values: _Values) -> dict[str, Any]:
    """Return the first regime whose condition holds."""
    comparisons = [c for regime in regimes for side in regime["when"].values() for c in side or ()]
    # Looked up before any is compared: what is missing must not depend on which comparison decides.
    for name in [c[key] for c in comparisons for key in ("feature", "feature2") if c.get(key)]:
        values.get(name)
    for regime in regimes:
        if _holds(regime["when"], values):
            return regime
    raise ValueError("no regime's condition holds")


def _holds(when: dict[str, Any], values: _Values) -> bool:
    """Return whether a condition holds: an empty `any` does not, an empty `all` does, a comparison with None does not."""

    def one(comparison: dict[str, Any]) -> bool:
        left, right = values.get(comparison["feature"]), comparison.get("value")
        if comparison.get("feature2"):
            right = values.get(comparison["feature2"])
        return left is not None and right is not None and bool(_OPERATORS[comparison["op"]](left, right))

    some, every = when.get("any"), when.get("all") or []
    return (some is None or any(map(one, some))) and all(map(one, every))


class _Values:
    """Values by name: given ones as they are, the others computed by their formulas, each once."""

    def __init__(self, model: dict[str, Any], given: dict[str, Any]) -> None:
        self.known: dict[str, Any] = dict(given)
        self.formulas: dict[str, str] = dict(model.get("definitions") or {})
        forms = [model, *model.get("regimes", ()), model.get("work", {}), model.get("without_clock", {})]
        for term in (t for form in forms for t in form.get("terms", ())):
            # A term whose formula is its own name is a column.
            if term.get("formula") and term["formula"] != term["feature"]:
                self.formulas[term["feature"]] = term["formula"]

    def get(self, name: str) -> float | None:
        if name not in self.known:
            if name not in self.formulas:
                raise KeyError(name)
            # Popped: a formula that needs itself finds no name.
            value = self._compute(_parsed(self.formulas.pop(name)))
            self.known[name] = value if value is not None and math.isfinite(value) else None
        value = self.known[name]
        return None if value is None or math.isnan(value) else float(value)

    def _compute(self, node: ast.expr, calls: int = 0) -> float | None:
        """Compute a formula, of which `calls` is how many min and max it is inside of; only what is named here is allowed."""
        if isinstance(node, ast.Name):
            return self.get(node.id)
        if isinstance(node, ast.Constant):
            return _constant(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
            value = self._compute(node.operand, calls)
            return value if value is None or isinstance(node.op, ast.UAdd) else 0.0 - value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            if node.keywords or not node.args or calls == _MAX_NESTED_CALLS:
                raise ValueError(f"a formula has a call of {node.func.id} that is not allowed")
            values = [self._compute(argument, calls + 1) for argument in node.args]
            known = [v for v in values if v is not None and not math.isnan(v)]
            if len(known) < len(values):
                return None
            return min(known) if node.func.id == "min" else max(known)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Pow) and not _is_bounded(node):
                raise ValueError("a formula has an exponent that is not allowed")
            left, right = self._compute(node.left, calls), self._compute(node.right, calls)
            return None if left is None or right is None else _binary(node.op, left, right)
        raise ValueError(f"a formula has a {type(node).__name__}, which is not allowed")


def _parsed(text: str) -> ast.expr:
    plain = " ".join(text.translate(_TYPESET).split())
    if len(text) > _MAX_FORMULA_CHARS or not _LEXICON.fullmatch(plain):
        raise ValueError(f"{text[:40]!r} is not allowed as a formula")
    try:
        return ast.parse(plain, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):  # the latter two for deep nesting
        raise ValueError(f"{text[:40]!r} cannot be parsed as a formula") from None


def _constant(node: ast.Constant) -> float:
    if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        # An integer of hundreds of digits is no float at all, one such as 1e999 is infinite.
        value = float(node.value) if node.value <= sys.float_info.max else math.inf
        if value < math.inf:
            return value
    raise ValueError("a formula has a constant that is not allowed")


def _is_bounded(power: ast.BinOp) -> bool:
    """Return whether the base is a number up to 1, or the exponent one from -4 to 4: nothing else stays within a float."""
    if isinstance(power.left, ast.Constant) and _constant(power.left) <= 1:
        return True
    exponent = power.right.operand if isinstance(power.right, ast.UnaryOp) else power.right
    return isinstance(exponent, ast.Constant) and _constant(exponent) <= _MAX_EXPONENT


def _binary(op: ast.operator, left: float, right: float) -> float:
    if isinstance(op, ast.Add):
        return left + right
    if isinstance(op, ast.Sub):
        return left - right
    if isinstance(op, ast.Mult):
        return left * right
    if isinstance(op, ast.Div):
        return left / (right or math.inf)  # a division by zero gives 0
    if isinstance(op, ast.Pow):
        return _power(left, right)
    raise ValueError(f"a formula has a {type(op).__name__}, which is not allowed")


def _power(base: float, exponent: float) -> float:
    """Raise to a power: a result that is not real is NaN, one that is too large is infinite; both are unknown in the end."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        # A negative base keeps its sign under an odd exponent.
        return math.inf if base > 0 or exponent % 2 == 0 else -math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan
