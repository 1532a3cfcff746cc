"""Ten hostile files of 60 MB through the real command: each ends in time and within 1 GiB, with a result or one line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time

import pyarrow as pa
import pytest

from tracefit.tables.store import TableStore

SIZE = 60 << 20
MEMORY_BYTES, SECONDS = 1 << 30, 120

MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
"""Runs a command and prints its exit code and the most memory it held."""


def _filled(start, unit, stop=b""):
    return start + unit * ((SIZE - len(start) - len(stop)) // len(unit)) + stop


def _frame(payload):
    return len(payload).to_bytes(4, "big") + payload


def _zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


FILES = {
    "gzip bomb": lambda _: gzip.compress(bytes(1 << 20), 9) * (SIZE // 1050),
    "zstd bomb": lambda _: _zstd(b"{" + b" " * (1 << 26)) * (SIZE // 8300),
    "deep nesting": lambda good: good + _filled(b"", b"[") + b"\n" + good,
    "empty objects": lambda good: good + _filled(b"", b"{}\n") + good,
    "empty objects as spans": lambda good: (
        good + _filled(b'{"resourceSpans":[{"scopeSpans":[{"spans":[', b"{},", b"{}]}]}]}\n") + good
    ),
    "one-letter lines": lambda good: good + _filled(b"", b"x\n") + good,
    "lengths that lie": lambda _: _filled(b"", b"\x00\x00\x01\x00\x0a\xff\x01\x12\x05hello"),
    "tiny frames": lambda _: _filled(b"", b"\x00\x00\x00\x02\x0a\x00"),
    "tiny zstd frames": lambda _: _filled(b"", _frame(_zstd(b"{}"))),
    "one huge string": lambda good: good + good.replace(b"llm_request", b"x" * SIZE) + good,
    "record starts": lambda good: good + _filled(b"", b'{"resourceSpans":[') + b"\n" + good,
    "empty events": lambda good: (
        good + _filled(good[: good.index(b'"events"')] + b'"events":[', b"{},", b"{}]}]}]}]}\n") + good
    ),
}
"""Name to a function from a good line to the bytes of a file."""

KEEPS_GOOD = ("deep nesting", "empty objects", "empty objects as spans", "one huge string", "record starts")
"""Files whose good records are read whatever lies between them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_ends_in_time_with_a_result_or_one_line(tmp_path, traces, name):
    line = traces.request(1, 0, step=1).lines()[0]
    span = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"]
    good = line.replace(": ", ":").replace(", ", ",").encode() + b"\n"
    path = tmp_path / "traces.json"
    path.write_bytes(FILES[name](good))
    command = [sys.executable, "-m", "tracefit.cli", "ingest", path, "--out", tmp_path / "tables"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        env=os.environ | {"COLUMNS": "200"},
        check=True,
    )
    seconds = time.monotonic() - began
    code, peak_bytes = map(int, done.stdout.split()[-2:])
    print(f"{name}: exit {code}, {seconds:.0f} s, {peak_bytes >> 20} MiB, {done.stderr.strip()[-300:]}")  # noqa: T201
    assert code in (0, 1, 2, 3)
    assert "Traceback" not in done.stderr
    if name in KEEPS_GOOD:
        assert span in TableStore(tmp_path / "tables").read("spans")["span_id"].to_list()
    assert seconds < SECONDS
    assert peak_bytes < MEMORY_BYTES
