"""Replay the held-out part of a run, or a new run, in a closed loop: arrivals and lengths in, replayed and measured
latencies out.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from tracefit.coefficients.request_ranges import described_requests, predicted_requests
from tracefit.errors import DataError, TracefitError, UsageError
from tracefit.models.targets import LATENCY_TITLES
from tracefit.options import ServerOptions, flag_of
from tracefit.replay.acceptance import measured_acceptance
from tracefit.replay.engine import EngineSettings
from tracefit.replay.models import FittedStepTimes, admission_us, batch_at, departure_us
from tracefit.replay.run import RequestLoad, replay
from tracefit.results.replays import QueueWindow, ReplayAtSpeed, Replayed, RunReplay
from tracefit.statistics import LIKELY_SDS, percentiles
from tracefit.tables.client_times import CLIENT_TIMES, with_clients_latencies
from tracefit.tables.dialects import CLIENT
from tracefit.tables.requests import latency_us
from tracefit.tables.schema import ENGINE, REQUEST, SERVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.models.deployment import DeploymentModels
    from tracefit.models.schema import Model
    from tracefit.statistics import Vector

LEAST_LOOP_REQUESTS = 20
"""Fewest held-out requests for percentiles."""
MOST_LOOP_REQUESTS = 2_000
"""Most held-out requests of a run that are compared; as many again may load the server while these run."""

PAST_SHARE = 0.1
"""Share of the requests of a new run that come before the compared ones: they give the requests in flight, and a
client's time around the engine."""

WHOLE_LOOP_SHARE = 0.999
_LOOP_WINDOWS = 20
_LOOP_PERCENTILES = (50, 90, 99)
_LOOP_LATENCIES = (*LATENCY_TITLES, "client")
_NEEDED = ("max_num_seqs", "max_num_batched_tokens")
_LOOP_TIMES = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finished_ns", "departed_ns")
LEFT = pl.coalesce("finished_ns", "aborted_ns", "departed_ns", "last_token_ns")
"""When a request left the engine."""


LOOP_REQUEST_COLUMNS = (
    *dict.fromkeys((*ENGINE, *REQUEST)),
    *(*_LOOP_TIMES, "queued_ns", "last_token_ns", "aborted_ns", "first_token_step", "finished_step"),
    *("prompt_tokens", "output_tokens", "max_tokens", "cached_prompt_tokens", "num_preemptions"),
    *("finish_status", *(f"{name}_us" for name in _LOOP_LATENCIES)),
    *("dialect", "first_scheduled_step", *CLIENT_TIMES),
)
"""Columns of `requests` that a replay reads."""

_LOOP_STEP_COLUMNS = (
    *SERVER,
    "ts_start_ns",
    "waiting_depth",
    "running_after",
    "num_decode_reqs",
    "num_prefill_reqs",
)
_BEFORE_NS = 60_000_000_000
"""The state at an arrival comes from the step before it, which is at most a minute old unless the server is idle."""


class RunTraces(NamedTuple):
    """Traces of one run: rows of the tables `runs` and `requests`, and a scan of `timeline`."""

    runs: pl.DataFrame
    requests: pl.DataFrame
    timeline: pl.LazyFrame


def held_out_from(deployment: DeploymentModels, run_id: str) -> dict[str, int]:
    """Return each server of a run whose step times were fitted, and the time at which its held-out part begins.

    Raises:
        TracefitError: There is no model of step times.
    """
    training = deployment.step_model.training
    ranges = training.time_range if training else ()
    return {r.server: r.holdout_from_ns for r in ranges if r.run_id == run_id}


def replay_run(run_id: str, traces: RunTraces, deployment: DeploymentModels) -> RunReplay:
    """Replay the held-out part of a run, or say why that is not possible.

    Args:
        run_id: The run.
        traces: Its traces.
        deployment: Models that were fitted on what came before.
    """
    try:
        cuts = held_out_from(deployment, run_id)
        if _is_of_client(traces.requests) and len(cuts) == 1:
            traces = traces._replace(requests=_of_client(traces, *cuts))
        if missing := missing_for_replay(traces.runs, traces.requests, cuts):
            raise DataError(missing)
        return _compared(run_id, traces, deployment, cuts)
    except TracefitError as error:
        return RunReplay(run_id, deployment.deployment_id, reason=str(error))


