"""How well step times are predicted on real GPUs, beside relative non-negative least squares and gradient boosting.

    python tests/benchmarks/gpu.py DATA

DATA is a folder with `fpm-b300/`, runs recorded as ForwardPassMetrics, and a step-traced run of an H100. Line and
boosting get the rows that the model was trained and tested on, with the plain columns of a batch and a flag for
prompts. Prints mean absolute errors in percent: of the last 30 %, of its mixed steps, of every third of ten equal
stretches; and beyond the load, trained on batches up to a quarter of the largest and tested above half of it.
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from scipy.optimize import nnls
from sklearn.ensemble import HistGradientBoostingRegressor

import tracefit
from tracefit.models.frames import evaluated_steps
from tracefit.tables.schema import ENGINE

if TYPE_CHECKING:
    from tracefit.statistics import Flags, Matrix, Vector

PLAIN = ("num_decode_reqs", "context_tokens", "prefill_tokens", "prefill_context_tokens", "num_prefill_reqs")
H100 = "h100-codellama-34b-tp2-general"
CSV = "fpm_metrics_detail.csv.gz"
FAR_PCT = 15.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors in percent of the model, the line and boosting; NaN where there are no rows."""

    ours: float
    line: float
    boosted: float

    def __str__(self) -> str:
        """Return cells of a table."""
        return " | ".join(f"{value:.2f}" for value in (self.ours, self.line, self.boosted))


def _frame(out: Path) -> pl.DataFrame:
    """Return the training frame with the plain columns, in time order."""
    rows = pl.read_parquet(out / "tables" / "beta_training" / "**" / "*.parquet")
    steps = pl.read_parquet(out / "tables" / "timeline" / "**" / "*.parquet")
    keys = [*ENGINE, "step_id"]
    rows = rows.select(*keys, "y", "split", "excluded_reason")
    return rows.join(steps.select(*keys, *PLAIN), on=keys).sort(keys)


def _plain(rows: pl.DataFrame) -> Matrix:
    known = [name for name in PLAIN if rows[name].null_count() < rows.height / 20]
    x = rows.select(pl.col(known).cast(pl.Float64).fill_null(0.0))
    flag = rows["num_prefill_reqs"].to_numpy() > 0
    return np.column_stack([x.to_numpy(), flag, np.ones(rows.height)])


def _pct(predicted: Vector, actual: Vector) -> float:
    return float(100 * np.mean(np.abs(predicted - actual) / actual)) if len(actual) else float("nan")


def _others(rows: pl.DataFrame, train: Flags) -> tuple[Vector, Vector]:
    """Predict all rows by a line and by boosting that are fitted on some."""
    x, y = _plain(rows), rows["y"].to_numpy().astype(float)
    scale = np.maximum(x.max(axis=0), 1.0)
    line, _ = nnls(x[train] / scale / y[train, None], np.ones(int(train.sum())))
    boosting = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    return x / scale @ line, np.asarray(boosting.fit(x[train], y[train]).predict(x))


def measure(run: Path, out: Path) -> tuple[str, Errors, Errors, Errors]:
    """Train on a run; return its feature set and the errors of the last 30 %, of its mixed steps, and of the
    stretches."""
    tracefit.run([run], out)
    entry = json.loads((out / "evaluation.json").read_text())["deployments"][0]["models"]["beta.cycle_time"]
    chosen = next(c["name"] for c in entry["candidates"] if c["chosen"])
    rows = _frame(out)
    included = rows.filter(pl.col("excluded_reason").is_null())
    train = (included["split"] == "train").to_numpy()
    y, mixed = included["y"].to_numpy(), (included["num_prefill_reqs"] > 0).to_numpy() & ~train
    line, boosted = _others(included, train)
    last = Errors(entry["holdout"]["mape_pct"], _pct(line[~train], y[~train]), _pct(boosted[~train], y[~train]))
    of_mixed = entry["by_group"].get("mixed", {}).get("mape_pct", float("nan"))
    prompts = Errors(of_mixed, _pct(line[mixed], y[mixed]), _pct(boosted[mixed], y[mixed]))
    every = rows.filter(pl.col("excluded_reason").is_null() | (pl.col("excluded_reason") == "outlier"))
    held = (np.arange(every.height) * 10 // every.height) % 3 == 2
    line, boosted = _others(every, ~held)
    y = every["y"].to_numpy()
    stretches = Errors(
        (entry["stretches"] or {}).get("mape_pct", float("nan")),
        _pct(line[held], y[held]),
        _pct(boosted[held], y[held]),
    )
    return chosen, last, prompts, stretches


def beyond(run: Path, folder: Path) -> tuple[float, float, float]:
    """Train on batches up to a quarter of the largest; return the error above half of it, the share of far steps that
    are marked out of range (NaN without any), and the smallest prediction in us."""
    steps = pl.read_csv(gzip.decompress((run / CSV).read_bytes()), infer_schema_length=None)
    most = steps["num_decode_requests"].max()
    small = folder / run.name
    shutil.copytree(run, small, ignore=shutil.ignore_patterns(CSV))
    low = steps.filter(4 * pl.col("num_decode_requests") <= most)
    (small / CSV).write_bytes(gzip.compress(low.write_csv().encode()))
    tracefit.run([small], folder / "out")
    large = steps.filter(2 * pl.col("num_decode_requests") > most, pl.col("latency_ms") > 0).select(
        num_decode_reqs="num_decode_requests",
        decode_tokens="num_decode_requests",
        context_tokens="sum_decode_kv_tokens",
        prefill_tokens="sum_prefill_tokens",
        prefill_context_tokens="sum_prefill_kv_tokens",
        num_prefill_reqs="num_prefill_requests",
        running_depth=pl.col("num_prefill_requests") + pl.col("num_decode_requests"),
        waiting_depth=pl.col("queued_prefill_requests") + pl.col("queued_decode_requests"),
        actual_us=pl.col("latency_ms") * 1e3,
    )
    # Steps of these recordings compute more prompt tokens than the setting allows, which `predict_step` refuses.
    found = evaluated_steps(tracefit.load(folder / "out").deployment(), large)
    relative = (found["predicted_us"] - found["actual_us"]).abs() / found["actual_us"]
    far = relative > FAR_PCT / 100
    marked = found["out_of_range"].is_not_null().filter(far)
    share = 100 * float(marked.mean()) if marked.len() else float("nan")
    return 100 * float(relative.mean()), share, float(found["predicted_us"].min())


def main() -> None:
    """Print the tables."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    runs = sorted(data.glob("fpm-b300/*"))
    if not runs:
        sys.exit(f"{data}: no runs in fpm-b300/; give the folder of the real traces (DATA=folder)")
    runs += [run for run in [data / H100] if run.exists()]
    print("run | features | ours | line | boosting | mixed steps: ours | line | boosting | stretches: ours | line | "
          "boosting | beyond the load | far steps marked % | least prediction us")  # fmt: skip
    print(" | ".join(["---"] * 14))
    found = []
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            chosen, *errors = measure(run, Path(folder) / "out")
        with tempfile.TemporaryDirectory() as folder:
            far = beyond(run, Path(folder)) if (run / CSV).exists() else None
        print(" | ".join([run.name, chosen, *map(str, errors), *(f"{value:.4g}" for value in far or ())]), flush=True)
        if far:
            found.append((errors[0].ours, errors[2].ours, far[0]))
    means = [statistics.fmean(column) for column in zip(*found, strict=True)]
    print(f"\nmean of B300: last 30 % {means[0]:.2f}, stretches {means[1]:.2f}, beyond the load {means[2]:.2f}")


if __name__ == "__main__":
    main()
