"""Export to BLIS (inference-sim), backend `trained-physics`: alpha and beta on exactly its terms, none negative.

Step time = sum of beta_i times term i of `blis_roofline`, cut to whole us. A request is queued alpha0 us after it
arrives (BLIS simulates the step boundaries and the queue itself), and departs alpha1 + alpha2 * (output tokens) us
after it finishes.

The export also holds the files with which BLIS simulates the traced server: the GPU's rates, the model's config.json,
and the traced requests (times and lengths only) for a replay.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl

from tracefit._version import __version__
from tracefit.consumers.base import (
    OUT,
    Export,
    Source,
    block_size,
    commented,
    flags,
    kv_blocks,
    model_name,
    number,
    yaml_text,
)
from tracefit.consumers.blis_fit import BLIS_LENGTHS, fit_blis, stamped_requests, whole_us
from tracefit.consumers.blis_roofline import BLIS_ROOFLINE_TERMS
from tracefit.tables.schema import ENGINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.server.hardware import Gpu

MOST_TRACED = 20_000
"""Most requests in the file for a replay: the latest of one engine."""

_CHIPS = {
    "H100-SXM": "H100",
    "H200-SXM": "H200",
    "A100-80GB-SXM": "A100-SXM",
    "L40S": "L40S",
}
"""GPU name to BLIS's name. A GPU that is not here keeps its name and is described in hardware_config.json."""

_UNREAD = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
"""The beta of a file that no instance reads: BLIS asks for seven that are not all 0."""

_BY_ROOFLINE = (
    "--num-instances 2 --prefill-instances 1 --decode-instances 1 --pd-decider never --decode-latency-model roofline"
)
"""One instance that serves whole requests by `roofline`. Named as the backend of all, `roofline` refuses alpha; that of
a pool takes what defaults.yaml holds, and without a decider nothing goes to the other pool: the same to the microsecond
where alpha is 0."""

_NO_REQUESTS = (
    "no traced request has its times, so no request can be replayed, and the workload of the use line is BLIS's default"
)
_TRACE_HEADER = "trace_version: 2\ntime_unit: microseconds\nmode: real\nwarm_up_requests: 0\n"


def to_blis(source: Source) -> Export:
    """Write `defaults.yaml` with the coefficients of one deployment, and the other files BLIS needs.

    Raises:
        DataError: The steps cannot support them, with the reason.
        UsageError: BLIS refuses the model on so many ranks.
    """
    fitted = fit_blis(source)
    by_roofline = len(fitted.beta) == len(BLIS_ROOFLINE_TERMS)
    written = _UNREAD if by_roofline else fitted.beta
    alpha, beta = (", ".join(map(number, values)) for values in (fitted.alpha, written))
    text = f"trained_physics_coefficients:\n  alpha_coeffs: [{alpha}]\n  beta_coeffs: [{beta}]\n"
    traced = _traced_requests(source)
    files: dict[str, str | bytes] = {
        "defaults.yaml": commented(fitted.notes, text),
        **_server_files(source, fitted.beta if by_roofline else ()),
    }
    server = _server_flags(source) + (f" {_BY_ROOFLINE}" if by_roofline else "")
    if not traced.height:
        return Export(files, fitted.errors, (*fitted.notes, _NO_REQUESTS), f"blis run {server}")
    files |= {"trace-header.yaml": _TRACE_HEADER, "trace-data.csv": _trace_csv(traced)}
    replayed = (
        f"replay of the traced requests: blis replay --trace-header {OUT}/trace-header.yaml "
        f"--trace-data {OUT}/trace-data.csv {server}"
    )
    usage = f"blis run {server} {_workload_flags(traced)}"
    return Export(files, fitted.errors, (*fitted.notes, replayed), usage)


# -- files that describe the traced server ---------------------------------------------------------------------


def _server_files(source: Source, factors: Sequence[float]) -> dict[str, str | bytes]:
    """Return the hardware file and the model's folder, by path relative to the coefficients."""
    context = source.deployment.context
    files: dict[str, str | bytes] = {}
    if context.gpu is not None:
        files["hardware_config.json"] = _hardware(context.gpu, factors)
    if context.model_config is not None:
        files["model/config.json"] = _with_dtype(context.model_config, context.settings.dtype)
    return files


def _chip(gpu: Gpu) -> str:
    """Return BLIS's name of a GPU."""
    return _CHIPS.get(gpu.name, gpu.name)


def _hardware(gpu: Gpu, factors: Sequence[float]) -> str:
    """Describe a GPU in BLIS's keys, at the rates that multiples of the peak times make of it."""
    # The backend `roofline` reads the two MFU; `trained-physics` does not, but the file must have them.
    mfu_prefill, mfu_decode, bandwidth = (1 / factor for factor in factors) if factors else (0.45, 0.3, 1.0)
    rates = {
        "TFlopsPeak": gpu.compute_tflops_fp16,
        "TFlopsFP8": gpu.compute_tflops_fp8 or 0,
        "BwPeakTBs": gpu.memory_bandwidth_gb_s / 1e3 * bandwidth,
        "mfuPrefill": mfu_prefill,
        "mfuDecode": mfu_decode,
        "MemoryGiB": gpu.memory_gb,
    }
    return json.dumps({_chip(gpu): rates}, indent=2) + "\n"


