"""Shipped files are what the repository's own commands make: fixtures, models, README."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import tracefit
from tracefit import evaluator
from tracefit.models.frames import predict_rows

ROOT = Path(__file__).parents[2]
EXPECTED = json.loads((ROOT / "fixtures/expected.json").read_text())


SHIPPED = {"runs": ROOT / "models", "logged": ROOT / "models/logged", "generated": ROOT / "fixtures/models"}
"""The runs of each folder of fixtures/ to what `make models` makes of them."""


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for runs in SHIPPED:
        made[runs] = tmp_path_factory.mktemp(runs)
        assert tracefit.run([ROOT / "fixtures" / runs], made[runs]).exit_code == 0
    return made


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EXPECTED if n.startswith("generated/")])
def test_a_fixture_yields_what_the_generator_put_in(remade: dict[str, Path], name: str) -> None:
    run, wanted = name.removeprefix("generated/"), EXPECTED[name]
    tables = remade["generated"] / "tables"
    row = pl.read_parquet(tables / f"runs/run_id={run}/*.parquet").row(0, named=True)
    assert {k: row[k] for k in ("spans", "steps", "requests")} == {k: wanted[k] for k in ("spans", "steps", "requests")}
    assert json.loads(row["events"]) == wanted["events"]
    requests = pl.read_parquet(tables / f"requests/run_id={run}/*.parquet")
    assert requests["output_tokens"].sum() == wanted["output_tokens"]


@pytest.mark.slow
def test_recorded_fixture_gives_a_step_model(tmp_path: Path) -> None:
    wanted = EXPECTED["recordings/fpm-dynamo"]
    options = tracefit.TrainOptions(features="batch", fast=True)
    result = tracefit.run([ROOT / "fixtures/recordings/fpm-dynamo"], tmp_path, options=options)
    assert (result.exit_code, result.ingested.runs[0].steps, result.ingested.runs[0].lost_steps) == (
        0,
        wanted["steps"],
        0,
    )
    timeline = pl.read_parquet(tmp_path / "tables/timeline/run_id=fpm-dynamo/*.parquet")
    assert timeline["cycle_us"].count() == wanted["timed"]
    timed = timeline.drop_nulls("cycle_us")
    assert timed["idle_before"].sum() == wanted["steps"] - wanted["timed"]
    (model,) = json.loads((tmp_path / "models/beta.json").read_text())["models"]
    terms = {term["feature"]: term["value"] for term in model["terms"]}
    # The coefficients behind it are in its truth.json.
    assert model["intercept"]["value"] == pytest.approx(7_000, rel=0.02)
    assert terms["prefill_tokens"] == pytest.approx(26, rel=0.05)
    assert "wall_time of ForwardPassMetrics" in model["target"]["definition"]
    assert json.loads((tmp_path / "models/alpha.json").read_text())["models"] == []
    names = [name for one in result.trained.not_fitted if "no journeys" in one.reason for name in one.models]
    assert len(names) == 3


@pytest.mark.slow
def test_the_fixture_of_a_log_is_steps_alone_in_whole_seconds(tmp_path: Path) -> None:
    wanted = EXPECTED["recordings/vllm-log"]
    options = tracefit.TrainOptions(features="batch", fast=True)
    result = tracefit.run([ROOT / "fixtures/recordings/vllm-log"], tmp_path, options=options)
    ingested = result.ingested.runs[0]
    assert (result.exit_code, ingested.steps, ingested.rejects, ingested.lost_steps) == (
        3,
        wanted["steps"],
        wanted["rejects"],
        1,
    )
    (model,) = json.loads((tmp_path / "models/beta.json").read_text())["models"]
    assert set(model["validation"]["rows_by_source"]) == {"log"}
    # The coefficients behind it are in its truth.json.
    terms = {term["feature"]: term["value"] for term in model["terms"]}
    assert model["intercept"]["value"] == pytest.approx(7_000, rel=0.02)
    assert terms["prefill_tokens"] == pytest.approx(26, rel=0.05)
    assert any("context" in note for note in model["notes"])


@pytest.mark.slow
def test_damage_costs_the_damaged_records_alone(tmp_path: Path) -> None:
    result = tracefit.ingest([ROOT / "fixtures/damaged"], tmp_path)
    assert result.exit_code == 3
    assert result.runs[0].rejects == EXPECTED["damaged"]["rejects"]
    # An independent count: whole lines, and the good record that was glued onto a cut one.
    lines = gzip.decompress((ROOT / "fixtures/damaged/traces.json.gz").read_bytes()).split(b"\n")
    whole = [line for line in lines if line.startswith(b"{") and _parses(line)]
    tail = lines[0][lines[0].rindex(b'{"resourceSpans"') :]
    assert result.runs[0].spans == sum(_spans(line) for line in [*whole, tail])


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _spans(line: bytes) -> int:
    return sum(
        len(scope["spans"]) for resource in json.loads(line)["resourceSpans"] for scope in resource["scopeSpans"]
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["models/alpha.json", "models/beta.json", "evaluation.json"])
@pytest.mark.parametrize("runs", SHIPPED)
def test_the_shipped_files_are_what_make_models_writes(remade: dict[str, Path], runs: str, name: str) -> None:
    shipped = json.loads((SHIPPED[runs] / name.removeprefix("models/")).read_text())
    _assert_same(shipped, json.loads((remade[runs] / name).read_text()), name)


def _assert_same(left: Any, right: Any, where: str) -> None:
    """Equal, numbers to 1e-6; provenance does not count, nor the reference's own randomness across versions."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left.keys() - {"provenance", "gradient_boosting", "strength", "cv_mae", "notes"}:
            _assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            _assert_same(*pair, f"{where}[{index}]")
    elif isinstance(left, float) and isinstance(right, float):
        assert math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-6), f"{where}: {left} {right}"
    else:
        assert left == right, where


