"""The report of a server that was never traced: where its model comes from, how exact it is, and what would make it
more exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.models.targets import is_step_model
from tracefit.reports.document import Bullets, Report, kept, section, table, table_of
from tracefit.reports.facts import expected_within
from tracefit.reports.sentences import verdicts
from tracefit.text import count, number, percent, plural, sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.coefficients import documents
    from tracefit.fit.results import LeftOutErrors
    from tracefit.models import schema
    from tracefit.models.validation import Metrics
    from tracefit.reports.document import ReportPart

_SOURCE_TEXTS: dict[str, str] = {
    "tensor_parallel": "deployments of the same model and GPU",
    "model": "deployments of other models on the same GPU",
    "gpu": "deployments on other GPUs",
    "model_and_gpu": "deployments of other models on other GPUs",
}
_LEFT_OUT_TEXT = (
    "Each source is left out in turn, and predicted by a law that is fitted to the others. *Nearest* is the most "
    "similar of these, its times for the same batches unchanged; *roofline* the longer of compute and memory at the "
    "rated speed; *own fit* the deployment's own model on its hold-out, the least that a law can reach. *Covered* "
    "are the steps within the interval that the others give."
)
_LAW = (
    "The time of a step is the sum of the terms in `always` and the longer of those in `memory` and `compute`; with "
    "prompts it is the sum of `launch` if that is longer. A term in us is a time at the rated speed of the GPU: its "
    "coefficient is one over an efficiency. Bounds come from physics, and no fit moves them; "
)
_OF_PHYSICS = "so do the priors."


def transfer_of(beta: documents.CoefficientFile) -> schema.Transfer | None:
    """Return where a file's model of step times comes from, if it is the only one and not just fitted."""
    steps = [m for m in beta.models if is_step_model(m.name)]
    return steps[0].transfer if len(steps) == 1 else None


def transferred_report(
    evaluation: documents.Evaluation,
    alpha: documents.CoefficientFile,
    beta: documents.CoefficientFile,
    more: Sequence[ReportPart | None],
) -> Report:
    """Build the report.

    Args:
        evaluation: Of one deployment.
        alpha: Models of requests.
        beta: Its model of step times.
        more: Parts that every report ends with.
    """
    transfer = transfer_of(beta)
    if transfer is None:
        raise ValueError("the model of step times is fitted, not transferred")
    deployment, model = evaluation.deployments[0], beta.models[0]
    facts = model.deployment
    title = f"{facts.model} on {facts.gpu}" if facts and facts.model and facts.gpu else deployment.deployment_id
    borrowed = [m for m in alpha.models if m.transfer is not None]
    parts = kept(
        verdicts(deployment),
        Bullets(tuple(map(sentence, model.notes))),
        section("Errors on servers that were left out", _LEFT_OUT_TEXT, table_of(evaluation.across, _FOLD_COLUMNS)),
        _calibration(transfer),
        section("The law", _LAW + _priors(transfer), _law(transfer)),
        Bullets(tuple(f"`{m.name}` is borrowed from `{m.transfer.sources[0]}`." for m in borrowed if m.transfer)),
        *more,
    )
    subject = (
        f"Latency models of `{deployment.deployment_id}`, from {plural(len(transfer.sources), 'other deployment')}."
    )
    return Report(title, lead(transfer, model.origin), parts, subject)


def lead(transfer: schema.Transfer, origin: str) -> str:
    """Say how exact the model is, and how that is known."""
    within = expected_within(transfer.p90_ape_pct)
    of = f"{plural(len(transfer.sources), 'deployment')} ({_SOURCE_TEXTS[transfer.kind]})"
    if origin == "calibrated" and transfer.calibration is not None:
        how = (
            f"a law from {of}, drawn to {count(transfer.calibration.steps)} steps of this server: {within}, as "
            "left-out blocks of these show"
        )
    elif not transfer.tested:
        how = (
            f"a law from {of}, untested for such a server: {within}, the widest interval known; some minutes of "
            "its traces would show more"
        )
    else:
        how = f"a law from {of}: {within}, as servers show that were left out of them"
    return f"Step times follow from {how}."


def _pct(errors: Metrics | None) -> str:
    return "-" if errors is None else percent(errors.mape_pct)


_FOLD_COLUMNS: dict[str, Callable[[LeftOutErrors], str]] = {
    "left out": lambda one: one.left_out,
    "deployment": lambda one: f"`{one.deployment_id}`" if one.deployment_id else "-",
    "mean error %": lambda one: _pct(one.errors),
    "without prompts %": lambda one: _pct(one.by_phase.get("decodes")),
    "with prompts %": lambda one: _pct(one.by_phase.get("prompts")),
    "nearest %": lambda one: _pct(one.nearest),
    "roofline %": lambda one: _pct(one.roofline),
    "own fit %": lambda one: _pct(one.own),
    "covered %": lambda one: percent(one.interval_coverage_pct),
    "steps": lambda one: count(one.errors.n),
}


def _priors(transfer: schema.Transfer) -> str:
    if not transfer.prior_sources:
        return _OF_PHYSICS
    names = ", ".join(f"`{name}`" for name in transfer.prior_sources)
    return f"the priors are a law of {names}, or of physics where it has no such term."


def _law(transfer: schema.Transfer) -> ReportPart:
    head = ("term", "sum", "unit", "value", "left out", "bounds", "prior")
    rows = [
        (
            f"`{c.feature}`",
            c.part,
            c.unit,
            number(c.value),
            f"{number(c.left_out_range[0])} to {number(c.left_out_range[1])}" if c.left_out_range else "-",
            f"{number(c.low)} to {number(c.high)}" if c.high is not None else f"from {number(c.low)}",
            number(c.prior),
        )
        for c in transfer.law
    ]
    return table(head, rows)


def _calibration(transfer: schema.Transfer) -> ReportPart | None:
    """Return what the steps of the server itself changed; null without any."""
    facts = transfer.calibration
    if facts is None:
        return None
    left_out = ", ".join(f"{count(n)} {reason.replace('_', ' ')}" for reason, n in facts.left_out.items())
    rows = [
        ("the transferred law", _pct(facts.before)),
        ("drawn to the steps, on left-out blocks of them", _pct(facts.after)),
    ]
    if facts.own_mape_pct is not None:
        rows += [
            ("an own fit, on the last part of the steps", percent(facts.own_mape_pct)),
            ("the calibrated law, on the same part", percent(facts.own_after_mape_pct)),
        ]
    text = f"{count(facts.steps)} steps count{f'; left out: {left_out}' if left_out else ''}."
    return section("Steps of this server", text, table(("model", "mean error %"), rows))
