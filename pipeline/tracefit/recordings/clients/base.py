"""Requests as a client measured them, made into spans and steps: what the modules of all load generators share."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import polars as pl
from msgspec.structs import astuple, replace

from tracefit.inputs.formats import Recording, register
from tracefit.inputs.framing import BOM
from tracefit.recordings.blocks import MOST_S, RecordedBlock
from tracefit.recordings.point_rows import read_points, spans_of_points
from tracefit.recordings.requests import as_spans, first_keys, from_json, lines_of, read_parts, seconds_to_ns
from tracefit.tables.client_times import BENCHMARK_DIGITS
from tracefit.tables.dialects import CLIENT_KEYS, CLIENT_SCOPE, NOT_SENT_S
from tracefit.tables.rows import RECORDED_STEPS, UNKNOWN_SERVER
from tracefit.tables.sources import CycleSource, declare
from tracefit.tables.stages import batch_numbers, steps_of
from tracefit.tables.units import unit_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding, Rejects
    from tracefit.recordings.point_rows import PointParts
    from tracefit.recordings.requests import Parts

CLIENT_STEPS = declare(
    CycleSource(
        name="client",
        recorder="token times of a load generator",
        interval=(
            "tokens of a step to those of the next, after idling from the send to the tokens, as the client "
            "received them"
        ),
        error="that of the way of a token to the client",
        seen_by="client",
        from_requests=True,
    )
)

_APART_TIMES = 3
"""Tokens are of different steps if they arrive apart by more than the shorter of their times divided by this."""

_MOST_LASTED_S, _MOST_TOKENS = 1e6, 2**31
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]
_MOST_ODD = 0.2
"""Largest share of requests that skip a step, or have two tokens in one, where all are of one engine."""

CLIENT_REQUESTS: dict[str, Any] = {
    "benchmark": pl.Int64,
    "ended_s": pl.Float64,
    "request_id": pl.String,
    "start_s": pl.Float64,
    "token_s": pl.List(pl.Float64),
    "first_s": pl.Float64,
    "last_s": pl.Float64,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "error": pl.Boolean,
    "is_result": pl.Boolean,
}
"""Requests of a client: the number of their benchmark in the file, and its end on the wall clock if only that is known;
when each was sent, on the client's clock, or `NOT_SENT_S`; the times of its tokens since then, or only of the first and
the last; whether its latencies are results: those of a warm-up are not, but it is load."""


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, with the fields of `CLIENT_REQUESTS` in their order.

    Raises:
        msgspec.ValidationError: Its times are not in order, or a value is out of range.
    """

    benchmark: int = 0
    ended_s: float | None = None
    request_id: str | None = None
    start_s: float
    token_s: list[float] | None = None
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: bool = False
    is_result: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        since = [time for time in (self.first_s, *(self.token_s or ()), self.last_s) if time is not None]
        if since != sorted(since) or not all(0 <= time <= _MOST_LASTED_S for time in since):
            raise msgspec.ValidationError("times out of order or range")
        tokens = (self.prompt_tokens or 0, self.output_tokens or 0)
        if not (0 <= self.start_s <= MOST_S and all(0 <= count <= _MOST_TOKENS for count in tokens)):
            raise msgspec.ValidationError("out of range")


def raw_items(payload: bytes) -> list[msgspec.Raw]:
    """Return the items of a JSON list."""
    return from_json(payload, list[msgspec.Raw])


def require_unit(what: str, seconds: float, of: str, others_s: float) -> None:
    """Refuse a time whose unit another one of the file contradicts.

    Raises:
        msgspec.ValidationError: It is off by a power of 1,000.
    """
    if others_s > 0 and (fault := unit_fault(what, of, seconds / others_s, "s")):
        raise msgspec.ValidationError(fault)


def tokens_since(first_s: float, gaps_s: list[float]) -> list[float]:
    """Return the times of tokens since a request was sent, from the first one and the gaps between them."""
    return [*accumulate(gaps_s, initial=first_s)]


