"""Evaluate coefficient files (alpha.json, beta.json) with only the Python standard library.

This file depends on nothing else: copy it, or read it as the description of how a consumer evaluates a model.
tracefit has another evaluator, for rows and for frames, and takes the limits and tables from here.

    from evaluator import load, predict

    model = load("beta.json", "beta.cycle_time")
    predict(model, {"prefill_tokens": 512, "decode_tokens": 24, ...})

`load` refuses, with a ValueError, what tracefit refuses: values of another kind than `SHAPES` says, unknown, missing or
duplicate keys, parts that contradict each other (`CONTRADICTIONS`), and formulas that are not allowed or build on
themselves. tracefit checks its files with `check` too, so that there is one list.

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
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TYPESET = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u2212": "-", "\u00f7": "/"})

# A file may come from anywhere: its contents are bounded, a formula is short, and other Python syntax (0x1f,
# 1_000, strings, other scripts) never reaches the parser.
VERSIONS = (3, 4)  # a file of version 3 has no `origin`: its models are fitted
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
ROUNDING = 1e-8  # a value may be outside its interval by as much of it: both are rounded
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
LEXICON = re.compile(r"(?:(?>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])|[A-Za-z_]\w*+|[-+*/(), ])*+", re.ASCII)

# -- the shape of a file ---------------------------------------------------------------------------------
#
# Keys of each object, and the kinds of their values: a key with `?` may be missing, `|` separates kinds, `[kind]2-9` is
# a list of 2 to 9, `{key:kind}` an object with any keys of a kind, text in quotes is itself, and a capital begins the
# name of a shape. `bounds` are two numbers, a `share` is a number from 0 to 1, a `model` is of the shape of its form.

_FORM_SHAPES = {"linear": "LinearModel", "regimes": "RegimesModel", "boundary": "BoundaryModel"}
_MODEL_FIELDS = (
    "name:text deployment_id?:text|null origin?:'fitted'|'transferred'|'calibrated' transfer?:Transfer|null "
    "target?:TargetFacts|null estimator?:Estimator|null features_left_out?:[OmittedFeature] training?:Training|null "
    "validation?:Validation|null deployment?:DeploymentFacts|null feature_set?:text|null "
    f"definitions?:{{name:formula}}0-{MAX_TERMS} notes?:[text] "
)
_OF_LINE = f"intercept:Number terms:[Term]0-{MAX_TERMS}"
_OF_METRICS = (
    "n:integer mape_pct:number|null mdape_pct:number|null mae:number|null rmse:number|null r2:number|null "
    "bias_pct:number|null p90_ape_pct:number|null p99_ape_pct:number|null zero_targets?:integer"
)
_SCALAR = "text|integer|number|bool|null"
_SHAPES = {
    "File": "schema?:'tracefit/coefficients' version?:3|4 kind:'alpha'|'beta' "
    f"models:[model]0-{MAX_MODELS} not_fitted?:[NotFitted] requests?:[RequestRange] provenance?:Provenance|null",
    "LinearModel": f"{_MODEL_FIELDS}form?:'linear' {_OF_LINE}",
    "RegimesModel": f"{_MODEL_FIELDS}form:'regimes' regimes:[Regime]1-{MAX_REGIMES}",
    "BoundaryModel": f"{_MODEL_FIELDS}form:'boundary' boundary:'step_start' queue?:'one_at_a_time'|null work:Work "
    "offset:Number without_clock:Linear expectation?:Expectation|null",
    "Linear": f"form?:'linear' {_OF_LINE}",
    "Regime": f"name:text when:Condition {_OF_LINE}",
    "Work": _OF_LINE,
    "Expectation": f"form?:'linear' {_OF_LINE} residual:Number busy_share:share",
    "Number": "value:number ci95?:bounds|null",
    "Term": "feature:name unit:text value:number ci95?:bounds|null sign?:'non_negative'|null "
    "training_range?:bounds|null formula?:formula|null collinear_with?:[name]",
    "Condition": f"any?:[Comparison]0-{MAX_COMPARISONS}|null all?:[Comparison]0-{MAX_COMPARISONS}|null",
    "Comparison": "feature:name op:'<'|'<='|'>'|'>='|'==' value?:number|null feature2?:name|null",
    "Transfer": "kind:'tensor_parallel'|'model'|'gpu'|'model_and_gpu' sources:[text] prior_sources?:[text] "
    "law?:[LawCoefficient] folds?:integer p90_ape_pct?:{text:number} sd_pct?:number coverage_pct?:number|null "
    "tested?:bool has_prompts?:bool calibration?:CalibrationFacts|null",
    "LawCoefficient": "feature:name unit:text value:number part:'always'|'memory'|'compute'|'launch' low:number "
    "high:number|null prior:number left_out_range?:bounds|null",
    "CalibrationFacts": "runs:[text] steps:integer left_out:{text:integer} used:bool before:Metrics after:Metrics "
    "own_mape_pct?:number|null own_after_mape_pct?:number|null",
    "TargetFacts": "name?:text|null unit?:'us' definition:text source:text",
    "Estimator": (
        "name:text penalty:text strength:number huber?:number|null chosen_by:text cv_mae?:number|null folds?:integer"
    ),
    "OmittedFeature": "feature:text reason:text training_range?:bounds|null collinear_with?:[text]",
    "Training": "runs:[text] rows:integer rows_used:integer rows_holdout:integer exclusions:{text:integer} "
    "time_range:[TimeRange] inputs_sha256:text inputs?:[RunInput]",
    "TimeRange": "run_id:text server:text first_ns:integer holdout_from_ns:integer last_ns:integer",
    "RunInput": "run_id:text traces_sha256:text context_sha256:text",
    "DeploymentFacts": f"model:text|null gpu:text|null architecture:{{text:{_SCALAR}}} hardware:{{text:{_SCALAR}}} "
    f"settings:{{text:{_SCALAR}}} assumed?:[text] workload?:Workload|null "
    f"input_ranges?:{{'step'|'request':{{text:bounds}}}}",
    "Workload": "requests:integer prompt_tokens:number cached_prompt_tokens:number output_tokens:number "
    "max_tokens:number|null running_context_tokens?:number|null running_remaining_tokens?:number|null "
    "prompt_steps?:[PromptSteps]",
    "PromptSteps": "tokens:number prompts:number",
    "Validation": "unit:text n_features:integer train:Metrics holdout:Metrics baseline:Metrics "
    "gradient_boosting:Metrics|null by_group?:{text:Metrics} by_phase?:[StepPhase] "
    "by_load?:{text:Metrics} held_out_equations?:SummedRowErrors|null "
    "error_over_load?:ErrorOverLoad|null load_extrapolation?:LoadExtrapolation|null "
    "stretches?:Metrics|null speed?:SpeedVariation|null noise?:MachineNoise|null "
    "candidates?:[Candidate] classifier?:Classifier|null within_5_pct?:number|null "
    "extrapolated_rows?:integer extrapolated?:{text:integer} "
    "prediction_intervals?:[PredictionInterval] interval_coverage_pct?:number|null "
    "prefill_reach_pct?:number|null collinearity?:[Collinearity] learning_curve?:[LearningPoint] "
    "rows_by_source?:{text:integer} boundary_accuracy_pct?:number|null "
    "boundary_accuracy_without_work_pct?:number|null bursts?:[Burst] skill:number|null",
    "Metrics": _OF_METRICS,
    "StepPhase": "run_id:text server:text from_s:number to_s:number arrivals_per_s:number requests:integer "
    "holdout:Metrics baseline:Metrics",
    "SummedRowErrors": "rows_by_source:{text:integer} per_equation:Metrics per_step:Metrics",
    "ErrorOverLoad": "load:text training_range:bounds bins:[LoadBin]",
    "LoadBin": "low:number high:number holdout:Metrics",
    "LoadExtrapolation": f"{_OF_METRICS} load:text cut:number gradient_boosting?:Metrics|null",
    "SpeedVariation": "stretch_s:number stretches:integer sd_pct:number fastest_pct:number slowest_pct:number "
    "holdout_pct:number|null adjusted:bool",
    "MachineNoise": "apart_s:bounds pairs:integer mape_pct:number mdape_pct:number p90_ape_pct:number",
    "Candidate": "name:text features:integer inside_mae:number beyond_mae:number|null chosen?:bool reason?:text "
    "inside_pct?:number|null beyond_pct?:number|null plain?:bool",
    "Classifier": "balanced_accuracy:number|null confusion:{text:integer}",
    "PredictionInterval": "regime:text level_pct:number kind:'ratio'|'difference' low:number high:number",
    "Collinearity": "regime:text condition_number:number|null variance_inflation:{text:number}",
    "LearningPoint": "share:number rows:integer mae:number mape_pct:number|null",
    "Burst": "run_id:text server:text from_s:number to_s:number requests:integer holdout_requests:integer",
    "NotFitted": "name:text deployment_id:text reason:text remedy?:text|null",
    "RequestRange": "deployment_id:text latency:'ttft'|'itl'|'e2e' low_ratio:number|null high_ratio:number|null "
    "requests:integer requests_held_out?:integer|null coverage_pct:number|null holdout:Metrics baseline:Metrics "
    "gradient_boosting?:Metrics|null reason?:text|null",
    "Provenance": f"tool:text version:text libraries:{{text:text}} options:{{text:{_SCALAR}}} files?:{{text:text}}",
}
SHAPES = {
    shape: {key: kind for key, _, kind in (field.partition(":") for field in fields.split())}
    for shape, fields in _SHAPES.items()
}


# -- reading a file --------------------------------------------------------------------------------------


def load(path: str | Path, name: str, deployment: str = "") -> dict[str, Any]:
    """Return the model of this name from a file, as plain JSON.

    Args:
        path: alpha.json or beta.json, of version 3 or 4.
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
        problem = f"{len(matching)} models, not one, are {name} of deployment {deployment!r}; there are: {listed}"
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
    check(document)
    return document  # type: ignore[no-any-return]  # an object, by the check


