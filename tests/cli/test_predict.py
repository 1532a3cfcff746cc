"""`tracefit predict`: questions by flags and by file, through the entry point."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

ROOT = Path(__file__).parents[2]

BETA = {
    "schema": "tracefit/coefficients",
    "version": 4,
    "kind": "beta",
    "models": [
        {
            "name": "beta.cycle_time",
            "deployment_id": "small.gpu.tp1.00000000",
            "form": "linear",
            "intercept": {"value": 1000.0},
            "terms": [
                {"feature": "prefill_tokens", "unit": "us/token", "value": 10.0, "training_range": [0, 60]},
                {"feature": "num_decode_reqs", "unit": "us/request", "value": 50.0, "training_range": [0, 6]},
            ],
        }
    ],
}


@pytest.fixture
def beta(tmp_path):
    path = tmp_path / "beta.json"
    path.write_text(json.dumps(BETA))
    return path


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--output", "80"), "--output describes a request; give its --prompt too"),
        (("--batch", "4", "--queue", "40"), "--queue describes a request; give its --prompt too"),
        (
            ("--prompt", "300", "--prefill-reqs", "2"),
            "--prefill-reqs describes a step, --prompt a request; leave one of them out",
        ),
        (
            ("--rows", "rows.csv", "--feature", "waiting_depth=3"),
            "--feature describes one prediction, --rows has many; make it a column",
        ),
        ((), "nothing to predict; describe a step (--batch, --prefill) or a request (--prompt, --output)"),
    ],
)
def test_options_that_a_prediction_would_not_read_are_refused(process, beta, options, said):
    done = process("predict", beta, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tracefit: {said}\n"


LOADED = """
import sys
from tracefit.cli import main
try:
    main()
finally:
    print("\\n" + " ".join(sorted({m.partition(".")[0] for m in sys.modules})))
"""


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    "question",
    [
        ("--batch", "4", "--context", "30", "--prefill", "40"),
        ("--prompt", "50", "--output", "10", "--queue", "3", "--batch", "2"),
    ],
)
def test_a_question_is_answered_without_the_libraries_that_fit(process, beta, question):
    done = process("predict", beta, *question, "--json", code=LOADED)
    assert done.returncode == 0, done.stderr
    answer, loaded = done.stdout.rsplit("\n\n", 1)
    assert json.loads(answer)["deployment_id"] == "small.gpu.tp1.00000000"
    assert not set(loaded.split()) & {"sklearn", "polars", "numpy", "scipy", "pyarrow"}


def test_a_step_in_text_and_in_json(tracefit, beta):
    code, out, err = tracefit("predict", beta, "--batch", 4, "--prefill", 70)
    assert (code, err) == (0, "")
    assert "1.900" in out
    assert "prefill_tokens 70 is outside 0 to 60" in out
    code, out, _ = tracefit("predict", beta, "--batch", 4, "--prefill", 70, "--json")
    result = json.loads(out)
    assert (code, result["step"]["value_us"], result["features"]) == (
        0,
        1900,
        [["prefill_tokens", 70], ["num_decode_reqs", 4]],
    )


def test_a_request_says_what_it_cannot(tracefit, beta):
    code, out, _ = tracefit("predict", beta, "--prompt", 50, "--output", 3)
    assert code == 0
    assert re.search(r"ITL +1\.050\n", out)
    assert re.search(r"TTFT +-\n", out)
    assert "no model alpha.queue_wait" in out


def test_a_feature_by_name(tracefit, beta):
    _, out, _ = tracefit("predict", beta, "--feature", "num_decode_reqs=3", "--json")
    assert json.loads(out)["step"]["value_us"] == 1150


@pytest.mark.parametrize("suffix", ["csv", "parquet", "ndjson"])
def test_rows_of_a_file_in_and_out(tracefit, beta, tmp_path, suffix):
    frame = pl.DataFrame({"note": ["a", "b"], "num_decode_reqs": [4, 7], "prefill_tokens": [40, 0]})
    writers = {"csv": frame.write_csv, "parquet": frame.write_parquet, "ndjson": frame.write_ndjson}
    writers[suffix](tmp_path / f"rows.{suffix}")
    out_file = tmp_path / "made" / f"predicted.{suffix}"
    code, out, err = tracefit("predict", beta, "--rows", tmp_path / f"rows.{suffix}", "--out", out_file)
    assert (code, err) == (0, "")
    assert "2 rows, 1 outside" in out
    readers = {"csv": pl.read_csv, "parquet": pl.read_parquet, "ndjson": pl.read_ndjson}
    result = readers[suffix](out_file)
    assert result["note"].to_list() == ["a", "b"]
    assert result["predicted_us"].to_list() == [1600, 1350]
    assert result["out_of_range"].to_list() == [None, "num_decode_reqs"]


def test_rows_go_to_stdout_where_no_file_is_named(tracefit, beta, tmp_path):
    (tmp_path / "rows.csv").write_text("batch,prefill\n4,40\n")
    code, out, _ = tracefit("predict", beta, "--rows", tmp_path / "rows.csv")
    assert code == 0
    assert out.splitlines() == ["batch,prefill,predicted_us,low_us,high_us,out_of_range", "4,40,1600.0,,,"]
    _, out, _ = tracefit("predict", beta, "--rows", tmp_path / "rows.csv", "--json")
    assert json.loads(out)["predictions"][0]["predicted_us"] == 1600


def test_columns_that_no_model_reads_are_named(tracefit, beta, tmp_path):
    """Text labels rows, and a table's rows have columns for other uses."""
    rows = tmp_path / "rows.csv"
    rows.write_text("name,batch,prefil,kv\na,4,40,1\n")
    code, _, err = tracefit("predict", beta, "--rows", rows)
    said = "no model that predicts this reads prefil (did you mean prefill?), kv"
    assert (code, err) == (0, f"warning: {rows}: {said}\n")
    assert tracefit("predict", beta, "--rows", rows, "--quiet")[2] == ""
    rows.write_text("prompt_tokens,output_tokens,que,queue\n50,3,1,0\n")
    _, _, err = tracefit("predict", beta, "--rows", rows, "--of", "request")
    assert "reads que (did you mean queue?)\n" in err
    rows.write_text("prefill_tokens,num_decode_reqs,duration\n1,2,3\n")
    _, _, err = tracefit("predict", beta, "--rows", rows, "--of", "beta.cycle_time")
    assert "reads duration\n" in err
    rows.write_text("run_id,prefill_tokens,num_decode_reqs,duration\nr,1,2,3\n")
    assert tracefit("predict", beta, "--rows", rows)[2] == ""


