"""The page for Prometheus: counts of the receiver, latencies of the sending servers, errors of predicted step times."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from tracefit.receive.intake import Intake

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Metrics(Collector):
    def __init__(self, intake: Intake, disk_free_bytes: int | None) -> None:
        self._intake = intake
        self._disk_free_bytes = disk_free_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        seen = self._intake.observed
        counters: dict[str, tuple[str, float]] = {
            "receive_spans": ("Spans acknowledged.", seen.spans),
            "receive_requests": ("Export requests acknowledged.", seen.exports),
            "receive_forgotten_senders": (
                "Senders forgotten after a silence.",
                self._intake.senders.forgotten,
            ),
            "receive_written_bytes": ("Bytes written to trace files.", self._intake.written_bytes),
            "server_requests": ("Requests of the servers that finished.", seen.requests),
            "server_steps": ("Engine steps traced.", seen.steps),
            "server_dropped_events": ("Events that the servers' SDK dropped.", seen.dropped_events),
        }
        gauges: dict[str, tuple[str, float | None]] = {
            "receive_open_requests": ("Export requests in progress.", self._intake.open_requests),
            "receive_senders": ("Senders that are active.", self._intake.senders.active()),
            "receive_senders_limit": ("Senders that may be active at once.", self._intake.limits.senders),
            "receive_disk_free_bytes": ("Free on the disk that is written to.", self._disk_free_bytes),
        }
        histograms = {
            "server_ttft_seconds": ("From arrival to the first token.", seen.ttft_s),
            "server_queue_wait_seconds": ("From QUEUED to SCHEDULED.", seen.queue_wait_s),
        }
        if (steps := seen.step_errors) is not None:
            measured = "Measured times of the steps that were predicted."
            counters["step_measured_seconds"] = (measured, steps.measured_s)
            counters["step_predicted_seconds"] = ("Their predictions.", steps.predicted_s)
            published = "Median error that the model was published with."
            gauges["step_published_error_ratio"] = (published, steps.published)
            error = "|predicted - measured| / measured, of step times."
            histograms["step_error_ratio"] = (error, steps.errors)
        for name, (text, count) in counters.items():
            yield CounterMetricFamily(f"tracefit_{name}", text, count)
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"tracefit_{name}", text, value)
        for name, (text, values) in histograms.items():
            bounds = [*map(str, values.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(values.counts), strict=True))
            yield HistogramMetricFamily(f"tracefit_{name}", text, buckets=buckets, sum_value=values.sum)
        refused = CounterMetricFamily(
            "tracefit_receive_refused", "Export requests refused, by cause.", labels=["cause"]
        )
        for cause, number in seen.refusals.counts.items():
            refused.add_metric([cause], number)
        yield refused


def metrics_page(intake: Intake, disk_free_bytes: int | None) -> bytes:
    """Return all metrics in Prometheus's text format."""
    return generate_latest(_Metrics(intake, disk_free_bytes))
