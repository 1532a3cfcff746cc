"""Prepare what the report's figures show, from the models and the tables of a scope.

Four kinds of figures: models evaluated on their rows, what durations consist of, engines over time, and latencies over load.
A figure shows some rows, taken evenly in time, and sums up all of them in groups, so that a page stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import polars as pl

from tracefit.coefficients.compiled import CompiledModel, main_forms
from tracefit.coefficients.model import LinearModel, RegimesModel
from tracefit.errors import UsageError
from tracefit.features.expressions import Binary, Call, Constant, Name
from tracefit.features.targets import parts_of
from tracefit.fit.splits import FEW_ROWS
from tracefit.results.figures import (
    LATENCIES,
    US_PER_MS,
    Bin,
    Breakdown,
    Cloud,
    EngineQuantity,
    EngineRun,
    LatencyOverLoad,
    ModelRows,
    OverTime,
    Points,
    ScopeRows,
    ShadedRegion,
)
from tracefit.statistics import PERCENTS, mean_of
from tracefit.tables.health import CUT_OFF
from tracefit.tables.schema import ENGINE, SERVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.coefficients.model import Model, ScopeEvaluation
    from tracefit.features.expressions import Node
    from tracefit.fit.results import Overload
    from tracefit.results.figures import RegionKind
    from tracefit.tables.store import TableStore

MOST_ENGINES = 4
"""Engines drawn per scope; the tables have all of them."""

MOST_RUNS = 6
"""Runs overlaid in one figure."""

SLO_MS: Mapping[str, float] = {"ttft": 2000.0, "itl": 200.0}
"""Limits of MLPerf Inference for Llama-2-70B in its server scenario: objectives where a user names none."""

_REQUEST_COLUMNS = (
    "run_id",
    "server",
    "arrival_ns",
    "queued_ns",
    "finished_ns",
    "aborted_ns",
    "departed_ns",
    "finish_status",
    "prompt_tokens",
)
_STEP_COLUMNS = ("run_id", "cycle_us", "cycle_source", "idle_after", "running_depth")
_BATCH_COLUMNS = (
    "num_prefill_reqs",
    "num_decode_reqs",
    "prefill_tokens",
    "prefill_context_tokens",
    "decode_tokens",
    "context_tokens",
)
"""What a step computes."""

_STEP = (*ENGINE, "step_id")
_ROW_COLUMNS = frozenset({*_STEP, "scope_id", "target", "source", "ts_ns", "y", "split", "excluded_reason"})
"""What figures need of training rows beside the features of the models."""

_GROUPS = 8
_STRONG = 2
_FAR_OUT = 4
"""Times the median from which on a largest value asks for logarithmic axes."""


def scope_rows(
    scope: ScopeEvaluation,
    models: Sequence[Model],
    store: TableStore,
    *,
    points: int,
    slo_ms: Mapping[str, float] = SLO_MS,
) -> ScopeRows:
    """Prepare the figures of one scope; `points` is the most per series, taken evenly in time.

    Raises:
        UsageError: A run of the scope has no tables.
    """
    missing = sorted(set(scope.runs) - set(store.runs()))
    if missing:
        raise UsageError(
            f"holds no tables of {', '.join(missing)}",
            where=str(store.root),
            hint="name the tables folder with --tables",
        )
    runs = list(scope.runs)
    own = pl.col("scope_id") == scope.scope_id
    columns = sorted(_ROW_COLUMNS.union(*(CompiledModel(m).columns_with_clock for m in models)))
    batches = store.read("timeline", runs, [*_STEP, *_BATCH_COLUMNS])
    steps = with_batches(
        store.read("beta_training", runs, columns).filter(own),
        batches,
        lag_steps=scope.timeline.execution_lag_steps,
    )
    waits = store.read("alpha_training", runs, columns).filter(own)
    durations = [*(f"{name}_us" for name in LATENCIES), *_first_token_parts().values()]
    requests = store.read("requests", runs, [*_REQUEST_COLUMNS, *dict.fromkeys(durations)])
    rows_of: dict[str, ModelRows] = {}
    for model in models:
        target = pl.col("target") == model.name.removeprefix("alpha.")
        frame = steps if model.name.startswith("beta.") else waits.filter(target)
        # Tables hold the training frames of the last training alone: those of other models lack their features.
        if (rows := model_rows(model, frame, points=points)) is not None:
            rows_of[model.name] = rows
    engines, more = _engines(scope, store, steps)
    shown = runs[:MOST_RUNS]
    drawn = pl.col("run_id").is_in(shown)
    return ScopeRows(
        rows_of,
        measured_latencies(requests),
        engines,
        more,
        latencies_over_load(requests.filter(drawn), slo_ms),
        step_times_over_batch(store.read("timeline", shown, _STEP_COLUMNS)),
        len(runs) - len(shown),
        first_token_breakdown(requests),
    )


def with_batches(steps: pl.DataFrame, batches: pl.DataFrame, *, lag_steps: int = 0) -> pl.DataFrame:
    """Add to rows of `beta_training` the batch that executed, by columns of `timeline`; null for an interval of several steps.

    With `lag_steps` 1 the batch of the step before executes: scheduling runs that far ahead.
    """
    single = pl.when(pl.col("source") != "interval").then(pl.col("step_id"))
    new = [c for c in _BATCH_COLUMNS if c not in steps.columns]
    return steps.with_columns(step_id=single).join(
        batches.select(*_STEP, *new).with_columns(pl.col("step_id") + lag_steps),
        on=list(_STEP),
        how="left",
        maintain_order="left",
    )


def model_rows(model: Model, rows: pl.DataFrame, *, points: int) -> ModelRows | None:
    """Evaluate a model on its training frame, of every split; null where that lacks a feature of it or has no held-out row."""
    compiled = CompiledModel(model)
    if not compiled.columns_with_clock <= set(rows.columns):
        return None
    kept = _with_predictions(compiled, rows)
    held = kept.filter(pl.col("split") == "holdout")
    if not held.height:
        return None
    predicted, wide_range, without_place = _predicted(model, held, points)
    is_step = set(_BATCH_COLUMNS) <= set(held.columns)
    several = kept.select(SERVER).n_unique()
    ends = held.group_by(SERVER).agg(start=pl.col("at_s").min(), end=pl.col("at_s").max())
    parts = (("training rows", kept.filter(pl.col("split") == "train")), ("held-out rows", held))
    return ModelRows(
        predicted=predicted,
        wide_range=wide_range,
        without_place=without_place,
        over_time=_cloud(parts, kept, "at_s", "residual_ms", points),
        holdout=_regions("hold-out", ends) if several == 1 else (),
        servers=several,
        over_features={
            feature: _cloud((("held-out rows", known),), known, feature, "residual_ms", points)
            for feature in _strongest(model, held)
            if (known := held.drop_nulls(feature)).height
        },
        timeline=_timeline(kept, points),
        breakdown=step_breakdown(model, held) if is_step and isinstance(model, LinearModel) else None,
    )


def _with_predictions(compiled: CompiledModel, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that count, with prediction, measurement and residual in ms."""
    model = compiled.model
    kept = rows.filter(pl.col("excluded_reason").is_null())
    if "source" in kept.columns:
        # A mean over an interval is no step: the errors of the report are those on single steps, if there are enough.
        single = kept.filter(pl.col("source") != "interval")
        kept = single if single.filter(pl.col("split") == "holdout").height >= FEW_ROWS else kept
    start = pl.col("ts_ns").min().over(SERVER)
    needed = {*_STEP, *_BATCH_COLUMNS, "ts_ns", "split", *compiled.columns_with_clock}
    kept = kept.select(
        *(c for c in kept.columns if c in needed),
        predicted_ms=compiled.expression_with_clock() / US_PER_MS,
        measured_ms=pl.col("y") / US_PER_MS,
        at_s=(pl.col("ts_ns") - start) / 1e9,
        first_regime=model.regimes[0].when.expression()
        if isinstance(model, RegimesModel)
        else pl.lit(value=True),
    )
    # To a nanosecond, the resolution of the clocks: rounding errors of arithmetic are no residuals.
    residual = (pl.col("measured_ms") - pl.col("predicted_ms")).round(6)
    return kept.with_columns(residual_ms=residual).drop_nulls("residual_ms")


