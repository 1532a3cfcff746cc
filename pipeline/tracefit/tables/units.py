"""Wrong units: times of a file that contradict each other by a power of 1,000.

A file names no units, or names the wrong one, and its numbers are plausible in both. Another time of the file, or of
its neighbour, shows the difference: no other fault is that large.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import polars as pl

from tracefit.tables.sources import SOURCES, StepFields, is_from
from tracefit.text import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNIT_NAMES = ("ns", "us", "ms", "s")


def power_of(ratio: float) -> int:
    """Return the power of 1,000 by which two times differ, from their ratio; 0, for ratios up to 31, if their units are
    the same.
    """
    return round(math.log10(ratio) / 3) if 0 < ratio < math.inf else 0


def unit_fault(what: str, of: str, ratio: float, unit: str) -> str | None:
    """Return the fault of a time that contradicts another by a power of 1,000; null if it does not.

    Args:
        what: Its name.
        of: The name of the other one.
        ratio: It in ratio to the other one.
        unit: The unit in which it is read.

    Examples:
        >>> unit_fault("the mean of ttfts", "mean_ttft_ms", 1010.0, "s")
        'the mean of ttfts is about 1,000 times mean_ttft_ms: is it in ms?'
        >>> unit_fault("the mean of ttfts", "mean_ttft_ms", 1.3, "s")
    """
    power = power_of(ratio)
    if not power:
        return None
    times = f"{1000**power:,} times" if power > 0 else f"1/{1000**-power:,} of"
    return f"{what} is about {times} {of}: {unit_question(power, unit)}"


def unit_question(power: int, unit: str) -> str:
    """Return the question after the unit of a time that is off by a power of 1,000.

    Examples:
        >>> unit_question(1, "s")
        'is it in ms?'
    """
    at = _UNIT_NAMES.index(unit) - power
    return f"is it in {_UNIT_NAMES[at]}?" if 0 <= at < len(_UNIT_NAMES) else f"is it in {unit}?"


_LEAST_STEPS = 8
"""Fewest steps of a server whose times are compared with the time that passed."""

DECODE_STEP_US = (50.0, 5e6)
"""Times that a step of output tokens alone takes on any server: launching its kernels takes longer, reading its weights
takes less."""


_SOURCE = pl.col("cycle_source").first()


def has_fields() -> pl.Expr:
    """Return which rows of `steps` are from a source whose units are checked."""
    return is_from(lambda source: source.fields)


def step_unit_faults(pieces: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Return the servers whose recorded step times do not fit the times at which the records were received.

    Where a request decodes in two steps, one after the other, the engine does not idle between them, so that the time
    of the
    second one is the time between the two records. Both the sum and the median have to differ: records that wait in a
    queue are received together, and a clock may jump. Records without times, such as those of a table, are compared
    with the times that a step of output tokens can take.

    Args:
        pieces: Rows of `steps` in their order.

    Returns:
        server, column (the one in the wrong unit), reason.
    """
    between, decodes = [], []
    for piece in pieces:
        between.append(_times_between(piece))
        decodes.append(_decode_times(piece))
    sums, untimed = pl.concat(between), pl.concat(decodes)
    of_server = (
        sums.group_by("server", maintain_order=True)
        .agg(_SOURCE, pl.sum("steps", "cycle_us", "passed_us"), pl.median("ratio"), pl.median("unix_ns"))
        .filter(pl.col("steps") >= _LEAST_STEPS)
    )
    columns = ("server", "cycle_source", "cycle_us", "passed_us", "ratio", "unix_ns")
    rows = [
        (server, *_step_fault(_fields(source), cycle_us / passed_us, unix_ns))
        for server, source, cycle_us, passed_us, ratio, unix_ns in of_server.select(columns).iter_rows()
        if passed_us > 0 and power_of(cycle_us / passed_us) == power_of(ratio) != 0
    ]
    of_untimed = untimed.group_by("server", maintain_order=True).agg(
        _SOURCE, pl.sum("steps", "timed"), pl.median("cycle_us")
    )
    for server, source, steps, timed, cycle_us in of_untimed.iter_rows():
        least, most = DECODE_STEP_US
        if not timed and steps >= _LEAST_STEPS and not least <= cycle_us <= most:
            rows.append((server, "cycle_us", _untimed_fault(_fields(source), cycle_us)))
    return pl.DataFrame(rows, dict.fromkeys(("server", "column", "reason"), pl.String), orient="row")


def _times_between(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the source of each server, sums over its busy steps: steps, cycle_us, passed_us, and medians: ratio,
    unix_ns.
    """
    engine = ["server", "epoch"]
    passed_us = pl.col("unix_ns").diff().over(engine) / 1e3
    is_next = (pl.col("step_id").diff().over(engine) == 1) & (pl.col("num_decode_reqs") > 0)
    busy = (
        steps.filter(has_fields())
        .with_columns(passed_us=passed_us, is_next=is_next)
        .filter("is_next")
        .drop_nulls(["cycle_us", "passed_us"])
    )
    return busy.group_by("server", maintain_order=True).agg(
        _SOURCE,
        pl.sum("cycle_us", "passed_us"),
        pl.median("unix_ns"),
        steps=pl.len(),
        ratio=(pl.col("cycle_us") / pl.col("passed_us").clip(1e-3)).median(),
    )


def _decode_times(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of each server that only decode: server, cycle_source, steps, timed (those with a time of
    receipt), median cycle_us.
    """
    decodes = (pl.col("num_decode_reqs") > 0) & (pl.col("prefill_tokens").fill_null(0) == 0)
    known = steps.filter(has_fields(), decodes).drop_nulls("cycle_us")
    return (
        known.group_by("server", maintain_order=True)
        .agg(_SOURCE, pl.median("cycle_us"), steps=pl.len(), timed=pl.col("unix_ns").count())
        .select("server", "cycle_source", "steps", "timed", "cycle_us")
    )


def _fields(source: str) -> StepFields:
    fields = SOURCES[source].fields
    assert fields  # noqa: S101 - sources without them are not compared
    return fields


def _untimed_fault(fields: StepFields, cycle_us: float) -> str:
    return (
        f"the median time of steps that only decode is {number(cycle_us / 1e6)} s, which no server takes: "
        f"{fields.units}"
    )


_LEAST_UNIX_NS = 10**17
"""No record is received before this time, in 1973: it is in a coarser unit than ns."""


def _step_fault(fields: StepFields, ratio: float, unix_ns: float) -> tuple[str, str | None]:
    """Return the column of `steps` that is in the wrong unit, and the fault."""
    if unix_ns < _LEAST_UNIX_NS:
        return "unix_ns", unit_fault(f"the range of {fields.stamp}", "the time of the steps", 1 / ratio, "ns")
    return "cycle_us", unit_fault(fields.time, "the time between the records", ratio, "s")


def without_wrong_units(pieces: Iterable[pl.DataFrame], faults: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield rows of `steps` without the values that are in the wrong unit; `faults` is what `step_unit_faults`
    returned.
    """
    for piece in pieces:
        is_off = {
            column: pl.col("server").is_in(faults.filter(column=column)["server"].implode()) & has_fields()
            for column in ("cycle_us", "unix_ns")
        }
        yield piece.with_columns(pl.when(~mark).then(name).alias(name) for name, mark in is_off.items())
