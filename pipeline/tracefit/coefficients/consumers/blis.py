"""BLIS (inference-sim), backend `trained-physics`: alpha and beta on exactly its terms, none negative.

Step time = sum of beta_i times term i of `features.blis`, us. A request is queued alpha0 us after it arrives (BLIS
simulates the step boundaries and the queue itself), and departs alpha1 + alpha2 * (output tokens) us after it finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit._version import __version__
from tracefit.coefficients.consumers.source import (
    Export,
    HeldOut,
    Source,
    held_out,
    matrix,
    number,
    train_and_holdout,
    written,
)
from tracefit.coefficients.model import BoundaryModel
from tracefit.errors import DataError
from tracefit.features.blis import BLIS_TERMS, add_blis_terms
from tracefit.features.sets import Feature, FeatureSet
from tracefit.fit.boundary import admission_with_clock
from tracefit.fit.frames import request_frame, step_frame
from tracefit.fit.nonnegative import balanced, fit_nonnegative

if TYPE_CHECKING:
    from tracefit.fit.metrics import Vector

_STEP = FeatureSet("blis", tuple(Feature(name, unit, name) for name, unit in BLIS_TERMS.items()))
_CONSTANT = "blis_one"


@dataclass(frozen=True, slots=True)
class BlisCoefficients:
    """What BLIS loads, as it is written, and how well it does."""

    alpha: tuple[float, float, float]
    beta: tuple[float, ...]
    errors: tuple[HeldOut, ...]
    notes: tuple[str, ...]


def to_blis(source: Source) -> Export:
    """Write `defaults.yaml` with the coefficients of one scope.

    Raises:
        DataError: The data cannot support them, with the reason.
        UsageError: BLIS refuses the model on so many ranks.
    """
    found = fit_blis(source)
    alpha, beta = (", ".join(number(v) for v in part) for part in (found.alpha, found.beta))
    text = f"trained_physics_coefficients:\n  alpha_coeffs: [{alpha}]\n  beta_coeffs: [{beta}]\n"
    flags = f"--alpha-coeffs {alpha.replace(' ', '')} --beta-coeffs {beta.replace(' ', '')}"
    names = [f"alpha{i}" for i in range(3)] + [f"beta{i}" for i in range(len(found.beta))]
    return Export(
        {"defaults.yaml": text},
        found.errors,
        found.notes,
        f"blis run --latency-model trained-physics {flags}",
        dict(zip(names, (*found.alpha, *found.beta), strict=True)),
    )


def fit_blis(source: Source) -> BlisCoefficients:
    """Fit BLIS's coefficients on its own terms.

    Raises:
        DataError: The data cannot support them, with the reason.
        UsageError: BLIS refuses the model on so many ranks.
    """
    arrival, arrival_error, folded = _arrival(source)
    departure, departure_error = _departure(source)
    beta, step_errors, notes = _beta(source)
    return BlisCoefficients(
        (arrival, *departure), beta, (*step_errors, arrival_error, departure_error), (*notes, *folded)
    )


def _beta(source: Source) -> tuple[tuple[float, ...], tuple[HeldOut, ...], tuple[str, ...]]:
    context = source.scope.context
    if context.architecture is None or context.gpu is None:
        lacking = "config.json" if context.architecture is None else "GPU"
        raise DataError(
            f"BLIS's step terms need the model's config.json and the GPU; the {lacking} is not known",
            hint="ingest the run again with --model-config and --gpu",
        )
    tp = context.settings.tensor_parallel or 1
    timeline = add_blis_terms(source.tables.timeline, context.architecture, context.gpu, tp=tp)
    rows = step_frame(source.tables, timeline, _STEP, {}, source.step_source)
    names = list(BLIS_TERMS)
    train, held = train_and_holdout(rows, names, "BLIS step terms")
    x, y = matrix(train, names), train["y"].to_numpy().astype(float)
    # In one scope whatever does not vary is one number: BLIS's constant of a step takes it.
    told_apart = np.array([n == _CONSTANT or np.ptp(x[:, i]) > 0 for i, n in enumerate(names)])
    mixed = train["has_prefill"].cast(pl.Int64).to_numpy()
    weights = balanced(mixed) * train["interval_steps"].to_numpy()
    found = fit_nonnegative(x * told_apart, y, weights)
    beta = tuple(written(v) for v in found)
    errors = _step_errors(held, names, beta, y)
    same = [n for n, apart in zip(names, told_apart, strict=True) if not apart and x[:, names.index(n)].any()]
    notes = (
        f"{', '.join(same)} do not vary in one scope: beta6 holds what they add, for this scope alone",
        f"prefill-bearing steps ({int(mixed.sum())} of {len(mixed)} training rows) count as much as decode-only ones",
    )
    return beta, errors, notes


def _step_errors(
    held: pl.DataFrame, names: list[str], beta: tuple[float, ...], trained: Vector
) -> tuple[HeldOut, ...]:
    y, told = held["y"].to_numpy().astype(float), matrix(held, names) @ np.array(beta)
    mixed = held["has_prefill"].to_numpy()
    parts = [("step time", np.ones(len(y), dtype=bool)), ("step time, mixed", mixed)]
    parts.append(("step time, decode only", ~mixed))
    return tuple(held_out(what, "us", y[rows], told[rows], trained) for what, rows in parts if rows.any())


def _arrival(source: Source) -> tuple[float, HeldOut, tuple[str, ...]]:
    """Take alpha0 from the API work of the admission model: never from a wait."""
    model = source.models.models.get("alpha.admission")
    if not isinstance(model, BoundaryModel):
        what = "there is no admission model" if model is None else "admission was fitted without a step clock"
        raise DataError(
            f"{what}: alpha0 is the API's own work, and BLIS simulates the step boundary and the queue itself",
            hint="a mean of ARRIVED to QUEUED, or a queue wait, would count a wait twice; trace steps and journeys",
        )
    rows = request_frame(source.tables, "admission", FeatureSet("none", ()), {})
    train, held = train_and_holdout(rows, ["prompt_tokens"], "ARRIVED to QUEUED")
    per_token = sum(t.value for t in model.work.terms if t.feature == "prompt_tokens")
    mean = float(train["prompt_tokens"].cast(pl.Float64).to_numpy().mean())
    alpha = written(max(model.work.intercept.value + per_token * mean, 0.0))
    told, known = admission_with_clock(held, source.tables.timeline, np.full(held.height, alpha), 0.0)
    y = held["y"].to_numpy().astype(float)
    if not known.any():
        raise DataError("no held-out request was queued at a step whose start is known")
    error = held_out(
        "ARRIVED to QUEUED, by alpha0 and the step boundary",
        "us",
        y[known],
        told[known],
        train["y"].to_numpy(),
    )
    folded = (
        f"alpha0 holds {number(per_token)} us per prompt token at the mean prompt of {mean:.0f} tokens",
    )
    return alpha, error, folded if per_token else ()


def _departure(source: Source) -> tuple[tuple[float, float], HeldOut]:
    rows = request_frame(source.tables, "departure", FeatureSet("none", ()), {})
    train, held = train_and_holdout(rows, ["output_tokens"], "FINISHED to DEPARTED")
    y = train["y"].to_numpy().astype(float)
    found = fit_nonnegative(np.column_stack([np.ones(train.height), matrix(train, ["output_tokens"])]), y)
    fixed, per_token = (written(v) for v in found)
    told = fixed + per_token * held["output_tokens"].to_numpy()
    return (fixed, per_token), held_out(
        "FINISHED to DEPARTED", "us", held["y"].to_numpy().astype(float), told, y
    )


# -- registry --------------------------------------------------------------------------------------------

_BETA_ENTRIES = (
    ("prefill_compute", "dimensionless"),
    ("decode_compute", "dimensionless"),
    ("weight_load", "dimensionless"),
    ("tp_allreduce_attention", "dimensionless"),
    ("per_layer_overhead", "us_per_layer"),
    ("per_request_overhead", "us_per_request"),
    ("per_step_overhead", "us_per_step"),
    ("per_moe_layer_overhead", "us_per_layer"),
    ("prefill_kv_read", "dimensionless"),
    ("decode_kv_read", "dimensionless"),
)
_ALPHA_ENTRIES = (
    ("queueing", "us_per_request"),
    ("post_decode_fixed", "us_per_request"),
    ("output_token_processing", "us_per_token"),
)
_CHIPS = {"H100-SXM": "H100", "H200-SXM": "H200", "A100-80GB-SXM": "A100-SXM"}


def to_blis_registry(source: Source) -> Export:
    """Write the same coefficients as a `CoefficientSet` of the registry: units, method, scope and source per value.

    Raises:
        DataError: As `to_blis`.
        UsageError: As `to_blis`.
    """
    found, context = fit_blis(source), source.scope.context
    gpu = context.gpu.name if context.gpu else "unknown"
    model = context.settings.model or (context.architecture.name if context.architecture else "unknown")
    scope = f"{{hardware: [{_quoted(_CHIPS.get(gpu, gpu))}], model: [{_quoted(model)}], tp: [{context.settings.tensor_parallel or 1}]}}"
    training = source.models.step_model.training
    inputs = training.inputs_sha256 if training else "unknown"
    cite = f"tracefit {__version__}, scope {source.scope.scope_id}, traces sha256 {inputs}"
    step = found.errors[0]
    values = [*zip(_BETA_ENTRIES, found.beta, strict=True), *zip(_ALPHA_ENTRIES, found.alpha, strict=True)]
    said = f"Held-out step time of the set: {_percent(step.mape_pct)} mean absolute percentage error on {step.n} steps."
    entries = [_entry(name, units, value, scope, cite, said) for (name, units), value in values]
    name = f"tracefit-{source.scope.scope_id}"
    text = "\n".join(["kind: CoefficientSet", f"name: {_quoted(name)}", "coefficients:", *entries, ""])
    facts = {name: value for (name, _), value in values}
    return Export({"coefficient-set.yaml": text}, found.errors, found.notes, "a file of coefficients/", facts)


def _entry(name: str, units: str, value: float, scope: str, cite: str, said: str) -> str:
    source = f"      sources: [{{kind: model, cite: {_quoted(cite)}, role: primary}}]"
    if value:
        told = ["      method: measured", "      fitted: true", f"      rationale: {_quoted(said)}", source]
    else:
        zero = "The fit on these traces puts it at zero, or cannot tell it from the constant of a step."
        told = ["      method: not_charged", "      fitted: false", f"      rationale: {_quoted(zero)}"]
    return "\n".join(
        [
            f"  - {name}:",
            f"      value: {number(value)}",
            f"      units: {units}",
            *told,
            f"      scope: {scope}",
        ]
    )


def _quoted(text: str) -> str:
    """Quote a text for YAML, whatever is in it."""
    safe = "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text)
    return f'"{safe}"'


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} %"
