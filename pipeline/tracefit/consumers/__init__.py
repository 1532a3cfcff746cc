"""Exports of coefficients in the forms that other programs load: one module per consumer, fitted on its own terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.consumers.aisimulate import to_aisimulate
from tracefit.consumers.base import Consumer
from tracefit.consumers.blis import to_blis, to_blis_registry
from tracefit.consumers.csv import to_csv
from tracefit.consumers.dynamo import to_dynamo
from tracefit.consumers.dynamo_planner import to_dynamo_planner
from tracefit.consumers.fleet_sim import to_fleet_sim
from tracefit.consumers.latency_predictor import to_latency_predictor
from tracefit.consumers.llmd_sim import to_llmd_sim
from tracefit.consumers.vcr import to_vcr

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONSUMERS = (
    Consumer("aisimulate", to_aisimulate),
    Consumer("blis", to_blis),
    Consumer("blis-registry", to_blis_registry),
    Consumer("csv", to_csv),
    Consumer("dynamo-mocker", to_dynamo),
    Consumer("dynamo-planner", to_dynamo_planner),
    Consumer("llm-d-latency-predictor", to_latency_predictor),
    Consumer("vllm-sr-sim", to_fleet_sim),
    Consumer("vllm-vcr", to_vcr),
    Consumer("llm-d-inference-sim", to_llmd_sim, versioned=True),
)


def known(consumers: Sequence[Consumer] = CONSUMERS) -> Mapping[str, Consumer]:
    """Return consumers by name, in name order.

    Raises:
        ValueError: Two have one name.
    """
    named = {one.name: one for one in sorted(consumers, key=lambda one: one.name)}
    if len(named) < len(consumers):
        raise ValueError(f"two consumers have one name: {', '.join(one.name for one in consumers)}")
    return named
