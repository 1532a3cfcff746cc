"""Compute the composition of every step from the journeys.

A request is in the batch from its SCHEDULED to its end (`segments`). Counts of such ranges are sums over difference
arrays on the step axis (`engines.range_add`), without a loop over steps. Only prompts in chunks are followed one by
one, in the order of their scheduling: each takes what the earlier ones leave of the token budgets.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.server.settings import DEFAULT_BLOCK_SIZE
from tracefit.timeline.engines import Floats, Ints, StepAxis, bincount_at, position, range_add

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WINDOW = 16
"""Steps that are searched first for the chunks of a prompt: few prompts have more."""


class EngineLimits(msgspec.Struct, frozen=True):
    """Limits of a server's scheduler; null if unknown.

    Attributes:
        max_num_batched_tokens: Token budget of a step.
        max_num_seqs: Slots.
        block_size: Tokens per KV block.
        num_blocks: Usable KV blocks.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int | None = None


class _Runs(msgspec.Struct, frozen=True, dict=True):
    """Segments of running as arrays, in the order of their scheduling; steps are positions on the axis.

    Attributes:
        start: First step.
        end: Last step that may compute its tokens.
        complete: Step that completed the prompt, -1 if no step did.
        need: Tokens to compute before the first token.
        cached: Tokens in the prefix cache.
        prompt: Prompt tokens.
        outputs: Output tokens before the segment.
        limit: Output tokens it may still produce, -1 if unknown.
        finished: 1 where it ended for good.
        lag: Steps that scheduling runs ahead of execution, on its server.
        late: Steps from its last one until the scheduler learns of its end: `lag`, or 0 after an abort, which takes
            effect at once.
        last: Last step of its engine.
    """

    start: Ints
    end: Ints
    complete: Ints
    need: Ints
    cached: Ints
    prompt: Ints
    outputs: Ints
    limit: Ints
    finished: Ints
    lag: Ints
    late: Ints
    last: Ints

    @classmethod
    def of(cls, frame: pl.DataFrame) -> _Runs:
        """Read located `running_segments` with the column `execution_lag_steps`."""
        limit = (pl.col("decode_max_tokens") - pl.col("outputs")).clip(lower_bound=0)
        columns = frame.select(
            start=position(pl.col("step_id")),
            end=position(pl.col("end_step")),
            complete=position(pl.col("complete_step")).fill_null(-1),
            need="need_tokens",
            cached="cached_tokens",
            prompt="prefill_total_tokens",
            outputs="outputs",
            limit=limit.fill_null(-1),
            finished=pl.col("has_finished").cast(pl.Int64),
            lag="execution_lag_steps",
            late=pl.when("has_finished", pl.col("next_finish_status").ne_missing("aborted"))
            .then("execution_lag_steps")
            .otherwise(0),
            last=pl.col("offset") + pl.col("last_step") - pl.col("first_step"),
            ts="ts_ns",
            engine="engine",
        )
        whole = columns.drop_nulls(["start", "end"]).sort("engine", "ts").drop("engine", "ts")
        return cls(*(column.fill_null(0).cast(pl.Int64).to_numpy() for column in whole))

    @cached_property
    def decoding(self) -> NDArray[np.bool_]:
        """Whether each segment decodes at all."""
        return (self.complete >= 0) & (self.complete < self.end)

    @cached_property
    def leave(self) -> Ints:
        """Last step whose schedule() sees each segment in the running list."""
        last: Ints = np.minimum(self.end + self.late, self.last)
        return last


class _Prompts(msgspec.Struct, frozen=True):
    """The prompt tokens of each segment at each position, one row for each pair with tokens."""

    position: Ints
    tokens: Ints
    context: Ints
    """Tokens computed before, including cached ones."""
    has_output: Ints
    owner: Ints
    """Index of the segment."""


