"""Good records behind junk are found, in every shape, whatever comes first: detection is not decided by it."""

from __future__ import annotations

import gzip
import itertools
import random
import sys

import pytest

from containers import in_pieces
from tracefit.inputs import blocks
from tracefit.inputs.blocks import inspect_file
from tracefit.inputs.files import TraceFile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HEAD_BYTES = 256 << 10
"""The head of a file here; it usually has 4 MiB, and to search megabytes for each combination shows nothing else."""
MORE = "more than the head that is looked at"
JUNK = {
    "random bytes": random.Random(0).randbytes(300),
    "random bytes that begin as a record does": b"\n" + random.Random(1).randbytes(300),
    "text": b"WARNING: the disk is slow\nplease wait\n" * 7,
    "zeros": bytes(500),
    "an open bracket": b'{"resourceLo\n',
    MORE: (b"not a record" * 100 + b"\n") * (HEAD_BYTES // 1_000),
}
PLACES = {
    "lines before it": lambda junk, good: junk + good,
    "a first gzip member": lambda junk, good: gzip.compress(junk) + gzip.compress(good),
    "a first zstd frame": lambda junk, good: zstd.compress(junk) + zstd.compress(good),
    "the first of many gzip members": lambda junk, good: gzip.compress(junk) + in_pieces(good, gzip.compress),
    "the first of many zstd frames": lambda junk, good: zstd.compress(junk) + in_pieces(good, zstd.compress),
    "a damaged first gzip member": lambda junk, good: _damaged(gzip.compress(junk)) + gzip.compress(good),
    "a damaged first zstd frame": lambda junk, good: _damaged(zstd.compress(junk)) + zstd.compress(good),
    "only a gzip head": lambda junk, good: b"\x1f\x8b\x08\x00" + junk + gzip.compress(good),
    "only a zstd head": lambda junk, good: b"\x28\xb5\x2f\xfd" + junk + zstd.compress(good),
}
SHAPES = (
    "lines",
    "lines with BOM, CRLF and blanks",
    "pretty object",
    "pretty array",
    "Tempo batches",
    "bare protobuf",
    "framed protobuf",
)


def _prefixed(frame):
    return len(frame).to_bytes(4, "big") + frame


def _damaged(member):
    middle = len(member) // 2
    return member[:middle] + b"\xff" * 9 + member[middle + 9 :]


LENGTHS_AND_FRAMES = {
    "lines before it": lambda junk: junk,
    "a first frame": lambda junk: _prefixed(zstd.compress(junk)),
    "a damaged first frame": lambda junk: _prefixed(_damaged(zstd.compress(junk))),
    "a length and bytes that are not a frame": _prefixed,
    "a length and only a frame's head": lambda junk: _prefixed(b"\x28\xb5\x2f\xfd" + junk),
}


@pytest.fixture
def _small_head(monkeypatch):
    monkeypatch.setattr(blocks, "FORMAT_HEAD_BYTES", HEAD_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["lines", "framed protobuf"])
def test_good_records_behind_more_than_the_usual_head_are_found(otlp, read, tmp_path, shape):
    assert blocks.FORMAT_HEAD_BYTES == 16 * HEAD_BYTES
    good = otlp.SHAPES[shape](40)
    _check(read(good), read(17 * JUNK[MORE] + good), tmp_path / "data")


@pytest.mark.usefixtures("_small_head")
@pytest.mark.parametrize(
    ("junk", "place", "shape"),
    [
        pytest.param(*names, marks=pytest.mark.slow if MORE in names else ())
        for names in itertools.product(JUNK, PLACES, SHAPES)
    ],
)
def test_good_records_behind_junk_are_found(otlp, read, tmp_path, shape, place, junk):
    good = otlp.SHAPES[shape](40)
    _check(read(good), read(PLACES[place](JUNK[junk], good)), tmp_path / "data")


@pytest.mark.usefixtures("_small_head")
@pytest.mark.parametrize("shape", ["framed zstd of JSON", "framed zstd of protobuf"])
@pytest.mark.parametrize("place", LENGTHS_AND_FRAMES)
@pytest.mark.parametrize("junk", [pytest.param(name, marks=pytest.mark.slow if name == MORE else ()) for name in JUNK])
def test_records_after_junk_are_read_in_prefixed_zstd(otlp, read, tmp_path, shape, place, junk):
    good = otlp.SHAPES[shape](40)
    _check(read(good), read(LENGTHS_AND_FRAMES[place](JUNK[junk]) + good), tmp_path / "data")


def _check(expected, found, path):
    """Hold what was read of a file against what should be, and that the file counts as one of traces in a folder."""
    assert inspect_file(TraceFile.local(path)).is_traces
    whole = b"".join(expected.payloads)
    # Junk right before a record may cost that one: there is no line between them. All others are found.
    spans = [bytes(f"{n:032x}", "ascii") for n in range(2, 41)]
    spans += [n.to_bytes(16, "big") for n in range(2, 41)]
    wanted = [s for s in spans if s in whole]
    payloads = b"".join(found.payloads)
    assert len(wanted) == 39
    assert [s for s in wanted if s not in payloads] == []
