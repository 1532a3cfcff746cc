"""What the models may be used for, first of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.model import Part, Table

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import Evaluation, Verdict


def verdict_parts(evaluation: Evaluation) -> list[Part]:
    """Say for each scope and use whether the models serve it, and why."""
    parts: list[Part] = ["## Verdict"]
    judged = [scope for scope in evaluation.scopes if scope.verdicts]
    if len(judged) > 1:
        uses = tuple(judged[0].verdicts)
        answers = tuple((f"`{s.scope_id}`", *(f"**{s.verdicts[u].answer}**" for u in uses)) for s in judged)
        parts.append(Table(("scope", *uses), answers))
    for scope in judged:
        rows = tuple((use, f"**{v.answer}**", _because(v)) for use, v in scope.verdicts.items())
        if len(judged) > 1:
            parts.append(f"### `{scope.scope_id}`")
        parts.append(Table(("use", "verdict", "because"), rows))
    parts.append(
        "Each use is as good as the worst measure it needs, all on the hold-out. The thresholds are in evaluation.json; "
        "`--threshold USE.MEASURE=YES:WITH_LIMITS` sets others."
    )
    return parts


def _because(verdict: Verdict) -> str:
    return "; ".join(verdict.reasons)