def compose(axis: StepAxis, running: pl.DataFrame, waiting: pl.DataFrame, limits: EngineLimits) -> pl.DataFrame:
    """Compute the batch of every step from the segments of running and waiting.

    Args:
        axis: All steps.
        running: `running_segments` with `execution_lag_steps` (0 or 1): steps that scheduling runs ahead of
            execution. With 1 a request's first decode still counts as prefill (its token is not out yet), and a
            finished request stays in the running list for one more step.
        waiting: `waiting_segments`.
        limits: Token budget and block size.

    Returns:
        One row per position: num_prefill_reqs, num_decode_reqs, prefill_tokens, decode_tokens, context_tokens,
        prefill_context_tokens, running_depth, waiting_depth, waiting_tokens, kv_blocks_used, and the state after
        the step: kv_blocks_freed, running_after, remaining_after, prefill_left_after.
    """
    size = axis.size
    runs = _Runs.of(running)
    queue = waiting.select(
        first=position(pl.col("wait_first")), last=position(pl.col("wait_last")), tokens="wait_tokens"
    ).drop_nulls(["first", "last"])
    first, last, tokens = (queue[c].fill_null(0).to_numpy() for c in queue.columns)
    decodes = _overlaps(size, runs.complete[runs.decoding] + 1, runs.end[runs.decoding])
    prompts = _prompt_rows(runs, decodes, size, limits)
    return pl.DataFrame(
        {
            **{name: _whole(values) for name, values in _counts(size, runs, prompts, decodes).items()},
            "running_depth": _whole(_overlaps(size, runs.start, runs.leave)),
            "waiting_depth": _whole(_overlaps(size, first, last)),
            "waiting_tokens": _whole(range_add(size, first, last, tokens)),
            "kv_blocks_used": _blocks(size, runs, prompts, limits.block_size),
            **_left_after(size, runs, prompts, limits.block_size),
        }
    )