def refuse(error: Exception, _: bytes) -> ClientRequest:
    """Raise an error in place of a part that cannot be read."""
    raise error


def number_of(value: Any) -> float:
    """Return a positive number of seconds, or 0 for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < MOST_S else 0.0


def _on_wall_clock(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests (`CLIENT_REQUESTS`) with their starts on the wall clock if the end of their benchmark is known.

    Dates are cut to whole seconds. Benchmarks of a file whose dates allow one clock are on one clock, by the latest of
    them.
    """
    is_sent = pl.col("start_s") < NOT_SENT_S
    end = (pl.col("start_s") + pl.col("last_s").fill_null(0)).filter(is_sent).max()
    ahead = (
        requests.group_by("benchmark", maintain_order=True).agg(ahead_s=pl.col("ended_s").first() - end).drop_nulls()
    )
    if not ahead.height:
        return requests
    known = np.sort(ahead["ahead_s"].to_numpy())
    latest = known[np.searchsorted(known, ahead["ahead_s"].to_numpy() + 1, "left") - 1]
    joined = requests.join(
        ahead.with_columns(ahead_s=pl.Series(latest)), on="benchmark", how="left", maintain_order="left"
    )
    moved = pl.col("start_s") + pl.col("ahead_s")
    return joined.with_columns(
        start_s=pl.when(is_sent & moved.is_between(0, MOST_S)).then(moved).otherwise("start_s")
    ).drop("ahead_s")


# -- blocks -------------------------------------------------------------------------------------------------


def items_of(
    split: Callable[[bytes], list[msgspec.Raw]], read: Callable[[bytes], ClientRequest]
) -> Callable[[bytes], Parts[ClientRequest]]:
    """Return a function that divides a document into the requests that `split` returns."""
    return lambda payload: ((0, bytes(item), read) for item in split(payload))


def each_line(read: Callable[[bytes], ClientRequest]) -> Callable[[bytes], Parts[ClientRequest]]:
    """Return a function that divides a block into its lines, each a request."""
    return lambda payload: lines_of(payload, read)


def no_parts(_: bytes) -> Parts[ClientRequest]:
    """Return nothing, for files that hold only a summary."""
    return ()


def decoder(
    name: str,
    parts: Callable[[bytes], Parts[ClientRequest]],
    points: Callable[[bytes, str], PointParts] | None = None,
) -> Callable[..., RecordedBlock]:
    """Return the decoder of a program's files.

    Args:
        name: The program's file, in reasons of rejects.
        parts: Divides a block into requests.
        points: Divides it into points, if the file holds summaries; it also gets the path of the file.
    """

    def decode(block: Block, payload: bytes, rejects: Rejects) -> RecordedBlock:
        found = read_parts(block, payload, parts, f"no request of {name}", rejects)
        requests = _numbered(
            pl.DataFrame(
                [(offset, *astuple(request)) for offset, request in found],
                schema={"source_offset": pl.Int64, **CLIENT_REQUESTS},
                orient="row",
            )
        )
        is_first = requests["is_first"].to_list()
        digests = _digests([request for (_, request), first in zip(found, is_first, strict=True) if first])
        # Of benchmarks with equal contents, the first one has steps.
        different = {digest: number for number, digest in reversed(digests.items())}
        digest = pl.Series([digests[request.benchmark] for _, request in found], dtype=pl.String)
        requests = _on_wall_clock(requests).with_columns(digest=digest)
        once = requests.filter("is_first", pl.col("benchmark").is_in(list(different.values())))
        keys = partial(first_keys, payload, parts)
        spans = requests_seen(requests)
        if points is not None:
            at_path = partial(_at_path, points, block.path or block.source_file)
            of_points = spans_of_points(read_points(block, payload, at_path, f"no summary of {name}", rejects))
            spans = pl.concat([spans, of_points], how="diagonal")
        return RecordedBlock(_steps_of_each(once), spans, keys)

    return decode


