"""What a prediction says beside its number: a range, and whether the question was one the model has seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A predicted duration.

    Attributes:
        value_us: The prediction.
        low_us: Lower end of the range that nine of ten held-out rows kept to; null without a validation.
        high_us: Its upper end; null also where held-out errors leave it open.
    """

    value_us: float
    low_us: float | None = None
    high_us: float | None = None

    def __add__(self, other: Span) -> Span:
        """Add durations; ends add up, as if both parts were off to the same side."""
        return Span(
            self.value_us + other.value_us,
            _sum(self.low_us, other.low_us),
            _sum(self.high_us, other.high_us),
        )

    def times(self, count: float) -> Span:
        """Return so many of this duration, all off to the same side."""
        low, high = (None if end is None else count * end for end in (self.low_us, self.high_us))
        return Span(count * self.value_us, low, high)


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right


def span(value_us: float, p90_ape_pct: float | None) -> Span:
    """Put the range around a prediction p that |p - actual| / actual <= q on nine of ten held-out rows says.

    It is p/(1 + q) to p/(1 - q), open above where q is 1 or more.
    """
    if p90_ape_pct is None:
        return Span(value_us)
    q = p90_ape_pct / 100
    return Span(value_us, value_us / (1 + q), value_us / (1 - q) if q < 1 else None)


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """A predicted step.

    Attributes:
        scope_id: Whose model speaks.
        model: Its name.
        step: The step's time.
        features: What the model was evaluated on.
        assumed: What the question left open, and what stands in.
        outside: Where the question leaves the training range.
    """

    scope_id: str | None
    model: str
    step: Span
    features: tuple[tuple[str, float], ...]
    assumed: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """A predicted request. Parts that the files have no model for are null, and what needs them too.

    Attributes:
        scope_id: Whose models speak.
        admission: ARRIVED to QUEUED.
        queue_wait: QUEUED to first SCHEDULED.
        prefill: First SCHEDULED to FIRST_TOKEN.
        itl: Time of a decode step.
        departure: FINISHED to DEPARTED.
        ttft: admission + queue wait + prefill.
        e2e: ttft + (output tokens - 1) * itl, ARRIVED to FINISHED.
        prefill_steps: Steps the prompt takes.
        assumed: What the question left open, and what stands in.
        outside: Where the question leaves the training range.
    """

    scope_id: str | None
    admission: Span | None
    queue_wait: Span | None
    prefill: Span
    itl: Span
    departure: Span | None
    ttft: Span | None
    e2e: Span | None
    prefill_steps: int
    assumed: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
