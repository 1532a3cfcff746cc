"""Formulas that turn the description of a step or a request into the columns that models read.

A user describes a step by its batch and its tokens, a request by its lengths and the load at its arrival;
models read the columns of tables, such as `kv_blocks_used`. Each column is a formula over the description, so
that one row and many are computed alike. A block is the unit in which vLLM hands
out its KV cache, `block_size` tokens each: the last block of a request is counted as half full.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from tracefit.errors import UsageError
from tracefit.models.amounts import smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tracefit.models.amounts import Amount
    from tracefit.models.formulas import Amounts
    from tracefit.models.schema import Workload

STEP_INPUTS = ("batch", "context", "prefill", "prefill_reqs", "prefill_done", "waiting")

STEP_VALUES: dict[str, str] = {
    "num_prefill_reqs": "prefill_reqs",
    "num_decode_reqs": "batch",
    "prefill_tokens": "prefill",
    "decode_tokens": "batch",
    "context_tokens": "batch * context",
    "prefill_context_tokens": "prefill_done",
    "running_depth": "batch + prefill_reqs",
    "waiting_depth": "waiting",
    "kv_blocks_used": "batch * (context / block_size + 0.5) + (prefill + prefill_done) / block_size + prefill_reqs / 2",
    "kv_usage_ratio": "min(kv_blocks_used / (num_gpu_blocks - 1), 1)",
}
"""Timeline columns of a step that decodes `batch` requests of `context` tokens and prefills `prefill` tokens."""

REQUEST_INPUTS = ("prompt_tokens", "output_tokens", "queue", "batch", "context", "cached")

OTHERS = ("others_prompt", "others_cached", "others_output", "others_max")
"""Mean lengths in tokens of the other requests that wait and run: prompt, part of it in the
prefix cache, output, and output allowed (max_tokens)."""

RUNNING = ("others_context", "others_remaining")
"""Mean tokens in the cache of a running request, and mean tokens it may still generate."""

_TRAFFIC: dict[str, str] = {
    "prompts_per_step": "others / steps_of_others",
    "others_computed": "max(others_prompt - others_cached, 1)",
    "prompt_tokens_per_step": "prompts_per_step * others_computed",
    "mean_prompt_reqs": "max(prompts_per_step, 1)",
    "mean_prompt_tokens": "min(max(others_computed * mean_prompt_reqs, 1), budget)",
    "mean_prompt_share": "min(prompt_tokens_per_step / mean_prompt_tokens, 1)",
}


def traffic_formulas(mean: Workload | None) -> dict[str, str]:
    """Return formulas for the load from other requests, at a steady state: requests arrive as fast as they finish.

    Each of the `others`, which run, finishes after `steps_of_others` steps, one per output token, and
    another request replaces it. Prompts differ in length and arrive in groups, and a step's time is not linear
    in their tokens (a roofline has a bend), so a step with the mean prompt would be too short. Therefore a
    share of the steps, `prompt_step_share`, has the tokens and prompts of the groups of steps measured in
    training (`prompt_step_groups` equally frequent ones), or else of the mean prompt. The step in progress at
    an arrival uses the mean prompt (`mean_prompt_*`): it weighs steps by the square of their time, which a
    few very long ones would dominate. If prompts arrive faster than these steps compute them, every step
    computes more.

    `steps_of_others` is infinite if the others are unknown: then no prompts are assumed. `budget` is the
    number of prompt tokens a step has room for.
    """
    groups = [(1.0, 1.0)]
    if mean is not None and mean.prompt_steps:
        computed = max(mean.prompt_tokens - mean.cached_prompt_tokens, 1.0)
        groups = [(max(step.tokens, 1.0) / computed, step.prompts) for step in mean.prompt_steps]
    # With more prompts per step than this, the prompt steps of the training could not compute them all.
    average = sum(tokens for tokens, _ in groups) / len(groups)
    formulas = {**_TRAFFIC, "crowding": f"max(prompts_per_step / {average!r}, 1)"}
    for k, (tokens, prompts) in enumerate(groups):
        formulas[f"prompt_step_tokens_{k}"] = f"min(max({tokens!r} * others_computed * crowding, 1), budget)"
        formulas[f"prompt_step_reqs_{k}"] = f"{prompts!r} * crowding"
    total = " + ".join(f"prompt_step_tokens_{k}" for k in range(len(groups)))
    formulas["prompt_step_share"] = f"min({len(groups)} * prompt_tokens_per_step / ({total}), 1)"
    return formulas


def prompt_step_groups(mean: Workload | None) -> int:
    """Return how many groups of steps with prompts `traffic_formulas` has."""
    return max(len(mean.prompt_steps), 1) if mean is not None else 1


_BATCH_LIMITS: dict[tuple[str, ...], tuple[str, str]] = {
    ("batch",): ("max_num_seqs", "it runs no more at a time"),
    ("context",): ("max_model_len", "no request has more"),
}
_BATCH_CHECKS: dict[str, dict[tuple[str, ...], tuple[str, str]]] = {
    "step": {**_BATCH_LIMITS, ("batch", "prefill"): ("max_num_batched_tokens", "no step computes more")},
    "request": {
        ("prompt_tokens", "output_tokens"): ("max_model_len", "it refuses such a request"),
        **_BATCH_LIMITS,
    },
}
"""Inputs to the setting of the server that bounds their sum, and the server's behaviour beyond it."""

