"""vLLM's log with a line for each engine step, as `--enable-logging-iteration-details` makes it write.

`Engine 000: Iteration(204): 0 context requests, 0 context tokens, 4 generation requests, 4 generation tokens, iteration
elapsed time: 11.91 ms, GPU KV cache usage: 0.5%`: up to 0.28 the engine process prints it, without the engine and the
usage. A line ends its step. `(dummy)` marks a step without a batch, which data parallelism makes; counts of encoders
may follow.

The text around the line depends on the logging configuration, container runtimes and terminals: anything that looks
like a time is its time, the finest first. Lines without an iteration are other output.

A log may be of several servers: then each line begins with, or states, its container, pod or host, which names the
server.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa

from tracefit.inputs.formats import Recording, register
from tracefit.inputs.rejects import TooManyRejectsError
from tracefit.recordings.blocks import RecordedBlock
from tracefit.tables.rows import RECORDED_STEPS, UNKNOWN_SERVER
from tracefit.tables.sources import CycleSource, declare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding, Rejects

_LOG_TITLE = "iteration lines of vLLM's log"
_STAMP_SD_US = 100.0
"""Distance of a fine stamp from the end of its step, measured on two runs with recorded ends."""

MEANS = declare(
    CycleSource(
        name="log_interval",
        recorder=_LOG_TITLE,
        interval="mean of the steps between two changes of the clock of the server's log",
        error="single steps are not known; a change is off by half a step",
        evidence="intervals between changes of the log's clock",
        time="stamped",
        sd_us=_STAMP_SD_US,
        is_one_step=False,
        of_traced_server=True,
    )
)

LOG_STEPS = declare(
    CycleSource(
        name="log",
        recorder=_LOG_TITLE,
        interval=(
            "a line of the server's log to the next one, which ends the step; of whole seconds its wait and "
            "the engine's usual work"
        ),
        error="0.1 ms at each end, and the resolution of the log's clock; of whole seconds that of the usual work",
        evidence="steps from a line of the log to the next",
        time="stamped",
        sd_us=_STAMP_SD_US,
        means=MEANS.name,
        of_traced_server=True,
    )
)

_MARK = b"Iteration("
_CUT_LINE = "iteration line cut, or not as vLLM writes it"
_LONG_LINE = "line of the log too long"
_MOST_LINE_BYTES = 64 << 10
"""Longest line; a usual one has 250 bytes."""

_COUNT_TEXTS = ("context requests", "context tokens", "generation requests", "generation tokens")
_LINE_FIELDS = ("num_prefill_reqs", "prefill_tokens", "num_decode_reqs", "decode_tokens", "elapsed_ms")

# Bounded repeats, and an engine that does not backtrack: no line costs more than its length.
_ITERATION_LINE = (
    r"(?:Engine ([0-9]{1,6}): )?Iteration\(([0-9]{1,18})\): "
    + "".join(rf"([0-9]{{1,18}}) {name}, " for name in _COUNT_TEXTS)
    + r"iteration elapsed time: ([0-9]{1,9}\.[0-9]{1,9}) ms"
)
_IN_LINE = r"Iteration\([0-9]"
_IN_HEAD = re.compile(_ITERATION_LINE.encode() + rb"|non-default args: \{|LLM engine \(v[0-9]")
"""A log that begins with a server's start has no iteration yet, or never: its settings are read."""

