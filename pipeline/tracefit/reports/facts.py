"""Facts that a terminal states as well as the page or the Markdown file, worded once; imports nothing heavy.

Their text is inline Markdown, as that of the report is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tracefit.reports.document import plain
from tracefit.text import count, in_words, mape_misleads, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.fit.results import Overload
    from tracefit.results.replays import RunReplay

HOLDOUT = "Measured on the hold-out, the last 30 % of each run in time, which no model was fitted on."
RAISE_EVENT_LIMIT = "set `OTEL_SPAN_EVENT_COUNT_LIMIT` above 128 on the server"
_NAMED_RUNS = 5
_PHASE_TEXTS = {"decodes": "without prompts", "prompts": "with prompts"}


class Fact(NamedTuple):
    """A fact: what is so, and how that is known or what follows from it."""

    claim: str
    detail: str

    @property
    def line(self) -> str:
        """The fact for a terminal, without marks and full stop."""
        return plain(f"{self.claim}{self.detail}")

    @property
    def paragraph(self) -> str:
        """The fact for the report: a paragraph whose claim is bold."""
        return f"**{self.claim[:1].upper()}{self.claim[1:]}**{self.detail}."


def mean_misleads(
    model: str, mape_pct: float | None, mdape_pct: float | None, p90_ape_pct: float | None
) -> Fact | None:
    """Warn of a mean percentage error that a few rows dominate; null where none do."""
    if not mape_misleads(mape_pct, mdape_pct):
        return None
    return Fact(
        f"`{model}`: the mean error misleads.",
        f" Half of the held-out rows are within {percent(mdape_pct)} %, nine of "
        f"ten within {percent(p90_ape_pct)} %; a few rows that are far off, or small, raise the mean to "
        f"{percent(mape_pct)} %. Read the median error and the MAE",
    )


def worse_than_median(
    model: str, skill: float | None, mae: float | None, baseline_mae: float | None, *, is_negligible: bool
) -> Fact | None:
    """Say that a model predicts the hold-out worse than the training median does; null where it does not, or where no
    use can tell.
    """
    if skill is None or skill >= 0 or is_negligible:
        return None
    return Fact(
        f"`{model}` is worse than the training median",
        f" on the hold-out: it is off by {number(mae)} us on average, the median by {number(baseline_mae)} us",
    )


def not_fitted(models: Sequence[str], reason: str, remedy: str | None) -> Fact:
    """Say which models are missing, for what reason, and what gives them."""
    if len(models) > 1 and remedy:
        remedy = remedy.replace(" gives it", " gives them")
    verb = "was" if len(models) == 1 else "were"
    return Fact(", ".join(models), f" {verb} not fitted: {reason}{f'; {remedy}' if remedy else ''}")


def not_replayed(runs: Sequence[str], reason: str) -> str:
    """Say which runs are not replayed, and for what reason."""
    shown, more = ", ".join(f"`{run}`" for run in runs[:_NAMED_RUNS]), len(runs) - _NAMED_RUNS
    names = f"{shown} and {more} more" if more > 0 else shown
    return f"{f'run {names} is' if len(runs) == 1 else f'runs {names} are'} not replayed: {reason}"


def compared_requests(run: RunReplay) -> str:
    """Say how many requests of a replay are compared with the measurement."""
    return f"{plural(run.requests, 'request')} compared, {count(run.in_flight)} in flight before"


def overloaded(one: Overload, option: str) -> Fact:
    """Say that a run was overloaded, for what reasons, and whether it is trained on.

    Args:
        one: The run.
        option: The option that keeps such runs, as its reader names it.
    """
    fate = (
        "it is trained on all the same, so the models describe an overloaded server"
        if one.trained_on
        else f"it is left out of training ({option} keeps it)"
    )
    return Fact(f"run `{one.run_id}` was overloaded", f" ({'; '.join(one.reasons)}): {fate}")


def dropped_events(events: int) -> str:
    """Say that the server did not export some events."""
    return f"{plural(events, 'event')} {'was' if events == 1 else 'were'} dropped by the server's SDK"


def point_load(rate_per_s: float | None, concurrency: float | None) -> str:
    """Write the load of a point of a benchmark; empty if unknown."""
    rate = f"{number(rate_per_s)}/s" if rate_per_s else ""
    return " at most ".join(filter(None, (rate, f"{number(concurrency)} at a time" if concurrency else "")))


def not_compared(points: Sequence[str], reason: str) -> str:
    """Say which points of a benchmark have no prediction beside them, and for what reason."""
    return (
        f"{'point' if len(points) == 1 else 'points'} {', '.join(points)} {'is' if len(points) == 1 else 'are'} "
        f"not compared: {reason}"
    )


def expected_within(p90_ape_pct: Mapping[str, float]) -> str:
    """Say what errors a transferred model is expected to have."""
    limits = [f"{percent(pct)} % {_PHASE_TEXTS[name]}" for name, pct in p90_ape_pct.items() if name in _PHASE_TEXTS]
    if not limits:
        return "its errors are not known"
    return f"nine of ten steps are expected within {in_words(limits)}"
