"""A fleet whose servers come and go for a day: refusals, files, descriptors and memory of the receiver, and lost spans.

`python tests/benchmarks/receive_fleet.py [--instances N] [--at-a-time N] [--hours N] [--every S] [--senders N]`: the
intake and the store of `tracefit receive` in this process, without its ports. Every instance exports a span each time;
the clock is passed in, so that a day takes some minutes (`TMPDIR=/dev/shm` saves those of the disk). `--senders` is how
many may be active: fewer than there are instances, so that silent ones have to be forgotten. The files are read back by
other code than the receiver's.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tracefit.receive.intake import Intake
from tracefit.receive.observed import Observed
from tracefit.receive.options import IntakeLimits, Rotation
from tracefit.receive.senders import Senders
from tracefit.receive.spans import PrivacyFilter
from tracefit.receive.store import TraceStore

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Iterator

_AT_ONCE = 64
"""Requests that are under way at the same time."""
_REPORTS = 6


@dataclass(frozen=True)
class Fleet:
    """Instances that come one after another and stay equally long; at any time, equally many are there."""

    instances: int
    at_a_time: int
    seconds: float
    every_s: float

    @property
    def apart_s(self) -> float:
        """Time between the beginnings of two instances."""
        return self.seconds / max(self.instances - self.at_a_time, 1)

    @property
    def most_files(self) -> int:
        """Files if each instance begins one with its first span and one every five minutes."""
        life_s = min(self.at_a_time * self.apart_s, self.seconds)
        return self.instances * (math.ceil(life_s / Rotation().seconds) + 1)

    def at(self, seconds: float) -> range:
        """Return the numbers of the instances that are there at a time."""
        first = int(seconds / self.apart_s)
        return range(first, min(first + self.at_a_time, self.instances))


def _body(instance: int, number: int) -> bytes:
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add()
    for key, value in (("service.name", "vllm"), ("service.instance.id", f"pod-{instance:06}")):
        spans.resource.attributes.append(KeyValue(key=key, value=AnyValue(string_value=value)))
    scope = spans.scope_spans.add()
    scope.scope.name = "vllm.api"
    span = scope.spans.add(name="llm_request", start_time_unix_nano=1, end_time_unix_nano=2)
    span.trace_id, span.span_id = number.to_bytes(16, "big"), number.to_bytes(8, "big")
    return message.SerializeToString()


def _numbers(folder: Path) -> Iterator[int]:
    """Yield the numbers of the spans in the files below a folder."""
    for path in folder.rglob("traces-*.binpb"):
        content = path.read_bytes()
        while content:
            stop = 4 + int.from_bytes(content[:4], "big")
            for resource_spans in TracesData.FromString(zstd.decompress(content[4:stop])).resource_spans:
                for scope in resource_spans.scope_spans:
                    yield from (int.from_bytes(span.trace_id, "big") for span in scope.spans)
            content = content[stop:]


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _memory_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) >> 10


async def send(fleet: Fleet, out: Path, most_senders: int) -> bytearray:
    """Have the fleet send, print what it took, and return for each span, by its number, whether it is acknowledged."""
    now = [0.0]
    limits = IntakeLimits(senders=most_senders)
    senders = Senders(limits, lambda: now[0])
    store = TraceStore(out, rotation=Rotation(), clock=lambda: now[0])
    intake = Intake(store, PrivacyFilter(), Observed(), limits, senders)
    writing = asyncio.create_task(intake.run())
    turns = int(fleet.seconds / fleet.every_s)
    acknowledged = bytearray(turns * fleet.at_a_time + 1)
    slots, refused, descriptors, number = asyncio.Semaphore(_AT_ONCE), 0, 0, 0

    async def export(instance: int, number: int) -> None:
        nonlocal refused
        async with slots:
            try:
                await intake.take(lambda: asyncio.sleep(0, _body(instance, number)))
            except Exception as error:  # noqa: BLE001 - whatever the receiver answers is counted
                refused += 1
                print(f"refused: {error}")
            else:
                acknowledged[number] = 1

    print(f"{'hours':>6} {'exports':>9} {'active':>7} {'forgotten':>9} {'files':>8} {'descriptors':>11} {'MiB':>5}")
    for turn in range(turns):
        now[0] = turn * fleet.every_s
        there = fleet.at(now[0])
        await asyncio.gather(*(export(instance, number + n) for n, instance in enumerate(there, 1)))
        number += len(there)
        descriptors = max(descriptors, _descriptors())
        if (turn + 1) % max(turns // _REPORTS, 1) == 0:
            row = (
                intake.observed.exports,
                senders.active(),
                senders.forgotten,
                store.file_count,
                descriptors,
            )
            exports, active, forgotten, files, most = (f"{value:,}" for value in row)
            hours = (now[0] + fleet.every_s) / 3600
            print(f"{hours:>6.1f} {exports:>9} {active:>7} {forgotten:>9} {files:>8} {most:>11} {_memory_mib():>5}")
    intake.close()
    await writing
    spans = senders.spans.total() + senders.forgotten_spans
    print(f"{number:,} exports, {refused:,} refused; spans counted: {spans:,}")
    print(f"{store.file_count:,} files; {fleet.most_files:,} if each instance begins one every five minutes")
    return acknowledged


def main() -> None:
    """Print a line for each part of the day, and how many spans are missing on disk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--instances", type=int, default=2000)
    parser.add_argument("--at-a-time", type=int, default=300)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--every", type=float, default=60)
    parser.add_argument("--senders", type=int, default=512)
    options = parser.parse_args()
    fleet = Fleet(options.instances, options.at_a_time, options.hours * 3600, options.every)
    out = Path(tempfile.mkdtemp(prefix="tracefit-bench-"))
    start = time.perf_counter()
    try:
        acknowledged = asyncio.run(send(fleet, out, options.senders))
        found = bytearray(len(acknowledged))
        twice = 0
        for number in _numbers(out):
            twice += found[number]
            found[number] = 1
        lost = sum(is_sent > is_there for is_sent, is_there in zip(acknowledged, found, strict=True))
        print(f"{sum(acknowledged):,} spans acknowledged, {lost:,} of them lost; {twice:,} are there twice")
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"{time.perf_counter() - start:,.0f} s, peak {peak_mib} MiB")
    finally:
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