def check(document: Any) -> None:
    """Check a decoded file.

    Raises:
        ValueError: It is not a coefficient file, or something in it is not allowed.
    """
    is_ours = isinstance(document, dict) and document.get("schema") == "tracefit/coefficients"
    # Its type too: 4.0 is equal to 4.
    version = document.get("version") if is_ours else None
    _require(type(version) is int and version in VERSIONS, "not a coefficient file of version 3 or 4")
    _check_object("File", document, "")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require(len(dict(pairs)) == len(pairs), "an object has the same key twice")
    return dict(pairs)


def _finite(text: str) -> float:
    _require(math.isfinite(float(text)), f"{text[:40]} is not a finite number")
    return float(text)


def _check_object(shape: str, value: Any, what: str) -> None:
    """Check an object, the values of its keys, and that they do not contradict each other."""
    place = f"{what}: " if what else ""
    _require(isinstance(value, dict), f"{place}{value!r:.40} is not an object")
    needed, allowed = _keys(shape)
    if lacking := sorted(needed - value.keys()):
        raise ValueError(f"{place}{lacking[0]} is missing")
    if unknown := sorted(value.keys() - allowed.keys()):
        raise ValueError(f"{place}{unknown[0]!r:.80} is not a key here")
    for key, inner in value.items():
        _check_value(allowed[key], inner, f"{what}.{key}" if what else key)
    for problem_of in CONTRADICTIONS.get(shape, ()):
        problem = problem_of(value)
        _require(problem is None, f"{place}{problem}")