def test_rows_of_requests_and_of_a_named_model(tracefit, beta, tmp_path):
    (tmp_path / "r.csv").write_text("prompt_tokens,output_tokens\n50,3\n")
    code, out, _ = tracefit("predict", beta, "--rows", tmp_path / "r.csv", "--of", "request", "--json")
    assert (code, json.loads(out)["predictions"][0]["itl_us"]) == (0, 1050)
    (tmp_path / "r.csv").write_text("prompt_tokens,output_tokens,batch\n50,3,2\n61,3,2\n")
    asked = ("predict", beta, "--rows", tmp_path / "r.csv", "--of", "request", "--out")
    assert "2 rows, 1 outside the training range" in tracefit(*asked, tmp_path / "out.csv")[1]
    assert pl.read_csv(tmp_path / "out.csv")["out_of_range"].to_list() == [None, "prefill_tokens"]
    (tmp_path / "r.csv").write_text("prompt_tokens,output_tokens,batch\n50,3,2\n50,3,-5\n")
    code, out, err = tracefit(*asked, tmp_path / "none.csv")
    assert (code, out, (tmp_path / "none.csv").exists()) == (2, "", False)
    assert err == "tracefit: row 2: batch: -5 is not a count\n"
    (tmp_path / "f.csv").write_text("prefill_tokens,num_decode_reqs\n1,2\n")
    code, out, _ = tracefit("predict", beta, "--rows", tmp_path / "f.csv", "--of", "beta.cycle_time", "--json")
    assert (code, json.loads(out)["predictions"][0]["predicted_us"]) == (0, 1110)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.txt", "x", "is not a .csv"),
        ("rows.csv", "", "cannot be read as csv"),
        ("rows.parquet", "junk", "cannot be read as parquet"),
        ("rows.ndjson", "{", "cannot be read as ndjson"),
        ("rows.csv", "a,b\n1,2\n", "needs num_decode_reqs, prefill_tokens"),
        ("rows.csv", "prefill_tokens,num_decode_reqs\nmany,2\n", "not a column of numbers"),
    ],
)
def test_rows_that_cannot_be_used_are_one_line(tracefit, beta, tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    code, out, err = tracefit("predict", beta, "--rows", tmp_path / name)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("tracefit: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rows", "missing.csv"), "missing.csv"),
        (("--feature", "a"), "NAME=NUMBER"),
        (("--feature", "a=nan"), "NAME=NUMBER"),
        (("--deployment", "other", "--batch", "4"), "no deployments match other"),
        (("--feature", "num_decode_reqs=-5"), "num_decode_reqs: -5 is not a count"),
        (
            ("--prompt", "10", "--output", "3", "--cached", "10"),
            "must be less than the prompt tokens",
        ),
    ],
)
def test_wrong_questions_are_one_line(tracefit, beta, arguments, says):
    code, out, err = tracefit("predict", beta, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_rows_of_requests_need_their_kind(tracefit, tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,output\n100,20\n")
    asked = ("--deployment", "llama-3.1-8b", "--rows", tmp_path / "rows.csv")
    code, _, err = tracefit("predict", ROOT / "fixtures/models", *asked)
    assert code == 2
    assert "for rows that are requests, --of is request" in err


def test_only_matching_deployments_are_offered(tracefit):
    code, _, err = tracefit("predict", ROOT / "models", "--deployment", "tiny", "--batch", 1)
    assert code == 2
    assert "3 deployments match tiny; name one with --deployment: tiny-llama-c" in err
    assert "qwen" not in err


def test_the_shipped_models_answer(tracefit):
    """7,000 us + 26 per prefill token + 15 per decode request is the law of the 8b deployment."""
    asked = ("--deployment", "llama-3.1-8b", "--batch", 32, "--context", 1500, "--prefill", 512, "--json")
    code, out, _ = tracefit("predict", ROOT / "fixtures/models", *asked)
    assert code == 0
    assert json.loads(out)["step"]["value_us"] == pytest.approx(7000 + 26 * 512 + 15 * 32 + 40 + 144, rel=0.02)
