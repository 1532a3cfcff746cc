"""Exports of coefficients in the forms that other programs load: one module per consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.consumers.aisimulate import to_aisimulate
from tracefit.consumers.blis import to_blis, to_blis_registry
from tracefit.consumers.csv import to_csv
from tracefit.consumers.dynamo import to_dynamo
from tracefit.consumers.dynamo_planner import to_dynamo_planner
from tracefit.consumers.fleet_sim import to_fleet_sim
from tracefit.consumers.latency_predictor import to_latency_predictor
from tracefit.consumers.llmd_sim import to_llmd_sim
from tracefit.consumers.vcr import to_vcr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracefit.consumers.base import Export, Source

CONSUMERS: Mapping[str, Callable[[Source], Export]] = {
    "aisimulate": to_aisimulate,
    "blis": to_blis,
    "blis-registry": to_blis_registry,
    "csv": to_csv,
    "dynamo-mocker": to_dynamo,
    "dynamo-planner": to_dynamo_planner,
    "llm-d-inference-sim": to_llmd_sim,
    "llm-d-latency-predictor": to_latency_predictor,
    "vllm-sr-sim": to_fleet_sim,
    "vllm-vcr": to_vcr,
}
"""Consumers by name, in name order."""

VERSIONED = {"llm-d-inference-sim"}
"""Consumers whose form depends on their version, `Source.consumer_version`."""
