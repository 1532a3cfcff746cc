"""Thousands of seeded mutations of good files: nothing raises or hangs, and what the damage did not touch is there."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass

import pytest

_BETWEEN = " \t\r,[]"
FEW, MANY = 300, 1_500
RECORDS_PER_FILE = 6
MAX_REJECTS_PER_FILE = 60


@dataclass(frozen=True)
class Good:
    """A file and those of its ranges that can be read by themselves: start, stop, and the ids of the spans inside."""

    data: bytes
    ranges: tuple[tuple[int, int, frozenset[str]], ...]


def _records(otlp, rng):
    """Return records of one or two spans each, with ids that are found nowhere else."""
    records = []
    for _ in range(RECORDS_PER_FILE):
        spans = []
        for _ in range(rng.choice([1, 1, 2])):
            steps = [
                otlp.event(
                    "step.BATCH_SUMMARY",
                    [
                        otlp.attribute("step.id", intValue=str(rng.randrange(10**6))),
                        otlp.attribute("x", doubleValue=0.5),
                    ],
                )
                for _ in range(rng.randrange(4))
            ]
            number = rng.getrandbits(64) | 1
            text = rng.choice(["", "é", 'a "quoted" {text}', '{"resourceSpans":[]}'])
            spans.append(otlp.span(number, name=text, events=steps))
        records.append(otlp.record(*spans))
    return records


def _ids(record):
    return frozenset(s["spanId"] for s in record["resourceSpans"][0]["scopeSpans"][0]["spans"])


def _file(records, of):
    """Make a file of one piece per record; each piece can be read by itself."""
    pieces = [of(each) for each in records]
    ranges, position = [], 0
    for piece, record in zip(pieces, records, strict=True):
        ranges.append((position, position + len(piece), _ids(record)))
        position += len(piece)
    return Good(b"".join(pieces), tuple(ranges))


def _make(otlp, shape, records):
    line = lambda each: otlp.to_json(each) + b"\n"  # noqa: E731
    of = {
        "lines": line,
        "Tempo lines": lambda each: otlp.to_json({"batches": each["resourceSpans"]}) + b"\n",
        "framed": lambda each: otlp.framed([otlp.to_protobuf(each)]),
        "framed zstd of JSON": lambda each: otlp.framed([otlp.zstd(otlp.to_json(each))]),
        "framed zstd of protobuf": lambda each: otlp.framed([otlp.zstd(otlp.to_protobuf(each))]),
        "gzip members": lambda each: gzip.compress(line(each), mtime=0),
        "zstd frames": lambda each: otlp.zstd(line(each)),
        "zstd frames of framed": lambda each: otlp.zstd(otlp.framed([otlp.to_protobuf(each)])),
    }
    if shape in of:
        return _file(records, of[shape])
    return Good(otlp.SHAPES[shape](records), ())  # one document: no part of it can be read by itself


def _cut(pieces, at):
    """Cut a list of pieces, each (start, stop) of the good file or new bytes, at a position."""
    left, right = [], []
    for piece in pieces:
        size = len(piece) if isinstance(piece, bytes) else piece[1] - piece[0]
        inside = min(max(at, 0), size)
        at -= size
        if isinstance(piece, bytes):
            halves = piece[:inside], piece[inside:]
        else:
            halves = (piece[0], piece[0] + inside), (piece[0] + inside, piece[1])
        left += [halves[0]] if inside else []
        right += [halves[1]] if inside < size else []
    return left, right


def _mutated(good, rng):
    """Flip, cut, splice, duplicate or swap something, once or a few times; return the pieces of what comes out."""
    pieces = [(0, len(good.data))]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        size = len(_joined(good, pieces))
        start = rng.randrange(size + 1)
        head, rest = _cut(pieces, start)
        some, tail = _cut(rest, rng.choice([1, 2, 8, 60, 400]))
        kind = rng.choice(["flip", "cut", "splice", "duplicate", "swap", "end"])
        if kind == "flip":
            some, tail = _cut(rest, 1)
            pieces = [*head, bytes(byte ^ (1 << rng.randrange(8)) for byte in _joined(good, some)), *tail]
        elif kind == "cut":
            pieces = head + tail
        elif kind == "splice":
            pieces = [*head, rng.randbytes(rng.randrange(1, 20)), *rest]
        elif kind == "duplicate":
            before, behind = _cut(pieces, rng.randrange(size + 1))
            pieces = before + some + behind
        elif kind == "swap":
            middle, tail = _cut(rest, rng.randrange(size + 1))
            first, second = _cut(middle, rng.randrange(size + 1))
            pieces = head + second + first + tail
        else:
            pieces = head
    return pieces


def _joined(good, pieces):
    return b"".join(piece if isinstance(piece, bytes) else good.data[slice(*piece)] for piece in pieces)


def _untouched(good, pieces, delimiter):
    """Return the ids of ranges that are still there, byte after byte, with their delimiter before them."""
    ids = set()
    for number, piece in enumerate(pieces):
        if isinstance(piece, bytes):
            continue
        before = _joined(good, pieces[:number])[-1:]
        for start, stop, inside in good.ranges:
            whole = piece[0] <= start and stop <= piece[1]
            if whole and (start > piece[0] or delimiter is None or before in (b"", delimiter)):
                ids |= inside
    return ids


SHARES = {
    "lines": 0.2,
    "Tempo lines": 0.06,
    "framed": 0.2,
    "framed zstd of JSON": 0.1,
    "framed zstd of protobuf": 0.1,
    "gzip members": 0.08,
    "zstd frames": 0.08,
    "zstd frames of framed": 0.06,
    "pretty object": 0.04,
    "array": 0.04,
    "bare protobuf": 0.04,
}


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("shape", SHARES)
def test_damage_costs_no_record_that_it_does_not_touch(otlp, shape):
    _mutate(otlp, shape, round(FEW * SHARES[shape]), random.Random(shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHARES)
def test_mutations_leave_untouched_records_readable(otlp, shape):
    _mutate(otlp, shape, round(MANY * SHARES[shape]), random.Random(f"many {shape}"))


def _mutate(otlp, shape, count, rng):
    """Damage files again and again. Expected values follow from where the damage is, without a decoder."""
    wanted = {"events": {"step.BATCH_SUMMARY": {"step.id": otlp.pl.Int64(), "x": otlp.pl.Float64()}}}
    for number in range(count):
        if number % 25 == 0:
            good = _make(otlp, shape, _records(otlp, rng))
            every = otlp.read(good.data, **wanted)
            assert every.rejects == []
        pieces = _mutated(good, rng)
        damaged = _joined(good, pieces)
        found = otlp.read(damaged, **wanted)
        assert _untouched(good, pieces, b"\n" if "lines" in shape else None) <= set(found.ids), damaged
        assert len(found.rejects) < MAX_REJECTS_PER_FILE
        assert all(reject.count >= 1 for reject in found.rejects)
        if shape == "lines":
            _check_each_bad_line_is_a_reject(damaged, found.rejects)


def _check_each_bad_line_is_a_reject(damaged, rejects):
    position = 0
    for line in damaged.split(b"\n"):
        inside = [r for r in rejects if position <= r.source_offset <= position + len(line)]
        assert _is_json(line) or inside, line
        position += len(line) + 1


def _is_json(line):
    """Return whether a line is JSON values one behind another, or nothing but punctuation between them."""
    try:
        text = line.decode().lstrip("\ufeff").strip(_BETWEEN)
        while text:
            _, end = json.JSONDecoder().raw_decode(text)
            text = text[end:].strip(_BETWEEN)
    except ValueError:
        return False
    return True
