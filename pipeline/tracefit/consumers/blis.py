"""Export to BLIS (inference-sim), backend `trained-physics`: alpha and beta on exactly its terms, none negative.

Step time = sum of beta_i times term i of `blis_roofline`, cut to whole us. A request is queued alpha0 us after it arrives
(BLIS simulates the step boundaries and the queue itself), and departs alpha1 + alpha2 * (output tokens) us after it finishes.

The export also holds the files with which BLIS simulates the traced server: the GPU's rates, the model's config.json, and
the traced requests (times and lengths only) for a replay.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit._version import __version__
from tracefit.coefficients.model import BoundaryModel
from tracefit.consumers.base import (
    OUT,
    Export,
    HeldOut,
    Source,
    commented,
    consumer,
    flags,
    held_out,
    kv_blocks,
    model_name,
    number,
    train_and_holdout,
    worse_than_baseline,
)
from tracefit.consumers.blis_fit import BlisCoefficients, fit_blis
from tracefit.errors import DataError
from tracefit.features.sets import FeatureSet
from tracefit.features.targets import target_named
from tracefit.fit.boundary import admission_with_clock, api_waits
from tracefit.fit.estimators import fit_nonnegative
from tracefit.fit.fitted import matrix, target_of
from tracefit.fit.splits import request_frame
from tracefit.server.settings import JOURNEY_FLAGS
from tracefit.tables.schema import ENGINE

if TYPE_CHECKING:
    from tracefit.server.hardware import Gpu
    from tracefit.statistics import Vector

MOST_TRACED = 20_000
"""Most requests in the file for a replay: the latest of one engine."""

_CHIPS = {
    "H100-SXM": "H100",
    "H200-SXM": "H200",
    "A100-80GB-SXM": "A100-SXM",
    "L40S": "L40S",
}
"""GPU name to BLIS's name. A GPU that is not here keeps its name and is described in hardware_config.json."""

_HEADER = "trace_version: 2\ntime_unit: microseconds\nmode: real\nwarm_up_requests: 0\n"


@consumer("blis")
def to_blis(source: Source) -> Export:
    """Write `defaults.yaml` with the coefficients of one scope, and the other files BLIS needs.

    Raises:
        DataError: The data cannot support them, with the reason.
        UsageError: BLIS refuses the model on so many ranks.
    """
    found = blis_coefficients(source)
    alpha, beta = (", ".join(number(v) for v in values) for values in (found.alpha, found.beta))
    text = f"trained_physics_coefficients:\n  alpha_coeffs: [{alpha}]\n  beta_coeffs: [{beta}]\n"
    names = [f"alpha{i}" for i in range(3)] + [f"beta{i}" for i in range(len(found.beta))]
    files: dict[str, str | bytes] = {"defaults.yaml": commented(found.notes, text), **server_files(source)}
    traced = _traced_requests(source)
    server = _server_flags(source)
    replayed = (
        f"replay of the traced requests: blis replay --trace-header {OUT}/trace-header.yaml "
        f"--trace-data {OUT}/trace-data.csv {server}"
    )
    return Export(
        files | {"trace-header.yaml": _HEADER, "trace-data.csv": _trace_csv(traced)},
        found.errors,
        (*found.notes, replayed),
        f"blis run {server} {_workload_flags(traced)}",
        dict(zip(names, (*found.alpha, *found.beta), strict=True)),
    )


def blis_coefficients(source: Source) -> BlisCoefficients:
    """Fit BLIS's coefficients on its own terms.

    Raises:
        DataError: The data cannot support them, with the reason.
        UsageError: BLIS refuses the model on so many ranks.
    """
    arrival, arrival_error, folded = _arrival(source)
    departure, departure_error = _departure(source)
    found = fit_blis(source, (arrival, *departure))
    errors = (*found.errors, arrival_error, departure_error)
    count = "ten beta: the eleventh that BLIS reads, MoE dispatch between data-parallel ranks, stays at its default, beta3"
    notes = (*found.notes, count, *folded, *worse_than_baseline(errors))
    return BlisCoefficients(found.alpha, found.beta, found.choice, errors, notes)


# -- files that describe the traced server ---------------------------------------------------------------------


