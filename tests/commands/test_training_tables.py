"""Training tables as other readers meet them: a folder of parts is one table."""

from __future__ import annotations

import polars as pl
import pytest

import tracefit


@pytest.fixture
def two_deployments(tmp_path, traces, new_traces, quick):
    """Train on two runs whose deployments offer different features: one has a GPU, the other none."""
    traces.load().write(tmp_path / "runs" / "bare", config=False)
    folder = new_traces().load(seed=3).write(tmp_path / "runs" / "whole")
    with (folder / "exp-config.yaml").open("a") as config:
        config.write("gpu: H100\n")
    tracefit.run(str(tmp_path / "runs"), tmp_path / "out")
    return tmp_path / "out" / "tables"


@pytest.mark.slow
def test_every_part_of_a_training_table_has_the_same_columns(two_deployments):
    for name in ("alpha_training", "beta_training"):
        bare, whole = sorted((two_deployments / name).rglob("*.parquet"))
        assert pl.read_parquet_schema(bare) == pl.read_parquet_schema(whole)
        table = pl.read_parquet([bare, whole], hive_partitioning=False)
        assert table["run_id"].unique().sort().to_list() == ["bare", "whole"]
    unknown = {c for c in table.columns if table.filter(run_id="bare")[c].is_null().all()}
    known = {c for c in table.columns if table.filter(run_id="whole")[c].is_not_null().any()}
    assert unknown & known, "the deployments were offered different features"
