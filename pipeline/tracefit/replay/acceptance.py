"""Tokens that a request gets from a step it decodes in: more than one where drafts are verified (speculative
decoding).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from tracefit.statistics import percentile
from tracefit.tables.schema import ENGINE

_SEVERAL_TOKENS = 1.05
"""Tokens a step from which on a server counts as one with drafts; preempted requests, and those cut off, are below
one."""
_FEWEST_REQUESTS = 10
"""Requests whose steps are known, below which nothing is said of them."""
_SAME_STEPS = 0.2
"""By how much the steps that requests decoded in, by the stamps of both, may differ from those that the log counts: the
two have one clock."""

ACCEPTANCE_COLUMNS = (
    *(*ENGINE, "output_tokens", "num_preemptions"),
    *("first_token_step", "finished_step", "first_token_ns", "last_token_ns"),
)
"""Columns of `requests` that are read."""


class Acceptance(NamedTuple):
    """The tokens a step of some requests.

    Attributes:
        mean: Tokens over steps, of all requests together.
        p10: The tenth percentile over requests; null where only sums are known.
        p90: The ninetieth.
    """

    mean: float
    p10: float | None = None
    p90: float | None = None


def measured_acceptance(requests: pl.DataFrame, timeline: pl.LazyFrame) -> Acceptance | None:
    """Return the tokens a step of a recording; null where a step gives one, or nothing shows them.

    The steps of a request are those between the events of its first and last token. Spans of an unmodified server have
    no steps: beside a log they are those whose lines are stamped between these tokens, or, where the clocks of the two
    differ, only their sum is known, since every line says how many requests decode.

    Args:
        requests: Complete requests of some runs.
        timeline: Steps of these runs.
    """
    per_request = _by_events(requests)
    if per_request.height < _FEWEST_REQUESTS:
        steps = timeline.select(*ENGINE, "ts_start_ns", "num_decode_reqs", "decode_tokens").collect()
        counted, computed = (_sum(steps[name]) for name in ("num_decode_reqs", "decode_tokens"))
        if computed <= _SEVERAL_TOKENS * counted:
            return None
        per_request = _by_stamps(requests, steps)
        if abs(_sum(per_request["steps"]) / counted - 1) > _SAME_STEPS:
            return _if_several(Acceptance(_sum(requests["output_tokens"] - 1) / counted))
    each = (per_request["tokens"] / per_request["steps"]).to_numpy()
    mean = _sum(per_request["tokens"]) / _sum(per_request["steps"])
    return _if_several(Acceptance(mean, *(percentile(each, q) for q in (10, 90))))


def _sum(values: pl.Series) -> float:
    return float(values.cast(pl.Float64).sum())


def _if_several(found: Acceptance) -> Acceptance | None:
    return found if found.mean > _SEVERAL_TOKENS else None


def _by_events(requests: pl.DataFrame) -> pl.DataFrame:
    """Return tokens and steps of the requests whose tokens have steps, without those that were preempted."""
    steps = pl.col("finished_step") - pl.col("first_token_step")
    kept = requests.filter((steps > 0) & (pl.col("num_preemptions").fill_null(0) == 0))
    return kept.select(tokens=pl.col("output_tokens") - 1, steps=steps)


def _by_stamps(requests: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return tokens and steps of the requests by the stamps of their tokens and of the steps of their engine."""
    timed = requests.filter(pl.col("output_tokens") > 1).drop_nulls(["first_token_ns", "last_token_ns"])
    starts = steps.drop_nulls("ts_start_ns").sort("ts_start_ns").partition_by(ENGINE, as_dict=True)
    parts = [pl.DataFrame(schema={"tokens": pl.Int64, "steps": pl.Int64})]
    for engine, part in timed.partition_by(ENGINE, as_dict=True).items():
        if engine in starts:
            begun = starts[engine]["ts_start_ns"].to_numpy()
            first, last = (
                np.searchsorted(begun, part[name].to_numpy()) for name in ("first_token_ns", "last_token_ns")
            )
            parts.append(part.select(tokens=pl.col("output_tokens") - 1, steps=pl.Series(last - first)))
    return pl.concat(parts).filter(pl.col("steps") > 0)
