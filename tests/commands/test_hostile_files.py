"""Hostile files through the real command: each ends in time and within 1 GiB, with a result or one line.

They have 60 MB where `make fuzz` runs them, and 1 in `make test-slow`.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from containers import framed, zstd
from tracefit.tables.store import TableStore

SIZE = int(os.environ.get("HOSTILE_MB", "1")) << 20
IS_FUZZ = SIZE > 1 << 20
MEMORY_BYTES = 1 << 30
ENDS_WITHIN_S = 300
"""A command that takes longer is killed, and its test fails: a tenth of it is usual, a hostile file once took hours."""

MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
"""Runs a command and prints its exit code and the most memory it held."""


def _filled(start, unit, stop=b""):
    return start + unit * ((SIZE - len(start) - len(stop)) // len(unit)) + stop


FILES = {
    "gzip bomb": lambda good: gzip.compress(good) + gzip.compress(bytes(1 << 20), 9) * (SIZE // 1050),
    "zstd bomb": lambda _: zstd(b"{" + b" " * (1 << 26)) * (SIZE // 8300),
    "deep nesting": lambda good: good + _filled(b"", b"[") + b"\n" + good,
    "empty objects": lambda good: good + _filled(b"", b"{}\n") + good,
    "empty objects as spans": lambda good: (
        good + _filled(b'{"resourceSpans":[{"scopeSpans":[{"spans":[', b"{},", b"{}]}]}]}\n") + good
    ),
    "one-letter lines": lambda good: good + _filled(b"", b"x\n") + good,
    "lengths that lie": lambda _: _filled(b"", b"\x00\x00\x01\x00\x0a\xff\x01\x12\x05hello"),
    "tiny frames": lambda _: _filled(b"", b"\x00\x00\x00\x02\x0a\x00"),
    "tiny zstd frames": lambda _: _filled(b"", framed([zstd(b"{}")])),
    "one huge string": lambda good: good + good.replace(b"llm_request", b"x" * SIZE) + good,
    "record starts": lambda good: good + _filled(b"", b'{"resourceSpans":[') + b"\n" + good,
    "empty events": lambda good: (
        good + _filled(good[: good.index(b'"events"')] + b'"events":[', b"{},", b"{}]}]}]}]}\n") + good
    ),
}
"""Name to a function from a good line to the bytes of a file."""
if IS_FUZZ:
    # Zeros, in which a record might begin, are searched twice up to a bound: half a minute, whatever the size.
    FILES["gzip bomb of zeros only"] = lambda _: gzip.compress(bytes(1 << 20), 9) * (SIZE // 1050)

KEEPS_GOOD = ("deep nesting", "empty objects", "empty objects as spans", "one huge string", "record starts")
"""Files whose good records are read whatever lies between them."""


MINIMAL = 1_000_000 if IS_FUZZ else 300_000
"""How many spans a file has, each with only its two ids."""


def _minimal_json(_):
    spans = b",".join(b'{"traceId":"%032x","spanId":"%016x"}' % (n, n) for n in range(1, MINIMAL + 1))
    return b'{"resourceSpans":[{"scopeSpans":[{"scope":{"name":"vllm.api"},"spans":[%b]}]}]}\n' % spans


def _minimal_lines(_):
    line = b'{"resourceSpans":[{"scopeSpans":[{"scope":{"name":"vllm.api"},"spans":[%b]}]}]}\n'
    span = b'{"traceId":"%032x","spanId":"%016x"}'
    return b"".join(line % (span % (n, n)) for n in range(1, MINIMAL + 1))


def _minimal_protobuf(_):
    traces = TracesData()
    group = traces.resource_spans.add().scope_spans.add()
    group.scope.name = "vllm.api"
    for n in range(1, MINIMAL + 1):
        group.spans.add(trace_id=n.to_bytes(16, "big"), span_id=n.to_bytes(8, "big"))
    return framed([traces.SerializeToString()])


def _many_keys(good):
    keys = b",".join(b'{"key":"k%d","value":{"intValue":"%d"}}' % (n, n) for n in range(400_000))
    start = good.index(b'"attributes":[', good.index(b'"events"')) + len(b'"attributes":[')
    return good[:start] + keys + b"," + good[start:]


WORST = {
    "bad frames of 8 bytes": (lambda _: b"\0\0\0\4\x28\xb5\x2f\xfd" * (SIZE // 8), 1),
    "minimal spans of one line": (_minimal_json, 0),
    "minimal spans of a line each": (_minimal_lines, 0),
    "minimal spans of one message": (_minimal_protobuf, 0),
    "an event of 400,000 keys": (_many_keys, 0),
}
"""Name to a function from a good line to the bytes of a file, and the exit code: files that took gigabytes once."""
WORST_MEMORY_BYTES = 700 << 20  # 580 to 650 MiB from run to run: the allocator gives pages back late


def _ingest(path, out):
    """Ingest a file with one worker; return exit code, the most memory held and stderr."""
    command = [sys.executable, "-m", "tracefit.cli", "ingest", path, "--out", out, "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        env=os.environ | {"COLUMNS": "200"},
        check=True,
    )
    code, peak_bytes = map(int, done.stdout.split()[-2:])
    return code, peak_bytes, done.stderr


@pytest.fixture
def good_line(traces):
    """Return a line of one request, without white space, and the id of its span."""
    line = traces.request(1, 0, step=1).lines()[0]
    span = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"]
    return line.replace(": ", ":").replace(", ", ",").encode() + b"\n", span


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_ends_in_time_with_a_result_or_one_line(tmp_path, good_line, name):
    good, span = good_line
    path = tmp_path / "traces.json"
    path.write_bytes(FILES[name](good))
    code, peak_bytes, stderr = _ingest(path, tmp_path / "tables")
    print(f"{name}: exit {code}, {peak_bytes >> 20} MiB, {stderr.strip()[-300:]}")  # noqa: T201
    assert code in (0, 1, 2, 3)
    assert "Traceback" not in stderr
    if name in KEEPS_GOOD:
        assert span in TableStore(tmp_path / "tables").read("spans")["span_id"].to_list()
    assert peak_bytes < MEMORY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.campaign] if n.endswith(("of one line", "of a line each")) else [])
        for n in WORST
    ],
)
def test_memory_hungry_files_keep_to_the_bound(tmp_path, good_line, name):
    make, expected = WORST[name]
    path = tmp_path / "traces.json"
    path.write_bytes(make(good_line[0]))
    code, peak_bytes, stderr = _ingest(path, tmp_path / "tables")
    print(f"{name}: exit {code}, {peak_bytes >> 20} MiB, {stderr.strip()[-300:]}")  # noqa: T201
    assert (code, "Traceback" in stderr) == (expected, False)
    if "minimal" in name:
        assert TableStore(tmp_path / "tables").read("spans").height == MINIMAL
    assert peak_bytes < WORST_MEMORY_BYTES