def server_files(source: Source) -> dict[str, str | bytes]:
    """Return the hardware file and the model's folder, by path relative to the coefficients."""
    context = source.scope.context
    files: dict[str, str | bytes] = {}
    if context.gpu is not None:
        files["hardware_config.json"] = _hardware(context.gpu)
    if context.model_config is not None:
        files["model/config.json"] = _with_dtype(context.model_config, context.settings.dtype)
    return files


def chip(gpu: Gpu) -> str:
    """Return BLIS's name of a GPU."""
    return _CHIPS.get(gpu.name, gpu.name)


def _hardware(gpu: Gpu) -> str:
    """Describe a GPU in BLIS's keys."""
    # BLIS's roofline backend reads the two MFU; `trained-physics` does not, but the file must have them.
    rates = {
        "TFlopsPeak": gpu.compute_tflops_fp16,
        "TFlopsFP8": gpu.compute_tflops_fp8 or 0,
        "BwPeakTBs": gpu.memory_bandwidth_gb_s / 1e3,
        "mfuPrefill": 0.45,
        "mfuDecode": 0.3,
        "MemoryGiB": gpu.memory_gb,
    }
    return json.dumps({chip(gpu): rates}, indent=2) + "\n"


def _with_dtype(text: str, dtype: str | None) -> str:
    """Return a config.json that states a data type, which BLIS requires."""
    config = json.loads(text)
    inner = config.get("text_config")
    places = [config, *([inner] if isinstance(inner, dict) else [])]
    if any(isinstance(place.get(key), str) for place in places for key in ("torch_dtype", "dtype")):
        return text
    stated = dtype if dtype in {"float32", "float16", "bfloat16"} else "bfloat16"
    return json.dumps(config | {"torch_dtype": stated}, indent=2) + "\n"


def _server_flags(source: Source) -> str:
    settings, gpu = source.scope.context.settings, source.scope.context.gpu
    return flags(
        {
            "latency-model": "trained-physics",
            "defaults-filepath": f"{OUT}/defaults.yaml",
            "model": model_name(source),
            "model-config-folder": f"{OUT}/model",
            "hardware-config": f"{OUT}/hardware_config.json",
            "hardware": chip(gpu) if gpu else None,
            "tp": settings.tensor_parallel or 1,
            "total-kv-blocks": kv_blocks(source),
            # Without these the simulator has its own limits, not the traced server's.
            "block-size-in-tokens": settings.block_size,
            "max-num-seqs": settings.max_num_seqs,
            "max-num-batched-tokens": settings.max_num_batched_tokens,
            "max-model-len": settings.max_model_len,
        }
    )


# -- the traced requests ---------------------------------------------------------------------------------


def _traced_requests(source: Source) -> pl.DataFrame:
    """Return the requests of the engine that has most: arrival, first token and end in us since the first, and lengths."""
    stamped = source.tables.requests.drop_nulls(["arrival_ns", "first_token_ns", "prompt_tokens"])
    largest = stamped.group_by(ENGINE).len().sort("len", *ENGINE, descending=[True, False, False, False])
    rows = stamped.join(largest.head(1), on=ENGINE).sort("arrival_ns").tail(MOST_TRACED)
    if not rows.height:
        raise DataError(
            "no request has ARRIVED, FIRST_TOKEN and prefill.total_tokens: BLIS has no workload to replay",
            hint=f"start the server with {JOURNEY_FLAGS}",
        )
    ended = pl.coalesce("departed_ns", "aborted_ns", "finished_ns", "first_token_ns")
    begin = pl.col("arrival_ns").min()
    return rows.select(
        arrival=((pl.col("arrival_ns") - begin) / 1e3).round().cast(pl.Int64),
        first=((pl.col("first_token_ns") - begin) / 1e3).round().cast(pl.Int64),
        end=((ended - begin) / 1e3).round().cast(pl.Int64),
        prompt="prompt_tokens",
        output=pl.col("output_tokens").fill_null(1).clip(lower_bound=1),
        shared=pl.col("cached_prompt_tokens").fill_null(0).clip(lower_bound=0),
    )