def _predicted(model: Model, held: pl.DataFrame, points: int) -> tuple[Cloud, bool, int]:
    """Return predicted over measured, whether its axes are logarithmic, and the rows that have no place on these."""
    most, middle = held.select(pl.col("measured_ms").max(), middle=pl.col("measured_ms").median()).row(0)
    wide_range = isinstance(model, RegimesModel) or (most or 0.0) > _FAR_OUT * max(middle or 0.0, 1e-9)
    parts = [("held-out rows", held)]
    if isinstance(model, RegimesModel):
        first, rest = model.regimes[0].name, model.regimes[-1].name
        parts = [(first, held.filter("first_regime")), (rest, held.filter(~pl.col("first_regime")))]
    if wide_range:
        positive = (pl.col("measured_ms") > 0) & (pl.col("predicted_ms") > 0)
        parts = [(name, part.filter(positive)) for name, part in parts]
    hidden = held.height - sum(part.height for _, part in parts)
    return _cloud(parts, held, "measured_ms", "predicted_ms", points), wide_range, hidden


TIME_BINS = 160
_BETWEEN_RUNS = 0.02
"""Room between two runs on a common time axis, as a share of all their time."""


def _timeline(kept: pl.DataFrame, points: int) -> OverTime:
    """Return measured and predicted over time, the runs of several servers one after the other."""
    engines = kept.group_by(SERVER, maintain_order=True).agg(seconds=pl.col("at_s").max()).head(MOST_RUNS)
    total = float(engines["seconds"].sum()) or 1.0
    begins = pl.col("seconds").cum_sum().shift(1, fill_value=0.0)
    engines = engines.with_columns(begins=begins + _BETWEEN_RUNS * total * pl.int_range(pl.len()))
    rows = (
        kept.join(engines, on=SERVER, how="inner", maintain_order="left")
        .with_columns(at_s=pl.col("at_s") + pl.col("begins"))
        .sort("at_s")
    )
    place = (pl.col("at_s") / (total / TIME_BINS)).floor()
    bins = (
        rows.group_by("begins", place.alias("bin"), maintain_order=True)
        .agg(pl.col("at_s", "measured_ms", "predicted_ms").mean())
        .sort("at_s")
    )
    # A row of nulls before every run but the first: there the lines break.
    breaks = pl.DataFrame({"begins": engines["begins"][1:], "at_s": engines["begins"][1:]})
    bins = pl.concat([breaks, bins], how="diagonal").sort("begins", "at_s", maintain_order=True)
    held = rows.filter(pl.col("split") == "holdout").group_by("begins", maintain_order=True)
    ends = held.agg(start=pl.col("at_s").min(), end=pl.col("at_s").max())
    named = engines.with_columns(
        name=pl.when(pl.col("run_id").is_duplicated())
        .then(pl.col("run_id") + ", " + pl.col("server"))
        .otherwise("run_id")
    )
    return OverTime(
        at_s=tuple(bins["at_s"]),
        measured=tuple(bins["measured_ms"]),
        predicted=tuple(bins["predicted_ms"]),
        rows=_points("single rows", rows, "at_s", "measured_ms", points),
        runs=tuple(named.select("name", "begins").iter_rows()),
        holdout=_regions("hold-out", ends),
    )


