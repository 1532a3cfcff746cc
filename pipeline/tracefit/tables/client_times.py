"""Join the measurements of load generators with the server's record of the same requests.

Requests match by their ids, as vLLM extends them (`cmpl-<id>-0`). If a client writes no ids, they match by length and
order of arrival (`tables.arrivals`). A request that matches none of the server's is left out and counted, because the
server's requests are the load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.tables.arrivals import pairs_by_arrival
from tracefit.tables.dialects import CLIENT, NOT_SENT_S
from tracefit.tables.units import power_of, unit_fault

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARK_DIGITS = 8
"""Digits of a client's trace id that name its benchmark."""

CLIENT_TIMES = ("client_ttft_us", "client_itl_us", "client_e2e_us")
_SERVER_ID = r"^(?:chat)?cmpl-|-[0-9]{1,2}$"
_NOT_SENT = f"{int(NOT_SENT_S * 1e9):016x}"
"""The end of the trace id of a request whose file does not say when it was sent: that of its start."""

_BY_ID_SHARE = 0.5
"""If at least this share of a benchmark's requests match by id, the ids are the server's, and the others match none."""

_LEAST_COMPARED_TIMES, _ALIKE_SHARE, _ALIKE_TIMES = 3, 0.8, 3.0
"""A unit is wrong if at least so many latencies of a benchmark, and this share of them, are off by a power of 1,000
within this factor: a queue before the server makes some of them long, in no proportion to the server's."""

UNMATCHED = "client requests that match no span"
NO_ID = "no span has their id"
FAILED = "failed at the client"
NO_LENGTH = "no length to match by"
NO_ARRIVAL = "the client does not say when they were sent"

_NEAR_TIMES, _MIN_NEAR = 0.05, 0.9
"""If at least this share of the requests have output lengths this close to the median, all were sent with one
length."""

_SHORT, _MIN_SHORT = 0.5, 0.005
_SAME_TIME, _MIN_SAME_TIME = 0.1, 0.9
"""Requests are short below this share of the median length. If they are at least this share of all, and so many of them
take about the median time, within this share, the client counted the tokens in the text."""

TEXT_COUNT = "output tokens of a client that counts them in the text: their median in place of them"


def with_asked_lengths(requests: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return requests with the median as output length, if all were sent with one length and the client counted the
    tokens in the text.

    An engine that ignores the end of a sequence computes as many tokens as requested. Some have no text, so that a
    client that counts in the text reports fewer for requests that took as long as the others.

    Args:
        requests: The `requests` table of a run with its clients' times.

    Returns:
        The requests, and the number of changed lengths: 0 if the counts follow the times, or a server recorded
            requests.
    """
    tokens, decode_us = pl.col("output_tokens"), pl.col("client_e2e_us") - pl.col("client_ttft_us")
    usual = tokens.median().round()
    is_near = (tokens / usual - 1).abs() <= _NEAR_TIMES
    is_short = tokens < _SHORT * usual
    lasts = (decode_us / decode_us.median() - 1).abs() <= _SAME_TIME
    timed = requests.drop_nulls(["output_tokens", "client_e2e_us", "client_ttft_us"])
    if not timed.height or not (requests["dialect"] == CLIENT).all():
        return requests, 0
    near, short, as_long, length = timed.select(
        is_near.mean(),
        is_short.mean().alias("short"),
        lasts.filter(is_short).mean().alias("long"),
        usual.alias("usual"),
    ).row(0)
    if near < _MIN_NEAR or short < _MIN_SHORT or (as_long or 0.0) < _MIN_SAME_TIME:
        return requests, 0
    asked = pl.when(tokens.is_not_null()).then(pl.lit(int(length), pl.Int64))
    changed = requests.with_columns(output_tokens=asked, client_itl_us=decode_us / max(length - 1, 1))
    return changed, int((requests["output_tokens"] != changed["output_tokens"]).sum())


def with_clients_latencies(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests with the client's TTFT, ITL and E2E as theirs, in runs whose requests only a client describes.

    Args:
        requests: Rows of the `requests` table with run_id, dialect, `CLIENT_TIMES` and the latencies.
    """
    only_client = (pl.col("dialect") == CLIENT).fill_null(value=False).all().over("run_id")
    own = {name.removeprefix("client_"): name for name in CLIENT_TIMES}
    return requests.with_columns(
        pl.when(only_client).then(client).otherwise(name).alias(name) for name, client in own.items()
    )


def with_client_times(requests: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int], dict[str, int]]:
    """Return requests with the times of their clients; client rows are left out if a server recorded requests.

    A run without requests of a server, or without a client, stays as it is.

    Args:
        requests: The `requests` table of a run.

    Returns:
        The requests; the number of the client's requests without a match, by likely reason; and of those whose times
        are left out because their unit is wrong, by fault.
    """
    is_client = pl.col("dialect") == CLIENT
    requests = _with_latencies(requests)
    numbered = requests.with_row_index("row").with_columns(
        benchmark=pl.col("trace_id").str.head(BENCHMARK_DIGITS).fill_null("")
    )
    client_rows = numbered.filter(is_client)
    # A server's request that never ended has an id but no lengths to compare.
    server_rows = numbered.filter(~is_client)
    if not client_rows.height or not server_rows.height:
        return requests, {}, {}
    by_id = _by_id(client_rows, server_rows)
    rest = client_rows.join(by_id, left_on="row", right_on="client", how="anti")
    share = client_rows.group_by("benchmark").agg(share=pl.col("row").is_in(by_id["client"].implode()).mean())
    has_ids = rest.join(share, on="benchmark", how="left")["share"] >= _BY_ID_SHARE
    times, several = pl.col("client_ttft_us").is_not_null(), pl.col("output_tokens") > 0
    known = rest.select("row", "benchmark", "arrival_ns", "output_tokens", "client_ttft_us").with_columns(
        reason=pl.when(has_ids)
        .then(pl.lit(NO_ID))
        .when(~times)
        .then(pl.lit(FAILED))
        .when(pl.col("arrival_ns").is_null())
        .then(pl.lit(NO_ARRIVAL))
        .when(~several.fill_null(value=False))
        .then(pl.lit(NO_LENGTH))
    )
    columns = ["row", "arrival_ns", "output_tokens"]
    received = server_rows.join(by_id, on="row", how="anti").select(columns).drop_nulls()
    sought = known.filter(pl.col("reason").is_null()).select("benchmark", *columns)
    by_arrival, unmatched = pairs_by_arrival(sought, received.filter(pl.col("output_tokens") > 0))
    pairs = pl.concat([by_id, by_arrival])
    reasons = pl.concat([known["reason"].drop_nulls(), unmatched["reason"]]).value_counts()
    measured = client_rows.select("row", "benchmark", *CLIENT_TIMES)
    joined = numbered.drop("benchmark").join(
        pairs.join(measured, left_on="client", right_on="row").drop("client"),
        on="row",
        how="left",
        suffix="_of_client",
        maintain_order="left",
    )
    filled = joined.with_columns(pl.coalesce(f"{name}_of_client", name).alias(name) for name in CLIENT_TIMES)
    kept, faults = _without_wrong_units(filled.filter(~is_client.fill_null(value=False)))
    kept = kept.with_columns(network_us=pl.col("client_ttft_us") - pl.col("ttft_us"))
    return kept.select(requests.columns), dict(reasons.sort("reason").iter_rows()), faults


