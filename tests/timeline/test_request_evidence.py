"""Signs in a recording of requests that are not in it."""

from __future__ import annotations

from functools import cache

import numpy as np
import polars as pl
import pytest

from stock import LAWS, stock_requests
from tracefit.synth import SynthOptions, synth
from tracefit.synth.options import LengthMix, LoadPhase
from tracefit.timeline import EngineLimits, count_steps, longest_whole_prompt, unknown_batches
from tracefit.timeline.evidence_statistics import sampler_rate

STEADY = (LoadPhase("steady", 1.0, 1.0),)


def _requests(rate=12.0, seed=1, requests=300, **more):
    return _of_run(
        SynthOptions(rate_per_s=rate, requests=requests, seed=seed, phases=STEADY, abort_fraction=0.0, **more)
    )


@cache
def _of_run(options):
    return stock_requests(synth(options), seed=options.seed)


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
    assert sampler_rate(kept["trace_id"]) == pytest.approx(rate, abs=0.05)
    assert "OTEL_TRACES_SAMPLER" in _reason(kept)


def test_ids_that_count_up_show_no_sampler():
    assert sampler_rate(pl.Series([f"{n:032x}" for n in range(1, 500)])) is None


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("rate", [12.0, 0.3, 3.0, 25.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_complete_recording_has_no_reason(rate, seed):
    assert _reason(_requests(rate=rate, seed=seed)) is None


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_an_unmarked_sampler_shows_in_waits_of_an_empty_engine(rate):
    requests = _requests(rate=4.0)
    kept = requests.filter(pl.Series(np.random.default_rng(3).random(requests.height) < rate))
    assert "no other was in the engine" in _reason(kept)


@pytest.mark.slow
def test_front_end_jitter_of_a_short_step_hides_no_request():
    # Steps of 1.8 ms, as a small model on a CPU has them; four of ten arrivals are held up by such a time.
    requests = _faster(_requests(rate=0.75, requests=600), 4)
    draw = np.random.default_rng(4)
    jitter_us = draw.exponential(2_500.0, requests.height) * (draw.random(requests.height) < 0.4)
    late = requests.with_columns(pl.col("ttft_us", "e2e_us") + pl.Series(jitter_us))
    assert _reason(late) is None


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "kept"), [(4.0, 0.5), (4.0, 0.1), (8.0, 0.05)])
def test_a_sampler_shows_in_waits_for_short_steps(rate, kept):
    requests = _faster(_requests(rate=rate, requests=1200), 4)
    some = requests.filter(pl.Series(np.random.default_rng(3).random(requests.height) < kept))
    assert "no other was in the engine" in _reason(some)


def _faster(requests, times):
    return requests.with_columns(
        pl.col("arrival_ns") // times,
        *(pl.col(name) / times for name in requests.columns if name.endswith("_us")),
    )


def _some(requests, share, seed=3):
    return requests.filter(pl.Series(np.random.default_rng(seed).random(requests.height) < share))


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("rate", [24.0, pytest.param(1.0, marks=pytest.mark.slow), 12.0])
@pytest.mark.parametrize("law", LAWS)
def test_missing_requests_are_seen_at_every_load(law, rate):
    requests = _requests(rate=rate, requests=400, law=LAWS[law])
    assert _reason(requests) is None
    for share in (0.7, 0.5):
        reason = _reason(_some(requests, share)) or ""
        assert any(
            sign in reason
            for sign in ("no other was in the engine", "prompts without a span", "steps of equal batches")
        )


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_a_queue_beside_free_slots_shows_missing_requests(law):
    """All of 64 slots are taken while requests wait; of seven in ten requests 45 run then, now more, now fewer."""
    requests = _requests(rate=60.0, requests=400, law=LAWS[law])
    assert _reason(requests) is None
    assert _reason(_some(requests, 0.7))
    # Where every prompt is short, a queue is all that shows.
    short = _requests(rate=90.0, requests=900, law=LAWS[law], prompt_tokens=LengthMix(((1.0, 4.0, 0.0),)))
    assert _reason(short) is None
    assert "left room in the engine" in _reason(_some(short, 0.7))


