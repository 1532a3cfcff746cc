"""The recording that could make every verdict a yes: a few stretches of steady load, and the shell commands that send
them.

The held-out last 30 % of a run is nearly its last round, so that training has every load too. Rates are shares of what
a server can serve, or of what it was measured to carry. The stretch of long prompts has a rate of its own, at which the
server computes half as many tokens a second as it carried.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from tracefit.coefficients.documents import LoadStretch, RecordingAdvice
from tracefit.text import count, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.coefficients.documents import DeploymentEvaluation
    from tracefit.results.requests import RecordedLoad
    from tracefit.server.settings import ServerSettings

_SWEEP_ROUNDS = 3
_LIGHT_S, _MODERATE_S, _HEAVY_S, _LONG_S = 60.0, 40.0, 60.0, 45.0
_MODERATE, _HEAVY = 0.4, 0.8
"""Shares of the rate that a server can serve. Nearer to it, latencies follow small changes of the machine's speed by a
multiple; the stretch beyond it has full batches."""
_OF_CARRIED = (0.5, 1.0)
"""Shares of the rate that was carried, where the capacity is not known."""
_LIGHT_REQUESTS = 0.7
"""Requests in the server on average where the load is light: half of them come while it is empty."""
_TOO_MUCH = 2.0
"""Times what a server can serve: the length of the queue depends little on the exact rate that it serves."""
_TOO_MUCH_S, _LONGEST_BURST_S = 10.0, 20.0
_FULL_LOAD = 2.0
"""Requests of that stretch, as a multiple of those that fit into the server: the others queue."""
_UNKNOWN_SLOTS = 256
"""Requests that run at once where no setting says how many can: a default of vLLM."""
_MOST_BURST = 2_000
_UNKNOWN_LOAD = (4.0, 512.0, 128.0)
"""Requests per second and mean lengths for a server that no request was recorded of."""
_UNKNOWN_BUDGET = 2048
_LONG_SHARE = 0.5
"""Prompts that fill less than this share of a step's token budget need a stretch of longer ones."""
_LONG_RATE = 0.5
_FEWEST_RECORDED, _FEWEST_LONG = 10, 5
_MOST_LONG_S = 90.0
_SPREAD = 0.9
_TOKENS_LEFT = 64
"""Tokens that special tokens and a prompt that is encoded again may add."""

_IDLE = "requests that come to an idle server show the work of only the API, and that no request lacks a span"
_QUEUES = "more requests than a server can run at once: some wait for room, which autoscaling and alerting need to see"

_PLAIN_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w./-]{0,200}")
_SERVER_URL = "http://server:8000"


class _Lengths(NamedTuple):
    """Mean lengths and their spreads."""

    prompt: int
    prompt_spread: float
    output: int
    output_spread: float


def to_record(deployment: DeploymentEvaluation, settings: ServerSettings) -> RecordingAdvice | None:
    """Return what to record to make every verdict yes; null where all are.

    Args:
        deployment: Its verdicts, load, capacity and rates.
        settings: Settings of its server.
    """
    uses = tuple(
        use
        for use, verdict in deployment.verdicts.items()
        # No recording on this machine makes up for its noise.
        if any(c.answer != "yes" and c.machine_pct is None for c in verdict.criteria)
    )
    if not uses:
        return None
    stretches = tuple(_stretch(k, load) for k, load in enumerate(_loads(deployment, settings), 1))
    # Requests that come faster than they are served take longer than their arrivals.
    served = _served_per_s(deployment)
    seconds = sum(max(one.seconds, one.requests / served) for one in stretches)
    return RecordingAdvice(
        uses=uses,
        rounds=_SWEEP_ROUNDS,
        stretches=stretches,
        minutes=math.ceil(_SWEEP_ROUNDS * seconds / 60),
        sampling="every request and, where steps are traced, every step: sampling rates of 1",
        command=tuple(_command(stretches, settings.model)),
    )


