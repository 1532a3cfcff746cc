"""Draw the README's picture: predicted against measured step times, from what `make models` made.

`python tests/make_picture.py OUT docs/step-times.svg`
"""

from __future__ import annotations

import sys
from pathlib import Path

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.commands.figure_data import model_rows
from tracefit.reports.figures import predicted_figure
from tracefit.reports.svg import figure_svg
from tracefit.tables.store import TableStore

SCOPE = "llama-3.1-8b"
STYLE = """<style>
svg{background:#fff}text{font:11px sans-serif;fill:#57606a}.l{font-size:12px;fill:#1b1f24}.m{text-anchor:middle}.e{text-anchor:end}
.f{fill:none;stroke:#d0d7de}.g{stroke:#d0d7de;stroke-width:.5}.r{stroke:#57606a;stroke-dasharray:4 3}.p0{fill:none;stroke:#0063b1;stroke-width:4.2;stroke-linecap:round;stroke-opacity:.5}
</style>"""


def main(out: Path, target: Path) -> None:
    """Write the picture of the step model of `SCOPE`."""
    evaluation = read_evaluation(out / "evaluation.json")
    scope = next(s for s in evaluation.scopes if s.scope_id.startswith(SCOPE))
    models = read_coefficients(out / "models/beta.json").models
    model = next(m for m in models if m.scope_id == scope.scope_id)
    rows = TableStore(out / "tables").read("beta_training", list(scope.runs))
    drawn = model_rows(model, rows, points=300)
    assert drawn is not None
    text = figure_svg(predicted_figure(model, drawn))
    start = text.index(">") + 1
    head = text[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="630" ')
    target.write_text(f"{head}{STYLE}{text[start:]}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