def _without_wrong_units(requests: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """Return a server's requests without the times of benchmarks in another unit, and the number of these by fault."""
    faults: dict[str, int] = {}
    for (benchmark,), rows in requests.drop_nulls("benchmark").group_by("benchmark", maintain_order=True):
        for fault in _unit_faults(rows):
            faults[fault] = faults.get(fault, 0) + rows.height
            is_off = (pl.col("benchmark") == benchmark).fill_null(value=False)
            requests = requests.with_columns(pl.when(~is_off).then(name).alias(name) for name in CLIENT_TIMES)
            break  # the first one says it
    return requests, faults


def _unit_faults(matched: pl.DataFrame) -> Iterator[str]:
    """Yield the faults of a benchmark's times that are, request by request, a power of 1,000 above or below the
    server's.
    """
    decode = {side: pl.col(f"{side}e2e_us") - pl.col(f"{side}ttft_us") for side in ("client_", "")}
    for what, ratio in (
        ("TTFT", pl.col("client_ttft_us") / pl.col("ttft_us")),
        ("E2E", pl.col("client_e2e_us") / pl.col("e2e_us")),
        ("ITL", decode["client_"] / decode[""]),
    ):
        ratios = matched.select(ratio=ratio).to_series().drop_nulls()
        ratios = ratios.filter(ratios.is_finite() & (ratios > 0))
        if ratios.len() < _LEAST_COMPARED_TIMES:
            continue
        exact = 1000.0 ** power_of(float(ratios.median()))  # type: ignore[arg-type]  # of floats
        is_alike = (ratios / exact).is_between(1 / _ALIKE_TIMES, _ALIKE_TIMES)
        fault = unit_fault(f"the client's {what}", "the server's", exact, "s")
        if fault and is_alike.mean() >= _ALIKE_SHARE:
            yield fault


def _with_latencies(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests with the latencies that another file of the same client has; latencies without a request get no
    arrival.
    """
    is_client = pl.col("dialect") == CLIENT
    is_sent = ~(is_client & pl.col("trace_id").str.ends_with(_NOT_SENT).fill_null(value=False))
    rest = requests.filter(~is_sent)
    if not rest.height:
        return requests
    # Several recorded benchmarks repeat ids, which then identify no request.
    measured = rest.select("request_id", *CLIENT_TIMES).unique("request_id", keep="none")
    sent = requests.filter(is_sent)
    is_unique = pl.len().over("request_id", "dialect") == 1
    matched = sent.with_columns(is_unique=is_unique & is_client).join(
        measured, on="request_id", how="left", suffix="_here", maintain_order="left"
    )
    matched = matched.with_columns(
        pl.when("is_unique").then(pl.coalesce(name, f"{name}_here")).otherwise(name).alias(name)
        for name in CLIENT_TIMES
    ).with_columns(
        client_itl_us=pl.when(pl.col("output_tokens") > 1).then(
            (pl.col("client_e2e_us") - pl.col("client_ttft_us")) / (pl.col("output_tokens") - 1)
        )
    )
    unmatched = rest.join(matched.filter("is_unique"), on="request_id", how="anti", maintain_order="left")
    unsent = unmatched.with_columns(arrival_ns=pl.lit(None, pl.Int64))
    return pl.concat([matched.select(requests.columns), unsent])


def _by_id(client_rows: pl.DataFrame, server_rows: pl.DataFrame) -> pl.DataFrame:
    """Return pairs of equal ids that occur once on each side: client, row."""
    name = pl.col("request_id").str.replace_all(_SERVER_ID, "")
    sides = [
        side.select(row, id=name).drop_nulls("id").unique("id", keep="none")
        for side, row in ((client_rows.rename({"row": "client"}), "client"), (server_rows, "row"))
    ]
    return sides[0].join(sides[1], on="id").select("client", "row")
