"""`tracefit requests` through the entry point: text for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
import json

import pytest

from tracefit.commands.ingest import ingest


@pytest.fixture
def folder(tmp_path, traces):
    """Tables of eleven requests, one per second; request k has its first token 100 k ms after it arrived."""
    for k in range(1, 12):
        at, first = 1_000_000 * (k - 1), 1_000_000 * (k - 1) + 100_000 * k
        traces.request(k, at, step=10 * k, tokens_at=(first, first + 40_000), departs=1_000)
    ingest([traces.write(tmp_path / "run-0", config=False)], tmp_path / "tables")
    return tmp_path / "tables"


@pytest.mark.slow
def test_the_command_prints_text_json_and_csv(tracefit, folder):
    code, text, err = tracefit("requests", folder)
    assert (code, err) == (0, "")
    assert text.startswith("11 requests: 0 failed, 0 in flight, 0 preemptions (11 FINISHED_LENGTH_CAPPED)\n")
    assert all(part in text for part in ("TTFT", "by phase", "by run", "over time: run-0", "\n10-12 s "))
    assert max(map(len, text.splitlines())) <= 80
    code, out, _ = tracefit("requests", folder, "--json")
    said = json.loads(out)
    assert code == said["exit_code"] == 0
    assert said["total"]["ttft"]["p90"] == pytest.approx(1.0)
    code, out, _ = tracefit("requests", folder, "--csv")
    lines = list(csv.DictReader(io.StringIO(out)))
    assert [line["by"] for line in lines] == ["all", "run", *["time"] * 6]
    assert float(lines[0]["ttft_p90"]) == pytest.approx(1.0)
    assert float(lines[0]["output_tokens_per_s"]) == pytest.approx(55 / 11.141)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("how", ["--csv", "--json"])
def test_the_command_prints_every_request(tracefit, folder, how):
    code, out, err = tracefit("requests", folder, "--each", how)
    lines = json.loads(out) if how == "--json" else list(csv.DictReader(io.StringIO(out)))
    assert (code, err, len(lines)) == (0, "", 11)
    assert sorted(float(line["ttft"]) for line in lines) == pytest.approx([k / 10 for k in range(1, 12)])


def test_the_command_says_in_one_line_what_is_missing(tracefit, tmp_path):
    code, out, err = tracefit("requests", tmp_path)
    assert (code, out) == (2, "")
    assert err == f"tracefit: {tmp_path}: holds no tables; `tracefit ingest RUNS --out TABLES` makes them\n"
