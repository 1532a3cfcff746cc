"""Choose one scope of several models, by a part of its id or by the name of one of its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from tracefit.coefficients.models import Models


def choose_scope(models: Models, scope: str | None, run: str | None) -> str | None:
    """Return the id of the scope that was trained on a run; `scope` as it is if no run is given.

    Args:
        models: Loaded coefficient files.
        scope: A scope id, or a part of one.
        run: Name of a run.

    Raises:
        UsageError: No scope was trained on the run, or the scope that was is another one.
    """
    if run is None:
        return scope
    runs: dict[str, list[str]] = {}
    for scope_id in models.scope_ids:
        trained = (m.training for m in models.scope(scope_id).models.values())
        for name in {r for t in trained if t is not None for r in t.runs}:
            runs.setdefault(name, []).append(scope_id)
    found = [s for s in runs.get(run, []) if scope is None or scope in s]
    if len(found) == 1:
        return found[0]
    if run in runs:
        raise UsageError(
            f"run {run} belongs to several scopes" if found else f"run {run} is not of scope {scope}",
            where=models.where,
            hint=f"name one with --scope: {', '.join(runs[run])}",
        )
    close = did_you_mean(run, runs)
    known = f"runs: {', '.join(sorted(runs))}" if runs else "the files name no runs"
    raise UsageError(
        f"no model was trained on run {run}", where=models.where, hint=f"{close} {known}" if close else known
    )