class NewReplay(NamedTuple):
    """A run that the models were not fitted on, replayed at several speeds of the machine.

    Attributes:
        replays: One for each speed; a single one with its reason where no replay is possible.
        beyond_pct: Percent of the compared requests that meet larger batches or have more prompt tokens than any step
            in training.
    """

    replays: tuple[RunReplay, ...]
    beyond_pct: float = 0.0


def replay_new_run(run_id: str, traces: RunTraces, deployment: DeploymentModels, factors: Sequence[float]) -> NewReplay:
    """Replay a run that the models were not fitted on, from the first tenth of its requests on, or say why that is not
    possible.

    Args:
        run_id: The run.
        traces: Its traces.
        deployment: The models.
        factors: Factors on all step times, one for each replay.
    """
    try:
        servers = traces.timeline.select(pl.col("server").unique(maintain_order=True)).collect()["server"]
        if _is_of_client(traces.requests) and servers.len() == 1:
            traces = traces._replace(requests=_of_client(traces, servers[0]))
        past = traces.requests.group_by("server").agg(
            pl.col("arrival_ns").quantile(PAST_SHARE, "higher").cast(pl.Int64)
        )
        cuts = dict(past.filter(pl.col("server").is_in(servers.to_list())).drop_nulls().iter_rows())
        if missing := missing_for_replay(traces.runs, traces.requests, cuts):
            raise DataError(missing)
        prepared = _prepared(traces, deployment, cuts)
        rows = [_replayed(prepared, deployment, factor) for factor in factors]
        compared = [_counted(each, "the run after its first tenth") for each in rows]
    except TracefitError as error:
        return NewReplay((RunReplay(run_id, deployment.deployment_id, reason=str(error)),))
    replays = (
        RunReplay(
            run_id,
            deployment.deployment_id,
            requests=each.height,
            in_flight=int((all_rows["arrival"] < 0).sum()),
            quantities=_quantities(each, prepared.before, each.clear()),
            notes=prepared.notes,
        )
        for all_rows, each in zip(rows, compared, strict=True)
    )
    ranges = deployment.input_ranges("step")
    fullest, longest = (ranges.get(name, (0.0, math.inf))[1] for name in ("batch", "prefill"))
    is_beyond = (pl.col("batch") > fullest) | (pl.col("prompt") - pl.col("cached") > longest)
    return NewReplay(tuple(replays), 100 * float(compared[0].select(is_beyond.mean()).item()))


def _is_of_client(requests: pl.DataFrame) -> bool:
    return requests.height > 0 and bool((requests["dialect"] == CLIENT).all())


def _of_client(traces: RunTraces, server: str) -> pl.DataFrame:
    """Return requests that only a client describes as those of a server, on the clock of its steps.

    The clocks are aligned so that the last token comes with the last traced step. Steps that were counted from these
    requests are on their clock already.
    """
    requests, steps = traces.requests, traces.timeline.filter(pl.col("server") == server)
    last = pl.col("arrival_ns") + (1e3 * pl.col("client_e2e_us")).cast(pl.Int64)
    ends = requests.select(last.max()).item(), steps.select(pl.col("ts_start_ns").max()).collect().item()
    ahead = 0 if None in ends or requests["first_scheduled_ns"].count() else ends[1] - ends[0]
    # A client does not see restarts.
    moved = requests.with_columns(
        server=pl.lit(server), epoch=pl.lit(0, pl.Int64), arrival_ns=pl.col("arrival_ns") + ahead
    )
    first, last = (
        pl.col("arrival_ns") + (1e3 * pl.col(name)).cast(pl.Int64) for name in ("client_ttft_us", "client_e2e_us")
    )
    # A client does not see when its requests are scheduled.
    unknown = pl.lit(None, pl.Int64)
    return with_clients_latencies(moved).with_columns(
        first_scheduled_ns=unknown, first_token_ns=first, last_token_ns=last, finished_ns=last
    )


