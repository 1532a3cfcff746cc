"""Write the result table of README.md from models/evaluation.json."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def _number(value: float | None) -> str:
    if value is None:  # a constant has no reference on the same features
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main(readme: Path, evaluation: Path) -> None:
    """Replace the rows of the table in `readme`."""
    rows = []
    for scope in json.loads(evaluation.read_text(encoding="utf-8"))["scopes"]:
        name = scope["scope_id"].rsplit(".", 1)[0]
        for model, entry in scope["models"].items():
            held = entry["holdout"]
            errors = [held["mdape_pct"], held["p90_ape_pct"]]
            others = [entry["baseline"], entry["gradient_boosting"]]
            maes = [held["mae"], *(other and other["mae"] for other in others)]
            cells = [name, model, f"{held['n']:,}", *(_number(v) for v in (*errors, *maes))]
            rows.append(f"| {' | '.join(cells)} |")
    text = readme.read_text(encoding="utf-8")
    table = re.compile(r"(?:^\| \S+ \| (?:alpha|beta)\..*\n)+", re.MULTILINE)
    readme.write_text(table.sub("\n".join(rows) + "\n", text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
