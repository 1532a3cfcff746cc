"""What steps of the runs hold that no training row does: coefficients that say nothing of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from tracefit.fit.linear import FittedTerm


def beyond_training(terms: Sequence[FittedTerm], steps: pl.DataFrame) -> tuple[str, ...]:
    """Name the features that some step has by more than twice as much as any training row.

    Step times are known of few steps where few are sampled: the longest prompts may be among the others.

    Args:
        terms: The terms of a model of step times.
        steps: Every known step; features it has no column of are not looked at.
    """
    notes = []
    for term in terms:
        name, (_, seen) = term.feature.name, term.training_range
        if name not in steps.columns:
            continue
        values = steps[name].drop_nulls()
        most = values.max()
        if isinstance(most, int | float) and most > 2 * max(seen, 0.0):
            share = 100 * int((values > seen).sum()) / len(values)
            notes.append(
                f"{name} is up to {seen:g} in the training rows and up to {most:g} in the runs' steps ({share:.2g} % are "
                "beyond): its coefficient says nothing of those"
            )
    return tuple(notes)