def missing_for_replay(run: pl.DataFrame, requests: pl.DataFrame, cuts: Mapping[str, int]) -> str | None:
    """Return why a run cannot be replayed; null where it can.

    Args:
        run: Rows of the `runs` table.
        requests: Rows of the `requests` table.
        cuts: Server to the time at which its held-out part begins.
    """
    sampled = run["journey_sampling"].drop_nulls()
    if not requests.height:
        return "no request was traced, only steps"
    if not cuts:
        return "the model of step times has no rows of this run"
    # A share of 0 is not a sample: other spans may show every request.
    if sampled.is_between(0, WHOLE_LOOP_SHARE, closed="none").any():
        share = float(sampled.to_numpy().min())
        return f"journeys are a sample of {share:.0%}: the requests between them are unknown"
    # The full length of a request that the run's end or its client cut off is unknown.
    has_prompt = pl.all_horizontal(pl.col("arrival_ns", "prompt_tokens").is_not_null())
    known = requests.filter(has_prompt & (pl.col("output_tokens").is_not_null() | ~_is_complete())).height
    if known < WHOLE_LOOP_SHARE * requests.height or not requests["output_tokens"].count():
        return f"arrival and lengths are known of {known} of {requests.height} requests"
    return None


def _is_complete() -> pl.Expr:
    """Say whether a request ended regularly; an unmodified server has spans only of such requests, without a status."""
    ended = pl.col("finish_status").fill_null("stopped").is_in(["stopped", "length"])
    return ended & pl.col("finished_ns").is_not_null()


def _gave_up() -> pl.Expr:
    """Say whether the client left while its request was queued: no step computes anything for it."""
    began = pl.col("is_complete") | pl.any_horizontal(pl.col("first_scheduled_ns", "first_token_ns").is_not_null())
    return pl.col("left").is_not_null() & ~began


class _Prepared(NamedTuple):
    """Requests of each engine, those that ended before the compared part, and the settings, with notes on these."""

    engines: Sequence[pl.DataFrame]
    before: pl.DataFrame
    settings: EngineSettings
    notes: tuple[str, ...]


def _prepared(traces: RunTraces, deployment: DeploymentModels, cuts: Mapping[str, int]) -> _Prepared:
    runs_from = pl.col("server").replace_strict(cuts, default=None, return_dtype=pl.Int64)
    requests = traces.requests.drop_nulls(["arrival_ns", "prompt_tokens"]).with_columns(
        cut=runs_from, left=LEFT, is_complete=_is_complete()
    )
    requests = requests.filter(~_gave_up())
    before = requests.filter(pl.col("is_complete") & (pl.col("left") < pl.col("cut")))
    accepted = measured_acceptance(before, traces.timeline)
    settings, notes = engine_settings(deployment, traces.timeline, 1.0 if accepted is None else accepted.mean)
    if accepted is not None:
        notes = (f"a step gives each request {accepted.mean:.2f} tokens, as in the training part", *notes)
    requests = _counting(_with_outputs(_with_hits(requests, traces.timeline), before))
    engines = requests.drop_nulls("cut").sort("arrival_ns").partition_by(ENGINE, maintain_order=True)
    return _Prepared(engines, before, settings, notes)


def _compared(run_id: str, traces: RunTraces, deployment: DeploymentModels, cuts: Mapping[str, int]) -> RunReplay:
    prepared = _prepared(traces, deployment, cuts)
    before, notes = prepared.before, prepared.notes
    replayed = _replayed(prepared, deployment, 1.0)
    compared = _counted(replayed, "the held-out part")
    predicted = _predicted(traces, deployment, compared)
    return RunReplay(
        run_id,
        deployment.deployment_id,
        requests=compared.height,
        in_flight=int((replayed["arrival"] < 0).sum()),
        quantities=_quantities(compared, before, predicted),
        queue=_queue(compared),
        notes=notes + _notes(replayed, deployment, is_full=compared.height >= MOST_LOOP_REQUESTS),
        at_speeds=tuple(
            ReplayAtSpeed(slower_pct, {q.name: q.replayed for q in _quantities(rows)})
            for slower_pct in _speeds_of_holdout_pct(deployment.step_model)
            for rows in (_replayed(prepared, deployment, 1 + slower_pct / 100).filter("counts"),)
        ),
    )