_USAGE = r" KV cache usage: ([0-9]{1,3}(?:\.[0-9]{1,9})?)%"
_PROCESS = r"EngineCore(?:_DP|_)([0-9]{1,6})[ )]"
_LINE_DATE = (
    r"(?:^|[^0-9-])(?:(?P<year>(?:19|20)[0-9]{2})[-/])?(?P<month>[01][0-9])[-/](?P<day>[0-3][0-9])[T ]"
    r"(?P<time>[0-2][0-9]:[0-5][0-9]:[0-5][0-9])"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SYSLOG_DATE = (
    rf"(?:^|[^A-Za-z])(?P<month>{'|'.join(_MONTHS)}) (?P<day>[ 0-3][0-9]) (?P<time>[0-2][0-9]:[0-5][0-9]:[0-5][0-9])"
)
_ZONE = r"(?: ?(?P<hours>[+-][0-9]{2}):?(?P<minutes>[0-9]{2}))?"
_FRACTION = r"[.,](?P<fraction>[0-9]{1,9})"
_UNIX = r"(?:^|[^0-9.])(?P<seconds>1[0-9]{9})"
_UNIX_FRACTION = r"\.?(?P<fraction>[0-9]{3,9})(?:[^0-9]|$)"
_COLOUR = r"\x1b\[[0-9;]*m"
_POD_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}"
_POD = r"(?:[a-z0-9-]+ )?([a-z0-9][a-z0-9.]*-[a-z0-9.-]*[a-z0-9]) ([a-z0-9-]*[a-z][a-z0-9-]*)"
_SYSLOG_TIME, _ISO_TIME = (
    r"[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8}(?:\.[0-9]+)?",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8}(?:[.,][0-9]+)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?",
)
_LINE_PREFIXES = {
    "docker compose": rf"^\s*({_POD_NAME}) *\| ",
    "kubectl logs --prefix": rf"^\[pod/({_POD_NAME})/({_POD_NAME})\] ",
    "stern": rf"^{_POD} (?:\(|INFO|DEBUG|WARNING|ERROR|[0-9]{{4}}-|1[0-9]{{9}}|\{{)",
    "syslog": rf"^(?:<[0-9]{{1,3}}>)?{_SYSLOG_TIME} ({_POD_NAME}) ({_POD_NAME})(?:\[[0-9]+\])?: ",
    "journalctl -o short-iso": rf"^{_ISO_TIME} ({_POD_NAME}) ({_POD_NAME})\[[0-9]+\]: ",
    "syslog of RFC 5424": rf"^<[0-9]{{1,3}}>1 [^ ]+ ({_POD_NAME}) ({_POD_NAME}) ",
}
"""The beginnings of lines in logs of several servers; groups are the parts of the server's name."""

_KEY_PREFIX = r"(?:[a-z0-9]+[._])*"
_LABEL_VALUE = rf'"?\s*[:=]\s*"/?({_POD_NAME})"'
_STATED_PODS = tuple(
    rf"(?i)\b{_KEY_PREFIX}(?:{keys}){_LABEL_VALUE}"
    for keys in ("pod(?:[._]?name)?", "container(?:[._]?name)?", "host(?:[._]?name)?|node(?:[._]?name)?")
)
"""Pod, container and host in a line of JSON or with labels, as log collectors write them."""

_OWN_BEGINNING = rf"^(?:{_COLOUR})*(?:\(|[A-Z]+ [0-9]|[0-9]+\.[0-9]+ )"

_NO_YEAR = "2000"
"""Stands for the year, which the default format leaves out; it is a leap year."""


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    return ("lines", "text") if _IN_HEAD.search(head) else None


def decode(block: Block, payload: bytes, rejects: Rejects) -> RecordedBlock:
    """Decode a block of whole lines; only cut lines are rejected.

    Args:
        block: The position of the bytes.
        payload: The bytes.
        rejects: Receives the cut ones; once they are too many, no more are listed.
    """
    lines = _marked(payload)
    fields = (
        pl.col("text").str.extract_groups(_ITERATION_LINE).struct.rename_fields(["engine", "step_id", *_LINE_FIELDS])
    )
    parsed = lines.with_columns(fields.alias("fields")).unnest("fields")
    is_bad = pl.col("step_id").is_null()
    bad = parsed.filter(is_bad).select("source_offset", "length", "text")
    with suppress(TooManyRejectsError):
        for offset, length, text in bad.iter_rows():
            reason = _LONG_LINE if text is None else _CUT_LINE
            rejects.add(offset, (text or "").encode(), reason, length=length)
    return RecordedBlock(_as_steps(parsed.filter(~is_bad), block.offset))