def _noisy(requests, sd, seed=8):
    """Let the machine's speed change every second by a factor with this standard deviation of its logarithm."""
    rng = np.random.default_rng(seed)
    ends = requests.select(end=pl.col("arrival_ns") + (1e3 * pl.col("e2e_us")).cast(pl.Int64))["end"]
    seconds = np.arange(-1, ends.max() / 1e9 + 2)
    factors = np.exp(sd * rng.standard_normal(len(seconds)))
    now = np.r_[0.0, np.cumsum(factors)]
    edges = np.r_[seconds, seconds[-1] + 1]

    def at(ns):
        return np.interp(np.asarray(ns) / 1e9, edges, now) * 1e9

    arrival = requests["arrival_ns"].to_numpy()
    marks = {"arrival": arrival.astype(float)}
    for name in ("ttft_us", "e2e_us"):
        marks[name] = arrival + 1e3 * requests[name].to_numpy()
    scheduled = marks["ttft_us"] - 1e3 * requests["prefill_us"].to_numpy()
    queued = scheduled - 1e3 * requests["queue_wait_us"].to_numpy()
    warped = {name: at(value) for name, value in marks.items()}
    return requests.with_columns(
        arrival_ns=pl.Series(warped["arrival"].round().astype(np.int64)),
        ttft_us=pl.Series((warped["ttft_us"] - warped["arrival"]) / 1e3),
        e2e_us=pl.Series((warped["e2e_us"] - warped["arrival"]) / 1e3),
        prefill_us=pl.Series((warped["ttft_us"] - at(scheduled)) / 1e3),
        decode_us=pl.Series((warped["e2e_us"] - warped["ttft_us"]) / 1e3),
        queue_wait_us=pl.Series((at(scheduled) - at(queued)) / 1e3),
    )


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("rate", [24.0, 1.0, 8.0])
def test_a_machine_with_changing_speed_is_no_missing_request(rate):
    """Seen on a real server with two shared cores: steps of equal batches differ by a third within a minute."""
    assert _reason(_noisy(_requests(rate=rate, requests=400), 0.25)) is None


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_missing_requests_are_seen_on_a_machine_with_changing_speed(share):
    requests = _noisy(_requests(rate=24.0, requests=400), 0.1)
    assert _reason(requests) is None
    assert "prompts without a span" in _reason(_some(requests, share))


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("share", "sampled"), [(None, False), (1.0, False), (0.25, True)])
def test_a_sampler_in_the_configuration_is_believed(share, sampled):
    reasons = unknown_batches(_requests(), 2048, traced_share=share)["reason"].to_list()
    assert [("25 %" in reason) for reason in reasons] == [True] * sampled
    assert bool(count_steps(_requests(), EngineLimits(), traced_share=share).starts.height) is not sampled


@pytest.mark.slow
def test_a_few_steps_of_two_tokens_are_seen():
    """Speculative decoding with 1.1 tokens a step."""
    requests = _requests()
    more = np.random.default_rng(5).binomial(requests["output_tokens"].to_numpy() - 1, 0.1)
    assert "several tokens a step" in _reason(requests.with_columns(pl.col("output_tokens") + pl.Series(more)))


@pytest.mark.slow
def test_two_engines_under_one_name_are_seen():
    one, other = _requests(), _requests(seed=2)
    begin = one["arrival_ns"].min() - other["arrival_ns"].min()
    both = pl.concat([one, other.with_columns(pl.col("arrival_ns") + begin + 3_456_789)])
    assert "one data-parallel rank" in _reason(both)