def _replayed(prepared: _Prepared, deployment: DeploymentModels, factor: float) -> pl.DataFrame:
    """Replay the requests of each engine with a factor on the step times, at most `MOST_LOOP_REQUESTS` that are
    compared.
    """
    times = FittedStepTimes(deployment.step_model, deployment.server, factor)
    parts: list[pl.DataFrame] = []
    room = MOST_LOOP_REQUESTS
    # A restart begins another engine: the later ones are left out where the first ones are enough.
    for engine in prepared.engines:
        if room > 0:
            parts.append(_engine(engine, deployment, times, prepared.settings, most=room))
            room -= int(parts[-1]["counts"].sum())
    if not parts:
        raise DataError("no request is of a server whose steps are known")
    return pl.concat(parts)


def _counted(replayed: pl.DataFrame, part: str) -> pl.DataFrame:
    """Return the compared requests of a part of a run.

    Raises:
        DataError: They are too few, or some are never served.
    """
    compared = replayed.filter("counts")
    if unserved := compared["replayed_last"].null_count():
        raise DataError(f"the replay never serves {unserved} of {compared.height} requests")
    if compared.height < LEAST_LOOP_REQUESTS:
        raise DataError(f"fewer than {LEAST_LOOP_REQUESTS} requests end in {part}: {compared.height}")
    return compared


def _speeds_of_holdout_pct(model: Model) -> tuple[float, ...]:
    """Return how much longer steps of equal batches took in the hold-out than the model says, in percent, from the
    fastest.

    The middle one is the speed of the whole hold-out, the others are two standard deviations of a stretch of time from
    it. Empty where the machine kept its speed.
    """
    speed = model.validation.speed if model.validation else None
    if speed is None or not speed.adjusted:
        return ()
    middle, sd = math.log1p((speed.holdout_pct or 0.0) / 100), math.log1p(speed.sd_pct / 100)
    return tuple(100 * math.expm1(middle + side * LIKELY_SDS * sd) for side in (-1, 0, 1))


def _notes(replayed: pl.DataFrame, deployment: DeploymentModels, *, is_full: bool) -> tuple[str, ...]:
    """Return the assumptions of a replay.

    Args:
        replayed: The replayed requests.
        deployment: The models.
        is_full: Whether more requests could be compared than are.
    """
    is_past = pl.col("arrival") < 0
    later = replayed.filter(~is_past & ~pl.col("is_before"))
    early = replayed.filter(pl.col("counts") & is_past).height
    front = replayed["front_us"].drop_nulls().to_list()
    more, guessed = later.filter(~pl.col("counts")).height, later["is_guessed"].sum()
    notes = {
        f"few requests come in the held-out part: {early} that end in it came before, their past is measured": early,
        f"{more} more requests load the server and are not compared": more,
        f"the first {MOST_LOOP_REQUESTS:,} held-out requests are compared": is_full,
        f"{guessed} requests were cut off: their output is taken to be of median length": guessed,
        (
            f"the client's requests are queued as they come: {sum(front[:1]) / 1e3:.2f} ms around the engine are the "
            "median of those before"
        ): front,
        "there is no model of the admission: requests are queued as they come": "alpha.admission"
        not in deployment.models
        and not front,
    }
    return tuple(text for text, holds in notes.items() if holds)


