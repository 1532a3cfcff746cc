"""How noise grows with the time of a step is read off the residuals."""

from __future__ import annotations

import numpy as np
import pytest

from tracefit.fit.train import noise_exponent, noise_weights


def _times(n=4_000):
    return np.random.default_rng(1).uniform(2_000, 40_000, n)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_the_exponent_of_planted_noise_is_found(exponent):
    times = _times()
    noise = np.random.default_rng(2).normal(0, 1, len(times)) * times**exponent
    assert noise_exponent(noise, times) == pytest.approx(exponent, abs=0.08)


@pytest.mark.parametrize(
    ("power", "times", "exponent"),
    [(2, _times(500), 1), (0, np.full(500, 3.0), 0), (0, _times(500)[:4], 0)],
    ids=["a share at most", "equal times", "few rows"],
)
def test_an_exponent_is_between_0_and_1(power, times, exponent):
    noise = np.random.default_rng(2).normal(0, 1, 500)[: len(times)]
    assert noise_exponent(noise * times**power, times) == exponent


def test_noise_weights_let_short_steps_determine_the_constant():
    rng = np.random.default_rng(4)
    errors = {True: [], False: []}
    for _ in range(30):
        x = np.concatenate([rng.uniform(0, 1, 40), rng.uniform(10, 20, 400)])[:, None]
        y = (1_000 + 1_000 * x[:, 0]) * np.exp(rng.normal(0, 0.05, 440))
        weights = noise_weights(x, y, np.ones(440))
        for weighted, misses in errors.items():
            w = np.sqrt(weights if weighted else np.ones(440))
            design = np.column_stack([np.ones(440), x[:, 0]])
            constant = np.linalg.lstsq(design * w[:, None], y * w, rcond=None)[0][0]
            misses.append(abs(constant - 1_000))
    assert np.mean(errors[True]) < 0.25 * np.mean(errors[False])