def test_two_front_ends_of_one_engine_are_seen():
    """Each stamps the outputs of a step itself, some ten microseconds apart."""
    requests = _requests()
    late = pl.Series(np.random.default_rng(4).integers(0, 2, requests.height) * 40.0)
    assert "front ends" in _reason(requests.with_columns(pl.col("ttft_us") + late, pl.col("e2e_us") + late))


@pytest.mark.slow
def test_steps_of_several_tokens_are_seen():
    """Speculative decoding gives one to three tokens a step: the tokens of a request do not count its steps."""
    requests = _requests()
    tokens = np.random.default_rng(5).uniform(1, 3, requests.height)
    more = (pl.col("output_tokens") * pl.Series(tokens)).round().cast(pl.Int64)
    assert "speculative" in _reason(requests.with_columns(output_tokens=more))


@pytest.mark.slow
def test_requests_that_fill_the_cache_evenly_are_all():
    """Where requests are preempted the cache is full: half of the requests would fill it now more, now less."""
    requests = _requests(14.0, requests=400, num_blocks=1200, output_tokens=LengthMix(((1.0, 400.0, 0.2),)))
    assert _reason(requests) is None
    assert "preempted" in _reason(requests.sample(fraction=0.6, seed=1).sort("arrival_ns"))


@pytest.mark.slow
def test_a_client_s_counts_of_words_are_not_the_engine_s_tokens():
    requests = _requests(output_tokens=LengthMix(((1.0, 250.0, 0.0),)))
    client = requests.with_columns(
        pl.lit(None).cast(pl.Float64).alias(name) for name in ("queue_wait_us", "prefill_us", "decode_us")
    ).with_columns(dialect=pl.lit("client"), client_ttft_us="ttft_us", client_e2e_us="e2e_us")
    words = pl.Series(np.random.default_rng(5).uniform(0.3, 1.0, requests.height))
    assert "usage" not in (_reason(client) or "")
    assert "usage" in _reason(
        client.with_columns(output_tokens=(pl.col("output_tokens") * words).round().cast(pl.Int64))
    )


def test_requests_without_times_were_in_the_batches_too():
    requests = _requests()
    some = pl.Series(np.arange(requests.height) % 10 == 0)
    lost = requests.with_columns(decode_us=pl.when(~some).then("decode_us"))
    assert "10 %" in _reason(lost)


def test_fifteen_requests_are_too_few():
    assert "too few" in _reason(_requests().head(15))


def _intervals(law, hits=lambda rng, tokens: 0 * tokens):
    """Return single steps, every other one with a prompt of 20 to 500 tokens, whose time `law` gives from what is
    computed."""
    rng = np.random.default_rng(6)
    tokens = rng.integers(20, 500, 600) * (np.arange(600) % 2)
    decodes = rng.integers(1, 12, 600)
    time = law(tokens - hits(rng, tokens), decodes) * rng.normal(1, 0.03, 600)
    return pl.DataFrame(
        {
            "interval_steps": 1,
            "y": time,
            "prompts": (tokens > 0).astype(float),
            "prompt_tokens": tokens.astype(float),
            "decodes": decodes.astype(float),
            "contexts": 300.0 * decodes,
        }
    )


def _linear(tokens, decodes):
    return 7_000 + 26 * tokens + 100 * decodes


def _bound(tokens, decodes):
    return 1_000 + 100 * decodes + np.maximum(7_000, 45 * (tokens + decodes))


def _padded(tokens, decodes):
    return _linear(tokens, 0) + 600 * 2 ** np.ceil(np.log2(decodes))


@pytest.mark.parametrize("law", [_linear, _bound, _padded])
def test_prompt_times_that_follow_lengths_show_no_prefix_hit(law):
    assert longest_whole_prompt(_intervals(law)) is None


def test_steps_without_any_noise_show_no_prefix_hit():
    """As in a simulation: every step of a batch takes as long, so that there is nothing to divide by."""
    rows = _intervals(_linear).with_columns(decodes=pl.lit(4.0), contexts=pl.lit(1_200.0))
    exact = rows.with_columns(y=10_000 + 26 * pl.col("prompt_tokens"))
    assert longest_whole_prompt(exact) is None