def engine_settings(
    deployment: DeploymentModels,
    timeline: pl.LazyFrame,
    tokens_per_step: float,
    changes: Mapping[str, float] = MappingProxyType({}),
) -> tuple[EngineSettings, tuple[str, ...]]:
    """Return the settings of a deployment's server, and notes on them; its KV blocks are those that the steps state.

    Args:
        deployment: The deployment.
        timeline: Steps of its runs.
        tokens_per_step: Tokens that a request gets from a step it decodes in.
        changes: Limits of the scheduler that differ from the deployment's.

    Raises:
        UsageError: A limit of the scheduler is unknown.
    """
    server = {**deployment.server, **changes}
    if unknown := [name for name in _NEEDED if not server[name]]:
        raise UsageError(
            f"{' and '.join(unknown)} of the server {'are' if len(unknown) > 1 else 'is'} unknown",
            hint=(
                f"give them with `tracefit run RUNS {flag_of(ServerOptions, 'settings')} NAME=N`, or put the "
                "server's log beside its traces"
            ),
        )
    stated = deployment.step_model.deployment.settings if deployment.step_model.deployment else {}
    tokens_of_step = pl.col("prefill_tokens") + pl.col("decode_tokens")
    seen = timeline.select(pl.col("kv_blocks_total").max(), fullest=tokens_of_step.max()).collect()
    traced, fullest = seen.row(0)
    budget = int(server["max_num_batched_tokens"] or 0)
    assumed = deployment.step_model.deployment.assumed if deployment.step_model.deployment else ()
    # A default that no input states may be wrong; no step is fuller than the budget.
    is_short = (fullest or 0) > budget and any(text.startswith("max_num_batched_tokens ") for text in assumed)
    budget = int(fullest) if is_short else budget
    stated_blocks, stated_tokens = server["num_gpu_blocks"], int(server["block_size"] or 0)
    blocks = traced or (int(stated_blocks) - 1 if stated_blocks else None)
    settings = EngineSettings(
        max_num_seqs=int(server["max_num_seqs"] or 0),
        max_num_batched_tokens=budget,
        block_size=block_tokens(timeline, blocks, stated_tokens),
        num_blocks=blocks,
        by_priority=stated.get("scheduling_policy") == "priority",
        chunked_prefill=stated.get("enable_chunked_prefill") is not False,
        prefix_caching=stated.get("enable_prefix_caching") is not False,
        async_scheduling=stated.get("async_scheduling") is True,
        tokens_per_step=tokens_per_step,
    )
    is_other_size = settings.block_size != stated_tokens
    notes = {
        f"the token budget of a step is {budget:,}, as the fullest step has, and not vLLM's default": is_short,
        f"a KV block has {settings.block_size} tokens by the steps, {stated_tokens} by the settings": is_other_size,
    }
    return settings, tuple(text for text, holds in notes.items() if holds)


def block_tokens(timeline: pl.LazyFrame, blocks: int | None, stated: int) -> int:
    """Return the tokens of a KV block: the stated ones, unless the steps show others, as a platform's default may be.

    Each request that decodes has its context in whole blocks, the last one half full on average. If the blocks in use
    are computed from the stated size, the blocks of the cache must still have room for the longest context. Shared
    blocks are counted once, so only a size far above the stated one counts as another.

    Args:
        timeline: Rows of the `timeline`.
        blocks: KV blocks of the server; null if unknown.
        stated: Tokens of a block by its settings.
    """
    used, requests, context = pl.col("kv_blocks_used"), pl.col("num_decode_reqs"), pl.col("context_tokens")
    decoding = timeline.filter((pl.col("num_prefill_reqs") == 0) & (requests > 0) & context.is_not_null())
    per_block = (context / (used - requests / 2)).filter(used > requests).median()
    seen, longest = decoding.select(per_block, longest=context.max()).collect().row(0)
    if (seen or 0.0) >= 3 * stated:
        return int(2 ** round(math.log2(seen)))
    least = (longest or 0) / blocks if blocks else 0.0
    return stated if least < 1.5 * stated else int(2 ** math.ceil(math.log2(least)))


def _with_outputs(requests: pl.DataFrame, before: pl.DataFrame) -> pl.DataFrame:
    """Add `output`, `is_guessed`, and `done`: tokens that each request has when the held-out part begins.

    Both use only requests before that time: a request in flight decodes as fast as their median.
    """
    lengths = requests["output_tokens"] if before["output_tokens"].count() == 0 else before["output_tokens"]
    median, itl_us = lengths.median(), (before if before.height else requests)["itl_us"].median()

    def tokens_at(time: pl.Expr) -> pl.Expr:
        since_first_us = (time - pl.col("first_token_ns")) / 1e3
        return 1 + (since_first_us.clip(lower_bound=0) / (itl_us or 1.0)).floor()

    is_guessed = pl.col("output_tokens").is_null()
    # A request that left early has the tokens until then; one that is there at the end gets the median, or the tokens
    # so far.
    until = tokens_at(pl.col("left")).fill_null(1)
    guess = pl.when(pl.col("left").is_null()).then(pl.min_horizontal(pl.lit(median), "max_tokens")).otherwise(until)
    # Requests of a client are replayed from before the cut.
    began, is_client = pl.col("first_token_ns") < pl.col("cut"), pl.col("dialect") == CLIENT
    return requests.with_columns(
        is_guessed=is_guessed,
        output=pl.coalesce("output_tokens", guess).clip(lower_bound=1).cast(pl.Int64),
        done=pl.when(began & ~is_client).then(tokens_at(pl.col("cut"))).otherwise(0).cast(pl.Int64),
    )


