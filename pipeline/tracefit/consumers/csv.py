"""Export to CSV: one row per coefficient, for spreadsheets and other tools."""

from __future__ import annotations

import csv
import io

from tracefit.consumers.base import OUT, Export, Source
from tracefit.errors import spreadsheet_safe
from tracefit.models.schema import coefficient_rows
from tracefit.results.models import HeldOut


def to_csv(source: Source) -> Export:
    """Write every number of every model of a deployment; the errors are those of the models themselves."""
    models, text = source.models, io.StringIO()
    rows = [
        {name: "" if cell is None else cell for name, cell in row.items()}
        for model in models.models.values()
        for row in coefficient_rows(model)
    ]
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: spreadsheet_safe(cell) for name, cell in row.items()} for row in rows)
    errors = tuple(
        HeldOut(m.name, "us", v.holdout.n, v.holdout.mape_pct, v.holdout.mae, v.holdout.bias_pct, v.baseline.mae)
        for m in models.models.values()
        if (v := m.validation) is not None
    )
    return Export({"coefficients.csv": text.getvalue()}, errors, (), f"column -s, -t {OUT}/coefficients.csv")