def _served_per_s(deployment: DeploymentEvaluation) -> float:
    """Return the rate that shares refer to: what a server can serve, or carried; at least what it carried."""
    carried = deployment.load.carried_per_s if deployment.load else None
    known = [deployment.capacity.capacity_per_s if deployment.capacity else None, carried]
    return max((rate for rate in known if rate), default=_UNKNOWN_LOAD[0])


class _Load(NamedTuple):
    """Requests at one rate, and what they are for."""

    name: str
    rate_per_s: float
    requests: float
    lengths: _Lengths
    reason: str


def _stretch(number_of: int, load: _Load) -> LoadStretch:
    """Return a stretch with the seeds of its calls, which no other stretch has."""
    return LoadStretch(
        name=load.name,
        requests_per_s=float(f"{load.rate_per_s:.2g}"),
        requests=max(math.ceil(load.requests), 1),
        prompt_tokens=load.lengths.prompt,
        prompt_spread=load.lengths.prompt_spread,
        output_tokens=load.lengths.output,
        output_spread=load.lengths.output_spread,
        seeds=tuple(10 * k + number_of for k in range(1, _SWEEP_ROUNDS + 1)),
        reason=load.reason,
    )


def _loads(deployment: DeploymentEvaluation, settings: ServerSettings) -> Iterator[_Load]:
    """Yield the loads of a round, from light to more than the server can serve."""
    lengths = _lengths(deployment.load, settings)
    served, is_known = _served_per_s(deployment), deployment.capacity is not None
    can = _served_text(deployment)
    # A server of unknown capacity is loaded up to what it carried, and then has more requests at once than it can run.
    moderate, heavy = (share * served for share in ((_MODERATE, _HEAVY) if is_known else _OF_CARRIED))
    light = min(_LIGHT_REQUESTS / e2e, moderate / 2) if (e2e := _e2e_s(deployment)) else moderate / 4
    yield _Load("light", light, max(_LIGHT_S * light, _FEWEST_RECORDED), lengths, _IDLE)
    of = (f"{100 * rate / served:.0f} % of {can}" for rate in (moderate, heavy))
    yield _Load("moderate", moderate, _MODERATE_S * moderate, lengths, f"{next(of)}: batches of middle size")
    yield _Load("heavy", heavy, _HEAVY_S * heavy, lengths, f"{next(of)}: large batches")
    if (long := _long(deployment, lengths, settings)) is not None:
        yield long
    slots = deployment.rates[-1].running_mean if deployment.rates else _slots(settings, lengths)
    burst = min(_FULL_LOAD * max(slots, 1.0), _MOST_BURST)
    # Where many fit, twice the rate for some seconds does not fill the server.
    rate = max(_TOO_MUCH * served, burst / (_LONGEST_BURST_S if is_known else _TOO_MUCH_S))
    yield _Load("too much", rate, max(burst, _TOO_MUCH_S * rate), lengths, _QUEUES)


def _served_text(deployment: DeploymentEvaluation) -> str:
    """Name the rate that shares refer to."""
    rate = number(_served_per_s(deployment))
    if deployment.capacity is not None:
        return f"the {rate}/s that a server can serve"
    is_measured = deployment.load is not None and deployment.load.carried_per_s is not None
    return f"the {rate}/s {'carried so far' if is_measured else 'assumed, as no request was recorded'}"


def _e2e_s(deployment: DeploymentEvaluation) -> float | None:
    """Return the median E2E under a light load, or the smallest measured one; null where neither is known."""
    if deployment.rates and (value := deployment.rates[0].latency("e2e_p50_ms").value):
        return value / 1e3
    return min((run.e2e.p50 for run in deployment.served if run.e2e.p50), default=None)


