"""Small things a person meets at the command line: hints, short help, closed pipes, warnings."""

from __future__ import annotations

import pytest

import tracefit


@pytest.mark.parametrize(
    ("wrong", "right"), [("--featuers", "--features"), ("--gpus", "--gpu"), ("--sampel-csv", "--sample-csv")]
)
def test_a_misspelt_option_is_answered_with_the_most_similar_one(tracefit, tmp_path, wrong, right):
    code, out, err = tracefit("run", tmp_path, "--out", tmp_path / "out", wrong, "x")
    assert (code, out) == (2, "")
    assert err.rstrip().endswith(f"did you mean {right}?")


def test_h_is_help(tracefit):
    assert tracefit("-h")[0] == tracefit("run", "-h")[0] == 0
    assert tracefit("run", "-h")[1] == tracefit("run", "--help")[1]


@pytest.mark.slow
def test_a_run_without_configuration_is_warned_of(tracefit, traces, tmp_path, quick):
    folder = traces.load().write(tmp_path / "bare", config=False)
    *_, err = tracefit("run", folder, "--out", tmp_path / "out")
    assert "bare: no server configuration was found" in err
    assert "--run-config" in err
    assert "--gpu" in err


@pytest.mark.mostly_slow(every=7)
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tracefit run x --gpu H100-", ["H100-SXM", "H100-PCIe", "H100-NVL"]),
        ("tracefit export {out} --deployment {start}", ["{deployment}"]),
        ("tracefit predict {out} --run b", ["busy"]),
        ("tracefit compare {out} {out}/models --deployment {start}", ["{deployment}"]),
        ("tracefit receive --models {out} --deployment {start}", ["{deployment}"]),
        ("tracefit export {out}/nothing --deployment ti", []),
        ("tracefit predict {out}/models/beta.json --run b", []),
    ],
)
def test_a_shell_completes_names(process, trained, monkeypatch, words, completed):
    (deployment,) = tracefit.load(trained).deployment_ids
    completed = [text.format(deployment=deployment) for text in completed]
    monkeypatch.setenv("_TRACEFIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words.format(out=trained, start=deployment[:5]))
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    shown = process()
    assert (shown.stdout.split(), shown.stderr) == (completed, "")