@cache
def _keys(shape: str) -> tuple[frozenset[str], dict[str, str]]:
    """Return the keys that an object must have, and the kinds of the values of all that it may have."""
    fields = SHAPES[shape]
    needed = frozenset(key for key in fields if not key.endswith("?"))
    return needed, {key.rstrip("?"): kind for key, kind in fields.items()}


@cache
def _options(kind: str) -> tuple[str, ...]:
    """Divide a kind at the `|` that are in no brackets."""
    options, depth = [""], 0
    for char in kind:
        depth += (char in "[{") - (char in "]}")
        if char == "|" and not depth:
            options.append("")
        else:
            options[-1] += char
    return tuple(options)


def _check_value(kind: str, value: Any, what: str) -> None:
    options = _options(kind)
    if value is None and "null" in options:
        return
    (first, *others) = (option for option in options if option != "null")
    if others or first in _IS or first[0] in "'0123456789":
        is_one = any(_is_scalar(option, value) for option in (first, *others))
        _require(is_one, f"{what} is not {' or '.join(map(_in_words, (first, *others)))}")
    elif first[0] in "[{":
        _check_items(first, value, what)
    elif first == "model":
        form = value.get("form") if isinstance(value, dict) else None
        is_known = isinstance(form, str) and form in _FORM_SHAPES
        _require(is_known, f"{what}: form is not {', '.join(_FORM_SHAPES)}")
        _check_object(_FORM_SHAPES[str(form)], value, what)
    elif first == "bounds":
        is_pair = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
        _require(is_pair, f"{what} is not two finite numbers")
    else:
        _check_object(first, value, what)


def _check_items(kind: str, value: Any, what: str) -> None:
    """Check a list, or an object with any keys."""
    inner, _, sizes = kind[1:].rpartition("]" if kind[0] == "[" else "}")
    least, most = (int(size or 0) for size in (sizes or "0-").split("-"))
    of, named = ("items", "a list") if kind[0] == "[" else ("names", "an object")
    _require(isinstance(value, list if kind[0] == "[" else dict), f"{what} is not {named}")
    _require(not most or len(value) <= most, f"{what} has more than {most:,} {of}")
    _require(len(value) >= least, f"{what} is empty")
    if isinstance(value, list):
        for number, item in enumerate(value):
            _check_value(inner, item, f"{what}[{number}]")
        return
    of_keys, _, of_values = inner.partition(":")
    for key, item in value.items():
        _check_value(of_keys, key, f"a key of {what}")
        _check_value(of_values, item, f"{what}.{key:.80}")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a character
        return False