def _strongest(model: Model, held: pl.DataFrame) -> list[str]:
    """Name the features that move the prediction most over the training range."""
    effects = {
        t.feature: abs(t.value) * (t.training_range[1] - t.training_range[0])
        for form in main_forms(model).values()
        for t in form.terms
        if t.training_range is not None and t.feature in held.columns
    }
    return sorted(effects, key=lambda f: -effects[f])[:_STRONG]


def _cloud(
    parts: Sequence[tuple[str, pl.DataFrame]], rows: pl.DataFrame, x: str, y: str, points: int
) -> Cloud:
    shown = [(name, part) for name, part in parts if part.height]
    drawn = tuple(_points(name, part.sort("ts_ns"), x, y, points) for name, part in shown)
    return Cloud(drawn, sum(part.height for _, part in shown), _bins(rows, x, y))


def _points(name: str, rows: pl.DataFrame, x: str, y: str, points: int) -> Points:
    """Return some of the rows with what a reader sees of each: what was measured and predicted, and its batch."""
    taken = thinned(rows, points)
    batch = COMPOSITION if set(_BATCH_COLUMNS) <= set(rows.columns) else {}
    facts = taken.select(
        pl.col("measured_ms").alias("measured, ms"), pl.col("predicted_ms").alias("predicted, ms"), **batch
    )
    return Points(name, tuple(taken[x]), tuple(taken[y]), {c: tuple(facts[c]) for c in facts.columns})


