"""What every step carried, from the journeys alone: difference arrays over the step axis, no loop per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracefit.timeline.engines import Floats, Ints, StepAxis, pile, spread

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a server's scheduler is bound by; null where not known.

    Attributes:
        max_num_batched_tokens: Token budget of a step.
        max_num_seqs: Slots.
        block_size: Tokens per KV block.
        num_blocks: KV blocks that can be used.
        chunked_prefill: Whether a prompt may be computed in parts.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int | None = None
    chunked_prefill: bool = True


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Rows of (stretch, position) in which prompt tokens were computed."""

    position: Ints
    tokens: Ints
    context: Ints
    """Tokens computed before, cached ones included."""
    has_output: Ints
    owner: Ints
    """Which stretch."""


def compose(
    axis: StepAxis, running: pl.DataFrame, waiting: pl.DataFrame, limits: EngineLimits, lag: int
) -> pl.DataFrame:
    """Work out the batch of every step from the stretches of running and waiting.

    Args:
        axis: All steps.
        running: `running_segments` with positions `start`, `end`, `complete`.
        waiting: `waiting_segments` with positions `first`, `last`.
        limits: Token budget and block size.
        lag: Steps that scheduling runs ahead of execution. With 1 a request's first decode still counts as prefill
            (its token is not known yet), and a finished request stays in the running list for one more step.

    Returns:
        One row per position: num_prefill_reqs, num_decode_reqs, prefill_tokens, decode_tokens, context_tokens,
        prefill_context_tokens, running_depth, waiting_depth, waiting_tokens, kv_blocks_used.
    """
    size = axis.size
    start, end, outputs = (_ints(running, c) for c in ("start", "end", "outputs"))
    complete = running["complete"].fill_null(-1).to_numpy()
    decoding = (complete >= 0) & (complete < end)
    first, last = complete[decoding] + 1, end[decoding]
    context = (_ints(running, "prompt_tokens") + outputs)[decoding]
    decodes = spread(size, first, last, np.ones(len(first)))
    prompts = _prompt_rows(running, decodes, size, limits)
    counts = _counts(size, prompts, decodes, first, last, context)
    if lag:
        counts = _first_decodes_as_prefill(
            size, counts, first[outputs[decoding] == 0], context[outputs[decoding] == 0]
        )
    leave = np.minimum(end + lag * _ints(running, "has_finished"), size - 1)
    wait_first, wait_last, wait_tokens = (_ints(waiting, c) for c in ("first", "last", "wait_tokens"))
    return pl.DataFrame(
        {
            **{name: values.round().astype(np.int64) for name, values in counts.items()},
            "running_depth": _whole(spread(size, start, leave, np.ones(len(start)))),
            "waiting_depth": _whole(spread(size, wait_first, wait_last, np.ones(len(wait_first)))),
            "waiting_tokens": _whole(spread(size, wait_first, wait_last, wait_tokens)),
            "kv_blocks_used": _blocks(size, prompts, first, last, context, limits.block_size),
            **_left_after(size, running, prompts, limits.block_size),
        }
    )


