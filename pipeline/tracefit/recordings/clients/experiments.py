"""Experiments of inference-sim (February 2026): `requests.json`, a document, and `measured.json`, a list of
latencies.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tracefit.inputs.formats import Recording
from tracefit.recordings.blocks import MOST_S
from tracefit.recordings.clients.base import (
    COUNTED,
    FILLS_REQUESTS,
    ClientRequest,
    Seconds,
    declare_client,
    finder,
    items_of,
    raw_items,
)
from tracefit.recordings.requests import TokenCount, from_json
from tracefit.tables.dialects import NOT_SENT_S
from tracefit.tables.unread import UNREAD_LENGTHS, UNREAD_TIMES


class _Sent(msgspec.Struct):
    index: TokenCount
    arrival_time_us: Annotated[float, msgspec.Meta(ge=0, le=MOST_S * 1e6)]
    input_tokens: TokenCount
    output_tokens: TokenCount
    has_error: bool = False


class _Experiment(msgspec.Struct):
    requests: list[msgspec.Raw]


class _Received(msgspec.Struct):
    index: TokenCount
    ttft_s: Seconds
    e2e_s: Seconds
    has_error: bool = False


def _sent(record: bytes) -> ClientRequest:
    sent = msgspec.json.decode(record, type=_Sent)
    return ClientRequest(
        start_s=sent.arrival_time_us / 1e6,
        request_id=str(sent.index),
        prompt_tokens=sent.input_tokens,
        output_tokens=sent.output_tokens,
        error=sent.has_error,
    )


def _received(record: bytes) -> ClientRequest:
    got = msgspec.json.decode(record, type=_Received)
    return ClientRequest(
        start_s=NOT_SENT_S,
        request_id=str(got.index),
        first_s=got.ttft_s,
        last_s=got.e2e_s,
        error=got.has_error,
    )


def _experiment(payload: bytes) -> list[msgspec.Raw]:
    return from_json(payload, _Experiment).requests


SENT = declare_client(
    Recording(
        "experiment_requests",
        "the requests that an experiment of inference-sim sent",
        finder("document", rb'"requests"\s*:\s*\[', rb'"arrival_time_us"\s*:'),
        fills=FILLS_REQUESTS + COUNTED,
        units="us",
        clock="the client's, which begins at its first request",
        lacks=(UNREAD_TIMES,),
        versions="February 2026",
    ),
    items_of(_experiment, _sent),
)
MEASURED_FORMAT = declare_client(
    Recording(
        "experiment_latencies",
        "the latencies that an experiment of inference-sim measured",
        finder("document", rb'^\s*\[\s*\{\s*"index"\s*:', rb'"ttft_s"\s*:'),
        fills=FILLS_REQUESTS,
        units="s",
        clock="none, because it has only durations; the file of sent requests has their times",
        lacks=UNREAD_LENGTHS,
        versions="February 2026",
    ),
    items_of(raw_items, _received),
)
