"""Runs that nobody expects: valid OTLP, generated and then damaged in content, go through every command."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Return the folder of the runs as they were generated."""
    return tmp_path_factory.mktemp("bases")


def _examples(count):
    return settings(settings.get_profile("whole-files"), max_examples=count, print_blob=True)


def _shaped(odd):
    # Half of the runs are ordinary ones before they are damaged: of the others some allow no model at all.
    return st.sampled_from(["busy"] * len(odd.shapes) + list(odd.shapes))


def _check(odd, root, data, **options):
    run = odd.run(data.draw(_shaped(odd), label="shape"), root)
    rng = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    for _ in range(data.draw(st.sampled_from((1, 1, 2, 4)), label="ways")):
        data.draw(st.just(odd.damage(run, rng)), label="damage")
    with tempfile.TemporaryDirectory(dir=root) as work:
        odd.through(run.write(Path(work) / "odd"), Path(work), **options)


@_examples(settings.get_profile("whole-files").max_examples // 2)
@given(data=st.data())
def test_some_odd_runs_go_through_every_command(odd, root, data):
    """But those that only read again, or fit again, what `run` did: they take as long as it."""
    _check(odd, root, data, commands=())


@pytest.mark.slow
@_examples(2000)
@given(data=st.data())
def test_2000_odd_runs_go_through_every_command(odd, root, data):
    _check(odd, root, data)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(13))
def test_a_run_of_every_shape_goes_through_every_command(odd, root, tmp_path, number):
    odd.through(odd.run(odd.shapes[number], root).write(tmp_path / "odd"), tmp_path)


@pytest.mark.slow
def test_a_run_without_first_tokens_is_refused_by_blis_with_the_reason(odd, root, tmp_path):
    """Durations that are step times give the step model; there is no request whose first token is known."""
    run = odd.run("whole durations", root)
    for span in run.spans():
        span["events"] = [e for e in span.get("events", ()) if e["name"] != "journey.FIRST_TOKEN"]
    run.write(tmp_path / "odd")
    assert (
        odd.call("run", tmp_path / "odd", "--out", tmp_path / "out", "--fast", "--features", "batch")[0] == 0
    )
    code, _, stderr = odd.call("export", tmp_path / "out", "--to", "blis", "--out", tmp_path / "blis")
    assert (code, stderr.count("\n")) == (1, 1)
    assert "no request has ARRIVED, FIRST_TOKEN and prefill.total_tokens" in stderr