def _left_after(size: int, running: pl.DataFrame, prompts: _Prompts, block: int) -> dict[str, Ints]:
    """Tell what is left once each step's outputs are processed: the state a request finds that is queued then."""
    start, end, outputs = (_ints(running, c) for c in ("start", "end", "outputs"))
    complete = running["complete"].fill_null(-1).to_numpy()
    finished = _ints(running, "has_finished")
    # A finished request is gone after its last step's update; a preempted one holds on until the next schedule().
    until = end - finished
    stays = until >= start
    limit = np.maximum(_ints(running, "max_tokens") - outputs, 0)
    done = (complete >= 0) & (complete <= until)
    where = np.arange(size)
    # After step q a request whose prompt was complete at step c has put out 1 + q - c tokens of this stretch.
    produced = spread(size, complete[done], until[done], 1 - complete[done])
    produced += where * spread(size, complete[done], until[done], np.ones(int(done.sum())))
    held_tokens = _ints(running, "prompt_tokens") + outputs + np.where(complete >= 0, end - complete, 0)
    need = _ints(running, "need_tokens")
    given_up = need - np.bincount(prompts.owner, weights=prompts.tokens, minlength=len(need))
    prompt_left = np.cumsum(
        pile(size, start, need) - pile(size, prompts.position, prompts.tokens) - pile(size, end, given_up)
    )
    return {
        "running_after": _whole(spread(size, start[stays], until[stays], np.ones(int(stays.sum())))),
        "remaining_after": _whole(spread(size, start[stays], until[stays], limit[stays]) - produced),
        "prefill_left_after": _whole(prompt_left),
        "kv_blocks_freed": _whole(pile(size, end, finished * -(-held_tokens // block))),
    }


def _ints(frame: pl.DataFrame, column: str) -> Ints:
    return frame[column].fill_null(0).cast(pl.Int64).to_numpy()


def _whole(values: Floats) -> Ints:
    return values.round().astype(np.int64)


def _counts(
    size: int, prompts: _Prompts, decodes: Floats, first: Ints, last: Ints, context: Ints
) -> dict[str, Floats]:
    fresh, again = prompts.has_output == 0, prompts.has_output == 1
    where = np.arange(size)
    # Over a decode's steps its context grows by one: constant part and slope are two difference arrays.
    grown = spread(size, first, last, context - first) + where * decodes

    def at(rows: Floats | Ints, values: Ints) -> Floats:
        return pile(size, prompts.position[rows], values[rows])

    return {
        "num_prefill_reqs": at(fresh, np.ones_like(prompts.tokens)),
        "num_decode_reqs": decodes + at(again, np.ones_like(prompts.tokens)),
        "prefill_tokens": at(fresh, prompts.tokens),
        "decode_tokens": decodes + at(again, prompts.tokens),
        "context_tokens": grown + at(again, prompts.context),
        "prefill_context_tokens": at(fresh, prompts.context),
    }


def _first_decodes_as_prefill(
    size: int, counts: dict[str, Floats], first: Ints, context: Ints
) -> dict[str, Floats]:
    moved = pile(size, first, np.ones(len(first)))
    moved_context = pile(size, first, context)
    change = {
        "num_prefill_reqs": moved,
        "num_decode_reqs": -moved,
        "prefill_tokens": moved,
        "decode_tokens": -moved,
        "context_tokens": -moved_context,
        "prefill_context_tokens": moved_context,
    }
    return {name: values + change[name] for name, values in counts.items()}


def _prompt_rows(running: pl.DataFrame, decodes: Floats, size: int, limits: EngineLimits) -> _Prompts:
    """Spread each stretch's prompt over its steps: whole in one step, or in chunks of what the budget leaves."""
    start, end, need = (_ints(running, c) for c in ("start", "end", "need_tokens"))
    complete = running["complete"].fill_null(-1).to_numpy()
    cached, has_output = _ints(running, "cached_tokens"), (_ints(running, "outputs") > 0).astype(np.int64)
    whole = complete == start
    singles = pile(size, start[whole], need[whole])
    rows = [(start[whole], need[whole], cached[whole], has_output[whole], np.flatnonzero(whole))]
    budget = limits.max_num_batched_tokens
    room = np.maximum((budget or 0) - decodes - singles, 0.0) if budget else None
    for i in np.flatnonzero(~whole):  # chunked prompts only, in the order they were scheduled
        stop = int(complete[i]) if complete[i] >= 0 else int(end[i])
        chunks = _chunks(int(start[i]), stop, int(need[i]), room, finished=complete[i] >= 0)
        before = cached[i] + np.concatenate([[0], np.cumsum(chunks)[:-1]])
        places = np.arange(start[i], stop + 1)
        used = chunks > 0
        same = np.ones(int(used.sum()), dtype=np.int64)
        rows.append((places[used], chunks[used], before[used], same * has_output[i], same * i))
    columns = [np.concatenate([row[k] for row in rows]).astype(np.int64) for k in range(5)]
    return _Prompts(*columns)


def _chunks(start: int, stop: int, need: int, room: Floats | None, *, finished: bool) -> Ints:
    """Tokens of one prompt in each of the steps start..stop; takes them out of `room`."""
    count = stop - start + 1
    if room is None:  # no budget known: even parts
        edges = np.linspace(0, need, count + 1).round().astype(np.int64)
        return np.diff(edges)
    taken = np.minimum(np.cumsum(room[start : stop + 1]), need)
    if finished:
        taken[-1] = need  # the completing step computed whatever was left
    chunks = np.diff(np.concatenate([[0.0], taken])).round().astype(np.int64)
    room[start : stop + 1] = np.maximum(room[start : stop + 1] - chunks, 0.0)
    return chunks


def _blocks(size: int, prompts: _Prompts, first: Ints, last: Ints, context: Ints, block: int) -> Ints:
    """KV blocks held after each step's scheduling: a request holds ceil(tokens / block) until it ends.

    Blocks that requests share through the prefix cache count for each of them.
    """
    filled = -(-(prompts.context + prompts.tokens) // block)
    held = pile(size, prompts.position, filled)
    held += spread(size, first, last, -(-context // block))
    # While decoding, another block is taken whenever the context reaches a multiple of the block size.
    next_block = first + (-context) % block
    more = np.maximum((last - next_block) // block + 1, 0)
    owner = np.repeat(np.arange(len(first)), more)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(more) - more, more)
    held += spread(size, next_block[owner] + nth * block, last[owner], np.ones(len(owner)))
    return _whole(held)
