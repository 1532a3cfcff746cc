"""The commands end to end: exit codes, what goes to which stream, and that they call the library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl
import pytest

from tracefit.engines.cores import available_cores
from tracefit.models.targets import TARGETS
from tracefit.tables.store import TableStore


@pytest.fixture
def folder(tmp_path, new_traces):
    return new_traces().load(steps=120, requests=60).write(tmp_path / "busy")


@pytest.mark.slow
def test_the_job_in_a_process_of_its_own(process, tmp_path, traces):
    """The run has only steps: one model is quicker to fit than four."""
    steps = traces.load(steps=120, requests=0).write(tmp_path / "steps")
    done = process("run", steps, "--out", tmp_path / "out", "--features", "batch")
    assert (done.returncode, done.stderr) == (0, "")
    assert "beta.cycle_time" in done.stdout
    assert "--enable-journey-tracing" in done.stdout, "what would give the other models"
    for file in ("models/alpha.json", "models/beta.json", "evaluation.json", "report.md"):
        assert str(tmp_path / "out" / file) in done.stdout
        assert (tmp_path / "out" / file).stat().st_size > 0


_THREADS = """
import os
del os.environ["POLARS_MAX_THREADS"]  # the tests' own
from tracefit.cli import main
try:
    main()
finally:
    import polars
    print(polars.thread_pool_size())
"""


def test_a_small_input_is_read_with_one_thread(process, folder):
    done = process("inspect", folder, code=_THREADS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"


_HAS_CORES = pytest.mark.skipif(sys.platform != "linux" or available_cores() < 2, reason="needs two cores of Linux")
_CORES = """
import os
from tracefit.cli import main
try:
    main()
finally:
    print(len(os.sched_getaffinity(0)))
