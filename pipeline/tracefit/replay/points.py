"""Replay a point of a benchmark: a server under a load of one concurrency or one rate, with requests of one length.

A client that keeps a concurrency sends a request as soon as another one ends; all its first ones come together, as in a benchmark
that begins. One with a rate sends them as a Poisson process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tracefit.replay.engine import ReplayedRequest, ReplayEngine
from tracefit.replay.models import admission_us
from tracefit.replay.plan import TrafficSample
from tracefit.statistics import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.replay.plan import Fleet
    from tracefit.statistics import Vector

_ROUNDS, _LEAST_REQUESTS, _MOST_REQUESTS = 10, 200, 4_000
"""Requests of a replay: so many for each that runs at a time, and at least and at most so many; those of the benchmark if it says."""


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


def latencies_at(fleet: Fleet, load: PointLoad) -> dict[str, Vector]:
    """Return ttft, tpot and e2e of each request, and itl as the mean over all tokens, in us.

    Args:
        fleet: The server; its own requests are not used.
        load: The load.

    Raises:
        DataError: The model reads a value that is unknown, or the server never serves such requests.
    """
    lengths = (np.array([load.prompt_tokens]), np.array([load.output_tokens]))
    sample = TrafficSample(*lengths, np.zeros(1, dtype=np.int64))
    fleet = replace(fleet, sample=sample, carried_per_s=None, _known={})
    several = load.output_tokens > 1
    if load.rate_per_s is not None:
        count = min(max(load.requests or 0, _LEAST_REQUESTS), _MOST_REQUESTS)
        found = fleet.at(1, load.rate_per_s, count).latencies
        times = {"ttft": found["ttft"], "tpot": found["itl"], "e2e": found["e2e"]}
    else:
        times = _in_turn(fleet, load)
    gaps = times["tpot"]
    return times | {
        "tpot": gaps if several else gaps[:0],
        "itl": gaps.mean(keepdims=True) if several else gaps[:0],
    }


def statistic_us(values: Vector, statistic: str) -> float | None:
    """Return the mean of some times, or a percentile such as `p90`; null without any."""
    if not len(values):
        return None
    return float(values.mean()) if statistic == "mean" else percentile(values, float(statistic[1:]))


def _in_turn(fleet: Fleet, load: PointLoad) -> dict[str, Vector]:
    """Return the latencies of requests that are each sent when another one ends."""
    slots = load.concurrency or 1
    asked = load.requests or max(_ROUNDS * slots, _LEAST_REQUESTS)
    count = min(max(asked, slots), max(_MOST_REQUESTS, 2 * slots))
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
    # Without the number of the benchmark's requests, its first ones, which come together, count for less than in a long one.
    counts = ~np.isnan(last) & (np.arange(count) >= (0 if load.requests else slots))
    tpot = (last - first) / max(load.output_tokens - 1, 1)
    times = {"ttft": first - sent_us, "tpot": tpot, "e2e": last - sent_us}
    return {name: values[counts] for name, values in times.items()}


class _ClosedLoop(ReplayEngine):
    """An engine whose client sends the next request as soon as one ends."""

    def __init__(self, fleet: Fleet, most_blocks: int, way_us: float) -> None:
        super().__init__(fleet.times, fleet.settings, most_blocks, shares_prefixes=False)
        self._way_us = way_us
        self._left = deque[tuple[int, int]]()
        self._sent: list[ReplayedRequest] = []

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
