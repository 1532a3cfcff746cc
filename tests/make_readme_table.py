"""Write the result tables of README.md: of models/evaluation.json scopes on GPUs and those without one, then models/logged/evaluation.json."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def _number(value: float | None) -> str:
    if value is None:  # a constant has no reference on the same features
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _rows(evaluation: Path) -> list[str]:
    rows = []
    for scope in json.loads(evaluation.read_text(encoding="utf-8"))["scopes"]:
        name = scope["scope_id"].rsplit(".", 1)[0]
        for model, entry in scope["models"].items():
            held = entry["holdout"]
            errors = [held["mdape_pct"], held["p90_ape_pct"]]
            others = [entry["baseline"], entry["gradient_boosting"]]
            maes = [held["mae"], *(other and other["mae"] for other in others)]
            cells = [name, model, f"{held['n']:,}", *(_number(v) for v in (*errors, *maes))]
            rows.append(f"| {' | '.join(cells)} |\n")
    return rows


def main(readme: Path, evaluation: Path, logged: Path) -> None:
    """Replace the rows of the tables in `readme`."""
    rows = _rows(evaluation)
    tables = [[row for row in rows if (".no-gpu." in row) is without] for without in (False, True)]
    tables.append(_rows(logged))
    text = readme.read_text(encoding="utf-8")
    table = re.compile(r"(?:^\| \S+ \| (?:alpha|beta)\..*\n)+", re.MULTILINE)
    written = iter(tables)
    readme.write_text(table.sub(lambda _: "".join(next(written)), text, count=3), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
