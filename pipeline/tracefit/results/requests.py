"""Summaries of requests: counts, failures, percentiles and throughput; `tracefit requests` prints them. Imports nothing
heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracefit.errors import EXIT_DONE
from tracefit.results.notebook import Shown


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Durations of some requests, in seconds."""

    # Seconds, as vLLM's own metrics have them; the tables hold microseconds.
    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @property
    def percentiles_ms(self) -> tuple[float | None, ...]:
        """P50, P90 and P99 in ms."""
        return tuple(None if s is None else 1e3 * s for s in (self.p50, self.p90, self.p99))


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one run, of one window of it, or of all runs.

    Failures are requests that were aborted, ignored or ended in an error; they count for the time to the first token
    and in the queue, not for the others. Throughput is over the time from the first arrival to the last event.
    """

    by: str
    name: str
    requests: int
    failed: int
    in_flight: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    seconds: float | None
    requests_per_s: float | None
    output_tokens_per_s: float | None
    ttft: Quantiles
    itl: Quantiles
    e2e: Quantiles
    queue: Quantiles


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """The requests of a deployment's runs: how many a second were carried, and their lengths.

    Attributes:
        carried_per_s: Most requests of mean length that one engine finished per second over `over_s`; of a sample or a
            shorter run, the mean over all of it.
        carried_together_per_s: The sum over the engines of a run, the largest of several runs.
        over_s: Time over which they are counted, in s.
        prompt_tokens: Mean prompt.
        computed_tokens: Mean prompt without tokens that were in the cache.
        output_tokens: Mean output.
        prompt_spread: Half the width of a uniform distribution with the standard deviation of the prompts, over their
            mean.
        output_spread: The same for the outputs.
    """

    carried_per_s: float | None
    carried_together_per_s: float | None
    over_s: float
    prompt_tokens: float
    computed_tokens: float
    output_tokens: float
    prompt_spread: float
    output_spread: float


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """How long requests were in one phase, and its share of all their phases' time."""

    phase: str
    share: float | None
    seconds: Quantiles


@dataclass(frozen=True, slots=True)
class RequestSummary(Shown):
    """Requests of all runs: in total, by run, by phase and over time."""

    total: RequestGroup
    states: dict[str, int]
    runs: tuple[RequestGroup, ...]
    phases: tuple[PhaseSummary, ...]
    windows: tuple[RequestGroup, ...]

    @property
    def groups(self) -> tuple[RequestGroup, ...]:
        """All groups, the largest first."""
        return (self.total, *self.runs, *self.windows)

    @property
    def exit_code(self) -> int:
        """0: there are requests."""
        return EXIT_DONE