def test_tables_of_results_are_the_shipped_evaluations() -> None:
    rows, logged = (_rows(ROOT / name) for name in ("models/evaluation.json", "models/logged/evaluation.json"))
    wanted = [[row for row in rows if (".no-gpu." in row) is without] for without in (False, True)] + [logged]
    page = (ROOT / "docs/explanation/results.md").read_text()
    parts = re.findall(
        r"On real GPUs: (.*?)Without a GPU: (.*?)The same run with the server's log (.*)",
        page,
        re.DOTALL,
    )
    for text, table in zip(parts[0], wanted, strict=True):
        assert [line for line in text.splitlines() if re.match(r"\| \S+ \| (alpha|beta)\.", line)] == table


def _rows(evaluation: Path) -> list[str]:
    return [
        f"| {deployment['deployment_id'].rsplit('.', 1)[0]} | {name} | {entry['holdout']['n']:,} | "
        + " | ".join(_written(v) for v in _numbers(entry))
        + " |"
        for deployment in json.loads(evaluation.read_text())["deployments"]
        for name, entry in deployment["models"].items()
    ]


def test_log_makes_step_times_closer_than_spans_alone() -> None:
    of = {"": "models", "logged": "models/logged"}
    maes = {
        name: deployment["models"]["beta.cycle_time"]["holdout"]["mae"]
        for name, folder in of.items()
        for deployment in json.loads((ROOT / folder / "evaluation.json").read_text())["deployments"]
        if deployment["deployment_id"].startswith("tiny-llama-b")
    }
    assert maes["logged"] < maes[""]


def _numbers(entry: dict[str, Any]) -> list[float | None]:
    maes = [entry[k] and entry[k]["mae"] for k in ("holdout", "baseline", "gradient_boosting")]
    return [entry["holdout"]["mdape_pct"], entry["holdout"]["p90_ape_pct"], *maes]


def _written(value: float | None) -> str:
    if value is None:  # a constant has no features, and no reference on them
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        # The median time between the starts of neighbouring traced steps that decode 78 to 82 requests and no prompt.
        ("README.md", 16_513),
        # The API works about 2,000 us: the boundary after it is at 4,000.
        ("docs/coefficients.md", 4_000),
    ],
)
def test_the_pages_python_evaluates_a_file_without_tracefit(tmp_path: Path, page: str, expected: float) -> None:
    """Run as a user would who copied the one file: the library cannot be imported."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    shutil.copy(ROOT / "pipeline/tracefit/evaluator.py", tmp_path)
    shutil.copytree(ROOT / "models", tmp_path / "models")
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[0]) == pytest.approx(expected, rel=0.02)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("runs", SHIPPED)
def test_standalone_evaluator_agrees_on_training_rows(remade: dict[str, Path], runs: str) -> None:
    out = remade[runs]
    models = tracefit.load(out / "models")
    forms = set()
    for kind in ("alpha", "beta"):
        rows = pl.concat(
            [pl.read_parquet(p) for p in sorted((out / f"tables/{kind}_training").rglob("*.parquet"))],
            how="diagonal_relaxed",
        )
        for plain in json.loads((out / "models" / f"{kind}.json").read_text())["models"]:
            mine = rows.filter(deployment_id=plain["deployment_id"])
            if kind == "alpha":
                mine = mine.filter(target=plain["name"].removeprefix("alpha."))
            model = models.model(plain["name"], plain["deployment_id"])
            predicted = predict_rows(model, mine).drop_nulls("predicted_us").head(40)
            for row in predicted.iter_rows(named=True):
                assert evaluator.predict(plain, row) == pytest.approx(row["predicted_us"], rel=1e-9)
            forms.add(plain["form"])
            assert predicted.height > 20
    # No request of the run with a log waits for room: its waits are one line.
    assert forms == {"linear", "boundary"} | ({"regimes"} if runs != "logged" else set())