def _with_hits(requests: pl.DataFrame, timeline: pl.LazyFrame) -> pl.DataFrame:
    """Fill in the cached tokens of prompts if no request states them: the step that computes a prompt states its new
    tokens.

    If the requests have no steps, every prompt has as many new tokens as the mean prompt of the steps before the cut.
    """
    if requests["cached_prompt_tokens"].count():
        return requests
    columns = ["ts_start_ns", "num_prefill_reqs", "prefill_tokens"]
    steps = timeline.filter(pl.col("num_prefill_reqs") > 0).select(*ENGINE, "step_id", *columns).collect()
    if not requests["first_token_step"].count():
        past = steps.filter(pl.col("ts_start_ns") < requests["cut"].max()).sum()
        if not past["num_prefill_reqs"][0]:
            return requests
        new = past["prefill_tokens"][0] / past["num_prefill_reqs"][0]
        cached = (pl.col("prompt_tokens") - new).clip(lower_bound=0)
        return requests.with_columns(cached_prompt_tokens=cached.cast(pl.Int64))
    # Only steps that compute all of their prompts, from the first token to the last.
    whole = pl.col("first_scheduled_step") == pl.col("first_token_step")
    by_step = (
        requests.group_by(*ENGINE, step_id="first_token_step")
        .agg(prompts=pl.col("prompt_tokens").sum(), count=pl.len(), whole=whole.all())
        .join(steps, on=[*ENGINE, "step_id"])
        .filter(pl.col("whole") & (pl.col("count") == pl.col("num_prefill_reqs")))
        .with_columns(new=pl.col("prefill_tokens") / pl.col("prompts"))
        .select(*ENGINE, "step_id", "new")
    )
    cached = (pl.col("prompt_tokens") * (1 - pl.col("new"))).round().clip(lower_bound=0).cast(pl.Int64)
    on = [*ENGINE, "first_token_step"]
    joined = requests.join(by_step, left_on=on, right_on=[*ENGINE, "step_id"], how="left", maintain_order="left")
    return joined.with_columns(cached_prompt_tokens=cached).drop("new")


def _counting(requests: pl.DataFrame) -> pl.DataFrame:
    """Mark the compared requests in `counts`: those that arrive and end in the held-out part; if few, all that end in
    it.
    """
    has_times = pl.all_horizontal(pl.col("first_token_ns", "finished_ns", "cut").is_not_null())
    ends = pl.col("is_complete") & has_times & (pl.col("finished_ns") >= pl.col("cut"))
    comes = ends & (pl.col("arrival_ns") >= pl.col("cut"))
    return requests.with_columns(counts=pl.when(comes.sum() >= LEAST_LOOP_REQUESTS).then(comes).otherwise(ends))