def test_prefix_hits_show_in_unequal_times_of_equal_prompts():
    """A third of the prompts longer than 128 tokens found 128 of them in the cache."""
    rows = _intervals(_linear, lambda rng, tokens: 128 * ((tokens > 128) & (rng.random(600) < 0.33)))
    assert longest_whole_prompt(rows) == 128


def test_prefix_hits_of_most_prompts_show_in_padded_batches():
    """The staircase of the decode batches does not hide the prompts without a hit, as noise would."""
    hits = _intervals(_padded, lambda rng, tokens: 128 * ((tokens > 128) & (rng.random(600) < 0.9)))
    assert longest_whole_prompt(hits) == 128


def test_hits_show_on_a_noisy_machine_where_longer_prompts_are_faster():
    """Seen on a real server: nearly all prompts longer than a block are hits, and steps differ by a fifth."""
    rng = np.random.default_rng(9)
    rows = _intervals(_linear, lambda rng, tokens: 384 * ((tokens > 384) & (rng.random(600) < 0.9)))
    rows = rows.with_columns(y=pl.col("y") * pl.Series(np.exp(0.2 * rng.standard_normal(600))))
    assert longest_whole_prompt(rows) == 256
    whole = _intervals(_linear).with_columns(y=pl.col("y") * pl.Series(np.exp(0.2 * rng.standard_normal(600))))
    assert longest_whole_prompt(whole) is None


def test_no_prompt_is_whole_where_hits_have_every_length():
    rows = _intervals(_linear, lambda rng, tokens: (tokens * rng.choice([0, 0.9], 600)).astype(int))
    assert longest_whole_prompt(rows) == 0


def _held_up(requests):
    """Let the front end hold each request up for 9 ms on average before the engine gets it, more than a step takes."""
    held_us = pl.Series(np.random.default_rng(7).exponential(9_000, requests.height))
    arrived = pl.col("arrival_ns") - (1e3 * held_us).cast(pl.Int64)
    return requests.with_columns(pl.col("ttft_us") + held_us, pl.col("e2e_us") + held_us, arrival_ns=arrived)


@pytest.mark.slow
def test_other_work_on_the_machine_is_no_missing_request():
    """Seen on a real server: what held up arrivals also held up steps."""
    uneven = _requests(rate=0.7, hiccup_rate=0.04, hiccup_us=500_000.0)
    assert "other work on the machine" in _reason(_held_up(uneven))
    # Where steps are even, arrivals that wait look like requests that nobody traced.
    assert "no other was in the engine" in _reason(_held_up(_requests(rate=0.7)))


def test_a_delayed_front_end_is_one_engine():
    """It stamps the outputs of some steps only just before those of the next one."""
    requests = _requests()
    stamps = [requests["arrival_ns"] + (1e3 * requests[name]).round().cast(int) for name in ("ttft_us", "e2e_us")]
    times = pl.concat(stamps).sort()
    steps = pl.DataFrame({"at": times, "next": times.shift(-1)}).filter(pl.col("next") - pl.col("at") > 100_000)
    short_ns = 1e3 * (requests["decode_us"] / (requests["output_tokens"] - 1)).quantile(0.05)
    near = steps.filter(pl.col("next") - pl.col("at") < 3 * short_ns).gather_every(12)
    assert near.height > 12
    late = near.select("at", later=pl.col("next") - 50_000 - pl.col("at"))

    def held_up(stamp):
        by = pl.DataFrame({"at": stamp}).join(late, on="at", how="left", maintain_order="left")["later"]
        return by.fill_null(0) / 1e3

    ttft_us, e2e_us = (
        requests[name] + held_up(stamp) for name, stamp in zip(("ttft_us", "e2e_us"), stamps, strict=True)
    )
    assert _reason(requests.with_columns(ttft_us=ttft_us, e2e_us=e2e_us)) is None
