"""Shared by the tests of consumers: BLIS's step time, written down from its documentation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tracefit.consumers.blis_replay import StepRates


def _blis_rates(beta, d, heads, kv_heads, layers, ffn, tp):
    if len(beta) == 8:
        rest, sizes = [0, 0, *beta[2:], 0, 0], (d, heads, kv_heads, layers, ffn, tp)
        phases = [
            tuple(
                _blis_rates([factor if i == term else 0 for i in range(10)], *sizes) for term in (compute, compute + 8)
            )
            for compute, factor in enumerate(beta[:2])
        ]
        return replace(_blis_rates(rest, *sizes), larger=tuple(phases))
    head, peak, bandwidth = d // heads, 989.5e6, 3.35e6
    token = layers * (2 * d * (2 * d + 2 * kv_heads * head) + 6 * d * ffn) / tp / peak
    pair = layers * 4 * heads / tp * head / peak
    kv = layers * 2 * kv_heads * head / tp * 2 / bandwidth
    reduced = 2 * layers * d * 2 * 2 * (tp - 1) / tp / bandwidth
    weight = layers * (d * (2 * d + 2 * kv_heads * head) + 3 * d * ffn) * 2 / tp / bandwidth
    return StepRates(
        beta[6] + beta[4] * layers + beta[2] * weight,
        beta[5],
        beta[0] * token + beta[8] * kv + beta[3] * reduced,
        beta[0] * pair,
        beta[1] * token + beta[9] * kv + beta[3] * reduced,
        beta[1] * pair + beta[9] * kv,
    )


@pytest.fixture(scope="session")
def blis_rates():
    """Return a function of BLIS's terms for a dense model on H100: beta and the model's sizes to us per product."""
    return _blis_rates
