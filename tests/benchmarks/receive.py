"""How many spans per second `tracefit receive` takes, per core, and how much memory, also of requests made to take
much.

`python tests/benchmarks/receive.py [--seconds N] [--profile FILE]`: a receiver in a process of its own, kept to one
core where the machine lets it; requests of 512 spans, encoded before the clock starts (what the receiver can take) or
by the SDK's exporters as they go (what a server sends). CPU seconds are the receiver's own, from the system.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tracefit.synth import SynthOptions, synth

sys.path.insert(0, str(Path(__file__).parents[1] / "receive"))
from sdk_spans import sdk_spans

if TYPE_CHECKING:
    from collections.abc import Callable

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_BATCH = 512


class Receiver:
    """A receiver in a process of its own."""

    def __init__(self, out: Path, profile: str | None) -> None:
        code = "from tracefit.cli import main; main()"
        if profile:
            code = f"import cProfile; cProfile.run({code!r}, {profile!r})"
        command = [
            sys.executable,
            "-c",
            code,
            "receive",
            "--out",
            str(out),
            "--grpc-port",
            "0",
            "--http-port",
            "0",
        ]
        pinned = ["taskset", "-c", "0"] if shutil.which("taskset") and (os.cpu_count() or 1) > 1 else []
        self._process = subprocess.Popen(
            [*pinned, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        self.grpc_port, self.http_port = map(int, re.findall(r":(\d+) \(", self._process.stderr.readline()))

    def cpu_seconds(self) -> float:
        """Return the CPU time it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> int:
        """Return the most memory it has held."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) >> 10

    def stop(self) -> None:
        """End it in order."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def measure(receiver: Receiver, name: str, senders: list[Callable[[], int]], seconds: float) -> None:
    """Send from as many threads as there are senders, each a function that sends once and returns how many spans."""
    sent = [0] * len(senders)
    stop_at = time.perf_counter() + seconds

    def send(number: int) -> None:
        while time.perf_counter() < stop_at:
            sent[number] += senders[number]()

    cpu, own, start = receiver.cpu_seconds(), time.process_time(), time.perf_counter()
    threads = [threading.Thread(target=send, args=(n,)) for n in range(len(senders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken, used = time.perf_counter() - start, receiver.cpu_seconds() - cpu
    rate, per_sender = sum(sent) / taken, sum(sent) / (time.process_time() - own)
    print(
        f"{name:<44} {len(senders):>3} connections {rate:>9,.0f} spans/s  {sum(sent) / used:>9,.0f} per core-second "
        f"of it {per_sender:>9,.0f} of the senders  {used / taken:>5.0%} of a core  peak {receiver.peak_mib()} MiB"
    )


def _field(number: int, body: bytes) -> bytes:
    length, rest = b"", len(body)
    while rest > 0x7F:
        length, rest = length + bytes([rest & 0x7F | 0x80]), rest >> 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + body


def hostile_bodies() -> dict[str, tuple[str, bytes]]:
    """Return requests whose work is far beyond their size: content type and body by name."""
    protobuf, json = "application/x-protobuf", "application/json"
    many = 8_000_000
    return {
        "empty objects, JSON": (json, b'{"resourceSpans":[' + b"{}," * (many * 5 // 8 - 1) + b"{}]}"),
        "empty resources": (protobuf, _field(1, b"") * many),
        "empty events": (protobuf, _field(1, _field(2, _field(2, _field(11, b"") * many)))),
    }


def _post(port: int, body: bytes, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    # A refusal may come before the body is sent.
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/traces", body, headers)
        connection.getresponse().read()
    connection.close()


def _sender(receiver: Receiver, kind: str, body: bytes, *, is_grpc: bool) -> Callable[[], object]:
    """Return a function that sends a hostile request once and takes any answer."""
    if not is_grpc:
        headers = {"content-type": kind, "content-encoding": "gzip"}
        zipped = gzip.compress(body)
        return lambda: _post(receiver.http_port, zipped, headers)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    call = grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}", options).unary_unary(_EXPORT)

    def send() -> None:
        with contextlib.suppress(grpc.RpcError):
            call(body)

    return send


def attack(receiver: Receiver, name: str, senders: list[Callable[[], object]], honest: bytes) -> None:
    """Send hostile requests for five seconds; print how long an honest sender waits beside them, and the peak
    memory."""
    stop_at, waits = time.perf_counter() + 5, [0.0]

    def send(sender: Callable[[], object]) -> None:
        while time.perf_counter() < stop_at:
            sender()

    threads = [threading.Thread(target=send, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    while time.perf_counter() < stop_at:
        start = time.perf_counter()
        _post(receiver.http_port, honest, {"content-type": "application/x-protobuf"})
        waits.append(time.perf_counter() - start)
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    print(
        f"{name:<44} {len(senders):>3} connections  an honest sender waits {max(waits):.2f} s at most"
        f"  peak {receiver.peak_mib()} MiB"
    )


def hostile(profile: str | None, honest: bytes, connections: int = 16) -> None:
    """Attack a receiver of its own with each hostile request over each protocol."""
    for name, (kind, body) in hostile_bodies().items():
        for is_grpc in (False, True) if kind.endswith("protobuf") else (False,):
            out = Path(tempfile.mkdtemp(prefix="tracefit-bench-"))
            receiver = Receiver(out, profile)
            senders = [_sender(receiver, kind, body, is_grpc=is_grpc) for _ in range(connections)]
            try:
                attack(receiver, f"{name}, {'gRPC' if is_grpc else 'HTTP, gzip'}", senders, honest)
            finally:
                receiver.stop()
                shutil.rmtree(out)


def main() -> None:
    """Print a line per way of sending, and per request that is made to take much."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--profile")
    options = parser.parse_args()
    run = synth(SynthOptions(requests=2000, step_sampling=0.1))
    spans = sdk_spans(run)
    batches = [spans[i : i + _BATCH] for i in range(0, len(spans) - _BATCH + 1, _BATCH)]
    bodies = [encode_spans(batch).SerializeToString() for batch in batches]
    zipped = [gzip.compress(body) for body in bodies]
    events = sum(len(s.events) for s in spans) / len(spans)
    print(f"{sum(map(len, bodies)) / len(bodies) / _BATCH:,.0f} bytes and {events:.1f} events per span")
    out = Path(tempfile.mkdtemp(prefix="tracefit-bench-"))
    receiver = Receiver(out, options.profile)

    def raw_grpc(number: int) -> Callable[[], int]:
        arguments = [("grpc.use_local_subchannel_pool", 1)]
        call = grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}", arguments).unary_unary(_EXPORT)
        count = iter(range(number, 1 << 60))
        return lambda: call(bodies[next(count) % len(bodies)]) is None or _BATCH

    def raw_http(number: int, *, is_gzip: bool) -> Callable[[], int]:
        connection = http.client.HTTPConnection("127.0.0.1", receiver.http_port)
        headers = {
            "content-type": "application/x-protobuf",
            **({"content-encoding": "gzip"} if is_gzip else {}),
        }
        count = iter(range(number, 1 << 60))

        def send() -> int:
            body = (zipped if is_gzip else bodies)[next(count) % len(bodies)]
            connection.request("POST", "/v1/traces", body, headers)
            answer = connection.getresponse()
            answer.read()
            return _BATCH if answer.status == 200 else 0

        return send

    def sdk(number: int, kind: str) -> Callable[[], int]:
        exporter = (
            GrpcExporter(f"http://127.0.0.1:{receiver.grpc_port}")
            if kind == "grpc"
            else HttpExporter(f"http://127.0.0.1:{receiver.http_port}/v1/traces", compression=Compression.Gzip)
        )
        count = iter(range(number, 1 << 60))
        return lambda: _BATCH * (exporter.export(batches[next(count) % len(batches)]) is SpanExportResult.SUCCESS)

    try:
        for many in (1, 8, 64):
            measure(receiver, "encoded, gRPC", [raw_grpc(n) for n in range(many)], options.seconds)
            measure(receiver, "encoded, HTTP", [raw_http(n, is_gzip=False) for n in range(many)], options.seconds)
        measure(receiver, "encoded, HTTP, gzip", [raw_http(n, is_gzip=True) for n in range(8)], options.seconds)
        measure(receiver, "SDK's exporter, gRPC", [sdk(0, "grpc")], options.seconds)
        measure(receiver, "SDK's exporter, HTTP, gzip", [sdk(0, "http")], options.seconds)
    finally:
        receiver.stop()
        shutil.rmtree(out)
    hostile(options.profile, bodies[0])


if __name__ == "__main__":
    main()