MAX_COUNT = 1e12


def impossible(
    of: Literal["step", "request"], given: Mapping[str, Any], limit: Callable[[str], float | None]
) -> Iterator[tuple[Any, str, Any, str]]:
    """Yield the rules a description can break: whether it does, the input, its value, and the message, a format of the
    value.

    Args:
        of: The kind of description.
        given: Input to its number, or to an array of one per row; NaN is unknown and breaks no rule.
        limit: Setting of the server to its value, null if unknown.
    """
    for name, value in given.items():
        if name in _COUNTED_NAMES:
            yield (value < 0) | (value >= MAX_COUNT), name, value, "{:g} is not a count"
    if of == "request":
        output, cached = given["output_tokens"], given["cached"]
        yield output < 1, "output", output, "a request generates at least 1 output token"
        last_is_computed = "must be less than the prompt tokens, because the last one is always computed"
        yield cached >= given["prompt_tokens"], "cached", cached, last_is_computed
    for names, (setting, behaviour) in _BATCH_CHECKS[of].items():
        most = limit(setting)
        if most is not None and all(name in given for name in names):
            total = sum(given[name] for name in names)
            exceeds = f"{{:,.0f}} is more than this server's {setting} of {most:,.0f}: {behaviour}"
            yield total > most, " + ".join(names), total, exceeds


def require_possible(
    of: Literal["step", "request"], given: Mapping[str, float | None], limit: Callable[[str], float | None]
) -> None:
    """Refuse the description of a step or a request that the server would not run; see `impossible`.

    Raises:
        UsageError: The description breaks a rule, or a value is NaN.
    """
    if unreadable := [name for name, value in given.items() if value is not None and math.isnan(value)]:
        raise UsageError("nan is not a count", where=unreadable[0])
    row = {name: math.nan if value is None else value for name, value in given.items()}
    for broken, name, value, words in impossible(of, row, limit):
        if broken:
            raise UsageError(words.format(value), where=name)


REQUEST_VALUES: dict[str, str] = {
    "max_tokens": "output_tokens",
    "cached_prompt_tokens": "cached",
    "prefix_hit_ratio": "cached / prompt_tokens",
    # The batch at an arrival is the running requests; prompts among their steps are in `_TRAFFIC`.
    "num_prefill_reqs": "0",
    "num_decode_reqs": "batch",
    "prefill_tokens": "0",
    "decode_tokens": "batch",
    "context_tokens": "batch * context",
    "running_depth": "batch",
    "waiting_depth": "queue",
    "batch_fullness": "running_depth / max_num_seqs",
    "tokens_ahead": "queue * others_prompt",
    "outputs_ahead": "queue * others_max",
    "token_steps_ahead": "outputs_ahead * (others_prompt + others_output / 2)",
    "blocks_ahead": "queue * (others_prompt / block_size + 0.5)",
    "block_demand": "blocks_ahead + prompt_tokens / block_size + 0.5",
    "running_remaining_tokens": "running_depth * others_remaining",
    "kv_blocks_total": "num_gpu_blocks - 1",
    "kv_blocks_used": "running_depth * (context / block_size + 0.5)",
    "kv_blocks_free": "max(kv_blocks_total - kv_blocks_used, 0)",
    "kv_usage_ratio": "min(kv_blocks_used / kv_blocks_total, 1)",
    "free_slots": "max_num_seqs - running_depth - queue",
    "free_tokens": "max_num_batched_tokens - running_depth - tokens_ahead",
    "finishing_reqs": "1",
    "state_age_us": "decode_cycle_us / 2",
    "step_residual_us": "decode_cycle_us / 2",
}
"""Columns of a request's state at its arrival: `queue` others wait, and `batch` run.

`decode_cycle_us` is the mean time of the step in progress at an arrival, E[c^2] / E[c]: more arrivals fall
into long steps.
"""


_COUNTED_NAMES = {*STEP_INPUTS, *STEP_VALUES, *REQUEST_INPUTS, *OTHERS}
"""Names whose values cannot be negative."""


def step_inputs(described: Amounts) -> dict[str, Amount]:
    """Return the amounts of `STEP_INPUTS` of a described step: 0 if not given."""
    given = {name: amount for name, amount in described.items() if name in STEP_INPUTS}
    # A step with prompt tokens prefills at least one request.
    implied = smallest(given.get("prefill", 0.0), 1.0)
    return {**dict.fromkeys(STEP_INPUTS, 0.0), "prefill_reqs": implied, **given}


def others_like(mean: Workload | None) -> dict[str, float] | None:
    """Return the values of `OTHERS` for requests like the mean one; null without one."""
    if mean is None:
        return None
    # If few clients state a limit, its mean may be below the mean output.
    longest = mean.output_tokens if mean.max_tokens is None else max(mean.max_tokens, mean.output_tokens)
    values = (mean.prompt_tokens, mean.cached_prompt_tokens, mean.output_tokens, longest)
    return dict(zip(OTHERS, values, strict=True))


def running_like(mean: Workload | None) -> dict[str, float] | None:
    """Return the values of `RUNNING` as measured in training; null if they were not.

    Running requests are longer than the mean request: each counts in proportion to the time it runs.
    """
    if mean is None or mean.running_context_tokens is None or mean.running_remaining_tokens is None:
        return None
    values = (mean.running_context_tokens, mean.running_remaining_tokens)
    return dict(zip(RUNNING, values, strict=True))
