"""Replay the held-out part of runs in a closed loop: arrivals and lengths in, latencies out, beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.coefficients.files import find_models
from tracefit.coefficients.models import load
from tracefit.commands.locate import choose_scope, tables_of
from tracefit.errors import TracefitError, UsageError, known_names
from tracefit.progress import NullProgress, Progress
from tracefit.replay.engine import EngineSettings
from tracefit.replay.models import FittedStepTimes, admission_us
from tracefit.replay.run import RequestLoad, replay
from tracefit.results.models import Replayed, ReplayResult, RunReplay
from tracefit.tables.schema import ENGINE
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.coefficients.models import Models
    from tracefit.coefficients.predict import ScopeModels

LEAST_REQUESTS = 20
"""Held-out requests, for percentiles that say something."""

ALL_JOURNEYS = 0.999

_NEEDED = ("max_num_seqs", "max_num_batched_tokens")
_OUTPUT = pl.coalesce("output_tokens", "max_tokens")
_TIMES = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finished_ns")


def replay_runs(
    folder: str | Path, *, run: str | None = None, progress: Progress | None = None
) -> ReplayResult:
    """Replay the held-out part of every run of a folder that `tracefit run` wrote.

    Args:
        folder: The folder.
        run: The run to replay; all if not given.
        progress: Receives the name of each run.

    Raises:
        UsageError: There are no models, no tables or no such run.
    """
    models, store = load(find_models(folder)), TableStore(tables_of(folder)).require()
    runs = store.runs()
    if run is not None and run not in runs:
        raise UsageError(
            f"there is no run {run}", where=str(folder), hint=known_names(run, runs, title="runs")
        )
    progress = progress or NullProgress()
    return ReplayResult(tuple(_run(store, models, one) for one in ([run] if run else runs)))


def _run(store: TableStore, models: Models, run_id: str) -> RunReplay:
    """Replay one run, or say why that is not possible."""
    scope_id = None
    try:
        scope_id = choose_scope(models, None, run_id)
        return _closed_loop(store, models.scope(scope_id), run_id)
    except TracefitError as error:
        return RunReplay(run_id, scope_id, reason=str(error))


def _closed_loop(store: TableStore, scope: ScopeModels, run_id: str) -> RunReplay:
    model = scope.step_model
    ranges = model.training.time_range if model.training else ()
    cuts = {r.server: r.holdout_from_ns for r in ranges if r.run_id == run_id}
    times, settings = FittedStepTimes(model, scope.server), _settings(scope, store, run_id)
    requests = store.read("requests", [run_id])
    if missing := _missing(store.read("runs", [run_id]), requests, cuts):
        return RunReplay(run_id, scope.scope_id, reason=missing)
    parts = [
        _engine(engine, cuts[engine["server"][0]], scope, times, settings)
        for engine in requests.partition_by(ENGINE, maintain_order=True)
        if engine["server"][0] in cuts
    ]
    found = pl.concat(parts)
    counted = found.filter("counts")
    if counted.height < LEAST_REQUESTS:
        few = (
            f"{counted.height} requests come in the held-out part and end in it: fewer than {LEAST_REQUESTS}"
        )
        return RunReplay(run_id, scope.scope_id, reason=few)
    in_flight = int((found["arrival"] < 0).sum())
    return RunReplay(run_id, scope.scope_id, counted.height, in_flight, _compared(counted))


def _missing(run: pl.DataFrame, requests: pl.DataFrame, cuts: dict[str, int]) -> str | None:
    """Return why a run cannot be replayed."""
    sampled = run["journey_sampling"].drop_nulls()
    known = requests.filter(
        pl.all_horizontal(pl.col("arrival_ns", "prompt_tokens").is_not_null(), _OUTPUT.is_not_null())
    ).height
    if not requests.height:
        return "no request was traced, only steps"
    if not cuts:
        return "the model of step times has no rows of this run"
    # None at all is no sample: other spans may show every request.
    if sampled.is_between(0, ALL_JOURNEYS, closed="none").any():
        share = float(sampled.to_numpy().min())
        return f"journeys are a sample of {share:.0%}: the requests between them are not known"
    if known < ALL_JOURNEYS * requests.height or not known:
        return f"arrival and lengths are known of {known} of {requests.height} requests"
    return None


def _settings(scope: ScopeModels, store: TableStore, run_id: str) -> EngineSettings:
    """Return the settings of a scope's server; its KV blocks are those that the steps state.

    Raises:
        UsageError: A limit of the scheduler is not known.
    """
    server = scope.server
    if unknown := [name for name in _NEEDED if not server[name]]:
        raise UsageError(f"{' and '.join(unknown)} of the server is not known")
    stated = scope.step_model.scope.settings if scope.step_model.scope else {}
    timeline = store.scan("timeline", [run_id]).select(pl.col("kv_blocks_total").max()).collect().item()
    given = server["num_gpu_blocks"]
    return EngineSettings(
        max_num_seqs=int(server["max_num_seqs"] or 0),
        max_num_batched_tokens=int(server["max_num_batched_tokens"] or 0),
        block_size=int(server["block_size"] or 0),
        num_blocks=timeline or (int(given) - 1 if given else None),
        by_priority=stated.get("scheduling_policy") == "priority",
        chunked_prefill=stated.get("enable_chunked_prefill") is not False,
        prefix_caching=stated.get("enable_prefix_caching") is not False,
        async_scheduling=stated.get("async_scheduling") is True,
    )


def _engine(
    requests: pl.DataFrame, cut_ns: int, scope: ScopeModels, times: FittedStepTimes, settings: EngineSettings
) -> pl.DataFrame:
    """Replay what one engine has from a time on: measured times and replayed ones, in us after it."""
    left = pl.coalesce("finished_ns", "aborted_ns", "departed_ns", "last_token_ns")
    rows = (
        requests.drop_nulls(["arrival_ns", "prompt_tokens"])
        .filter(left.is_null() | (left >= cut_ns))
        .sort("arrival_ns")
        .select(
            *((pl.col(name) - cut_ns).truediv(1e3).alias(name.removesuffix("_ns")) for name in _TIMES),
            prompt=pl.col("prompt_tokens").clip(lower_bound=1),
            # One that never ended may have generated all it was allowed.
            output=_OUTPUT.fill_null(1).clip(lower_bound=1),
            cached=pl.col("cached_prompt_tokens").fill_null(0),
            # What is in flight has as many tokens as its share of the time between its first and its last.
            share=(cut_ns - pl.col("first_token_ns")) / (pl.col("finished_ns") - pl.col("first_token_ns")),
            # An unmodified server's spans have no status: those that finished have not been aborted.
            ended=pl.col("finish_status").fill_null("stopped").is_in(["stopped", "length"]),
        )
        .with_columns(done=(1 + pl.col("share").clip(0, 1) * (pl.col("output") - 1)).floor().cast(pl.Int64))
        .with_columns(done=pl.when(pl.col("share") > 0).then("done").otherwise(0))
    )
    arrival, prompt, output, cached, done = (
        rows[n].to_numpy() for n in ("arrival", "prompt", "output", "cached", "done")
    )
    come = np.maximum(arrival, 0.0)
    admission = admission_us(scope.models.get("alpha.admission"), arrival, prompt) + arrival - come
    load = RequestLoad(come, prompt, output, cached, generated_tokens=done)
    found = replay(load, times, settings, admission_us=np.maximum(admission, 0.0))
    replayed = {
        "scheduled": found.scheduled_us,
        "first": found.first_us,
        "last": found.last_us,
    }
    rows = rows.with_columns(pl.Series(f"replayed_{n}", v, nan_to_null=True) for n, v in replayed.items())
    is_known = pl.all_horizontal(pl.col("^(replayed_.*|first_scheduled|first_token|finished)$").is_not_null())
    return rows.with_columns(counts=(pl.col("arrival") >= 0) & pl.col("ended") & is_known)


def _compared(rows: pl.DataFrame) -> tuple[Replayed, ...]:
    """Return percentiles, throughput and the mean queue of the same requests, measured and replayed."""
    sides = [
        ("first_scheduled", "first_token", "finished"),
        ("replayed_scheduled", "replayed_first", "replayed_last"),
    ]
    measured, replayed = (_quantities(rows, *names) for names in sides)
    return tuple(
        Replayed(name, value, replayed[name], 100 * (replayed[name] / value - 1) if value else None)
        for name, value in measured.items()
        if name in replayed
    )


def _quantities(rows: pl.DataFrame, scheduled: str, first: str, last: str) -> dict[str, float]:
    begin = pl.col("arrival")
    latencies = {
        "ttft": rows.select(pl.col(first) - begin),
        "itl": rows.filter(pl.col("output") > 1).select(
            (pl.col(last) - pl.col(first)) / (pl.col("output") - 1)
        ),
        "e2e": rows.select(pl.col(last) - begin),
    }
    found = {
        f"{name}_p{q}_us": float(np.percentile(values.to_series().to_numpy(), q))
        for name, values in latencies.items()
        if values.height
        for q in (50, 90, 99)
    }
    span = float(rows.select(pl.col(last).max() - begin.min()).item())
    # By Little's law, the sum of waits over the time is the mean number that wait.
    waited = float(rows.select((pl.col(scheduled) - begin).sum()).item())
    return found | {
        "output_tokens_per_s": 1e6 * float(rows["output"].sum()) / span,
        "waiting_mean": waited / span,
    }
