"""Evaluate coefficient files (alpha.json, beta.json) with only the Python standard library.

This file depends on nothing else: copy it, or read it as the description of how a consumer evaluates a model.
tracefit has another evaluator, for rows and for frames, and takes the limits and tables from here.

    from evaluator import load, predict

    model = load("beta.json", "beta.cycle_time")
    predict(model, {"prefill_tokens": 512, "decode_tokens": 24, ...})

`load` refuses, with a ValueError, what tracefit refuses in the parts of a file that a prediction reads:
numbers that are not finite, unknown or duplicate keys, formulas that are not allowed or build on themselves,
and more of anything than a file may hold. Ranges, errors and provenance are not checked.

`features` are values by name: columns of the tables, or features as the file names them. A value that is
given wins over its formula; None and NaN are unknown: a comparison with it does not hold, and a sum with it
is None, as is one that is not finite. A name that is neither given nor computable is a KeyError, even in a
condition that another comparison decides. All predictions are in us and not below 0.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TYPESET = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u2212": "-", "\u00f7": "/"})

# A file may come from anywhere: its contents are bounded, a formula is short, and other Python syntax (0x1f,
# 1_000, strings, other scripts) never reaches the parser.
MAX_FILE_BYTES = 16 * 1024 * 1024  # thousands of models; even the worst such JSON fits in memory once parsed
MAX_VALUES = 500_000
MAX_MODELS = 10_000
MAX_REGIMES = 20
MAX_TERMS = 1000
MAX_COMPARISONS = 100
MAX_NAME_CHARS = 200
MAX_FORMULA_CHARS = 400
MAX_NESTED_CALLS = 4
MAX_EXPONENT = 4
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
LEXICON = re.compile(
    r"(?:(?>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])|[A-Za-z_]\w*+|[-+*/(), ])*+", re.ASCII
)

# Keys that an object must have, and keys that it may have.
_FILE_KEYS = ("schema version kind models", "not_fitted requests provenance")
_FORM_KEYS = {
    "linear": ("name form intercept", "terms"),
    "regimes": ("name form regimes", ""),
    "boundary": ("name form boundary work offset without_clock", "queue expectation"),
}
_MODEL_KEYS = "deployment_id target estimator features_left_out training validation deployment feature_set definitions notes"
_TERM_KEYS = ("feature unit value", "ci95 sign training_range formula collinear_with")


# -- reading a file --------------------------------------------------------------------------------------


def load(path: str | Path, name: str, deployment: str = "") -> dict[str, Any]:
    """Return the model of this name from a file, as plain JSON.

    Args:
        path: alpha.json or beta.json, of version 3.
        name: The name of the model, for example `beta.cycle_time`.
        deployment: A part of its deployment_id, if the file has several.

    Raises:
        ValueError: It is not a coefficient file, something in it is not allowed, or not exactly one model matches.
        OSError: It cannot be read.
    """
    try:
        document = _document(path)
        models = [(m["name"], m.get("deployment_id") or "", m) for m in document["models"]]
        matching = [m for m_name, m_deployment, m in models if m_name == name and deployment in m_deployment]
        listed = ", ".join(f"{m_name} of {m_deployment}" for m_name, m_deployment, _ in models)
        problem = (
            f"{len(matching)} models, not one, are {name} of deployment {deployment!r}; there are: {listed}"
        )
        _require(len(matching) == 1, problem)
        model: dict[str, Any] = matching[0]
        _in_order({name: _parsed(text)[1] for name, text in _formulas(model).items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return model


def _document(path: str | Path) -> dict[str, Any]:
    with Path(path).open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    text = content.decode("utf-8-sig")
    _require(len(content) <= MAX_FILE_BYTES, f"is larger than {MAX_FILE_BYTES:,} bytes")
    _require(max(map(text.count, ",[{")) <= MAX_VALUES, f"has more than {MAX_VALUES:,} values")
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    is_ours = isinstance(document, dict) and document.get("schema") == "tracefit/coefficients"
    # Its type too: 3.0 is equal to 3.
    version = document.get("version") if is_ours else None
    _require(type(version) is int and version == 3, "not a coefficient file of version 3")
    _check_keys(document, *_FILE_KEYS)
    _require(document["kind"] in ("alpha", "beta"), "kind is not alpha or beta")
    for number, model in enumerate(_items(document, "models", MAX_MODELS)):
        try:
            _check_model(model)
        except ValueError as error:
            raise ValueError(f"models[{number}]: {error}") from None
    names = {(model["name"], model.get("deployment_id")) for model in document["models"]}
    _require(len(names) == len(document["models"]), "a deployment has two models of one name")
    return document  # type: ignore[no-any-return]  # an object, by the check of its keys


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require(len(dict(pairs)) == len(pairs), "an object has the same key twice")
    return dict(pairs)


def _finite(text: str) -> float:
    _require(math.isfinite(float(text)), f"{text[:40]} is not a finite number")
    return float(text)


def _check_keys(value: Any, needed: str, allowed: str = "") -> None:
    _require(isinstance(value, dict), f"{value!r:.40} is not an object")
    if lacking := sorted(set(needed.split()) - value.keys()):
        raise ValueError(f"{lacking[0]} is missing")
    if unknown := sorted(value.keys() - set(f"{needed} {allowed}".split())):
        raise ValueError(f"{unknown[0]!r:.80} is not a key here")


def _items(value: dict[str, Any], key: str, most: int) -> list[Any]:
    items = value.get(key, [])
    _require(isinstance(items, list) and len(items) <= most, f"{key} is not a list of up to {most:,} items")
    return items  # type: ignore[no-any-return]  # a list, by the line above


def _check_text(value: Any, what: str, most: int | None = None) -> None:
    _require(isinstance(value, str), f"{what} is not text")
    _require(most is None or len(value) <= most, f"{what} has more than {most} characters")


def _check_name(value: Any) -> None:
    _check_text(value, "a name", MAX_NAME_CHARS)
    _require(NAME.fullmatch(value) is not None, f"{value!r:.80} is not a name")


def _check_number(value: Any, what: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        _require(is_number and math.isfinite(value), f"{what} is not a finite number")
    except OverflowError:  # an integer of hundreds of digits
        raise ValueError(f"{what} is not a finite number") from None


def _check_fitted(value: Any, what: str) -> None:
    _check_keys(value, "value", "ci95")
    _check_number(value["value"], what)


def _check_model(model: Any) -> None:
    form = model.get("form") if isinstance(model, dict) else None
    _require(isinstance(form, str) and form in _FORM_KEYS, "form is not linear, regimes or boundary")
    needed, allowed = _FORM_KEYS[str(form)]
    _check_keys(model, needed, f"{allowed} {_MODEL_KEYS}")
    _check_text(model["name"], "name")
    if model.get("deployment_id") is not None:
        _check_text(model["deployment_id"], "deployment_id")
    definitions = model.get("definitions", {})
    _require(isinstance(definitions, dict), "definitions is not an object")
    _require(len(definitions) <= MAX_TERMS, f"definitions has more than {MAX_TERMS:,} names")
    for name, text in definitions.items():
        _check_name(name)
        _check_text(text, f"the definition of {name}", MAX_FORMULA_CHARS)
    if form == "linear":
        _check_line(model)
    elif form == "regimes":
        regimes = _items(model, "regimes", MAX_REGIMES)
        _require(bool(regimes), "regimes is empty")
        for regime in regimes:
            _check_keys(regime, "name when intercept", "terms")
            _check_text(regime["name"], "the name of a regime")
            _check_condition(regime["when"])
            _check_line(regime)
        _require(len({r["name"] for r in regimes}) == len(regimes), "two regimes have one name")
    else:
        _require(model["boundary"] == "step_start", "boundary is not step_start")
        _require(model.get("queue") in (None, "one_at_a_time"), "queue is not one_at_a_time")
        _check_fitted(model["offset"], "offset")
        for key, keys in (("work", "terms"), ("without_clock", "form terms")):
            _check_keys(model[key], "intercept", keys)
            _check_line(model[key])
        _require(model["without_clock"].get("form", "linear") == "linear", "without_clock is not linear")


def _check_line(form: dict[str, Any]) -> None:
    _check_fitted(form["intercept"], "intercept")
    terms = _items(form, "terms", MAX_TERMS)
    for term in terms:
        _check_keys(term, *_TERM_KEYS)
        _check_name(term["feature"])
        _check_text(term["unit"], "unit")
        _check_number(term["value"], f"the value of {term['feature']}")
        if term.get("formula") is not None:
            _check_text(term["formula"], f"the formula of {term['feature']}", MAX_FORMULA_CHARS)
    _require(len({term["feature"] for term in terms}) == len(terms), "a feature has two terms")


def _check_condition(when: Any) -> None:
    _check_keys(when, "", "any all")
    sides = [_items(when, key, MAX_COMPARISONS) for key in ("any", "all") if when.get(key) is not None]
    _require(bool(sides), "a condition needs any or all")
    for comparison in (c for side in sides for c in side):
        _check_keys(comparison, "feature op", "value feature2")
        _check_name(comparison["feature"])
        op, value, other = (comparison.get(key) for key in ("op", "value", "feature2"))
        _require(isinstance(op, str) and op in COMPARE, f"{op!r:.40} is not a comparison")
        _require((value is None) != (other is None), "a comparison needs either value or feature2")
        if value is None:
            _check_name(other)
        else:
            _check_number(value, "what a feature is compared with")


# -- predicting ------------------------------------------------------------------------------------------


def predict(
    model: dict[str, Any],
    features: dict[str, Any],
    step_starts: list[float] | None = None,
    api_wait_us: float = 0.0,
) -> float | None:
    """Return a prediction in us; None if a feature is unknown.

    Args:
        model: A model as `load` returns it.
        features: Values by name.
        step_starts: For form `boundary`: when the next steps start, in us after the event, in order; empty when the
            engine is idle. None if unknown: then `without_clock` is evaluated.
        api_wait_us: For form `boundary` with a `queue`: work left on the events before this one.

    Raises:
        KeyError: A name is neither given nor computable.
        ValueError: A formula is not allowed, a value is not a number, or no regime's condition holds.
    """
    formulas = _formulas(model)
    if model["form"] == "linear":
        return _line(model, features, formulas)
    if model["form"] == "regimes":
        return _line(_active(model["regimes"], features, formulas), features, formulas)
    if step_starts is None:
        return _line(model["without_clock"], features, formulas)
    done = _line(model["work"], features, formulas)
    if done is None:
        return None
    if model.get("queue"):
        done += api_wait_us
    for start in step_starts:
        if start >= done:
            return max(float(start + model["offset"]["value"]), 0.0)
    return done


def _formulas(model: dict[str, Any]) -> dict[str, str]:
    """Return the formulas of a model by name; those of its terms win over its definitions."""
    formulas: dict[str, str] = dict(model.get("definitions") or {})
    forms = [model, *model.get("regimes", ()), model.get("work", {}), model.get("without_clock", {})]
    for term in (t for form in forms for t in form.get("terms", ())):
        # A term whose formula is its own name is a column.
        if term.get("formula") and term["formula"] != term["feature"]:
            formulas[term["feature"]] = term["formula"]
    return formulas


def _line(form: dict[str, Any], features: dict[str, Any], formulas: dict[str, str]) -> float | None:
    """Return intercept + sum of value * feature, not below 0; None if a feature is unknown or the sum is not finite."""
    terms = form.get("terms", ())
    values = _values([term["feature"] for term in terms], features, formulas)
    total = float(form["intercept"]["value"])
    for term in terms:
        value = values[term["feature"]]
        if value is None:
            return None
        total += term["value"] * value
    return max(total, 0.0) if math.isfinite(total) else None


def _active(
    regimes: list[dict[str, Any]], features: dict[str, Any], formulas: dict[str, str]
) -> dict[str, Any]:
    """Return the first regime whose condition holds."""
    comparisons = [c for regime in regimes for side in regime["when"].values() for c in side or ()]
    # All are looked up before any comparison, so that a missing name is always an error.
    names = [c[key] for c in comparisons for key in ("feature", "feature2") if c.get(key)]
    values = _values(names, features, formulas)
    for regime in regimes:
        if _holds(regime["when"], values):
            return regime
    raise ValueError("no regime's condition holds")


def _holds(when: dict[str, Any], values: dict[str, float | None]) -> bool:
    """Return whether a condition holds: an empty `any` and a comparison with None do not, an empty `all` does."""

    def one(comparison: dict[str, Any]) -> bool:
        left, other = values[comparison["feature"]], comparison.get("feature2")
        right = values[other] if other else float(comparison["value"])
        return left is not None and right is not None and bool(COMPARE[comparison["op"]](left, right))

    some, every = when.get("any"), when.get("all") or []
    return (some is None or any(map(one, some))) and all(map(one, every))


# -- values and formulas ---------------------------------------------------------------------------------


def _values(names: list[str], features: dict[str, Any], formulas: dict[str, str]) -> dict[str, float | None]:
    """Return values by name: given ones as they are, the others computed in order of dependence."""
    nodes: dict[str, ast.expr] = {}
    needs: dict[str, set[str]] = {}
    wanted = list(names)
    for name in wanted:  # it grows on the way
        if name not in needs:
            needs[name] = set()
            if name in formulas and name not in features:
                nodes[name], needs[name] = _parsed(formulas[name])
                wanted += needs[name]
    if missing := sorted(name for name in needs if name not in features and name not in nodes):
        raise KeyError(", ".join(missing))
    values: dict[str, float | None] = {}
    for name in _in_order(needs) if nodes else needs:
        value = _compute(nodes[name], values) if name in nodes else _given(name, features[name])
        values[name] = value if name not in nodes or value is None or math.isfinite(value) else None
    return values


def _in_order(needs: dict[str, set[str]]) -> list[str]:
    """Return names so that each comes after those it needs."""
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise ValueError(f"{error.args[1][0]} is defined by itself") from None


def _given(name: str, value: Any) -> float | None:
    try:
        return None if value is None or math.isnan(value) else float(value)
    except (TypeError, OverflowError):
        raise ValueError(f"{name} is not a number: {value!r:.40}") from None


def _parsed(text: str) -> tuple[ast.expr, set[str]]:
    """Return a formula that is allowed, and the names in it."""
    plain = " ".join(text.translate(TYPESET).split())
    if len(text) > MAX_FORMULA_CHARS or not LEXICON.fullmatch(plain):
        raise ValueError(f"{text[:40]!r} is not allowed as a formula")
    try:
        node = ast.parse(plain, mode="eval").body
        return node, _names(node)
    except (SyntaxError, RecursionError, MemoryError):  # the latter two for deep nesting
        raise ValueError(f"{text[:40]!r} cannot be parsed as a formula") from None


def _names(node: ast.expr, calls: int = 0) -> set[str]:
    """Return the names in a formula; only these nodes are allowed. `calls` is the depth of min/max."""
    node, _ = _unsigned(node)
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Constant):
        _constant(node)
        return set()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        if node.keywords or not node.args or calls == MAX_NESTED_CALLS:
            raise ValueError(f"a formula has a call of {node.func.id} that is not allowed")
        return set().union(*(_names(argument, calls + 1) for argument in node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (*_ARITHMETIC, ast.Div, ast.Pow)):
        if isinstance(node.op, ast.Pow) and not _is_bounded(node):
            raise ValueError("a formula has an exponent that is not allowed")
        return _names(node.left, calls) | _names(node.right, calls)
    raise ValueError(f"a formula has a {type(node).__name__}, which is not allowed")


def _unsigned(node: ast.expr) -> tuple[ast.expr, bool]:
    """Return a formula without the signs before it, and whether they make it negative; there can be hundreds."""
    negative = False
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        negative ^= isinstance(node.op, ast.USub)
        node = node.operand
    return node, negative


def _constant(node: ast.Constant) -> float:
    try:
        _check_number(node.value, "a constant")
    except ValueError:
        raise ValueError("a formula has a constant that is not allowed") from None
    return float(node.value)  # type: ignore[arg-type]  # a number, by the check above


def _is_bounded(power: ast.BinOp) -> bool:
    """Return whether the base is a number up to 1 or the exponent one from -4 to 4; others may overflow."""
    base, negative = _unsigned(power.left)
    if isinstance(base, ast.Constant) and not negative and _constant(base) <= 1:
        return True
    exponent = power.right.operand if isinstance(power.right, ast.UnaryOp) else power.right
    return isinstance(exponent, ast.Constant) and _constant(exponent) <= MAX_EXPONENT


def _compute(node: ast.expr, values: dict[str, float | None]) -> float | None:
    """Compute a formula that `_names` allows; None if something in it is unknown."""
    node, negative = _unsigned(node)
    value: float | None
    if isinstance(node, ast.Name):
        value = values[node.id]
    elif isinstance(node, ast.Constant):
        value = _constant(node)
    elif isinstance(node, ast.Call):
        arguments = [_compute(argument, values) for argument in node.args]
        numbers = [v for v in arguments if v is not None and not math.isnan(v)]
        if len(numbers) < len(arguments):
            return None
        value = min(numbers) if getattr(node.func, "id", "") == "min" else max(numbers)
    else:
        assert isinstance(node, ast.BinOp)  # noqa: S101 - nothing else is allowed
        left, right = _compute(node.left, values), _compute(node.right, values)
        value = None if left is None or right is None else _binary(node.op, left, right)
    return 0.0 - value if negative and value is not None else value


def _binary(op: ast.operator, left: float, right: float) -> float:
    if isinstance(op, ast.Div):
        return left / (right or math.inf)  # a division by zero gives 0
    return power(left, right) if isinstance(op, ast.Pow) else float(_ARITHMETIC[type(op)](left, right))


def power(base: float, exponent: float) -> float:
    """Raise to a power: NaN if not real, infinite if too large; the caller turns both into None."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        # A negative base keeps its sign under an odd exponent.
        return math.inf if base > 0 or exponent % 2 == 0 else -math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan
