"""Export to CSV: one row per coefficient, for spreadsheets and other tools."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from tracefit.coefficients.compiled import linear_forms
from tracefit.coefficients.model import BoundaryModel, Regime
from tracefit.consumers.base import OUT, Export, Source, consumer
from tracefit.errors import spreadsheet_safe
from tracefit.results.models import HeldOut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.coefficients.model import Model
    from tracefit.fit.results import Bounds, Number, Term

_HEAD = (
    "scope_id",
    "model",
    "part",
    "condition",
    "term",
    "unit",
    "value",
    "ci95_low",
    "ci95_high",
    "training_min",
    "training_max",
    "formula",
)


@consumer("csv")
def to_csv(source: Source) -> Export:
    """Write every number of every model of a scope; the errors are those of the models themselves."""
    models, text = source.models, io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD)
    for model in models.models.values():
        for form, condition, row in _rows(model):
            cells = (models.scope_id, model.name, form, condition, *row)
            writer.writerow([spreadsheet_safe(cell) for cell in cells])
    errors = tuple(
        HeldOut(
            m.name, "us", v.holdout.n, v.holdout.mape_pct, v.holdout.mae, v.holdout.bias_pct, v.baseline.mae
        )
        for m in models.models.values()
        if (v := m.validation) is not None
    )
    return Export({"coefficients.csv": text.getvalue()}, errors, (), f"column -s, -t {OUT}/coefficients.csv")


def _rows(model: Model) -> Iterator[tuple[str, str, list[object]]]:
    """Yield the linear form, its condition and the other cells of every number of a model."""
    clock = {"work": "step starts known", "without_clock": "step starts unknown"}
    for name, form in linear_forms(model).items():
        condition = form.when.text() if isinstance(form, Regime) else clock.get(name, "")
        yield name, condition, _number("intercept", "us", form.intercept)
        for term in form.terms:
            yield name, condition, _number(term.feature, term.unit, term, term.training_range, term.formula)
        # The offset is added behind the boundary: it is no term of the work.
        if isinstance(model, BoundaryModel) and form is model.work:
            yield name, condition, _number("offset", "us", model.offset)


def _number(
    name: str,
    unit: str,
    found: Number | Term,
    training_range: Bounds | None = None,
    formula: str | None = None,
) -> list[object]:
    ends = (found.ci95, training_range)
    return [name, unit, found.value, *(end for pair in ends for end in pair or ("", "")), formula or ""]
