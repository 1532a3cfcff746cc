"""Speed and memory of ingestion against the plain way, on the same generated file.

The plain way decodes and writes nothing: `json.loads` per line, or protobuf's `FromString` per message, and a loop over
the attributes into dicts. Ours writes all tables of an ingest. Both run in processes of their own, turn by turn, and
their clocks begin once everything is imported. What is compared is the median of the pairs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GB = 10**9
UNIT_REQUESTS = 3000
COPY_NS = 400 * GB
"""A copy of the generated unit comes so much later than the one before."""

_IDS = re.compile(rb'"(traceId|spanId|parentSpanId)":"[0-9a-f]{4}')
_UNIX = re.compile(rb'"(179\d{16})"')
_ENGINE = re.compile(rb'"intValue":"(\d{13})"')
_SECONDS = re.compile(rb'"doubleValue":(\d{4}\.\d+)')


def generate(folder: Path, kind: str, size: int) -> Path:
    """Write a run of at least `size` bytes: one generated unit, again and again with other ids and later times."""
    from tracefit.synth import SynthOptions, synth, write_run  # noqa: PLC0415

    unit = folder / "unit"
    if not unit.exists():
        write_run(
            synth(SynthOptions(name="unit", requests=UNIT_REQUESTS, rich_sampling=0.1)),
            folder,
            formats=["json", "protobuf"],
        )
    name, source = ("traces.json", unit) if kind == "json" else ("traces.binpb", folder / "unit-proto")
    run = folder / f"{kind}-{size}"
    run.mkdir()
    data = (source / name).read_bytes()
    with (run / name).open("wb") as out:
        for number in range(10_000):
            out.write((_later_json if kind == "json" else _later_protobuf)(data, number))
            if out.tell() >= size:
                break
    for file in ("config.json", "exp-config.yaml"):
        (run / file).write_bytes((source / file).read_bytes())
    return run / name


def _later_json(data: bytes, number: int) -> bytes:
    shift = number * COPY_NS
    data = _IDS.sub(lambda m: b'"%b":"%04x' % (m[1], number), data)
    data = _UNIX.sub(lambda m: b'"%d"' % (int(m[1]) + shift), data)
    data = _ENGINE.sub(lambda m: b'"intValue":"%d"' % (int(m[1]) + shift), data)
    return _SECONDS.sub(lambda m: b'"doubleValue":%.9f' % (float(m[1]) + shift / 1e9), data)


def _later_protobuf(data: bytes, number: int) -> bytes:
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData  # noqa: PLC0415

    shift, out, position = number * COPY_NS, [], 0
    prefix = number.to_bytes(2, "big")
    while position < len(data):
        stop = position + 4 + int.from_bytes(data[position : position + 4], "big")
        message = TracesData.FromString(data[position + 4 : stop])
        spans = (s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans)
        for span in spans:
            span.trace_id, span.span_id = prefix + span.trace_id[2:], prefix + span.span_id[2:]
            if span.parent_span_id:
                span.parent_span_id = prefix + span.parent_span_id[2:]
            span.start_time_unix_nano += shift
            span.end_time_unix_nano += shift
            for event in span.events:
                event.time_unix_nano += shift
                for attribute in event.attributes:
                    if attribute.key.endswith("_ns"):
                        attribute.value.int_value += shift
                    elif attribute.key.endswith("ts.monotonic"):
                        attribute.value.double_value += shift / 1e9
        payload = message.SerializeToString()
        out.append(len(payload).to_bytes(4, "big") + payload)
        position = stop
    return b"".join(out)


def plain_json(path: Path) -> int:
    """Decode JSON lines the plain way; return how many attributes there were."""
    count = 0
    with path.open("rb") as stream:
        for line in stream:
            for resource_spans in json.loads(line)["resourceSpans"]:
                for scope_spans in resource_spans["scopeSpans"]:
                    for span in scope_spans["spans"]:
                        for holder in (span, *span["events"]):
                            count += len({a["key"]: _plain(a["value"]) for a in holder["attributes"]})
    return count


def _plain(value: dict[str, object]) -> object:
    for kind, content in value.items():
        return int(str(content)) if kind == "intValue" else content
    return None


def plain_protobuf(path: Path) -> int:
    """Decode framed protobuf the plain way; return how many attributes there were."""
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData  # noqa: PLC0415

    count = 0
    with path.open("rb") as stream:
        while head := stream.read(4):
            message = TracesData.FromString(stream.read(int.from_bytes(head, "big")))
            for resource_spans in message.resource_spans:
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        for holder in (span, *span.events):
                            values = {
                                a.key: getattr(a.value, str(a.value.WhichOneof("value")))
                                for a in holder.attributes
                            }
                            count += len(values)
    return count


def ours(path: Path, workers: int) -> None:
    """Write all tables of a run."""
    from tracefit.verbs.ingest import ingest  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir=path.parents[1]) as out:
        began = time.perf_counter()
        ingest([path.parent], out, workers=workers)
        _report(began)


def _report(began: float) -> None:
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "peak_mib": _peak_mib()}))


def _peak_mib() -> float:
    # Not getrusage: its peak counts the process that started this one, which has made the traces.
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def _measured(way: str, path: Path, workers: int = 0) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--path", str(path), "--workers", str(workers)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def _one_way(way: str, path: Path, workers: int) -> None:
    from tracefit.memory import reuse_freed  # noqa: PLC0415

    reuse_freed()  # as the command line does
    if way == "ours":
        import tracefit.verbs.ingest  # noqa: F401, PLC0415

        ours(path, workers)
        return
    import opentelemetry.proto.trace.v1.trace_pb2  # noqa: F401, PLC0415

    began = time.perf_counter()
    (plain_json if way == "json" else plain_protobuf)(path)
    _report(began)


def compare(path: Path, kind: str, workers: int, pairs: int) -> tuple[float, float]:
    """Return the median ratio of the plain way's time to ours, and the median of our times."""
    ratios, times = [], []
    for _ in range(pairs):
        plain, mine = _measured(kind, path)["seconds"], _measured("ours", path, workers)["seconds"]
        ratios.append(plain / mine)
        times.append(mine)
    return statistics.median(ratios), statistics.median(times)


