"""Latencies as distributions: predicted beside measured where a model predicts them."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from tracefit.coefficients.files import read_evaluation
from tracefit.diagnostics.load import measured_latencies
from tracefit.reports.figures.evaluation import distribution_figures
from tracefit.tables.schema import REQUESTS


@pytest.fixture
def deployment(trained):
    return read_evaluation(trained / "evaluation.json").deployments[0]


def test_curves_are_the_quantiles_of_the_evaluation(deployment):
    figures = {f.title: f for f in distribution_figures(deployment, {}, {})}
    assert list(figures) == [f"{name}, predicted and measured" for name in ("TTFT", "ITL", "E2E")]
    for name, label in (("ttft", "TTFT"), ("e2e", "E2E")):
        published = deployment.latency[name].distribution
        figure = figures[f"{label}, predicted and measured"]
        drawn = {t["name"]: t for t in figure.traces}
        assert list(drawn) == [
            "measured",
            "predicted on arrival",
            "given the measured queue and batches",
        ]
        for series, quantiles in (
            (drawn["measured"], published.measured),
            (drawn["predicted on arrival"], published.predicted),
            (drawn["given the measured queue and batches"], published.given_measured_state),
        ):
            assert series["x"] == pytest.approx([q / 1000 for q in quantiles], rel=1e-4)
            assert series["y"] == pytest.approx(published.percents)
        (row,) = (r for r in figure.summary.rows if r[0] == "P90")
        where = published.percents.index(90)
        expected = [published.measured[where] / 1000, published.predicted[where] / 1000]
        assert [float(c) for c in row[1:3]] == pytest.approx(expected, rel=5e-3)
        assert f"{published.requests:,} held-out requests" in figure.caption


def test_latencies_without_a_model_are_drawn_as_measured(deployment):
    """1 to 101 ms: the p-th percentile is p + 1 ms. A latency without values is not drawn."""
    requests = REQUESTS.conform(
        pl.DataFrame(
            {
                "ttft_us": [1000.0 * k for k in range(1, 102)],
                "e2e_us": [2000.0 * k for k in range(1, 102)],
            }
        )
    )
    ttft, e2e = distribution_figures(deployment.model_copy(update={"latency": {}}), measured_latencies(requests), {})
    assert (ttft.title, e2e.title) == ("TTFT as measured", "E2E as measured")
    (series,) = ttft.traces
    assert dict(zip(series["y"], series["x"], strict=True))[50.0] == pytest.approx(51.0)
    assert ("P90", "91") in ttft.summary.rows


def test_a_zero_has_no_place_on_an_axis_of_powers_of_ten(deployment):
    entry = deployment.latency["ttft"]
    with_zero = replace(entry.distribution, given_measured_state=(0.0, *entry.distribution.given_measured_state[1:]))
    changed = deployment.model_copy(update={"latency": {"ttft": replace(entry, distribution=with_zero)}})
    (figure,) = distribution_figures(changed, {}, {})
    lengths = [len(t["x"]) for t in figure.traces]
    assert lengths == [len(with_zero.percents), len(with_zero.percents), len(with_zero.percents) - 1]
