"""What a recording shows of requests that are not in it."""

from __future__ import annotations

from functools import cache

import numpy as np
import polars as pl
import pytest

from stock import stock_requests
from tracefit.synth import SynthOptions, synth
from tracefit.synth.options import LoadPhase
from tracefit.timeline import EngineLimits, count_steps, unknown_batches
from tracefit.timeline.request_evidence import sampled_rate

STEADY = (LoadPhase("steady", 1.0, 1.0),)


@cache
def _requests(rate=12.0, seed=1, requests=300, **more):
    run = synth(
        SynthOptions(rate_per_s=rate, requests=requests, seed=seed, phases=STEADY, abort_fraction=0.0, **more)
    )
    return stock_requests(run, seed=seed)


def _low_bits(bits):
    """Return the low bits of each trace id as a share of what they can be."""
    return pl.Series([int(x, 16) % 2**bits / 2**bits for x in _requests()["trace_id"]])


def _reason(requests):
    found = unknown_batches(requests, 2048)["reason"].to_list()
    assert len(found) <= 1
    if found:
        assert not count_steps(requests, EngineLimits()).starts.height
    return found[0] if found else None


def _kept(rate, sampler):
    low = _low_bits(64)
    return {
        "below": low < rate,
        "without sign": 2 * pl.Series(np.minimum(low, 1 - low)) < rate,
        "above": _low_bits(56) >= 1 - rate,
    }[sampler]


@pytest.mark.parametrize("sampler", ["below", "without sign", "above"])
@pytest.mark.parametrize("rate", [0.9, 0.5, 0.1])
def test_a_head_sampler_shows_in_the_ids_it_kept(rate, sampler):
    kept = _requests().filter(_kept(rate, sampler))
    assert sampled_rate(kept["trace_id"]) == pytest.approx(rate, abs=0.05)
    assert "OTEL_TRACES_SAMPLER" in _reason(kept)


def test_ids_that_count_up_say_nothing():
    assert sampled_rate(pl.Series([f"{n:032x}" for n in range(1, 500)])) is None


@pytest.mark.parametrize("rate", [0.3, 3.0, 12.0, 25.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_said_of_a_complete_recording(rate, seed):
    assert _reason(_requests(rate=rate, seed=seed)) is None


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_a_sampler_without_a_mark_shows_where_requests_wait_in_an_empty_engine(rate):
    requests = _requests(rate=4.0, requests=600)
    kept = requests.filter(pl.Series(np.random.default_rng(3).random(requests.height) < rate))
    assert "no other was in the engine" in _reason(kept)


def test_two_engines_under_one_name_are_seen():
    one, other = _requests(), _requests(seed=2)
    begin = one["arrival_ns"].min() - other["arrival_ns"].min()
    both = pl.concat([one, other.with_columns(pl.col("arrival_ns") + begin + 3_456_789)])
    assert "service.instance.id" in _reason(both)


def test_two_front_ends_of_one_engine_are_seen():
    """Each stamps the outputs of a step itself, some ten microseconds apart."""
    requests = _requests()
    late = pl.Series(np.random.default_rng(4).integers(0, 2, requests.height) * 40.0)
    assert "front ends" in _reason(requests.with_columns(pl.col("ttft_us") + late, pl.col("e2e_us") + late))


def test_steps_of_several_tokens_are_seen():
    """Speculative decoding gives one to three tokens a step: the tokens of a request do not count its steps."""
    requests = _requests()
    tokens = np.random.default_rng(5).uniform(1, 3, requests.height)
    more = (pl.col("output_tokens") * pl.Series(tokens)).round().cast(pl.Int64)
    assert "speculative" in _reason(requests.with_columns(output_tokens=more))


def test_requests_without_times_were_in_the_batches_too():
    requests = _requests()
    some = pl.Series(np.arange(requests.height) % 10 == 0)
    lost = requests.with_columns(decode_us=pl.when(~some).then("decode_us"))
    assert "10 %" in _reason(lost)


def test_a_few_requests_show_nothing():
    assert "too few" in _reason(_requests().head(15))
