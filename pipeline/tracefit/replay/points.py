"""Replay a point of a benchmark: a server under a load of one concurrency or one rate, with requests of one length.

A client that keeps a concurrency sends a request as soon as another one ends; all its first ones come together, as in a
benchmark that begins. One with a rate sends them as a Poisson process.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from tracefit.errors import DataError
from tracefit.replay.engine import ReplayedRequest, ReplayEngine
from tracefit.replay.models import admission_us
from tracefit.replay.plan import BatchRecorder, TrafficSample
from tracefit.replay.run import token_gaps
from tracefit.statistics import percentile, percentile_of_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.replay.plan import Fleet
    from tracefit.replay.run import TokenGaps
    from tracefit.statistics import Integers, Vector

_FEWEST_LOOP_ROUNDS, _LEAST_REQUESTS, _MOST_POINT_REQUESTS = 10, 200, 4_000
"""Requests of a replay: so many for each that runs at a time, and at least and at most so many; those of the benchmark
if it says."""


class PointLoad(NamedTuple):
    """A load of a benchmark.

    Attributes:
        concurrency: Requests at a time; null if they come at a rate.
        rate_per_s: Requests per second; null if each is sent when another one ends.
        prompt_tokens: Of every request.
        output_tokens: Of every request.
        requests: How many the benchmark had; null if it does not say.
    """

    concurrency: int | None
    rate_per_s: float | None
    prompt_tokens: int
    output_tokens: int
    requests: int | None = None


class ReplayedLatency(NamedTuple):
    """A latency of a load.

    Attributes:
        values_us: Its values, shape (n,).
        counts: How often each occurs, shape (n,); null for once.
        has_percentiles: Whether its percentiles are known; if not, only its mean is.
    """

    values_us: Vector
    counts: Integers | None = None
    has_percentiles: bool = True

    def statistic_us(self, name: str) -> float | None:
        """Return the mean, or a percentile such as `p90`; null where it is not known."""
        if not len(self.values_us) or not (name == "mean" or self.has_percentiles):
            return None
        if name == "mean":
            return float(np.average(self.values_us, weights=self.counts))
        q = float(name[1:])
        if self.counts is None:
            return percentile(self.values_us, q)
        return percentile_of_counts(self.values_us, self.counts, q)


def latencies_at(fleet: Fleet, load: PointLoad) -> dict[str, ReplayedLatency]:
    """Return ttft, tpot and e2e of each request, and itl of each token after a first one.

    Percentiles of itl are not known where a step gives a request several tokens: clients see them at once, or one by
    one.

    Args:
        fleet: The server; its own requests are not used.
        load: The load.

    Raises:
        DataError: The model reads a value that is unknown, or the server never serves such requests.
    """
    lengths = (np.array([load.prompt_tokens]), np.array([load.output_tokens]))
    sample = TrafficSample(*lengths, np.zeros(1, dtype=np.int64))
    fleet = replace(fleet, sample=sample, carried_per_s=None, _known={})
    if load.rate_per_s is not None:
        count = min(max(load.requests or 0, _LEAST_REQUESTS), _MOST_POINT_REQUESTS)
        simulated = fleet.at(1, load.rate_per_s, count)
        found, gaps = simulated.latencies, simulated.gaps
        times = {"ttft": found["ttft"], "tpot": found["itl"], "e2e": found["e2e"]}
    else:
        times, gaps = _in_turn(fleet, load)
    if load.output_tokens <= 1:
        times, gaps = times | {"tpot": times["tpot"][:0]}, None
    itl = (
        ReplayedLatency(times["tpot"], has_percentiles=False)
        if gaps is None
        else ReplayedLatency(gaps.gaps_us, gaps.counts)
    )
    return {name: ReplayedLatency(values) for name, values in times.items()} | {"itl": itl}


def _in_turn(fleet: Fleet, load: PointLoad) -> tuple[dict[str, Vector], TokenGaps | None]:
    """Return the latencies of requests that are each sent when another one ends, and the times between their tokens."""
    slots = load.concurrency or 1
    asked = load.requests or max(_FEWEST_LOOP_ROUNDS * slots, _LEAST_REQUESTS)
    count = min(max(asked, slots), max(_MOST_POINT_REQUESTS, 2 * slots))
    admission = admission_us(
        fleet.deployment.models.get("alpha.admission"), np.zeros(1), np.array([load.prompt_tokens])
    )
    way_us = float(np.mean(admission))
    size = fleet.settings.block_size
    blocks = count * (-(-(load.prompt_tokens + load.output_tokens) // size) + 1)
    engine = _ClosedLoop(fleet, blocks, way_us)
    sent = engine.serve([(load.prompt_tokens, load.output_tokens)] * count, slots)
    first, last = (np.array([getattr(r, name) for r in sent]) for name in ("first_us", "last_us"))
    sent_us = np.array([r.queued_us for r in sent]) - way_us
    # Without the number of the benchmark's requests, its first ones, which come together, count for less than in a long
    # one.
    if np.isnan(last).all():
        raise DataError(
            f"requests of {load.prompt_tokens:,} and {load.output_tokens:,} tokens are never served: they need more "
            "KV blocks or a larger token budget than the server has"
        )
    counts = ~np.isnan(last) & (np.arange(count) >= (0 if load.requests else slots))
    tpot = (last - first) / max(load.output_tokens - 1, 1)
    times = {"ttft": first - sent_us, "tpot": tpot, "e2e": last - sent_us}
    gaps = token_gaps(engine.steps, engine.decoding)
    # Those after the first requests have ended.
    begin_us = float(first[counts].min()) if counts.any() else 0.0
    steady = None if fleet.settings.tokens_per_step > 1 else gaps.within(begin_us, float("inf"))
    return {name: values[counts] for name, values in times.items()}, steady


class _ClosedLoop(ReplayEngine):
    """An engine whose client sends the next request as soon as one ends."""

    def __init__(self, fleet: Fleet, most_blocks: int, way_us: float) -> None:
        times = BatchRecorder(fleet.times)
        super().__init__(times, fleet.settings, most_blocks, shares_prefixes=False)
        self._batches = times.batches
        self._way_us = way_us
        self._left = deque[tuple[int, int]]()
        self._sent: list[ReplayedRequest] = []

    @property
    def decoding(self) -> list[int]:
        """Requests that decode in each group of steps."""
        return [batch.decode_reqs for batch, _ in self._batches]

    def serve(self, lengths: Sequence[tuple[int, int]], slots: int) -> list[ReplayedRequest]:
        """Serve requests of some prompts and outputs, so many at a time, and return them in the order of sending."""
        self._left.extend(lengths)
        for _ in range(min(slots, len(lengths))):
            self._send_next()
        self.run()
        return self._sent

    def _send_next(self) -> None:
        if self._left:
            request = ReplayedRequest(len(self._sent), self.now + self._way_us, *self._left.popleft())
            self._sent.append(request)
            self.send(request)

    def _finish(self, finished: Sequence[ReplayedRequest]) -> None:
        super()._finish(finished)
        for _ in finished:
            self._send_next()
