"""Write the tables of docs/explanation/results.md: replays of all evaluations, then the models of each: of the first,
deployments on GPUs and those without."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path


def _number(value: float | None) -> str:
    if value is None:  # a constant has no reference on the same features
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _rows(evaluation: Path) -> list[str]:
    rows = []
    for deployment in json.loads(evaluation.read_text(encoding="utf-8"))["deployments"]:
        name = deployment["deployment_id"].rsplit(".", 1)[0]
        for model, entry in deployment["models"].items():
            held = entry["holdout"]
            errors = [held["mdape_pct"], held["p90_ape_pct"]]
            others = [entry["baseline"], entry["gradient_boosting"]]
            maes = [held["mae"], *(other and other["mae"] for other in others)]
            cells = [name, model, f"{held['n']:,}", *(_number(v) for v in (*errors, *maes))]
            rows.append(f"| {' | '.join(cells)} |\n")
    return rows


def _replays(evaluation: Path) -> list[str]:
    """Return errors of replayed latencies; of a run that is in two evaluations the file's folder tells them apart."""
    rows = []
    where = " (with its log)" if evaluation.parent.name == "logged" else ""
    deployments = json.loads(evaluation.read_text(encoding="utf-8"))["deployments"]
    for run in (run for deployment in deployments for run in deployment["replays"]):
        found = {q["name"]: q for q in run["quantities"]}
        for latency in ("ttft", "itl", "e2e"):
            points = [q for p in (50, 90, 99) if (q := found.get(f"{latency}_p{p}_us"))]
            if points:
                p50 = points[0]
                guesses = [p50[way] and 100 * (p50[way] / p50["measured"] - 1) for way in ("constant", "predicted")]
                errors = [_signed(e) for e in (*(q["error_pct"] for q in points), *guesses)]
                cells = [run["run_id"] + where, latency.upper(), f"{run['requests']:,}", *errors]
                rows.append(f"| {' | '.join(cells)} |\n")
    return rows


def _medians(rows: list[str]) -> list[str]:
    """Return the median of the absolute errors over the runs, per latency."""
    found = []
    for latency in ("TTFT", "ITL", "E2E"):
        cells = [row.strip("|\n ").split(" | ") for row in rows if f" {latency} " in row]
        errors = [
            [abs(float(c.replace(",", ""))) for c in column if c != "-"]
            for column in list(zip(*cells, strict=True))[3:]
        ]
        medians = [f"{statistics.median(e):.1f}" if e else "-" for e in errors]
        found.append(f"| median of {len(cells)} | {latency} | | {' | '.join(medians)} |\n")
    return found


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+,.1f}"


def main(page: Path, evaluation: Path, logged: Path, generated: Path) -> None:
    """Replace the rows of the tables in a page."""
    rows = _rows(evaluation)
    tables = [[row for row in rows if (".no-gpu." in row) is without] for without in (False, True)]
    tables.append(_rows(logged))
    text = page.read_text(encoding="utf-8")
    replays = [row for each in (evaluation, logged, generated) for row in _replays(each)]
    replays += _medians(replays)
    replayed = re.compile(r"(?:^\| [^|]+ \| (?:TTFT|ITL|E2E) \|.*\n)+", re.MULTILINE)
    text = replayed.sub(lambda _: "".join(replays), text, count=1)
    table = re.compile(r"(?:^\| \S+ \| (?:alpha|beta)\..*\n)+", re.MULTILINE)
    written = iter(tables)
    page.write_text(table.sub(lambda _: "".join(next(written)), text, count=3), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
