"""Byte frames to decoded spans as columns, and rejects with reasons."""

from tracefit.otlp.batch import (
    ATTRIBUTE_COLUMNS,
    EVENT_COLUMNS,
    REJECT_COLUMNS,
    SPAN_COLUMNS,
    SpanBatch,
)
from tracefit.otlp.decode import BATCH_BYTES, decode_frames
from tracefit.sources.records import Reject

__all__ = [
    "ATTRIBUTE_COLUMNS",
    "BATCH_BYTES",
    "EVENT_COLUMNS",
    "REJECT_COLUMNS",
    "SPAN_COLUMNS",
    "Reject",
    "SpanBatch",
    "decode_frames",
]