def main() -> None:
    """Print ratios, peak memory, and whether time grows as the file does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=200_000_000)
    parser.add_argument("--large-bytes", type=int, default=2_000_000_000, help="0 leaves the large file out")
    parser.add_argument("--way", choices=["json", "protobuf", "ours"])
    parser.add_argument("--path", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    if given.way:
        _one_way(given.way, given.path, given.workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind, goals in (("json", (3.0, 5.0)), ("protobuf", (2.0, 3.5))):
            path = generate(Path(folder), kind, given.bytes)
            size = path.stat().st_size
            for workers, goal in zip((1, 2), goals, strict=True):
                ratio, seconds = compare(path, kind, workers, given.pairs)
                print(
                    f"{kind}, {size / 1e6:.0f} MB, {workers} worker(s): {ratio:.2f} times the plain way (goal {goal}), "
                    f"{size / 1e6 / seconds:.0f} MB/s",
                    flush=True,
                )
        small = Path(folder) / f"json-{given.bytes}" / "traces.json"
        sizes = [small, *([generate(Path(folder), "json", given.large_bytes)] if given.large_bytes else [])]
        rates = []
        for path in sizes:
            size, run = path.stat().st_size, _measured("ours", path, 1)
            rates.append(run["seconds"] / size)
            print(
                f"json, {size / 1e6:.0f} MB, 1 worker: {run['seconds']:.1f} s, peak {run['peak_mib']:.0f} MiB "
                f"(goal 500), {100 * (rates[-1] / rates[0] - 1):+.0f} % time per byte (goal within 15)",
                flush=True,
            )


if __name__ == "__main__":
    main()
