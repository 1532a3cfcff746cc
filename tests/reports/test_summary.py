"""What a command says at its end."""

from __future__ import annotations

from pathlib import Path

from tracefit.reports.summary import ingest_text, train_text
from tracefit.results.ingestion import IngestResult, RunSummary
from tracefit.results.training import ModelSummary, TrainResult

RUN = RunSummary("busy", "scope", 1, 1000, 1416, 3, 2, 5, 9536, 1, 1, 6764, 674)
MODEL = ModelSummary("beta.cycle_time", "scope", 2.345, 1859.4, 4728.0, None, 0.6067, 4436, 2019)


def test_counts_stand_below_their_heads():
    text = ingest_text(IngestResult(Path("out/tables"), (RUN,)))
    head, row = text.splitlines()[:2]
    for name, value in {
        "spans": "1,416",
        "steps": "6,764",
        "requests": "674",
        "rejects": "5",
        "dropped events": "9,536",
        "duplicates": "2",
    }.items():
        end = head.index(name) + len(name)
        assert row[:end].split()[-1] == value
    assert row.startswith("busy")
    assert "out/tables" in text


def test_errors_files_and_what_is_missing():
    result = TrainResult(
        Path("m"), (Path("m/beta.json"),), Path("m/e"), Path("m/r"), (MODEL,), ("alpha.departure: why",)
    )
    lines = train_text(result).splitlines()
    assert lines[1].split() == ["scope", "beta.cycle_time", "2,019", "2.35", "1,859", "4,728", "-", "0.607"]
    assert "not fitted: alpha.departure: why" in lines
    assert "wrote   m/beta.json" in lines