def _numbered(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests (`CLIENT_REQUESTS`) with their `number` in the benchmark, and whether they come there for the
    first time.

    A request that a file has twice has one number: it was sent at the same time, and took as long for every token.
    Without an id, one that failed, or whose time of sending is not stated, may be like another one.
    """
    told = [name for name in CLIENT_REQUESTS if name != "token_s"]
    known = requests.with_columns(
        row=pl.int_range(pl.len()).over("benchmark"),
        sum_s=pl.col("token_s").list.sum(),
        is_told=pl.col("request_id").is_not_null()
        | (
            ~pl.col("error")
            & pl.col("last_s").is_not_null()
            & pl.col("start_s").is_between(0, NOT_SENT_S, closed="none")
        ),
    )
    first = pl.when("is_told").then(pl.col("row").first().over([*told, "sum_s", "is_told"])).otherwise("row")
    numbered = known.with_columns(number=first).with_columns(is_first=pl.col("number") == pl.col("row"))
    # Numbers without gaps, so that the rest has those that it has in a file without the repeats.
    dense = (pl.col("is_first").cum_sum() - 1).over("benchmark").alias("dense")
    return (
        numbered.with_columns(dense)
        .with_columns(number=pl.col("dense").filter("is_first").first().over("benchmark", "number"))
        .drop("row", "sum_s", "is_told", "dense")
    )


def _at_path(points: Callable[[bytes, str], PointParts], path: str, payload: bytes) -> PointParts:
    return points(payload, path)


def _digests(requests: list[ClientRequest]) -> dict[int, str]:
    """Return the number of each benchmark with a digest of its requests, in the order of the numbers."""
    contents: dict[int, Any] = defaultdict(lambda: blake2b(digest_size=BENCHMARK_DIGITS // 2))
    for benchmark, *request in map(astuple, requests):
        contents[benchmark].update(msgspec.json.encode(request))
    return {number: contents[number].hexdigest() for number in sorted(contents)}


def _steps_of_each(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of every benchmark, each numbered from 1."""
    benchmarks = requests.partition_by("benchmark", maintain_order=True)
    return pl.concat([steps_seen(requests.clear()), *map(steps_seen, benchmarks)])


def requests_seen(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests of a client (`CLIENT_REQUESTS`, their `number` and the `digest` of their benchmark) as spans.

    One that failed has no times, and one of a warm-up no latencies. Their ids are those of the benchmark and of the
    request in it, wherever they are read, so that one that a file has twice counts once.
    """
    is_good = ~pl.col("error") & (pl.col("first_s").fill_null(0) <= pl.col("last_s"))
    counts = is_good & pl.col("is_result")
    several = pl.col("output_tokens") > 1
    last = pl.when(is_good).then("last_s")
    values = {
        "request_id": pl.col("request_id"),
        "api_prompt_tokens": pl.col("prompt_tokens"),
        "api_completion_tokens": pl.col("output_tokens"),
        "client_ttft_us": pl.when(counts).then("first_s"),
        "client_e2e_us": pl.when(counts).then("last_s"),
        "client_itl_us": pl.when(counts & several).then(
            (pl.col("last_s") - pl.col("first_s")) / (pl.col("output_tokens") - 1)
        ),
    }
    start = seconds_to_ns(pl.col("start_s"))
    rows = requests.with_columns(
        **{CLIENT_KEYS[column]: value for column, value in values.items()},
        start_unix_ns=start,
        end_unix_ns=start + seconds_to_ns(last.fill_null(0.0)),
    )
    spans = as_spans(rows, CLIENT_SCOPE, CLIENT_KEYS.values(), pl.col("number"))
    return spans.with_columns(trace_id=rows["digest"] + spans["trace_id"])


def steps_seen(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the steps that the tokens of a client's requests (`CLIENT_REQUESTS`) show, columns as `RECORDED_STEPS` but
    `file`.

    The result is empty if a request lacks the time of a token, or that at which it was sent. Where requests skip steps,
    or have two tokens in one, as those of several engines do, their times stay unknown.
    """
    good = requests.filter(~pl.col("error")).with_row_index("request")
    names = [name for name in RECORDED_STEPS if name != "file"]
    is_whole = (good["token_s"].list.len() == good["output_tokens"]) & (good["start_s"] < NOT_SENT_S)
    if not good.height or not is_whole.fill_null(value=False).all():
        return pl.DataFrame(schema=RECORDED_STEPS).select(names)
    token = pl.int_range(pl.len()).over("request")
    tokens = (
        good.explode("token_s")
        .with_columns(token=token, end_ns=seconds_to_ns(pl.col("start_s") + pl.col("token_s")))
        .with_columns(
            busy_ns=pl.coalesce(pl.col("end_ns").shift(1).over("request"), seconds_to_ns(pl.col("start_s"))),
            is_loop=pl.col("token") > 0,
        )
        .with_columns(
            server=pl.lit(UNKNOWN_SERVER),
            lasted_ns=pl.col("end_ns") - pl.col("busy_ns"),
            tokens=pl.when("is_loop").then(1).otherwise("prompt_tokens"),
            context=pl.when("is_loop").then(pl.col("prompt_tokens") + pl.col("token") - 1).otherwise(0),
        )
    )
    steps = steps_of(tokens, 1, CLIENT_STEPS, _APART_TIMES)
    if _odd_share(tokens) > _MOST_ODD:
        steps = steps.with_columns(cycle_us=pl.lit(None, pl.Float64))
    missing = [pl.lit(None).alias(name) for name in names if name not in steps.columns]
    whole = steps.with_columns(missing).with_columns(source_offset=pl.lit(good["source_offset"].min()))
    return whole.select(pl.col(name).cast(RECORDED_STEPS[name]) for name in names)


def _odd_share(tokens: pl.DataFrame) -> float:
    """Return the share of requests that are not in every step from their first token to their last."""
    spread = (
        batch_numbers(tokens, _APART_TIMES)
        .group_by("request")
        .agg(odd=pl.col("batch").max() - pl.col("batch").min() + 1 != pl.len())
    )
    return float(spread["odd"].mean() or 0.0)  # type: ignore[arg-type]  # of Booleans


# -- declarations -------------------------------------------------------------------------------------------


def finder(shape: Shape, *patterns: bytes) -> Callable[[bytes], tuple[Shape, Encoding] | None]:
    """Return a function that recognises content whose beginning has every one of some patterns."""

    def find(head: bytes) -> tuple[Shape, Encoding] | None:
        content = head.removeprefix(BOM)
        # Compiled here, where they are needed: most files are ruled out by the first pattern.
        return (shape, "json") if all(re.search(pattern, content) for pattern in patterns) else None

    return find


FILLS_REQUESTS = "`requests` with the client's TTFT, ITL and E2E, next to the server's if it traces the requests too"
COUNTED = "; without spans, also `timeline`, as from spans of stock vLLM"
STEPPED = "; without spans, also `steps` and `timeline` with the batch of each step"
FILLS_POINTS = "`points`: its summary"
BOOT = "the client's, which begins at boot"
WALL = "the client's wall clock"


def declare_client(
    recording: Recording,
    parts: Callable[[bytes], Parts[ClientRequest]] = no_parts,
    points: Callable[[bytes, str], PointParts] | None = None,
) -> Recording:
    """Register the format of a load generator's file; it is one block, because the tokens of all requests show the
    steps.

    Args:
        recording: The format, without its decoder.
        parts: Divides a file into requests.
        points: Divides it into points, if it holds summaries.
    """
    return register(
        replace(
            recording,
            decode=decoder(recording.title, parts, points),
            asked="a load generator's log",
            sources=(CLIENT_STEPS.name,) if STEPPED in recording.fills else (),
        )
    )
