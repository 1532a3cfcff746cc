"""Join the measurements of load generators with the server's record of the same requests.

Requests match by their ids, as vLLM extends them (`cmpl-<id>-0`). If a client writes no ids, they match by length and
order of arrival: the two clocks differ by one constant, on which most pairs of equal length agree.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from tracefit.tables.dialects import CLIENT

TIMES = ("client_ttft_us", "client_itl_us", "client_e2e_us")
_SERVER_ID = r"^(?:chat)?cmpl-|-[0-9]{1,2}$"
_MAX_PAIRED = 1_000
"""Requests of each side whose arrivals are compared to find the difference of the clocks."""

_SAME_NS = 100_000_000
"""Largest scatter of the arrivals of one request between client and server."""

_MIN_LATENCIES = 2
"""Fewest requests without lengths that make a log of latencies: a single one is the last request of a client."""

_MIN_PAIRED_SHARE = 0.5
"""Least share of the smaller side's requests that must agree on the difference of the clocks."""

_NEAR, _MIN_NEAR = 0.05, 0.9
"""If at least this share of the requests have output lengths this close to the median, all were sent with one length."""

_SHORT, _MIN_SHORT = 0.5, 0.005
_SAME_TIME, _MIN_SAME_TIME = 0.1, 0.9
"""Requests are short below this share of the median length. If they are at least this share of all, and so many of them take about
the median time, within this share, the client counted the tokens in the text."""

TEXT_COUNT = "output tokens of a client that counts them in the text: their median in place of them"


def with_asked_lengths(requests: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return requests with the median as output length, if all were sent with one length and the client counted the tokens in the text.

    An engine that ignores the end of a sequence computes as many tokens as requested. Some have no text, so that a client that
    counts in the text reports fewer for requests that took as long as the others.

    Args:
        requests: The `requests` table of a run with its clients' times.

    Returns:
        The requests, and the number of changed lengths: 0 if the counts follow the times, or a server recorded requests.
    """
    tokens, decode_us = pl.col("output_tokens"), pl.col("client_e2e_us") - pl.col("client_ttft_us")
    usual = tokens.median().round()
    is_near = (tokens / usual - 1).abs() <= _NEAR
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
        requests: Rows of the `requests` table with run_id, dialect, `TIMES` and the latencies.
    """
    only_client = (pl.col("dialect") == CLIENT).fill_null(value=False).all().over("run_id")
    own = {name.removeprefix("client_"): name for name in TIMES}
    return requests.with_columns(
        pl.when(only_client).then(client).otherwise(name).alias(name) for name, client in own.items()
    )


def with_client_times(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests with the times of their clients; client rows that match a server's request are left out.

    A run without requests of a server, or without a client, stays as it is.

    Args:
        requests: The `requests` table of a run.
    """
    is_client = pl.col("dialect") == CLIENT
    requests = _with_latencies(requests)
    numbered = requests.with_row_index("row")
    client_rows = numbered.filter(is_client)
    # A server's request that never ended has an id but no lengths to compare.
    server_rows = numbered.filter(~is_client)
    if not client_rows.height or not server_rows.height:
        return requests
    pairs = _by_id(client_rows, server_rows)
    left = [
        side.join(pairs, left_on="row", right_on=name, how="anti")
        for side, name in ((client_rows, "client"), (server_rows, "row"))
    ]
    pairs = pl.concat([pairs, _by_arrival(left[0], left[1])])
    measured = pairs.join(client_rows.select("row", *TIMES), left_on="client", right_on="row").drop("client")
    joined = numbered.join(measured, on="row", how="left", suffix="_of_client", maintain_order="left")
    filled = joined.with_columns(pl.coalesce(f"{name}_of_client", name).alias(name) for name in TIMES)
    kept = filled.join(pairs, left_on="row", right_on="client", how="anti", maintain_order="left")
    return kept.with_columns(network_us=pl.col("client_ttft_us") - pl.col("ttft_us")).select(requests.columns)


def _with_latencies(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests with the latencies that another file of the same client has; latencies without a request get no arrival."""
    is_client = pl.col("dialect") == CLIENT
    # A log of latencies has no lengths, and one arrival for all of its requests, after every other (`NOT_SENT_S`).
    has_lengths = pl.any_horizontal(pl.col("prompt_tokens", "output_tokens").is_not_null())
    is_latest = pl.col("arrival_ns") == pl.col("arrival_ns").filter(is_client).max()
    is_sent = ~(is_client & ~has_lengths & is_latest.fill_null(value=False))
    rest = requests.filter(~is_sent)
    if rest.height < _MIN_LATENCIES:
        return requests
    # Several recorded benchmarks repeat ids, which then identify no request.
    measured = rest.select("request_id", *TIMES).unique("request_id", keep="none")
    sent = requests.filter(is_sent)
    is_unique = pl.len().over("request_id", "dialect") == 1
    matched = sent.with_columns(is_unique=is_unique & is_client).join(
        measured, on="request_id", how="left", suffix="_here", maintain_order="left"
    )
    matched = matched.with_columns(
        pl.when("is_unique").then(pl.coalesce(name, f"{name}_here")).otherwise(name).alias(name)
        for name in TIMES
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


def _by_arrival(client_rows: pl.DataFrame, server_rows: pl.DataFrame) -> pl.DataFrame:
    """Return pairs of equal output lengths and about equal arrivals, by the difference of the clocks: client, row."""
    columns = ["row", "arrival_ns", "output_tokens"]
    sent, received = (
        side.select(columns).drop_nulls().filter(pl.col("output_tokens") > 0).sort("arrival_ns", "row")
        for side in (client_rows.filter(pl.col("client_ttft_us").is_not_null()), server_rows)
    )
    if (ahead := _ahead(sent, received)) is None:
        return pl.DataFrame(schema={"client": pl.UInt32, "row": pl.UInt32})
    moved = sent.select(client="row", arrival_ns=pl.col("arrival_ns") + ahead, output_tokens="output_tokens")
    joined = moved.sort("arrival_ns").join_asof(
        received.rename({"arrival_ns": "at_ns"}).with_columns(arrival_ns="at_ns"),
        on="arrival_ns",
        by="output_tokens",
        strategy="nearest",
        tolerance=_SAME_NS,
        check_sortedness=False,
    )
    apart = (pl.col("at_ns") - pl.col("arrival_ns")).abs()
    nearest = joined.drop_nulls("row").sort(apart, "client").unique("row", keep="first", maintain_order=True)
    return nearest.select("client", "row")


def _ahead(sent: pl.DataFrame, received: pl.DataFrame) -> int | None:
    """Return how far the server's clock is ahead of the client's in ns, on which most pairs of equal length agree."""
    some = [side.head(_MAX_PAIRED) for side in (sent, received)]
    pairs = some[0].join(some[1], on="output_tokens", suffix="_server")
    apart = np.sort((pairs["arrival_ns_server"] - pairs["arrival_ns"]).to_numpy())
    if not apart.size:
        return None
    until = np.searchsorted(apart, apart + _SAME_NS, side="right")
    within = until - np.arange(apart.size)
    best = int(np.argmax(within))
    if within[best] < max(2.0, _MIN_PAIRED_SHARE * min(side.height for side in some)):
        return None
    return int(np.median(apart[best : until[best]]))