def _with_dtype(text: str, dtype: str | None) -> str:
    """Return a config.json that states a data type, which BLIS requires."""
    config = json.loads(text)
    inner = config.get("text_config")
    configs = [config, inner if isinstance(inner, dict) else {}]
    if any(isinstance(each.get(key), str) for each in configs for key in ("torch_dtype", "dtype")):
        return text
    stated = dtype if dtype in {"float32", "float16", "bfloat16"} else "bfloat16"
    return json.dumps(config | {"torch_dtype": stated}, indent=2) + "\n"


def _server_flags(source: Source) -> str:
    settings, gpu = source.deployment.context.settings, source.deployment.context.gpu
    return flags(
        {
            "latency-model": "trained-physics",
            "defaults-filepath": f"{OUT}/defaults.yaml",
            "model": model_name(source),
            "model-config-folder": f"{OUT}/model",
            "hardware-config": f"{OUT}/hardware_config.json",
            "hardware": _chip(gpu) if gpu else None,
            "tp": settings.tensor_parallel or 1,
            "total-kv-blocks": kv_blocks(source),
            # Without these the simulator has its default limits, not those of the traced server.
            "block-size-in-tokens": block_size(source),
            "max-num-seqs": settings.max_num_seqs,
            "max-num-batched-tokens": settings.max_num_batched_tokens,
            "max-model-len": settings.max_model_len,
        }
    )


# -- the traced requests ---------------------------------------------------------------------------------


def _traced_requests(source: Source) -> pl.DataFrame:
    """Return the requests of the engine that has most: arrival, first token and end in us since the first, and
    lengths.
    """
    stamped = stamped_requests(source)
    largest = stamped.group_by(ENGINE).len().sort("len", *ENGINE, descending=[True, False, False, False])
    rows = stamped.join(largest.head(1), on=ENGINE).sort("arrival_ns").tail(MOST_TRACED)
    ended = pl.coalesce("departed_ns", "aborted_ns", "finished_ns", "first_token_ns")
    begin = pl.col("arrival_ns").min()
    return rows.select(
        arrival=whole_us(pl.col("arrival_ns") - begin),
        first=whole_us(pl.col("first_token_ns") - begin),
        end=whole_us(ended - begin),
        **BLIS_LENGTHS,
    )


def _trace_csv(traced: pl.DataFrame) -> str:
    """Write requests in BLIS's format TraceV2, without clients, sessions or texts.

    Prompt tokens found in the prefix cache become a prefix shared with all requests that have as many.
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
    "the five cost-model-* sets that BLIS's latency kernel reads price kernels, collectives and host work one by "
    "one, below what a trace of steps can tell; no program reads this set today"
)


def to_blis_registry(source: Source) -> Export:
    """Write the same coefficients as a `CoefficientSet` of the registry: units, method, deployment and source per
    value.

    Raises:
        DataError: As `to_blis`.
        UsageError: As `to_blis`.
    """
    # Its names are those of ten coefficients.
    fitted, context = fit_blis(source, only_ten=True), source.deployment.context
    # The registry writes chips in lower case.
    gpu = _chip(context.gpu).lower() if context.gpu else "unknown"
    ranks = context.settings.tensor_parallel or 1
    deployment = f"{{hardware: [{yaml_text(gpu)}], model: [{yaml_text(model_name(source))}], tp: [{ranks}]}}"
    training = source.models.step_model.training
    inputs = training.inputs_sha256 if training else "unknown"
    cite = f"tracefit {__version__}, deployment {source.deployment.deployment_id}, traces sha256 {inputs}"
    step = fitted.errors[0]
    values = [*zip(_BETA_ENTRIES, fitted.beta, strict=True), *zip(_ALPHA_ENTRIES, fitted.alpha, strict=True)]
    error = "unknown" if step.mape_pct is None else f"{step.mape_pct:.3g} %"
    rationale = f"Held-out step time of the set: {error} mean absolute percentage error on {step.n} steps."
    entries = [_entry(name, units, value, deployment, cite, rationale) for (name, units), value in values]
    name = f"tracefit-{source.deployment.deployment_id}"
    notes = (*fitted.notes, _KERNEL_SETS, "the use line is for a clone of blis-registry")
    text = "\n".join(["kind: CoefficientSet", f"name: {yaml_text(name)}", "coefficients:", *entries, ""])
    use = f"cp {OUT}/coefficient-set.yaml coefficients/"
    return Export({"coefficient-set.yaml": commented(notes, text)}, fitted.errors, notes, use)


def _entry(name: str, units: str, value: float, deployment: str, cite: str, rationale: str) -> str:
    # Its rules: a value of zero is "not charged", and every other one names how and from what it was derived.
    method = "measured" if value else "not_charged"
    source = f"sources: [{{kind: model, cite: {yaml_text(cite)}, role: primary}}]\n      " if value else ""
    if not value:
        rationale = "The fit on these traces puts it at zero, or cannot tell it from the constant of a step."
    return (
        f"  - {name}:\n      value: {number(value)}\n      units: {units}\n      method: {method}\n      fitted: "
        f"{str(bool(value)).lower()}\n      rationale: {yaml_text(rationale)}\n      {source}deployment: {deployment}"
    )
