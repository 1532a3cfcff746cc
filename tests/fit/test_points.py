"""Points of closed loops: their mean step, and a law that is fitted to them."""

import numpy as np
import polars as pl
import pytest
from tests.fit.test_transfer import DENSE, LARGE, _context

from tracefit.features.law import LAW_TERMS
from tracefit.fit.fitted import target_of
from tracefit.fit.points import (
    CACHE_TOO_SMALL,
    NOT_CLOSED,
    POINT_TERMS,
    PointServer,
    fit_points,
    leave_points_out,
    point_errors,
    point_rows,
    predict_points,
)
from tracefit.fit.transfer import DECODES, FASTER, Law, LawRows, calibrate, errors_of
from tracefit.server.context import deployment_of

TRUTH = {
    "one": 500.0,
    "kernels": 3.0,
    "all_reduces": 7.0,
    "weight_read_us": 1.3,
    "decode_kv_read_us": 1.3,
    "prompt_matrix_us": 1.6,
    "prompt_attention_us": 1.5,
    "tp_comm_us": 1.5,
    "batch_requests": 5.0,
}
PLANTED = Law(POINT_TERMS, tuple(TRUTH.get(t.feature.name, 0.0) for t in POINT_TERMS))


def _points(**columns):
    frame = {
        "concurrency": 8.0,
        "prompt_tokens": 1000.0,
        "output_tokens": 100.0,
        "ttft_us": 0.0,
        "tpot_us": 20_000.0,
    }
    return pl.DataFrame({name: columns.get(name, [value]) for name, value in frame.items()})


def _server(config=DENSE, gpu="H100", tp=1, seed=0, noise=0.02):
    rng = np.random.default_rng(seed + 10 * tp)
    points = pl.DataFrame(
        [
            {"concurrency": c, "prompt_tokens": p, "output_tokens": o, "ttft_us": 50_000.0, "tpot_us": 9e6}
            for c in (1.0, 4.0, 16.0, 64.0)
            for p, o in ((128.0, 512.0), (1024.0, 1024.0), (4096.0, 256.0))
        ]
    )
    deployment = deployment_of(_context(config, gpu, tp))
    tpot_us = predict_points(PLANTED, deployment, points) * np.exp(noise * rng.standard_normal(points.height))
    return PointServer.of(deployment, points.with_columns(tpot_us=pl.Series(tpot_us)))


def test_a_request_that_waits_for_its_first_token_does_not_decode():
    # 100 tokens of 20 ms each after 2 s: half of the eight requests decode at a time, each with half of its output
    # behind it.
    rows = point_rows(deployment_of(_context()), _points(ttft_us=[2e6])).rows
    assert rows["of_num_decode_reqs"].to_list() == pytest.approx([4.0])
    assert rows["of_context_tokens"].to_list() == pytest.approx([4 * 1050.0])


def test_prompts_come_in_as_fast_as_requests_end():
    deployment = deployment_of(_context())
    one, double = (point_rows(deployment, _points(output_tokens=[n])).rows for n in (100.0, 200.0))
    # 8 / 100 and 8 / 200 prompts a step.
    ratio = one["prompt_matrix_us"][0] / double["prompt_matrix_us"][0]
    assert ratio == pytest.approx(2.0)
    # 80 prompt tokens a step and the FLOPs of 8 billion weights twice, at 989.5 TFLOP/s: without the embedding, with
    # the head of the last.
    assert one["prompt_matrix_us"][0] == pytest.approx(80 * 2 * 6.98e9 / 989.5e6, rel=0.01)


def test_the_weights_are_read_once_a_step_whatever_the_load():
    rows = point_rows(deployment_of(_context()), _points(concurrency=[1.0, 64.0], **_twice())).rows
    assert rows["weight_read_us"].n_unique() == 1