def _marked(payload: bytes) -> pl.DataFrame:
    """Return the lines with an iteration: source_offset, length, text (null if too long); of glued lines one row for
    each iteration.
    """
    import pyarrow.compute as pc  # noqa: PLC0415 - takes long to import, and few files are logs

    ends = np.flatnonzero(np.frombuffer(payload, np.uint8) == ord("\n")) + 1
    begins = np.r_[0, ends, len(payload)]
    sizes = np.diff(begins)
    buffers = [None, pa.py_buffer(begins), pa.py_buffer(payload)]
    lines = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sizes), buffers)
    counted = pc.count_substring(lines, _MARK)
    marks, is_long = pl.Series(counted).to_numpy(), sizes > _MOST_LINE_BYTES
    once = lines.filter(pl.Series((marks == 1) & ~is_long).to_arrow())
    single, long = np.flatnonzero((marks == 1) & ~is_long), np.flatnonzero((marks > 0) & is_long)
    parts = [pl.DataFrame({"source_offset": begins[single], "length": sizes[single], "text": _text(once)})]
    for at in np.flatnonzero((marks > 1) & ~is_long):
        pieces = [(begins[at] + skipped, len(piece), _readable(piece)) for skipped, piece in _pieces(lines[at].as_py())]
        parts.append(pl.DataFrame(pieces, parts[0].schema, orient="row"))
    matching = pl.concat(parts).filter(pl.col("text").str.contains(_IN_LINE))
    too_long = pl.DataFrame({"source_offset": begins[long], "length": sizes[long]})
    return pl.concat([matching, too_long], how="diagonal")