def _trace_csv(traced: pl.DataFrame) -> str:
    """Write requests in BLIS's format TraceV2, without clients, sessions or texts.

    Prompt tokens found in the prefix cache become a prefix shared with all requests that found the same number.
    """
    shared, computed = pl.col("shared"), pl.col("prompt") - pl.col("shared")
    blank, zero = pl.lit(None, pl.String), pl.lit(0)
    # All columns of the format, in its order.
    return traced.select(
        request_id=pl.int_range(pl.len()),
        client_id=pl.lit("c"),
        tenant_id=blank,
        slo_class=pl.lit("standard"),
        session_id=blank,
        round_index=zero,
        prefix_group=pl.when(shared > 0).then(pl.format("prefix-{}", shared)),
        prefix_length=shared,
        streaming=pl.lit("true"),
        input_tokens=computed,
        output_tokens="output",
        text_tokens=computed,
        image_tokens=zero,
        audio_tokens=zero,
        video_tokens=zero,
        reason_ratio=zero,
        model=blank,
        deadline_us=zero,
        server_input_tokens="prompt",
        arrival_time_us="arrival",
        send_time_us="arrival",
        first_chunk_time_us="first",
        last_chunk_time_us="end",
        num_chunks="output",
        status=pl.lit("ok"),
        error_message=blank,
        finish_reason=pl.lit("length"),
    ).write_csv()


def _workload_flags(traced: pl.DataFrame) -> str:
    """Return the flags of a generated workload with the number, rate and mean lengths of the traced requests."""
    seconds = max(float(traced["arrival"].to_numpy().max(initial=0)) / 1e6, 1e-3)
    described: dict[str, str | float | None] = {
        "rate": number(traced.height / seconds),
        "num-requests": traced.height,
    }
    for name, column in (("prompt-tokens", "prompt"), ("output-tokens", "output")):
        lengths = traced[column].to_numpy()
        described |= {
            name: round(float(lengths.mean())),
            f"{name}-stdev": round(float(lengths.std())),
            f"{name}-min": int(lengths.min()),
            f"{name}-max": int(lengths.max()),
        }
    return flags(described)


# -- overheads -------------------------------------------------------------------------------------------


def _arrival(source: Source) -> tuple[int, HeldOut, tuple[str, ...]]:
    """Return alpha0, the API work of the admission model at the mean prompt, with its error and notes."""
    # Only the boundary rule knows the API work by itself; QUEUED - ARRIVED holds the wait for the step in progress.
    model = source.models.models.get("alpha.admission")
    if not isinstance(model, BoundaryModel):
        what = "there is no admission model" if model is None else "admission was fitted without a step clock"
        raise DataError(
            f"{what}: alpha0 is the API's own work, and BLIS simulates the step boundary and the queue itself",
            hint="a mean of ARRIVED to QUEUED, or a queue wait, would count a wait twice; trace steps and journeys",
        )
    rows = request_frame(source.tables, target_named("admission"), FeatureSet("none", ()), {})
    train, held = train_and_holdout(rows, ["prompt_tokens"], "ARRIVED to QUEUED")
    per_token = sum(t.value for t in model.work.terms if t.feature == "prompt_tokens")
    mean = float(train["prompt_tokens"].cast(pl.Float64).to_numpy().mean())
    # BLIS has no API work per prompt token: the mean prompt stands for all.
    alpha = round(max(model.work.intercept.value + per_token * mean, 0.0))
    done = np.full(held.height, float(alpha))
    # BLIS works on all arrivals at once; the wait says which of them another one is ahead of.
    predicted, known = admission_with_clock(held, source.tables.timeline, api_waits(held, done), done, 0.0)
    y = target_of(held)
    if not known.any():
        raise DataError("no held-out request was queued at a step whose start is known")
    error = held_out(
        "ARRIVED to QUEUED, by alpha0 and the step boundary",
        "us",
        y[known],
        predicted[known],
        train["y"].to_numpy(),
    )
    folded = (
        f"alpha0 holds {number(per_token)} us per prompt token at the mean prompt of {mean:.0f} tokens",
    )
    return alpha, error, folded if per_token else ()


