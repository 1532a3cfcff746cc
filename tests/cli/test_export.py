"""`tracefit export` through the entry point: what is written, what is refused, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_export_prints_the_error_of_the_exported_form(tracefit, tmp_path, trained):
    code, out, err = tracefit(
        "export", trained / "models", "--to", "llm-d-inference-sim", "--out", tmp_path / "sim"
    )
    assert (code, err) == (0, "")
    assert "exported form, held out" in out
    assert (tmp_path / "sim" / "config.yaml").exists()
    code, out, _ = tracefit(
        "export",
        trained / "models",
        "--to",
        "llm-d-inference-sim",
        "--out",
        tmp_path,
        "--tables",
        trained / "tables",
        "--json",
    )
    result = json.loads(out)
    assert (code, result["consumer"], result["errors"][0]["unit"]) == (0, "llm-d-inference-sim", "us")
    assert [Path(f).name for f in result["files"]] == ["config.yaml"]


def test_what_cannot_be_converted_is_one_line_and_1(tracefit, tmp_path, trained):
    code, out, err = tracefit("export", trained / "models", "--to", "blis", "--out", tmp_path / "blis")
    assert (code, out) == (1, "")
    assert "the GPU is not known" in err
    assert err.count("\n") == 1
    code, _, err = tracefit("export", trained / "models", "--to", "vidur", "--out", tmp_path / "x")
    assert (code, "per operator" in err) == (1, True)
    code, _, err = tracefit("export", trained / "models", "--to", "nobody", "--out", tmp_path / "x")
    assert (code, "known: blis" in err) == (2, True)
    assert not (tmp_path / "blis").exists()


def test_the_shipped_models_make_a_table(tracefit, tmp_path):
    code, out, _ = tracefit(
        "export", ROOT / "models", "--to", "csv", "--scope", "llama-2-70b", "--out", tmp_path, "--json"
    )
    assert (code, len(json.loads(out)["errors"])) == (0, 4)