"""


@_HAS_CORES
@pytest.mark.parametrize(("workers", "cores"), [((), 1), (("--workers", "2"), available_cores())])
def test_a_small_input_is_read_on_one_core_unless_workers_are_asked_for(process, folder, tmp_path, workers, cores):
    done = process("ingest", folder, "--out", tmp_path / "out", *workers, code=_CORES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(cores)


@_HAS_CORES
def test_a_large_input_is_read_on_all_cores(process, folder):
    with (folder / "spans.log").open("wb") as file:
        file.truncate(40 * 2**20)
    done = process("inspect", folder, code=_CORES)
    assert done.stdout.splitlines()[-1] == str(available_cores())


@pytest.mark.slow
def test_the_text_names_every_model_and_file(tracefit, tmp_path, folder, quick):
    code, out, err = tracefit("run", folder, "--out", tmp_path / "out", *quick)
    assert (code, err) == (0, "")
    for name in ("beta.cycle_time", *(target.model for target in TARGETS)):
        assert name in out
    for file in ("models/alpha.json", "models/beta.json", "evaluation.json", "report.md"):
        assert str(tmp_path / "out" / file) in out


@pytest.mark.slow
def test_json_is_the_result_as_it_is_on_disk(tracefit, tmp_path, folder, quick):
    code, out, _ = tracefit("run", folder, "--out", tmp_path / "out", "--json", *quick)
    said = json.loads(out)
    assert code == said["exit_code"] == 0
    run = said["ingested"]["runs"][0]
    assert (run["run_id"], run["spans"], run["steps"], run["requests"]) == ("busy", 121, 120, 60)
    assert said["trained"]["files"] == [
        str(tmp_path / "out" / name)
        for name in ("models/alpha.json", "models/beta.json", "evaluation.json", "report.md", "report.html")
    ]
    deployment = json.loads((tmp_path / "out" / "evaluation.json").read_text())["deployments"][0]
    for fitted in said["trained"]["fitted"]:
        entry = deployment["models"][fitted["name"]]
        assert fitted["deployment_id"] == deployment["deployment_id"]
        assert fitted["holdout_mae"] == pytest.approx(entry["holdout"]["mae"])
        assert fitted["rows_holdout"] == entry["holdout"]["n"]


@pytest.mark.slow
def test_inspect_tells_facts_and_writes_nothing(tracefit, tmp_path, folder):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = tracefit("inspect", folder)
    assert (code, err) == (0, "")
    assert "step time" in out
    code, out, _ = tracefit("inspect", folder, "--json")
    said = json.loads(out)
    assert (code, said["exit_code"], said["runs"][0]["run_id"]) == (0, 0, "busy")
    assert {a["what"]: a["verdict"] for a in said["deployments"][0]["allows"]}["step time"] == "yes"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_quiet_prints_nothing(tracefit, tmp_path, folder, quick):
    assert tracefit("run", folder, "--out", tmp_path / "out", "--quiet", *quick) == (0, "", "")
    assert (tmp_path / "out" / "report.md").exists()


def test_quiet_still_prints_errors(tracefit, tmp_path):
    code, out, err = tracefit("run", tmp_path, "--out", tmp_path / "out", "-q")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_loose_files_take_their_facts_from_options(tracefit, tmp_path, folder, quick):
    assert tracefit("run", folder, "--out", tmp_path / "a", "--gpu", "H100", "-q", *quick)[0] == 0
    loose = tmp_path / "traces-0001.json"
    (folder / "traces.json").rename(loose)
    options = (
        "--run-config",
        folder / "exp-config.yaml",
        "--model-config",
        folder / "config.json",
        "--gpu",
        "H100",
    )
    assert tracefit("run", loose, "--out", tmp_path / "b", *options, "-q", *quick)[0] == 0
    models = [json.loads((tmp_path / out / "models" / "beta.json").read_text())["models"][0] for out in "ab"]
    assert models[0]["terms"] == models[1]["terms"]
    assert models[0]["deployment_id"] == models[1]["deployment_id"]
    assert TableStore(tmp_path / "b" / "tables").runs() == ["traces-0001"]


@pytest.mark.slow
def test_options_win_over_the_runs_files(tracefit, tmp_path, folder, quick):
    options = ("--gpu", "A100", "--tp", 2, "--set", "max_num_seqs=97", "--set", "enforce_eager=true")
    assert tracefit("run", folder, "--out", tmp_path / "out", *options, "-q", *quick)[0] == 0
    model = json.loads((tmp_path / "out" / "models" / "beta.json").read_text())["models"][0]
    settings = model["deployment"]["settings"]
    assert (settings["tensor_parallel"], settings["max_num_seqs"], settings["enforce_eager"]) == (2, 97, True)
    assert settings["max_num_batched_tokens"] == 2048
    assert model["deployment"]["gpu"].startswith("A100")
    assert ".tp2." in model["deployment_id"]


@pytest.mark.slow
def test_a_damaged_line_is_exit_code_3_with_a_warning(tracefit, tmp_path, folder, quick):
    with (folder / "traces.json").open("a") as stream:
        stream.write('{"resourceSpans": [{"cut')
    code, out, err = tracefit("run", folder, "--out", tmp_path / "out", *quick)
    assert code == 3
    assert "beta.cycle_time" in out
    assert err == "warning: busy: 1 record could not be read (1 not JSON); see the rejects table\n"
    assert TableStore(tmp_path / "out" / "tables").read("rejects").height == 1


def _broken_config(folder):
    (folder / "config.json").write_text('["llama"]')
    return ()


FAULTS = {
    "a setting without a value": (lambda _: ("--set", "max_num_seqs"), 2, "KEY=VALUE"),
    "a setting that cannot be": (lambda _: ("--set", "max_num_seqs=-4"), 2, "max_num_seqs"),
    "no such gpu file": (lambda _: ("--gpu", "H9000.json"), 2, "H9000.json"),
    "no such run config": (lambda f: ("--run-config", f / "none.yaml"), 2, "none.yaml"),
    "a model configuration that is a list": (_broken_config, 2, "config.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_one_line(tracefit, tmp_path, folder, fault):
    options, code, says = FAULTS[fault]
    ended, out, err = tracefit("run", folder, "--out", tmp_path / "out", *options(folder))
    assert (ended, out) == (code, "")
    assert err.startswith("tracefit: ")
    assert err.count("\n") == 1
    assert says in err
    assert not (tmp_path / "out").exists()


def test_an_interrupt_is_one_line(tracefit, tmp_path, folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pl.DataFrame, "with_columns", interrupted)
    assert tracefit("run", folder, "--out", tmp_path / "out") == (130, "", "tracefit: interrupted\n")


def test_what_rows_lack_is_named_as_the_columns_a_user_can_give(tracefit, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("num_prefill_reqs,prefill_tokens,num_decode_reqs,decode_tokens\n0,0,3,3\n")
    model = Path(__file__).parents[2] / "fixtures/models/beta.json"
    code, _, err = tracefit("predict", model, "--deployment", "llama-2-70b", "--rows", rows)
    # The model is of rooflines, which are computed from the tokens that a step reads.
    assert code == 2
    assert "needs context_tokens" in err
    assert "with --feature, or as a column of --rows; given: decode_tokens" in err
    assert "compute_us" not in err