def _twice():
    return {
        "prompt_tokens": [1000.0] * 2,
        "output_tokens": [100.0] * 2,
        "ttft_us": [None, 0.0],
        "tpot_us": [20_000.0] * 2,
    }


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"concurrency": [None]}, NOT_CLOSED),
        ({"output_tokens": [1.0]}, NOT_CLOSED),
        ({"tpot_us": [float("nan")]}, FASTER),
        ({"tpot_us": [100.0]}, FASTER),
        ({"concurrency": [100_000.0]}, CACHE_TOO_SMALL),
    ],
)
def test_points_that_show_no_step_are_counted(columns, reason):
    rows = point_rows(deployment_of(_context(num_gpu_blocks=10_000)), _points(**columns))
    assert (rows.rows.height, rows.left_out) == (0, {reason: 1})


def test_another_tensor_parallelism_follows_from_points():
    law = fit_points([_server(tp=tp) for tp in (1, 2, 4)])
    unseen = _server(tp=8, noise=0.0)
    predicted = predict_points(law, unseen.deployment, unseen.points)
    assert np.abs(predicted / target_of(unseen.rows.rows) - 1).mean() < 0.05


def test_steps_are_a_server_like_those_with_points():
    """12 points of each of two servers at the planted law, and 600 steps of a third that take twice as long: a third of
    the weight."""
    with_points = [_server(tp=tp, noise=0.0) for tp in (1, 2)]
    steps = PointServer.of_steps(LawRows(with_points[0].deployment, pl.concat([with_points[0].rows.rows] * 50)))
    without_prompts = steps.rows.rows.with_columns(of_num_prefill_reqs=0.0, y=2 * pl.col("y"))
    doubled = PointServer(steps.deployment, steps.points, LawRows(steps.deployment, without_prompts))
    assert not doubled.has_points
    alone = fit_points(with_points)
    both = fit_points([*with_points, doubled])
    ratio = both.predict(with_points[0].rows.rows) / alone.predict(with_points[0].rows.rows)
    # The robust mean of times 1, 1 and 2; the last is on one of two servers only.
    assert 1.0 < float(np.median(ratio)) < 1.5
    folds = leave_points_out([*with_points, doubled], "tensor_parallel")
    assert sum(len(fold.actual) for fold in folds) == 24


def test_only_steps_without_a_prompt_are_taken():
    rows = _server().rows.rows.with_columns(of_num_prefill_reqs=pl.Series([0.0, 1.0] * 6))
    assert PointServer.of_steps(LawRows(deployment_of(_context()), rows)).rows.rows.height == 6


def test_servers_that_are_left_out_show_the_errors_and_the_interval():
    servers = [_server(config, gpu, 2) for config in (DENSE, LARGE) for gpu in ("H100", "H200")]
    folds = leave_points_out(servers, "model_and_gpu")
    assert len(folds) == 4
    assert {fold.left_out for fold in folds} == {
        f"{model} on {gpu}" for model in ("llama-32x4096", "llama-80x8192") for gpu in ("h100-sxm", "h200-sxm")
    }
    errors = point_errors(folds)
    assert errors.folds == 4
    assert errors.p90_ape_pct[DECODES] == pytest.approx(
        np.quantile(np.concatenate([fold.ape_pct for fold in folds]), 0.9)
    )
    # Both properties of a fold are unseen: one server is left to learn from, and nothing nested tests that.
    assert not any(len(fold.is_covered) for fold in folds)
    assert np.median(np.concatenate([fold.ape_pct for fold in folds])) < 8


def test_ten_points_draw_the_law():
    law = fit_points([_server(tp=tp) for tp in (1, 2)])
    slow = _server(tp=4, noise=0.0)
    rows = slow.rows.rows.with_columns(y=pl.col("y") * 1.3)
    before = law.predict(rows) / target_of(rows) - 1
    made = calibrate(law, LawRows(slow.deployment, rows), errors_of(()), fewest=10)
    assert made is not None
    assert made.used
    after = made.law.predict(rows) / target_of(rows) - 1
    assert np.abs(after).mean() < 0.4 * np.abs(before).mean()


def test_points_show_no_launches():
    assert {t.feature.name for t in LAW_TERMS} - {t.feature.name for t in POINT_TERMS} == {
        "prompt_kernels",
        "decode_matrix_us",
        "launched_small",
        "launched_large",
    }
