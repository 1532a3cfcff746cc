"""Runs that nobody expects: valid OTLP, generated and then damaged in content, go through every command."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

RUNS = int(os.environ.get("ODD_RUNS", "2"))
"""How many numbered runs the slow tests try; 2,000 take an hour or two."""

FIRST = int(os.environ.get("ODD_FIRST", "0"))


def _shaped(odd):
    # Half of the runs are ordinary ones before they are damaged: of the others some allow no model at all.
    return st.sampled_from(["busy"] * len(odd.shapes) + list(odd.shapes))


@pytest.mark.slow
@settings(settings.get_profile("whole-files"), max_examples=1, print_blob=True)
@given(data=st.data())
def test_an_odd_run_of_chance_goes_through_run(odd, root, data):
    """The other commands read again, or fit again, what `run` did: they take as long as it."""
    run = odd.run(data.draw(_shaped(odd), label="shape"), root)
    rng = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    for _ in range(data.draw(st.sampled_from((1, 1, 2, 4)), label="ways")):
        data.draw(st.just(odd.damage(run, rng)), label="damage")
    with tempfile.TemporaryDirectory(dir=root) as work:
        odd.through(run.write(Path(work) / "odd"), Path(work), commands=())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FIRST, FIRST + RUNS))
def test_an_odd_run_goes_through_every_command(odd, root, number):
    """The number is the seed: to make a failed run again takes only its number."""
    rng = random.Random(number)
    run = odd.run(rng.choice([*["busy"] * len(odd.shapes), *odd.shapes]), root)
    ways = [odd.damage(run, rng) for _ in range(rng.choice((1, 1, 2, 4)))]
    print(run.shape, *ways, sep="\n")  # noqa: T201 - shown where it fails
    with tempfile.TemporaryDirectory(dir=root) as work:
        odd.through(run.write(Path(work) / "odd"), Path(work))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [FIRST, *(pytest.param(n, marks=pytest.mark.slow) for n in range(FIRST + 1, FIRST + RUNS))]
)
def test_odd_recorded_steps_go_through_every_command(odd, root, tmp_path, number):
    """A run that holds nothing to read ends with one line, as others do."""
    rng = random.Random(number)
    shape = rng.choice(["busy"] * len(odd.shapes) + list(odd.shapes))
    odd.run(shape, root)
    odd.through(odd.recorded(shape, rng, tmp_path / "odd", root), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [FIRST, *(pytest.param(n, marks=pytest.mark.slow) for n in range(FIRST + 1, FIRST + RUNS))]
)
def test_odd_logs_of_clients_go_through_every_command(odd, tmp_path, number):
    odd.through(odd.logged(random.Random(number), tmp_path / "odd"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(16))
def test_a_run_of_every_shape_goes_through_run(odd, root, tmp_path, number):
    """Every fourth goes through the other commands too."""
    more = {} if number % 4 == 0 else {"commands": ()}
    odd.through(odd.run(odd.shapes[number], root).write(tmp_path / "odd"), tmp_path, **more)


@pytest.mark.slow
def test_run_without_first_tokens_has_no_blis_replay(odd, root, tmp_path):
    """Durations that are step times give BLIS its coefficients; no request's first token is known to replay, and the
    export says so."""
    run = odd.run("whole durations", root)
    for span in run.spans():
        span["events"] = [e for e in span.get("events", ()) if e["name"] != "journey.FIRST_TOKEN"]
    run.write(tmp_path / "odd")
    assert odd.call("run", tmp_path / "odd", "--out", tmp_path / "out", "--fast", "--features", "batch")[0] == 0
    code, stdout, stderr = odd.call("export", tmp_path / "out", "--to", "blis", "--out", tmp_path / "blis")
    assert code == 0, stderr
    assert "no traced request has its times, so no request can be replayed" in " ".join((stdout + stderr).split())
    assert not (tmp_path / "blis" / "trace-data.csv").exists()
