"""A missing attribute is a missing column: whatever an event lacks, every command does what the rest allows."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tracefit.tables import dialects


def _attributes():
    """Return every attribute of every event of the server, as (event, attribute); a core event's clock has two."""
    found = []
    for kind in dialects.EVENT_KINDS:
        if kind.layer == "api":
            found += [(kind.event, "event.ts.monotonic")]
            continue
        found += [(kind.event, "event.type")]
        found += [(kind.event, keys[0]) for keys in dialects.JOURNEY_KEYS.values()]
        found += [(kind.event, "ts.monotonic_ns"), (kind.event, "ts.monotonic")]
    found += [("ABORTED", "reason"), ("ABORTED", "error")]
    found += [(dialects.STEP_EVENT, keys[0]) for keys in dialects.STEP_KEYS.values()]
    found += [(dialects.SNAPSHOT_EVENT, keys[0]) for keys in dialects.SNAPSHOT_KEYS.values()]
    return found


OF_SPANS = (
    "gen_ai.request.id",
    "gen_ai.request.max_tokens",
    "gen_ai.response.model",
    "gen_ai.usage.completion_tokens",
    "gen_ai.usage.prompt_tokens",
    "http.route",
)
_EVENTS_OF = Counter(key for _, key in _attributes())
EVERYWHERE = sorted({key for key, events in _EVENTS_OF.items() if events > 1} | set(OF_SPANS))
"""Attributes of several events, and of spans: without one of the others, a run lacks what one event lacks."""


@pytest.mark.slow
@pytest.mark.mostly_campaign(every=15)
@pytest.mark.parametrize(("event", "key"), _attributes())
def test_a_run_without_an_attribute_goes_through_run(odd, root, tmp_path, event, key):
    """The other commands read what it wrote; those below try them."""
    run = odd.run("preempted and aborted", root)
    if not run.strip(event, key):
        pytest.skip("this server does not write it")
    odd.through(run.write(tmp_path / "odd"), tmp_path, commands=())


@pytest.mark.slow
@pytest.mark.mostly_campaign(every=8)
@pytest.mark.parametrize("key", EVERYWHERE)
def test_commands_work_without_an_attribute(odd, root, tmp_path, key):
    run = odd.run("preempted and aborted", root)
    if not run.strip("", key):
        pytest.skip("this server does not write it")
    odd.through(run.write(tmp_path / "odd"), tmp_path)


@pytest.mark.slow
@pytest.mark.mostly_campaign(every=3)
@pytest.mark.parametrize("seed", range(8))
def test_a_run_without_ten_attributes_goes_through_run(odd, root, tmp_path, seed):
    """The first goes through the other commands too."""
    run = odd.run("preempted and aborted", root)
    for pair in random.Random(seed).sample(_attributes(), 10):
        run.strip(*pair)
    odd.through(run.write(tmp_path / "odd"), tmp_path, **({"commands": ()} if seed else {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "key", "named", "flag"),
    [
        (dialects.STEP_EVENT, "batch.decode_tokens", "step.BATCH_SUMMARY", "--step-tracing-enabled"),
        ("SCHEDULED", "scheduler.step", "journey.SCHEDULED", "--enable-journey-tracing"),
        (dialects.STEP_EVENT, "step.ts_start_ns", "step.BATCH_SUMMARY", "--step-tracing-enabled"),
    ],
)
def test_what_is_missing_is_named_with_what_gives_it(odd, root, tmp_path, event, key, named, flag):
    run = odd.run("busy", root)
    run.strip(event, key)
    code, stdout, _ = odd.call("inspect", run.write(tmp_path / "odd"))
    assert code == 0
    text = " ".join(stdout.split())
    (sentence,) = (s for s in text.split("no ") if s.startswith(f"{named} has a usable"))
    assert key in sentence
    assert "vLLM 0.15.1" in sentence
    assert flag in sentence


@pytest.mark.slow
def test_model_names_its_missing_events(odd, root, tmp_path):
    run = odd.run("busy", root)
    for span in run.spans():
        span["events"] = [e for e in span.get("events", ()) if e["name"] != "journey.SCHEDULED"]
    evaluation, _ = odd.through(run.write(tmp_path / "odd"), tmp_path, commands=())
    (deployment,) = evaluation["deployments"]
    (missing,) = deployment["not_fitted"]
    assert missing["name"] == "alpha.queue_wait"
    assert missing["reason"] == "no request has both events (QUEUED to first SCHEDULED)"
    assert "vLLM 0.15.1" in missing["remedy"]
    assert "--enable-journey-tracing" in missing["remedy"]


@pytest.mark.slow
def test_step_model_names_its_missing_attribute(odd, root, tmp_path):
    run = odd.run("busy", root)
    run.strip(dialects.STEP_EVENT, "step.ts_start_ns")
    for span in run.spans():
        span["events"] = [e for e in span.get("events", ()) if e["name"].startswith("step.")]
    _, said = odd.through(run.write(tmp_path / "odd"), tmp_path, commands=())
    wanted = "beta.cycle_time: no step.BATCH_SUMMARY has a usable step.id or step.ts_start_ns"
    assert wanted in said["run"]
    assert "vLLM 0.15.1 gives them with --step-tracing-enabled" in said["run"]
