"""Summarize requests: counts, failures, latency percentiles and throughput."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import polars as pl

from tracefit.commands.locate import find_tables
from tracefit.errors import FORMULA_SIGNS, DataError
from tracefit.models import targets
from tracefit.results.requests import PhaseSummary, Quantiles, RequestGroup, RequestSummary
from tracefit.server.settings import ENDPOINT_FLAG
from tracefit.statistics import percentiles
from tracefit.tables import client_times, schema
from tracefit.tables.requests import latency_us
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tracefit.options import TablesArgument

_RUN_KEY = ["run_id"]
_FAILED_STATUSES = ("FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR")
_LIVE = ("WAITING", "RUNNING", "PREEMPTED")
WINDOWS = 10
"""Windows of time a run is cut into, about."""

_OF_A_GROUP = {
    *("arrival_ns", "queued_ns", "finished_ns", "departed_ns", "aborted_ns", "state", "num_preemptions"),
    *("prompt_tokens", "output_tokens", "ttft_us", "itl_us", "e2e_us", "time_in_queue_us"),
    *("run_id", "dialect", "finish_status", *client_times.CLIENT_TIMES),
}
_STEP_PHASES = {"requeue wait": "requeue_wait_us", "prefill": "prefill_us", "decode": "decode_us"}


def phase_columns() -> dict[str, str]:
    """Return the parts of a request's life, in their order, and their columns."""
    before, after = ({t.label: t.column for t in targets.parts_of(latency)} for latency in ("ttft", "client"))
    return before | _STEP_PHASES | after


SECONDS_VIEW = {
    "arrival_time": "arrival_ns",
    "first_scheduled_time": "first_scheduled_ns",
    "first_token_time": "first_token_ns",
    "last_token_time": "last_token_ns",
    "finished_time": "finished_ns",
    "time_in_queue": "time_in_queue_us",
    "first_wait": "queue_wait_us",
    "preempted_time": "requeue_wait_us",
    "scheduler_time": "scheduler_us",
    "model_forward_time": "model_forward_us",
    "model_execute_time": "model_execute_us",
    "ttft": "ttft_us",
    "itl": "itl_us",
    "itl_p99": "itl_p99_us",
    "tpot": "tpot_us",
    "e2e": "e2e_us",
}
"""vLLM's names of a request's metrics, in seconds, and the columns they come from."""
_UNCHANGED = (
    *("tokens_per_s", "queue_ratio", "execute_ratio"),
    *("prompt_tokens", "output_tokens", "num_preemptions"),
)
_PER_SECOND = {"ns": 1e9, "us": 1e6}


def read_requests(tables: str | Path) -> pl.DataFrame:
    """Read the `requests` table of all runs.

    Raises:
        UsageError: The folder has no tables.
        DataError: The tables have no requests.
    """
    rows = schema.REQUESTS.conform(TableStore(find_tables(tables)).require().read("requests"))
    if not rows.height:
        raise DataError(
            "holds no requests",
            where=str(tables),
            hint=f"start vLLM with {ENDPOINT_FLAG} URL, which gives a span of every request",
        )
    return rows


def requests(tables: TablesArgument) -> RequestSummary:
    """Summarize the requests of all runs: together, by run, by phase, and over time.

    Raises:
        UsageError: The folder has no tables.
        DataError: The tables have no requests.

    Examples:
        >>> import tracefit
        >>> total = tracefit.requests("out/").total
        >>> total.requests, total.failed
        (100, 4)
    """
    rows = client_times.with_clients_latencies(read_requests(tables))
    # Clocks of different runs do not compare: times are since the first arrival of each run.
    begin, end = pl.col("arrival_ns").min().over(_RUN_KEY), _last_event().max().over(_RUN_KEY)
    rows = rows.with_columns(since_s=(pl.col("arrival_ns") - begin) / 1e9, run_s=(end - begin) / 1e9)
    runs = {str(name): part for (name,), part in rows.group_by(_RUN_KEY, maintain_order=True)}
    lengths = {name: _seconds(part) for name, part in runs.items()}
    known = [s for s in lengths.values() if s is not None]
    states = rows["state"].fill_null("unknown").value_counts().sort("state")
    return RequestSummary(
        total=_group("all", "all", rows, sum(known) if known else None),
        states=dict(states.iter_rows()),
        runs=tuple(_group("run", name, part, lengths[name]) for name, part in runs.items()),
        phases=_phases(rows),
        windows=tuple(w for name, part in runs.items() for w in _windows(name, part, lengths[name])),
    )