def _engine(
    requests: pl.DataFrame,
    deployment: DeploymentModels,
    times: FittedStepTimes,
    settings: EngineSettings,
    *,
    most: int,
) -> pl.DataFrame:
    """Replay the requests of one engine from its cut on; return measured and replayed times, in us after it.

    Some of a client's requests before the cut are replayed too: the differences from their measured times are the front
    end's.
    """
    cut = start = int(requests["cut"][0])
    is_client = (requests["dialect"] == CLIENT).all()
    if is_client:
        earlier = requests.filter(pl.col("arrival_ns") < cut)["arrival_ns"].sort(descending=True)
        start = earlier.head(MOST_LOOP_REQUESTS).min() or cut  # type: ignore[assignment]  # of integers
        of_part = pl.col("arrival_ns") >= start
    else:
        of_part = pl.col("left").is_null() | (pl.col("left") >= cut)
    rows = _first(requests.filter(of_part).sort("arrival_ns"), most).select(
        *REQUEST,
        *((pl.col(name) - start).truediv(1e3).alias(name.removesuffix("_ns")) for name in _LOOP_TIMES),
        *("output", "done", "is_guessed", "counts"),
        *(latency_us(name).alias(f"{name}_us") for name in _LOOP_LATENCIES),
        is_before=pl.col("arrival_ns") < cut,
        prompt=pl.col("prompt_tokens").clip(lower_bound=1),
        cached=pl.col("cached_prompt_tokens").fill_null(0),
    )
    arrival, prompt, output, cached, done = (
        rows[n].to_numpy() for n in ("arrival", "prompt", "output", "cached", "done")
    )
    come = np.maximum(arrival, 0.0)
    admission = admission_us(deployment.models.get("alpha.admission"), arrival, prompt) + arrival - come
    load = RequestLoad(come, prompt, output, cached, generated_tokens=np.minimum(done, output))
    simulated = replay(load, times, settings, admission_us=np.maximum(admission, 0.0))
    departs = departure_us(deployment.models.get("alpha.departure"), simulated, output)
    replayed = {
        "scheduled": simulated.scheduled_us,
        "first": simulated.first_us,
        "last": simulated.last_us,
        "departed": simulated.last_us + departs,
    }
    rows = rows.with_columns(
        *(pl.Series(f"replayed_{n}", v, nan_to_null=True) for n, v in replayed.items()),
        batch=batch_at(simulated.last_us, simulated),
    )
    if is_client:
        # The time from the send to the queue and from the step's end to the client is a constant of requests before the
        # cut.
        is_past = pl.col("is_before") & (pl.col("finished") < (cut - start) / 1e3)
        front = rows.filter(is_past).select((pl.col("first_token") - pl.col("replayed_first")).median()).item()
        return rows.with_columns(
            (pl.col(f"replayed_{n}") + max(front or 0.0, 0.0)).alias(f"replayed_{n}") for n in ("first", "last")
        ).with_columns(front_us=pl.lit(front, pl.Float64))
    # Events before the held-out part are given, not replayed.
    past = {"replayed_scheduled": "first_scheduled", "replayed_first": "first_token"}
    return rows.with_columns(
        *(pl.when(pl.col("done") > 0).then(m).otherwise(r).alias(r) for r, m in past.items()),
        front_us=pl.lit(None, pl.Float64),
    )


def _first(rows: pl.DataFrame, most: int) -> pl.DataFrame:
    """Compare only the first `most` requests, and keep those that load the server until these end."""
    rows = rows.with_columns(counts=pl.col("counts") & (pl.col("counts").cum_sum() <= most))
    last = rows.filter("counts")["finished_ns"].max()
    kept = rows if last is None else rows.filter(pl.col("arrival_ns") <= last)
    return kept.head((kept["counts"].arg_max() or 0) + 2 * MOST_LOOP_REQUESTS)


# -- measured and replayed -------------------------------------------------------------------------------


def _predicted(traces: RunTraces, deployment: DeploymentModels, counted: pl.DataFrame) -> pl.DataFrame:
    """Return the predictions of the compared requests at their arrival; no rows if there can be none."""
    rows = counted.select(REQUEST).join(traces.requests, on=REQUEST, how="left", nulls_equal=True)
    first, last = rows.select(pl.col("arrival_ns").min() - _BEFORE_NS, pl.col("finished_ns").max()).row(0)
    steps = traces.timeline.filter(pl.col("ts_start_ns").is_between(first, last)).select(_LOOP_STEP_COLUMNS).collect()
    described = described_requests(rows.with_columns(split=pl.lit("holdout")), steps)
    try:
        return predicted_requests(deployment, described)
    except TracefitError:
        return described.with_columns(pl.lit(None, pl.Float64).alias(f"{name}_us") for name in LATENCY_TITLES)