def _lengths(load: RecordedLoad | None, settings: ServerSettings) -> _Lengths:
    """Return lengths as recorded, no longer than the server takes."""
    if load is None:
        _, prompt, output = _UNKNOWN_LOAD
        spreads = (_SPREAD, _SPREAD)
    else:
        prompt, output = load.prompt_tokens, load.output_tokens
        spreads = (load.prompt_spread, load.output_spread)
    known = _Lengths(max(round(prompt), 1), round(spreads[0], 1), max(round(output), 1), round(spreads[1], 1))
    longest = _most(known.prompt, known.prompt_spread) + _most(known.output, known.output_spread) + _TOKENS_LEFT
    if settings.max_model_len is None or longest <= settings.max_model_len:
        return known
    scale = settings.max_model_len / longest
    return known._replace(prompt=max(int(scale * known.prompt), 1), output=max(int(scale * known.output), 1))


def _most(mean: int, spread: float) -> int:
    return math.ceil(mean * (1 + spread))


def _long(deployment: DeploymentEvaluation, lengths: _Lengths, settings: ServerSettings) -> _Load | None:
    """Return prompts that fill a step, at a rate that a server carries; null where prompts as recorded are long
    enough.
    """
    budget = settings.max_num_batched_tokens or _UNKNOWN_BUDGET
    if _most(lengths.prompt, lengths.prompt_spread) >= _LONG_SHARE * budget:
        return None
    room = (settings.max_model_len or 2 * budget) - _most(lengths.output, lengths.output_spread) - _TOKENS_LEFT
    prompt = int(min(budget, room) / (1 + _SPREAD))
    if prompt <= lengths.prompt:
        return None
    load = deployment.load
    tokens = sum(_UNKNOWN_LOAD[1:]) if load is None else load.computed_tokens + load.output_tokens
    # An output token takes at least the time of a prompt token, which shares a step with many others.
    carries = _LONG_RATE * _served_per_s(deployment) * tokens / (prompt + lengths.output)
    requests = min(max(_LONG_S * carries, _FEWEST_RECORDED), max(_MOST_LONG_S * carries, _FEWEST_LONG))
    reason = (
        f"prompts of up to {count(_most(prompt, _SPREAD))} tokens, which fill a step, at half of the tokens a "
        f"second of {_served_text(deployment)}"
    )
    return _Load("long prompts", carries, requests, lengths._replace(prompt=prompt, prompt_spread=_SPREAD), reason)


def _slots(settings: ServerSettings, lengths: _Lengths) -> float:
    """Return how many requests run at once at most, by the settings."""
    slots = float(settings.max_num_seqs or _UNKNOWN_SLOTS)
    if settings.num_gpu_blocks and settings.block_size:
        slots = min(slots, settings.num_gpu_blocks * settings.block_size / (lengths.prompt + lengths.output))
    return slots


def _command(stretches: tuple[LoadStretch, ...], model: str | None) -> Iterator[str]:
    """Yield the lines of a shell that send the stretches."""
    # A name from a trace may be anything: only a plain one is put into a command.
    name = model if model is not None and _PLAIN_MODEL_NAME.fullmatch(model) else None
    yield f"BASE_URL={_SERVER_URL}  # put the address of the server here"
    if name is None:
        yield "MODEL=model  # put the model here: a name at Hugging Face, or the folder of its tokenizer"
    yield f"for round in {' '.join(map(str, range(1, _SWEEP_ROUNDS + 1)))}; do"
    for number_of, one in enumerate(stretches, 1):
        yield f"  # {one.name}, {one.seconds:.0f} s: {one.reason}"
        yield (
            f'  vllm bench serve --base-url "$BASE_URL" --model {name or chr(34) + "$MODEL" + chr(34)} '
            "--dataset-name random "
            f"--seed ${{round}}{number_of} --request-rate {one.requests_per_s:g} --num-prompts {one.requests} "
            f"--random-input-len {one.prompt_tokens} --random-output-len {one.output_tokens} "
            f"--random-range-ratio {_ratio(one)} --ignore-eos"
        )
    yield "done"


def _ratio(one: LoadStretch) -> str:
    """Write the spreads as `vllm bench serve` reads them: one number, or one for each kind of length."""
    if one.prompt_spread == one.output_spread:
        return f"{one.prompt_spread:g}"
    return f'\'{{"input": {one.prompt_spread:g}, "output": {one.output_spread:g}}}\''