def served(store: TableStore, runs: Iterable[str]) -> tuple[RequestGroup, ...]:
    """Summarize the requests of each run; runs without any are left out."""
    columns = [c.name for c in schema.REQUESTS.columns if c.name in _OF_A_GROUP]
    groups = []
    for run in runs:
        rows = client_times.with_clients_latencies(store.read("requests", [run], columns))
        seconds = rows.select(run_s=(_last_event().max() - pl.col("arrival_ns").min()) / 1e9)
        if rows.height:
            groups.append(_group("run", run, rows, _seconds(seconds)))
    return tuple(groups)


def seconds_view(tables: str | Path) -> pl.DataFrame:
    """Return one row per request under vLLM's names, in seconds on the engine's clock; null where not known.

    Raises:
        UsageError: The folder has no tables.
        DataError: The tables have no requests.
    """
    rows = read_requests(tables)
    units = {c.name: c.unit for c in schema.REQUESTS.columns}
    return rows.select(
        *("run_id", "server", "request_id", "core_request_id", "state"),
        *((pl.col(c) / _PER_SECOND[units[c] or ""]).alias(name) for name, c in SECONDS_VIEW.items()),
        *_UNCHANGED,
    )


def _last_event() -> pl.Expr:
    return pl.max_horizontal("arrival_ns", "queued_ns", "finished_ns", "departed_ns", "aborted_ns")


def _seconds(rows: pl.DataFrame) -> float | None:
    """Time from the first arrival to the last event; null without one of them."""
    seconds = rows["run_s"].max()
    return float(seconds) if isinstance(seconds, float) and seconds > 0 else None


def _windows(run: str, rows: pl.DataFrame, seconds: float | None) -> list[RequestGroup]:
    """Cut a run into about `WINDOWS` windows of a round length, by arrival."""
    if seconds is None:
        return []
    length = _round_length(seconds / WINDOWS)
    # Windows are by arrival: a request that runs through several of them counts once.
    cut = rows.drop_nulls("since_s").with_columns(begins=pl.col("since_s") // length * length).sort("begins")
    return [
        _group("time", f"{run} {begins:g}-{begins + length:g} s", part, min(length, seconds - begins))
        for (begins,), part in cut.group_by("begins", maintain_order=True)
        if isinstance(begins, float)
    ]


def _round_length(seconds: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= seconds)


def _group(by: str, name: str, rows: pl.DataFrame, seconds: float | None) -> RequestGroup:
    latencies = rows.select(latency_us(latency).alias(latency) for latency in targets.LATENCY_TITLES)
    tokens = int(rows["output_tokens"].sum() or 0)
    return RequestGroup(
        by=by,
        name=name,
        requests=rows.height,
        failed=int(rows["state"].is_in(_FAILED_STATUSES).sum() or 0),
        in_flight=int(rows["state"].is_in(_LIVE).sum() or 0),
        preemptions=int(rows["num_preemptions"].sum() or 0),
        prompt_tokens=int(rows["prompt_tokens"].sum() or 0),
        output_tokens=tokens,
        seconds=seconds,
        requests_per_s=rows.height / seconds if seconds else None,
        output_tokens_per_s=tokens / seconds if seconds else None,
        ttft=_quantiles(latencies["ttft"]),
        itl=_quantiles(latencies["itl"]),
        e2e=_quantiles(latencies["e2e"]),
        queue=_quantiles(rows["time_in_queue_us"]),
    )


def _phases(rows: pl.DataFrame) -> tuple[PhaseSummary, ...]:
    columns = phase_columns()
    totals = {name: float(rows[column].sum() or 0) for name, column in columns.items()}
    everything = sum(totals.values()) or None
    return tuple(
        PhaseSummary(name, everything and totals[name] / everything, _quantiles(rows[column]))
        for name, column in columns.items()
        if rows[column].is_not_null().any()
    )


def _quantiles(us: pl.Series) -> Quantiles:
    """Describe durations in us."""
    known = us.drop_nulls() / 1e6
    if not len(known):
        return Quantiles(0, None, None, None, None)
    p50, p90, p99 = percentiles(known.to_numpy(), (50, 90, 99))
    return Quantiles(len(known), float(known.sum()) / len(known), p50, p90, p99)


def csv_text(rows: pl.DataFrame) -> str:
    """Return a frame as CSV. Ids and names come from elsewhere: none is a formula to a spreadsheet."""
    formula = rf"^([{re.escape(FORMULA_SIGNS)}])"
    return rows.with_columns(pl.col(pl.String).str.replace(formula, "'${1}")).write_csv()