def _pieces(line: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each iteration of glued lines with its offset: from the mark of the one before it to that of the one after
    it.
    """
    marks = [match.start() for match in re.finditer(re.escape(_MARK), line)]
    for before, after in zip([0, *(at + len(_MARK) for at in marks)], [*marks[1:], len(line)], strict=False):
        yield before, line[before:after]


def _text(lines: pa.LargeBinaryArray) -> pl.Series:
    try:
        return pl.Series(lines.cast(pa.large_string()), dtype=pl.String)
    except pa.ArrowInvalid:
        return pl.Series([_readable(line) for line in lines.to_pylist()], dtype=pl.String)


def _readable(line: bytes) -> str:
    return line.decode("utf-8", "replace")


# -- rows ---------------------------------------------------------------------------------------------------


def _as_steps(records: pl.DataFrame, offset: int) -> pl.DataFrame:
    """Return lines as rows of steps, each with the printed time; where nothing is scheduled, nothing waits."""
    number = {name: pl.col(name).cast(pl.Int64) for name in ("step_id", *_LINE_FIELDS[:-1])}
    engine = pl.coalesce("engine", pl.col("text").str.extract(_PROCESS), pl.lit("0")).cast(pl.Int64)
    instance = _instance(records["text"]).fill_null(UNKNOWN_SERVER)
    requests = pl.col("num_prefill_reqs") + pl.col("num_decode_reqs")
    steps = records.with_columns(**number, unix_ns=_unix_ns(records["text"])).with_columns(
        pl.col("source_offset") + offset,
        server=pl.format("{}.dp{}", instance, engine),
        cycle_us=pl.col("elapsed_ms").cast(pl.Float64) * 1e3,
        cycle_source=pl.lit(LOG_STEPS.name),
        scheduled_tokens=pl.col("prefill_tokens") + pl.col("decode_tokens"),
        running_depth=requests,
        waiting_depth=pl.when(requests == 0).then(0).cast(pl.Int64),
        kv_usage_ratio=pl.col("text").str.extract(_USAGE).cast(pl.Float64) / 100,
    )
    return steps.select(name for name in RECORDED_STEPS if name in steps.columns)


def _instance(text: pl.Series) -> pl.Series:
    """Return the container, pod or host that each line is of; null where the line has none."""
    instances = pl.Series([None], dtype=pl.String).new_from_index(0, len(text))
    # A line that begins as vLLM writes it has no prefix.
    others = (~text.str.contains(_OWN_BEGINNING)).arg_true()
    if not len(others):
        return instances
    text = text[others]
    heads = text.str.splitn(_MARK.decode(), 2).struct.field("field_0").str.replace_all(_COLOUR, "")
    prefixes = [pl.col("head").str.extract_groups(pattern).struct.unnest() for pattern in _LINE_PREFIXES.values()]
    pod, container, host = (pl.col("text").str.extract(pattern) for pattern in _STATED_PODS)
    parts: list[pl.Expr | list[pl.Expr]] = [*prefixes, [pod, container]]
    names = [pl.concat_str(part, separator="/", ignore_nulls=True).replace("", None) for part in parts]
    found = pl.DataFrame({"text": text, "head": heads}).select(pl.coalesce(*names, host)).to_series()
    return instances.scatter(others, found)


def _unix_ns(text: pl.Series) -> pl.Series:
    """Return the time of each line, the finest there is; a local time without its zone counts as UTC.

    It is the last one before the iteration, for a cut line may be glued to the line, or the first one after it.
    """
    times_ns = pl.Series("unix_ns", [None], pl.Int64).new_from_index(0, len(text))
    sides = pl.DataFrame({"parts": text.str.splitn(_MARK.decode(), 2)}).unnest("parts")
    for pattern, parsed in _STAMPS:
        for side, start in zip(sides, (r"^.*", ""), strict=True):
            if times_ns.null_count():
                parts = side.str.extract_groups(f"{start}(?:{pattern})")
                times_ns = (
                    pl.DataFrame({"times_ns": times_ns, "parts": parts})
                    .unnest("parts")
                    .select(pl.coalesce("times_ns", parsed))
                    .to_series()
                )
    return times_ns


def _of_date() -> pl.Expr:
    date = pl.format("{}-{}-{} {}", pl.col("year").fill_null(_NO_YEAR), "month", "day", "time")
    seconds = date.str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="ns", strict=False).cast(pl.Int64)
    hours, minutes = (pl.col(name).cast(pl.Int64).fill_null(0) for name in ("hours", "minutes"))
    east = 3600 * hours + 60 * minutes * pl.when(pl.col("hours").str.starts_with("-")).then(-1).otherwise(1)
    return seconds + _fraction_ns() - 10**9 * east


def _of_syslog() -> pl.Expr:
    month = pl.col("month").replace_strict(_MONTHS, range(1, 13), return_dtype=pl.Int64)
    date = pl.format("{}-{}-{} {}", pl.lit(_NO_YEAR), month, pl.col("day").str.strip_chars(), "time")
    seconds = date.str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="ns", strict=False).cast(pl.Int64)
    return seconds + _fraction_ns()


def _of_unix() -> pl.Expr:
    return pl.col("seconds").cast(pl.Int64) * 10**9 + _fraction_ns()


def _fraction_ns() -> pl.Expr:
    return pl.col("fraction").fill_null("0").str.pad_end(9, "0").cast(pl.Int64)


_STAMPS = (
    (_LINE_DATE + _FRACTION + _ZONE, _of_date()),
    (_UNIX + _UNIX_FRACTION, _of_unix()),
    (_SYSLOG_DATE + _FRACTION, _of_syslog()),
    (_LINE_DATE + r"(?P<fraction>0)?" + _ZONE, _of_date()),
    (_UNIX + r"(?P<fraction>0)?(?:[^0-9.]|$)", _of_unix()),
    (_SYSLOG_DATE + r"(?P<fraction>0)?", _of_syslog()),
)
"""How times look, the finest first, and what becomes of their parts."""

FORMAT = register(
    Recording(
        name="log",
        title=_LOG_TITLE,
        asked="vLLM's log with --enable-logging-iteration-details",
        find=_find,
        fills="`steps`, and `timeline` with the exact batch of each step, without context tokens",
        units="ms (elapsed time), % (KV cache usage)",
        clock="the server's wall clock, in UTC or local time, at the resolution that the log is configured for",
        sources=(LOG_STEPS.name, MEANS.name),
        decode=decode,
        stamped=(_MARK,),
    )
)
