"""The recording that could make a verdict a yes: its load, prompts, minutes and sampling, and a load generator's command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import RecordingAdvice
from tracefit.text import count, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefit.coefficients.model import Criterion
    from tracefit.results.plans import PlanPoint
    from tracefit.results.requests import RequestGroup

_OF_CAPACITY = (0.2, 0.9, 0.5, 0.7)
"""Rates as shares of what a server can serve: heavy ones stand next to light ones, so that queues empty in between."""
_OF_RECORDED = (0.5, 2.0, 1.0, 1.5)
_UNKNOWN = (1.0, 8.0, 2.0, 4.0)
_TOO_MUCH = 1.3
"""Times what a server can serve: for a minute, requests queue."""
_ROUNDS = 3
"""Rounds of all rates: the held-out last 30 % of the time is about one of them, so that training has every load too."""
_DEFAULT_TOKENS = (512, 128)
_SPREAD = 0.9
"""Lengths go from a tenth of the mean to 1.9 times it."""
_OF_PROMPTS = "step_prefill_reach_pct"


def to_record(
    criteria: Iterable[Criterion],
    served: Sequence[RequestGroup],
    rates: Sequence[PlanPoint],
    limits: Mapping[str, float | None],
) -> RecordingAdvice | None:
    """Return what to record to make a verdict yes; null where it is yes.

    Args:
        criteria: The criteria of the verdict.
        served: The work of the servers so far.
        rates: The work of one server at rates up to its capacity; empty if unknown.
        limits: `max_num_batched_tokens` and `max_model_len`, null if unknown.
    """
    missed = {c.measure for c in criteria if c.answer != "yes" and c.machine_pct is None}
    if not missed:
        return None
    needs_queue = any(name.startswith("queue") for name in missed)
    prompt, output = _lengths(served)
    words = f"prompts of {count(prompt)} tokens on average{', as so far' if served else ''}"
    if _OF_PROMPTS in missed:
        budget = limits.get("max_num_batched_tokens") or 2048
        longest = min(budget, (limits.get("max_model_len") or budget) - 2 * output)
        prompt = max(int(longest / (1 + _SPREAD)), 1)
        words = f"prompts of up to {count(int((1 + _SPREAD) * prompt))} tokens: a step may have {count(int(budget))} of them"
    loads, reach = _rates(served, rates, needs_queue=needs_queue)
    listed = " ".join(f"{rate:g}:{max(int(60 * rate), 20)}" for rate in loads)
    return RecordingAdvice(
        load=f"{_ROUNDS} rounds of {', '.join(f'{r:g}' for r in loads)} requests per second, {reach}: every round has all loads, "
        "so that the held-out end of the run has none that is new",
        prompts=words,
        minutes=_ROUNDS * len(loads),
        sampling="every request and, where steps are traced, every step: sampling rates of 1",
        command=f"for round in {' '.join(map(str, range(1, _ROUNDS + 1)))}; do for load in {listed}; do vllm bench serve "
        f"--dataset-name random --random-input-len {prompt} --random-output-len {output} --random-range-ratio {_SPREAD} "
        "--ignore-eos --request-rate ${load%:*} --num-prompts ${load#*:}; done; done",
    )


def _lengths(served: Sequence[RequestGroup]) -> tuple[int, int]:
    """Return the mean prompt and output so far; common ones where there are no requests."""
    if not (requests := sum(run.requests for run in served)):
        return _DEFAULT_TOKENS
    prompt, output = sum(run.prompt_tokens for run in served), sum(run.output_tokens for run in served)
    return max(round(prompt / requests), 1), max(round(output / requests), 1)


def _rates(
    served: Sequence[RequestGroup], rates: Sequence[PlanPoint], *, needs_queue: bool
) -> tuple[list[float], str]:
    """Return requests per second to record, and how far they reach in words."""
    recorded = max((run.requests_per_s or 0.0 for run in served), default=0.0)
    if rates:
        most = rates[-1].rate_per_s
        loads = [share * most for share in _OF_CAPACITY]
        reach = f"up to nine tenths of the {number(most)} that a server can serve"
    elif recorded:
        most = 2 * recorded
        loads = [share * recorded for share in _OF_RECORDED]
        reach = "up to twice the rate so far"
    else:
        most, loads, reach = max(_UNKNOWN), [*_UNKNOWN], "until latencies climb"
    if needs_queue:
        loads.append(_TOO_MUCH * most)
        reach += ", and one minute of more than that, in which requests queue"
    return [float(f"{load:.2g}") for load in loads], f"a minute each, {reach}"
