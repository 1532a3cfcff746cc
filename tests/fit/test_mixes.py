"""Servers with adapters, moved KV blocks or images: their models say that they hold for the recorded mix."""

from __future__ import annotations

import json
from types import SimpleNamespace

import polars as pl
import pytest

from tracefit.fit.mixes import mixes
from tracefit.server.settings import settings_from
from tracefit.tables import schema


def _notes(stated, *, models=(), timeline=None, requests=None):
    """Return the notes on a server with some settings, and on what its traces hold."""
    deployment = SimpleNamespace(context=SimpleNamespace(settings=settings_from(stated, where="test")))
    rows = [["server", "service", name, spans] for name, spans in models]
    tables = SimpleNamespace(
        runs=pl.DataFrame({"models": [json.dumps(rows)]}),
        timeline=pl.DataFrame(timeline or {"step_id": [1]}),
        requests=schema.REQUESTS.shape(pl.DataFrame(requests or {"trace_id": ["a"]})),
    )
    return [*mixes(deployment, tables)]


def test_a_plain_server_has_no_notes():
    assert _notes({"model": "m"}) == []


def test_shares_of_adapters_are_named():
    """Three of four spans name the base."""
    (note,) = _notes({"enable_lora": True}, models=[("base", 30), ("sql", 10)])
    assert "base 75 % and sql 25 %" in note
    assert note.endswith("the coefficients hold for this mix")


def test_adapters_that_no_span_names_are_said_to_be_unknown():
    (note,) = _notes({"enable_lora": True}, models=[("base", 30)])
    assert "do not say which requests use them" in note


def test_moved_blocks_are_counted():
    (note,) = _notes({}, timeline={"kv_blocks_offloaded": [3, 4], "kv_blocks_loaded": [0, 2]})
    assert "kv_blocks_offloaded 7" in note
    assert "kv_blocks_loaded 2" in note
    (note,) = _notes({"kv_offloading_size": 8})
    assert "kv_offloading_size" in note
    (note,) = _notes({}, requests={"kv_transfer_us": [5.0, None]})
    assert "1 request waited" in note


@pytest.mark.parametrize(
    ("limit", "is_said"),
    [('{"image": 2}', True), ('{"image": 0, "video": 0}', False), ("image=3", True), (None, False)],
)
def test_images_are_named_where_the_server_takes_some(limit, is_said):
    notes = _notes({} if limit is None else {"limit_mm_per_prompt": limit})
    assert bool(notes) is is_said