def _departure(source: Source) -> tuple[tuple[int, int], HeldOut]:
    rows = request_frame(source.tables, target_named("departure"), FeatureSet("none", ()), {})
    train, held = train_and_holdout(rows, ["output_tokens"], "FINISHED to DEPARTED")
    y = target_of(train)
    fixed, per_token = _whole_line(matrix(train, ["output_tokens"])[:, 0], y)
    predicted = fixed + per_token * held["output_tokens"].to_numpy()
    return (fixed, per_token), held_out("FINISHED to DEPARTED", "us", target_of(held), predicted, y)


def _whole_line(tokens: Vector, y: Vector) -> tuple[int, int]:
    """Fit y = fixed + per_token * tokens in whole us, neither negative: BLIS drops the digits after the decimal point.

    Args:
        tokens: Shape (n,).
        y: In us, shape (n,).
    """
    # Rounding both at once can be far off: the constant is fitted anew for each whole slope beside the best one.
    best = (np.inf, 0, 0)
    slope = float(fit_nonnegative(np.column_stack([np.ones(len(y)), tokens]), y)[1])
    for per_token in sorted({0, int(slope), int(slope) + 1}):
        rest = y - per_token * tokens
        fixed = round(float(fit_nonnegative(np.ones((len(y), 1)), np.maximum(rest, 0.0))[0]))
        best = min(best, (float(np.abs(rest - fixed).mean()), fixed, per_token))
    return best[1], best[2]


# -- registry --------------------------------------------------------------------------------------------

# The registry's names and units, in the order of BLIS's coefficients.
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
_KERNEL_SETS = (
    "the five cost-model-* sets that BLIS's latency kernel reads price kernels, collectives and host work one by one, below what a "
    "trace of steps can tell; no reader of this set is known today"
)


@consumer("blis-registry")
def to_blis_registry(source: Source) -> Export:
    """Write the same coefficients as a `CoefficientSet` of the registry: units, method, scope and source per value.

    Raises:
        DataError: As `to_blis`.
        UsageError: As `to_blis`.
    """
    found, context = blis_coefficients(source), source.scope.context
    # The registry writes chips in lower case.
    gpu = chip(context.gpu).lower() if context.gpu else "unknown"
    ranks = context.settings.tensor_parallel or 1
    scope = f"{{hardware: [{_quoted(gpu)}], model: [{_quoted(model_name(source))}], tp: [{ranks}]}}"
    training = source.models.step_model.training
    inputs = training.inputs_sha256 if training else "unknown"
    cite = f"tracefit {__version__}, scope {source.scope.scope_id}, traces sha256 {inputs}"
    step = found.errors[0]
    values = [*zip(_BETA_ENTRIES, found.beta, strict=True), *zip(_ALPHA_ENTRIES, found.alpha, strict=True)]
    said = f"Held-out step time of the set: {_percent(step.mape_pct)} mean absolute percentage error on {step.n} steps."
    entries = [_entry(name, units, value, scope, cite, said) for (name, units), value in values]
    name = f"tracefit-{source.scope.scope_id}"
    notes = (*found.notes, _KERNEL_SETS, "the use line is for a clone of blis-registry")
    text = "\n".join(["kind: CoefficientSet", f"name: {_quoted(name)}", "coefficients:", *entries, ""])
    facts = {name: value for (name, _), value in values}
    use = f"cp {OUT}/coefficient-set.yaml coefficients/"
    return Export({"coefficient-set.yaml": commented(notes, text)}, found.errors, notes, use, facts)


def _entry(name: str, units: str, value: float, scope: str, cite: str, said: str) -> str:
    source = f"      sources: [{{kind: model, cite: {_quoted(cite)}, role: primary}}]"
    # Its rules: a value of zero is "not charged", and every other one names how and from what it was derived.
    if value:
        provenance = [
            "      method: measured",
            "      fitted: true",
            f"      rationale: {_quoted(said)}",
            source,
        ]
    else:
        zero = "The fit on these traces puts it at zero, or cannot tell it from the constant of a step."
        provenance = ["      method: not_charged", "      fitted: false", f"      rationale: {_quoted(zero)}"]
    return "\n".join(
        [
            f"  - {name}:",
            f"      value: {number(value)}",
            f"      units: {units}",
            *provenance,
            f"      scope: {scope}",
        ]
    )


def _quoted(text: str) -> str:
    """Return a text as a YAML string; characters that cannot be in one become `?`."""
    safe = "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text)
    return f'"{safe}"'


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} %"