def _left_after(size: int, runs: _Runs, prompts: _Prompts, block: int) -> dict[str, Ints | pl.Series]:
    """Return the state of the engine after each step, once the available outputs are processed, for a request queued
    then.

    The available outputs are those of the step; with scheduling a step ahead, those of the step before it.
    """
    start, end, complete = runs.start, runs.end, runs.complete
    # A finished request is gone after the update of its last step; a preempted one stays until the next schedule().
    until = end - runs.finished + runs.late
    stays = until >= start
    done = (complete >= 0) & (complete <= until)
    # After step q a request whose prompt was complete at step c has put out 1 + q - c tokens of this segment.
    produced = range_add(size, complete[done], until[done], 1 - runs.lag[done] - complete[done])
    produced += np.arange(size) * _overlaps(size, complete[done], until[done])
    computed = np.bincount(prompts.owner, weights=prompts.tokens, minlength=len(start))
    filled = np.where(complete >= 0, runs.prompt + runs.outputs + end - complete, runs.cached + computed)
    prompt_left = np.cumsum(
        bincount_at(size, start, runs.need)
        - bincount_at(size, prompts.position, prompts.tokens)
        - bincount_at(size, end, runs.need - computed)
    )
    remaining = range_add(size, start[stays], until[stays], runs.limit[stays]) - produced
    open_ended = stays & (runs.limit < 0)
    is_unknown = _overlaps(size, start[open_ended], until[open_ended]) > 0
    freed = runs.finished * -(-filled.astype(np.int64) // block)
    return {
        "running_after": _whole(_overlaps(size, start[stays], until[stays])),
        "remaining_after": pl.Series(_whole(remaining)).set(pl.Series(is_unknown), None),
        "prefill_left_after": _whole(prompt_left),
        "kv_blocks_freed": _whole(bincount_at(size, runs.leave, freed)),
    }


def _overlaps(size: int, first: Ints, last: Ints) -> Floats:
    """Count the inclusive ranges that cover each position."""
    return range_add(size, first, last, np.ones(len(first)))


def _whole(values: Floats) -> Ints:
    return values.round().astype(np.int64)


def _counts(size: int, runs: _Runs, prompts: _Prompts, decodes: Floats) -> dict[str, Floats]:
    fresh, resumed = prompts.has_output == 0, prompts.has_output == 1
    decoding = runs.decoding
    first, last = runs.complete[decoding] + 1, runs.end[decoding]
    context = (runs.prompt + runs.outputs)[decoding]
    # Over a decode's steps its context grows by one: constant part and slope are two difference arrays.
    grown = range_add(size, first, last, context - first) + np.arange(size) * decodes
    # With scheduling a step ahead a first decode counts as prefill.
    early = (runs.lag[decoding] > 0) & (runs.outputs[decoding] == 0)
    moved = bincount_at(size, first[early], np.ones(int(early.sum())))
    moved_context = bincount_at(size, first[early], context[early])

    def at(rows: NDArray[np.bool_], values: Ints) -> Floats:
        return bincount_at(size, prompts.position[rows], values[rows])

    ones = np.ones_like(prompts.tokens)
    return {
        "num_prefill_reqs": at(fresh, ones) + moved,
        "num_decode_reqs": decodes + at(resumed, ones) - moved,
        "prefill_tokens": at(fresh, prompts.tokens) + moved,
        "decode_tokens": decodes + at(resumed, prompts.tokens) - moved,
        "context_tokens": grown + at(resumed, prompts.context) - moved_context,
        "prefill_context_tokens": at(fresh, prompts.context) + moved_context,
    }


def _prompt_rows(runs: _Runs, decodes: Floats, size: int, limits: EngineLimits) -> _Prompts:
    """Distribute each segment's prompt over its steps: in one step, or in chunks as large as the budget allows."""
    # Most prompts are computed in one step; only the others depend on the remaining budget of each step.
    whole = runs.complete == runs.start
    singles = bincount_at(size, runs.start[whole], runs.need[whole])
    has_output = (runs.outputs > 0).astype(np.int64)
    rows = [(runs.start[whole], runs.need[whole], runs.cached[whole], np.flatnonzero(whole))]
    budget = limits.max_num_batched_tokens
    room = np.maximum(budget - decodes - singles, 0.0) if budget else None
    for i in np.flatnonzero(~whole):  # chunked prompts only, in the order they were scheduled
        start, need = int(runs.start[i]), int(runs.need[i])
        finished = bool(runs.complete[i] >= 0)
        stop = int(runs.complete[i] if finished else runs.end[i])
        chunks = _chunks(start, stop, need, room, finished=finished)
        used = np.flatnonzero(chunks)
        before = runs.cached[i] + np.cumsum(chunks) - chunks
        rows.append((start + used, chunks[used], before[used], np.full(len(used), i)))
    steps, tokens, context, owner = (np.concatenate(c).astype(np.int64) for c in zip(*rows, strict=True))
    return _Prompts(steps, tokens, context, has_output[owner], owner)


def _chunks(start: int, stop: int, need: int, room: Floats | None, *, finished: bool) -> Ints:
    """Return the tokens of one prompt in each step from `start` to `stop` at most, and take them out of `room`."""
    if room is None:  # unknown budget: equal chunks
        stop = stop if finished else min(stop, start + _WINDOW - 1)
        edges: Ints = np.linspace(0, need, stop - start + 2).round().astype(np.int64)
        return edges[1:] - edges[:-1]
    free = room[start : start + _WINDOW] if start + _WINDOW <= stop else room[start : stop + 1]
    # A segment without an end lasts to the end of the trace; its prompt does not.
    while len(free) < stop + 1 - start and free.sum() < need:
        free = room[start : min(start + 4 * len(free), stop + 1)]
    taken = np.minimum(np.cumsum(free), need)
    if finished and start + len(free) == stop + 1:
        taken[-1] = need  # the completing step computed the rest
    chunks = np.diff(taken, prepend=0.0)
    free -= np.minimum(free, chunks)
    return chunks.round().astype(np.int64)


def _blocks(size: int, runs: _Runs, prompts: _Prompts, block: int) -> Ints:
    """Return the KV blocks in use after each step's scheduling: ceil(tokens / block) of a request until it ends.

    Blocks that requests share through the prefix cache count for each of them.
    """
    filled = -(-(prompts.context + prompts.tokens) // block)
    # A chunk's blocks are in use until the next chunk, the last one's until decoding begins or the segment ends.
    ends = np.where((runs.complete < 0) | (runs.complete == runs.end), runs.leave, runs.complete)
    until = ends[prompts.owner]
    more_follow = np.flatnonzero(np.diff(prompts.owner) == 0)
    until[more_follow] = prompts.position[more_follow + 1] - 1
    used = range_add(size, prompts.position, until, filled)
    decoding = runs.decoding
    first, last = runs.complete[decoding] + 1, runs.leave[decoding]
    context = (runs.prompt + runs.outputs)[decoding]
    used += range_add(size, first, last, -(-context // block))
    # A decoding request takes a block whenever its context reaches a multiple of the block size, and keeps it to the
    # end.
    next_block = first + (-context) % block
    more = np.maximum((runs.end[decoding] - next_block) // block + 1, 0)
    stride = min(block, size)
    taken = np.zeros(-(-size // stride) * stride)
    for at, change in ((next_block, 1.0), (next_block + more * block, -1.0)):
        inside = at[(more > 0) & (at < size)]
        taken += bincount_at(len(taken), inside, np.full(len(inside), change))
    every_block = np.cumsum(taken.reshape(-1, stride), axis=0).ravel()[:size]
    return _whole(used + np.cumsum(every_block) - np.cumsum(bincount_at(size + 1, last + 1, more)[:size]))