def thinned(rows: pl.DataFrame, points: int) -> pl.DataFrame:
    """Take at most `points` rows, evenly."""
    return rows.gather_every(max(1, -(-rows.height // points)))


def _bins(rows: pl.DataFrame, x: str, y: str) -> tuple[Bin, ...]:
    """Sum up y in groups of equal size along x."""
    place = (pl.int_range(pl.len()) * _GROUPS // pl.len()).alias("bin")
    groups = (
        rows.sort(x)
        .with_columns(place)
        .group_by("bin", maintain_order=True)
        .agg(
            rows=pl.len(),
            low=pl.col(x).min(),
            high=pl.col(x).max(),
            middle=pl.col(x).median(),
            median=pl.col(y).median(),
            p10=pl.col(y).quantile(0.1),
            p90=pl.col(y).quantile(0.9),
        )
    )
    return tuple(Bin(**row) for row in groups.drop("bin").iter_rows(named=True))


def measured_latencies(requests: pl.DataFrame) -> dict[str, dict[int, float]]:
    """Return percentiles of the measured request latencies in ms; a latency of fewer than two requests is left out."""
    found = {}
    for name in LATENCIES:
        positive = requests[f"{name}_us"].drop_nulls()
        positive = positive.filter(positive > 0)
        if positive.len() >= 2:
            found[name] = {
                p: float(positive.quantile(p / 100, "linear") or 0.0) / US_PER_MS for p in PERCENTS
            }
    return found


# Runs over their load


def latencies_over_load(
    requests: pl.DataFrame, slo_ms: Mapping[str, float] = SLO_MS
) -> dict[str, LatencyOverLoad]:
    """Return each latency of each run over the requests in flight when a request arrived, from the `requests` table."""
    began = pl.coalesce("arrival_ns", "queued_ns")
    ended = pl.coalesce("finished_ns", "aborted_ns", "departed_ns")
    rows = requests.with_columns(began=began, ended=ended).drop_nulls("began")
    parts = [
        part.with_columns(in_flight=_in_flight(part).cast(pl.Float64))
        for _, part in rows.group_by(SERVER, maintain_order=True)
    ]
    if not parts:
        return {}
    rows = pl.concat(parts)
    cut_off = pl.col("finish_status").is_in(CUT_OFF).fill_null(value=False)
    found = {}
    for name in LATENCIES:
        ms = pl.col(f"{name}_us") / US_PER_MS
        known = rows.filter(ms > 0, pl.lit(name == "ttft") | ~cut_off).with_columns(ms=ms)
        if known.height < 2:
            continue
        slo = slo_ms.get(name)
        found[name] = LatencyOverLoad(
            runs=_bins_by_run(known, "in_flight", "ms"),
            requests=known.height,
            slo_ms=slo,
            within_pct=None if slo is None else 100 * int((known["ms"] <= slo).sum()) / known.height,
        )
    return found


def _in_flight(rows: pl.DataFrame) -> pl.Series:
    """Count the requests of a server that had begun and not ended when each one began; those without an end do not count."""
    whole = rows.drop_nulls("ended")
    starts, ends = whole["began"].sort(), whole["ended"].sort()
    began = starts.search_sorted(rows["began"], side="left")
    return began.cast(pl.Int64) - ends.search_sorted(rows["began"], side="right").cast(pl.Int64)


def step_times_over_batch(timeline: pl.DataFrame) -> dict[str, tuple[Bin, ...]]:
    """Return the step times of each run over the requests in the batch, of steps whose next one is known and not idle."""
    steps = timeline.filter(pl.col("cycle_source") == "adjacent", ~pl.col("idle_after")).with_columns(
        ms=pl.col("cycle_us") / US_PER_MS
    )
    return _bins_by_run(steps.drop_nulls(["ms", "running_depth"]), "running_depth", "ms")


def _bins_by_run(rows: pl.DataFrame, x: str, y: str) -> dict[str, tuple[Bin, ...]]:
    runs = rows.sort("run_id", maintain_order=True).group_by("run_id", maintain_order=True)
    return {str(run): _bins(part, x, y) for (run,), part in runs}


# Engines over their runs

BINS = 80
SHORTEST_IDLE_SHARE = 0.005
"""Idle gaps shorter than this share of the run are too thin to be visible."""

MOST_IDLE_GAPS = 60

TIMELINE_COLUMNS = (
    "server",
    "ts_start_ns",
    "cycle_us",
    "interval_steps",
    "idle_after",
    "running_depth",
    "waiting_depth",
    "prefill_tokens",
    "decode_tokens",
    "kv_usage_ratio",
)
_QUANTITIES = ("running", "waiting", "tokens", "kv_pct", "cycle_ms")


def _engines(
    scope: ScopeEvaluation, store: TableStore, steps: pl.DataFrame
) -> tuple[tuple[EngineRun, ...], int]:
    """Prepare the engines of overloaded runs first, trained on or not: a reader should look at those."""
    overloads = {o.run_id: o for o in scope.overloaded}
    runs = dict.fromkeys(r for r in (*overloads, *scope.runs) if r in store.runs())
    found: list[EngineRun] = []
    for run_id in runs:
        timeline = store.read("timeline", [run_id], TIMELINE_COLUMNS)
        training = steps.filter(pl.col("run_id") == run_id)
        for server in timeline["server"].unique().sort():
            if len(found) == MOST_ENGINES:
                break
            own = pl.col("server") == server
            engine = engine_run(
                timeline.filter(own),
                training.filter(own),
                run_id=run_id,
                server=server,
                overload=overloads.get(run_id),
            )
            found += [engine] if engine is not None else []
    return tuple(found), max(0, scope.timeline.servers - len(found))


def engine_run(
    timeline: pl.DataFrame,
    training: pl.DataFrame,
    *,
    run_id: str,
    server: str,
    overload: Overload | None = None,
) -> EngineRun | None:
    """Summarize one engine over its run; null where fewer than two steps are known.

    Args:
        timeline: The server's rows of the `timeline` table, the columns `TIMELINE_COLUMNS` at least.
        training: Its rows of `beta_training`, for the warm-up and the hold-out; may be empty.
        run_id: The run.
        server: The server.
        overload: The overload of the run in the evaluation, if there was one.
    """
    known = timeline.drop_nulls(["ts_start_ns", "running_depth"]).sort("ts_start_ns")
    if known.height < 2:
        return None
    start = int(known["ts_start_ns"][0])
    known = known.with_columns(at_s=(pl.col("ts_start_ns") - start) / 1e9)
    seconds = float(known["at_s"][-1]) or 1.0
    bins = _time_bins(known, seconds)
    overloaded = _overloaded(overload, server, start)
    boundary = _holdout_from(training, start)
    at = boundary if boundary is not None else float("inf")
    before, after = bins.filter(pl.col("at_s") < at), bins.filter(pl.col("at_s") >= at)
    return EngineRun(
        run_id=run_id,
        server=server,
        quantities=tuple(
            EngineQuantity(
                key, tuple(part["at_s"]), tuple(part[key]), mean_of(before[key]), mean_of(after[key])
            )
            for key in _QUANTITIES
            if (part := bins.drop_nulls(key)).height
        ),
        regions=(
            *_warm_up(training, start),
            *_idle(known, seconds),
            *_queues(bins, overloaded),
            *overloaded,
        ),
        holdout_from_s=boundary,
        overloaded=None if overload is None else overload.trained_on,
    )


def _time_bins(known: pl.DataFrame, seconds: float) -> pl.DataFrame:
    width = seconds / BINS
    place = (pl.col("at_s") / width).floor().clip(0, BINS - 1)
    busy = pl.col("cycle_us").filter(~pl.col("idle_after"))
    return (
        known.with_columns(bin=place)
        .group_by("bin", maintain_order=True)
        .agg(
            at_s=pl.col("at_s").mean(),
            running=pl.col("running_depth").mean(),
            waiting=pl.col("waiting_depth").mean(),
            queued=pl.col("waiting_depth").min() > 0,
            # Not per second: of sampled steps the tokens of those between are not known.
            tokens=(pl.col("prefill_tokens") + pl.col("decode_tokens")).mean(),
            kv_pct=100 * pl.col("kv_usage_ratio").mean(),
            cycle_ms=busy.median() / US_PER_MS,
        )
        .with_columns(start=pl.col("bin") * width, end=(pl.col("bin") + 1) * width)
        .sort("bin")
    )


def _overloaded(overload: Overload | None, server: str, start_ns: int) -> tuple[ShadedRegion, ...]:
    return tuple(
        ShadedRegion("overload", max(0.0, (q.from_ns - start_ns) / 1e9), (q.to_ns - start_ns) / 1e9)
        for q in (overload.queued if overload else ())
        if q.server == server
    )


def _queues(bins: pl.DataFrame, overloaded: tuple[ShadedRegion, ...]) -> tuple[ShadedRegion, ...]:
    """Join neighbouring intervals in which requests wait at every step, but those already marked as overload."""
    middle = (pl.col("start") + pl.col("end")) / 2
    marked = pl.any_horizontal(pl.lit(value=False), *(middle.is_between(b.start, b.end) for b in overloaded))
    queued = bins.filter(pl.col("queued").fill_null(value=False) & ~marked)
    group = (pl.col("bin").diff().fill_null(1) > 1).cum_sum()
    joined = queued.with_columns(group=group).group_by("group", maintain_order=True)
    ends = joined.agg(pl.col("start").min(), pl.col("end").max()).select("start", "end")
    return _regions("queue never empty", ends)


def _idle(known: pl.DataFrame, seconds: float) -> tuple[ShadedRegion, ...]:
    length = pl.col("cycle_us") * pl.col("interval_steps") / 1e6
    gaps = known.filter(pl.col("idle_after") & (length > SHORTEST_IDLE_SHARE * seconds))
    ends = gaps.select(start="at_s", end=pl.col("at_s") + length, length=length)
    longest = ends.sort("length", descending=True).head(MOST_IDLE_GAPS).sort("start")
    return _regions("idle", longest)


def _warm_up(training: pl.DataFrame, start_ns: int) -> tuple[ShadedRegion, ...]:
    left_out = training.filter(pl.col("excluded_reason") == "warm_up")
    ends = left_out.group_by("epoch").agg(a=pl.col("ts_ns").min(), b=pl.col("ts_ns").max()).sort("epoch")
    return tuple(
        ShadedRegion("warm-up", (a - start_ns) / 1e9, (b - start_ns) / 1e9) for _, a, b in ends.iter_rows()
    )


def _regions(kind: RegionKind, ends: pl.DataFrame) -> tuple[ShadedRegion, ...]:
    return tuple(ShadedRegion(kind, a, b) for a, b in ends.select("start", "end").iter_rows())


def _holdout_from(training: pl.DataFrame, start_ns: int) -> float | None:
    held = training.filter(pl.col("split") == "holdout")
    return (held.select(pl.col("ts_ns").min()).item() - start_ns) / 1e9 if held.height else None


GROUPS = 10
EVERY_STEP = "every step"

_PARTS: Mapping[str, tuple[str, ...]] = {
    EVERY_STEP: ("layers",),
    "weights": ("weight_read_us", "weight_kb", "moe_expert_read_us", "expert_kb"),
    "prompt tokens": (
        "prefill_compute_us",
        "prefill_mflop",
        "prefill_kv_write_us",
        "kv_write_kb",
        "prefill_tokens",
        "prefill_tokens_squared",
        "prefill_tokens_x_layers",
        "prefill_share",
    ),
    "generated tokens": ("decode_compute_us", "decode_mflop", "decode_tokens"),
    "context": (
        "decode_kv_read_us",
        "kv_read_kb",
        "context_tokens",
        "decode_tokens_x_kv_blocks",
        "kv_usage_ratio",
    ),
    "requests": (
        "batch_requests",
        "num_prefill_reqs",
        "num_decode_reqs",
        "num_decode_reqs_squared",
        "first_decode_reqs",
        "running_depth",
    ),
    "waiting requests": ("waiting_depth",),
    "communication": ("tp_comm_us", "moe_dispatch_us"),
}
"""Part to the features that belong to it; any other feature is a part of its own."""

_PART_OF = {feature: part for part, features in _PARTS.items() for feature in features}

COMPOSITION = {
    "requests": pl.col("num_prefill_reqs") + pl.col("num_decode_reqs"),
    "prompt tokens": pl.col("prefill_tokens"),
    "generated tokens": pl.col("decode_tokens"),
    "context tokens": pl.col("context_tokens"),
}
"""What a reader sees of a step, over columns of the `timeline` table."""


def step_breakdown(model: LinearModel, steps: pl.DataFrame) -> Breakdown | None:
    """Return what step times consist of by the terms of their model, short steps first; null where no step has all it needs.

    `steps` have `measured_ms`, the model's features, and the `timeline` columns of the batch that executed.
    """
    compiled = CompiledModel(model)
    largest = {t.feature: _largest_of(compiled.formulas.nodes.get(t.feature)) for t in model.terms}
    known = compiled.formulas.frame(
        steps, {name for sums in largest.values() for one in sums for name in one}
    )
    parts: dict[str, list[pl.Expr]] = {EVERY_STEP: [pl.lit(model.intercept.value)]}
    for term in model.terms:
        sums = largest[term.feature]
        can_split = sums and all(set(one) <= set(known.columns) for one in sums)
        addends = _split(sums) if can_split else {term.feature: pl.col(term.feature)}
        for name, value in addends.items():
            parts.setdefault(_PART_OF.get(name, name), []).append(term.value * value)
    ms = {name: pl.sum_horizontal(values, ignore_nulls=False) / US_PER_MS for name, values in parts.items()}
    return _grouped(known, ms, pl.col("measured_ms"), COMPOSITION)


def first_token_breakdown(requests: pl.DataFrame) -> Breakdown | None:
    """Return what the measured TTFT consists of, shortest first; null where no request has all of its parts."""
    return _grouped(
        requests,
        {name: pl.col(column) / US_PER_MS for name, column in _first_token_parts().items()},
        pl.col("ttft_us") / US_PER_MS,
        {"prompt tokens": pl.col("prompt_tokens")},
    )


def _first_token_parts() -> dict[str, str]:
    """Return what TTFT consists of: name to column of the `requests` table, in us."""
    return {target.label: target.column for target in parts_of("ttft")} | {"prefill": "prefill_us"}


def _grouped(
    rows: pl.DataFrame, parts: Mapping[str, pl.Expr], duration: pl.Expr, facts: Mapping[str, pl.Expr]
) -> Breakdown | None:
    """Sum up rows in groups of equal size by their duration; parts that are zero everywhere are left out."""
    columns = {f"part {k}": value for k, value in enumerate(parts.values())}
    known = rows.select(duration=duration, **columns, **facts).drop_nulls(["duration", *columns])
    if known.height < GROUPS:
        return None
    group = (pl.int_range(pl.len()) * GROUPS // pl.len()).alias("group")
    means = (
        known.sort("duration")
        .with_columns(group)
        .group_by("group", maintain_order=True)
        .agg(pl.len().alias("rows"), pl.col(["duration", *columns, *facts]).mean())
    )
    found = {name: means[column] for name, column in zip(parts, columns, strict=True)}
    return Breakdown(
        parts={name: tuple(values) for name, values in found.items() if values.abs().max()},
        measured=tuple(means["duration"]),
        rows=tuple(means["rows"]),
        facts={name: tuple(means[name]) for name in facts},
    )


_Sum: TypeAlias = dict[str, float]
"""Name to factor."""


def _largest_of(node: Node | None) -> list[_Sum]:
    """Return the sums that a formula is the largest of; none for any other formula."""
    if not isinstance(node, Call) or node.function != "max":
        return []
    sums = [_addends(argument) for argument in node.arguments]
    return [one for one in sums if one is not None] if None not in sums else []


def _split(sums: list[_Sum]) -> dict[str, pl.Expr]:
    """Return the addends of the largest of several sums, row by row: 0 where their sum is not the largest."""
    addends = [{name: factor * pl.col(name) for name, factor in one.items()} for one in sums]
    wholes = [pl.sum_horizontal(one.values(), ignore_nulls=False) for one in addends]
    largest = pl.concat_list(wholes).list.arg_max()
    return {
        name: pl.when(largest == k).then(value).otherwise(0.0)
        for k, one in enumerate(addends)
        for name, value in one.items()
    }


def _addends(node: Node, factor: float = 1.0) -> _Sum | None:
    """Return name to factor of a sum of names; null for any other formula."""
    match node:
        case Name(name):
            return {name: factor}
        case Binary("+", left, right):
            first, second = _addends(left, factor), _addends(right, factor)
            return None if first is None or second is None else first | second
        case Binary("*", Constant(value), other) | Binary("*", other, Constant(value)):
            return _addends(other, factor * value)
        case _:
            return None