def _quantities(
    rows: pl.DataFrame, before: pl.DataFrame | None = None, predicted: pl.DataFrame | None = None
) -> tuple[Replayed, ...]:
    """Return percentiles, throughput and the mean queue of the same requests, measured and replayed.

    Those of the requests `before` are a constant guess, and `predicted` are the predictions of the requests; where they
    are not given, nothing is guessed.
    """
    measured, replayed = _latencies(rows)
    entries = []
    for name, values in measured.items():
        known = ~np.isnan(values)
        if known.sum() < LEAST_LOOP_REQUESTS or np.isnan(replayed[name][known]).any():
            continue
        pair = [percentiles(side[name][known], _LOOP_PERCENTILES) for side in (measured, replayed)]
        those = (
            None if predicted is None else predicted.join(rows.filter(known), on=REQUEST, how="semi", nulls_equal=True)
        )
        guesses = [_percentiles(frame, f"{name}_us") for frame in (before, those)]
        of_each = zip(*pair, *guesses, strict=True)
        entries += [_entry(f"{name}_p{q}_us", *of) for q, of in zip(_LOOP_PERCENTILES, of_each, strict=True)]
    span = [
        float(rows.select(pl.col(end).max() - pl.col("arrival").min()).item()) for end in ("finished", "replayed_last")
    ]
    tokens = float(rows["output"].sum())
    entries.append(_entry("output_tokens_per_s", *(1e6 * tokens / s for s in span if s)))
    if rows["first_scheduled"].null_count() == 0:
        # By Little's law, the sum of waits over the time is the mean number that wait.
        waits = (float((rows[n] - rows["arrival"]).sum()) for n in ("first_scheduled", "replayed_scheduled"))
        entries.append(_entry("waiting_mean", *(w / s for w, s in zip(waits, span, strict=True))))
    return tuple(entries)


def _entry(
    name: str, measured: float, replayed: float, constant: float | None = None, predicted: float | None = None
) -> Replayed:
    error = 100 * (replayed / measured - 1) if measured else None
    return Replayed(name, measured, replayed, error, constant, predicted)


def _percentiles(rows: pl.DataFrame | None, column: str) -> Sequence[float | None]:
    known = rows[column].drop_nulls() if rows is not None and column in rows.columns else None
    if known is None or known.is_empty():
        return [None] * len(_LOOP_PERCENTILES)
    return percentiles(known.to_numpy(), _LOOP_PERCENTILES)


def _latencies(rows: pl.DataFrame) -> tuple[dict[str, Vector], dict[str, Vector]]:
    """Return the latencies of requests, measured as the `requests` table has them, and replayed; NaN if unknown."""
    begin, decoded = pl.col("arrival"), pl.col("output") - 1
    first, last, departed = (pl.col(f"replayed_{name}") for name in ("first", "last", "departed"))
    measured = {name: pl.col(f"{name}_us") for name in _LOOP_LATENCIES}
    replayed = {
        "ttft": first - begin,
        "itl": pl.when(decoded > 0).then((last - first) / decoded),
        "e2e": last - begin,
        "client": departed - begin,
    }

    def arrays(latencies: Mapping[str, pl.Expr]) -> dict[str, Vector]:
        # A first token before the held-out part is not replayed.
        ttft = pl.when(pl.col("done") == 0).then(latencies["ttft"])
        values = rows.select(**{**latencies, "ttft": ttft}).cast(pl.Float64).fill_null(float("nan"))
        return {name: values[name].to_numpy() for name in values.columns}

    return arrays(measured), arrays(replayed)


def _queue(rows: pl.DataFrame) -> tuple[QueueWindow, ...]:
    """Return the mean number of requests between arrival and first schedule, in equal windows of the compared time."""
    end = max(float(rows[n].max() or 0.0) for n in ("finished", "replayed_last"))  # type: ignore[arg-type]  # of floats
    edges = np.linspace(0.0, end, _LOOP_WINDOWS + 1)
    begin = rows["arrival"].to_numpy()
    if rows["first_scheduled"].null_count() or end <= 0:
        return ()

    def waiting(until: Vector) -> Vector:
        # Seconds waited before each edge, summed over requests: its differences are those within a window.
        before = np.clip(edges[:, None] - begin, 0.0, np.maximum(until - begin, 0.0)).sum(axis=1)
        return np.asarray(np.diff(before) / np.diff(edges))

    sides = (waiting(rows[n].to_numpy()) for n in ("first_scheduled", "replayed_scheduled"))
    columns = (edges[:-1] / 1e6, *sides)
    return tuple(QueueWindow(*row) for row in zip(*(c.tolist() for c in columns), strict=True))
