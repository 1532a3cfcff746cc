"""Export to CSV: one row per coefficient, for spreadsheets and other tools."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from tracefit.coefficients.compiled import linear_forms
from tracefit.coefficients.model import BoundaryModel, Regime
from tracefit.consumers.base import OUT, Export, Source
from tracefit.errors import spreadsheet_safe
from tracefit.fit.results import Term
from tracefit.results.models import HeldOut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.coefficients.model import Model
    from tracefit.fit.results import Number


def to_csv(source: Source) -> Export:
    """Write every number of every model of a scope; the errors are those of the models themselves."""
    models, text = source.models, io.StringIO()
    rows = [
        {"scope_id": models.scope_id, "model": model.name, **row}
        for model in models.models.values()
        for row in _rows(model)
    ]
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: spreadsheet_safe(cell) for name, cell in row.items()} for row in rows)
    errors = tuple(
        HeldOut(
            m.name, "us", v.holdout.n, v.holdout.mape_pct, v.holdout.mae, v.holdout.bias_pct, v.baseline.mae
        )
        for m in models.models.values()
        if (v := m.validation) is not None
    )
    return Export({"coefficients.csv": text.getvalue()}, errors, (), f"column -s, -t {OUT}/coefficients.csv")


def _rows(model: Model) -> Iterator[dict[str, object]]:
    """Yield the cells of every number of a model: its linear form, the condition, and the number."""
    clock = {"work": "step starts known", "without_clock": "step starts unknown"}
    for name, form in linear_forms(model).items():
        condition = form.when.text() if isinstance(form, Regime) else clock.get(name, "")
        numbers: list[tuple[str, str, Number | Term]] = [("intercept", "us", form.intercept)]
        numbers += [(term.feature, term.unit, term) for term in form.terms]
        # The offset is added behind the boundary: it is no term of the work.
        if isinstance(model, BoundaryModel) and form is model.work:
            numbers.append(("offset", "us", model.offset))
        for term, unit, found in numbers:
            ranges = (found.ci95, found.training_range if isinstance(found, Term) else None)
            low, high, least, most = (end for pair in ranges for end in pair or ("", ""))
            yield {
                "part": name,
                "condition": condition,
                "term": term,
                "unit": unit,
                "value": found.value,
                "ci95_low": low,
                "ci95_high": high,
                "training_min": least,
                "training_max": most,
                "formula": (found.formula if isinstance(found, Term) else None) or "",
            }