_IS: dict[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "name": lambda value: (
        isinstance(value, str) and len(value) <= MAX_NAME_CHARS and bool(NAME_PATTERN.fullmatch(value))
    ),
    "formula": lambda value: _is_text(value) and len(value) <= MAX_FORMULA_CHARS,
    "number": _is_number,
    "share": lambda value: _is_number(value) and 0 <= value <= 1,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
}
_KIND_WORDS = {
    "name": f"a name of up to {MAX_NAME_CHARS} characters",
    "formula": f"a formula of up to {MAX_FORMULA_CHARS} characters",
    "number": "a finite number",
    "share": "a number from 0 to 1",
    "integer": "a whole number",
    "bool": "true or false",
}


def _is_scalar(kind: str, value: Any) -> bool:
    """Return whether a value is of a kind without inner ones: a word, or a text or number that stands for itself."""
    if kind in _IS:
        return _IS[kind](value)
    return value == kind[1:-1] if kind[0] == "'" else type(value) is int and value == int(kind)


def _in_words(kind: str) -> str:
    return _KIND_WORDS.get(kind, kind)


# -- contradictions --------------------------------------------------------------------------------------


def _terms_of(model: dict[str, Any]) -> list[dict[str, Any]]:
    forms = [model, *model.get("regimes", ()), model.get("work", {}), model.get("without_clock", {})]
    return [term for form in forms for term in form.get("terms", ())]


def _outside_interval(number: dict[str, Any]) -> str | None:
    value, ci95 = number["value"], number.get("ci95")
    if ci95 is None:
        return None
    # Each was rounded by itself.
    room = ROUNDING * max(abs(value), abs(ci95[0]), abs(ci95[1]))
    holds = ci95[0] - room <= value <= ci95[1] + room
    return None if holds else f"ci95 {ci95} does not contain the value {value}"


def _reversed_range(term: dict[str, Any]) -> str | None:
    low, high = term.get("training_range") or (0, 0)
    return f"training_range of {term['feature']} begins above its end" if low > high else None


def _repeated_feature(form: dict[str, Any]) -> str | None:
    features = [term["feature"] for term in form["terms"]]
    return "a feature has two terms" if len(set(features)) < len(features) else None


def _lost_term(model: dict[str, Any]) -> str | None:
    terms, validation = len(_terms_of(model)), model.get("validation")
    # Files of earlier versions count only the terms of the form without a clock.
    counts = (terms, len(model["without_clock"]["terms"])) if "without_clock" in model else (terms,)
    if validation is None or validation["n_features"] in counts:
        return None
    return f"has {terms} terms, and its errors are those of {validation['n_features']}"


def _repeated_regime(model: dict[str, Any]) -> str | None:
    names = [regime["name"] for regime in model["regimes"]]
    return "two regimes have one name" if len(set(names)) < len(names) else None


def _no_sides(when: dict[str, Any]) -> str | None:
    return "a condition needs any or all" if when.get("any") is None and when.get("all") is None else None


def _not_one_side(comparison: dict[str, Any]) -> str | None:
    has_one = (comparison.get("value") is None) != (comparison.get("feature2") is None)
    return None if has_one else "a comparison needs either value or feature2"


def _repeated_model(document: dict[str, Any]) -> str | None:
    names = {(model["name"], model.get("deployment_id")) for model in document["models"]}
    return "a deployment has two models of one name" if len(names) < len(document["models"]) else None


def _alpha_among_beta(document: dict[str, Any]) -> str | None:
    # The models of a beta file are of step times; in an alpha file a model of step times is found by its name.
    names = [model["name"] for model in document["models"] if model["name"].startswith("alpha.")]
    return f"{names[0]:.80} is in a file of kind beta" if names and document["kind"] == "beta" else None


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], str | None], ...]] = {
    "File": (_repeated_model, _alpha_among_beta),
    "LinearModel": (_repeated_feature, _lost_term),
    "RegimesModel": (_repeated_regime, _lost_term),
    "BoundaryModel": (_lost_term,),
    **dict.fromkeys(("Linear", "Regime", "Work", "Expectation"), (_repeated_feature,)),
    "Number": (_outside_interval,),
    "Term": (_outside_interval, _reversed_range),
    "Condition": (_no_sides,),
    "Comparison": (_not_one_side,),
}
"""Shape to functions that return the problem of an object of that shape, if it has one."""


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
    for term in _terms_of(model):
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


def _active(regimes: list[dict[str, Any]], features: dict[str, Any], formulas: dict[str, str]) -> dict[str, Any]:
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
    _require(_is_number(node.value), "a formula has a constant that is not allowed")
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
