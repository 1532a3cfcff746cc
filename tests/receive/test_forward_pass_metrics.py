"""ForwardPassMetrics from publishers: what is kept, what is counted, what is bounded, and that the room of recordings
reads it."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import polars as pl
import pytest
import zmq
import zmq.asyncio

import tracefit
from recorded import arrays, maps, record
from tracefit.errors import UsageError
from tracefit.receive import forward_pass_metrics
from tracefit.receive.forward_pass_metrics import MESSAGE_BYTES, StepRecorder
from tracefit.receive.options import ReceiveOptions, Rotation
from tracefit.receive.runs import RunFolders
from tracefit.receive.store import TraceStore
from tracefit.recordings.fpm import as_line

BUSY = {"num_decode_requests": 4, "sum_decode_kv_tokens": 800}


def steps(count, first=1, **fields):
    return [record(n, 0.01 + n / 1e5, **BUSY, **fields) for n in range(first, first + count)]


def numbered(payloads, first=0):
    return [[b"", n.to_bytes(8, "big"), payload] for n, payload in enumerate(payloads, first)]


@pytest.fixture
def publishing(lib, tmp_path, monkeypatch):
    """Return a context: publishers, and a recorder that reads from them into `tmp_path`."""
    monkeypatch.setattr(forward_pass_metrics, "_WRITE_S", 0.01)

    @asynccontextmanager
    async def of(publishers=1, **options):
        store = options.pop("store", None) or TraceStore(
            tmp_path,
            rotation=Rotation(),
            runs=RunFolders(tmp_path, {"exp-config.yaml": b"model: m\n"}),
        )
        context = zmq.asyncio.Context()
        # Like PUB, and says when somebody subscribes: until then messages go nowhere.
        sockets = [context.socket(zmq.XPUB) for _ in range(publishers)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
        async with lib.running(tmp_path, store=store) as receiver:
            endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
            recorder = StepRecorder(endpoints, as_line, receiver.intake)
            recorder.start()
            for socket in sockets:
                assert await socket.recv() == b"\x01"

            async def send(*messages, to=0):
                for message in messages:
                    await sockets[to].send_multipart(message)

            async def resubscribed():
                # The connection that ends says that nobody is subscribed.
                async with asyncio.timeout(30):
                    while await sockets[0].recv() != b"\x01":
                        pass

            async def done(count, source=0):
                """Wait until so many messages of a source are on disk or refused."""
                each = recorder.publishers[source]
                await lib.until(lambda: each.records + each.refused.total() == count)

            try:
                yield SimpleNamespace(
                    send=send,
                    done=done,
                    resubscribed=resubscribed,
                    recorder=recorder,
                    endpoints=endpoints,
                    intake=receiver.intake,
                )
            finally:
                await recorder.stop()
                context.destroy(linger=0)

    return of


def run_folder(tmp_path, endpoint):
    return tmp_path / endpoint.removeprefix("tcp://").replace(":", "-")


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("encode", [maps, arrays])
def test_two_publishers_make_two_runs(publishing, tmp_path, encode):
    async def body():
        async with publishing(publishers=2) as at:
            await at.send(*numbered(encode([*steps(3), record(4, 0.0)])))
            await at.send(*numbered(encode(steps(2, worker="other", rank=1))), to=1)
            await at.done(4)
            await at.done(2, source=1)
            assert at.intake.observed.steps == 5  # a heartbeat is not a step
            return at.endpoints

    first, second = (run_folder(tmp_path, each) for each in asyncio.run(body()))
    assert (first / "exp-config.yaml").read_bytes() == b"model: m\n"
    result = tracefit.ingest([first, second], tmp_path / "tables")
    assert [run.rejects for run in result.runs] == [0, 0]
    found = pl.read_parquet(tmp_path / f"tables/steps/run_id={first.name}/*.parquet")
    assert found["step_id"].to_list() == [1, 2, 3, 4]
    assert found["unix_ns"].is_sorted()
    assert found["unix_ns"].null_count() == 0
    timeline = pl.read_parquet(tmp_path / f"tables/timeline/run_id={second.name}/*.parquet")
    assert timeline.select("server", "cycle_us", "context_tokens").rows() == [
        ("other.dp1", pytest.approx(10_010.0), 800),
        ("other.dp1", pytest.approx(10_020.0), 800),
    ]


def test_junk_is_counted_by_cause_and_costs_itself_alone(publishing):
    good = maps(steps(2))
    number = (7).to_bytes(8, "big")
    junk = {
        "frames": [[good[0]], [b"", number], [b"", number, good[0], b""], [b"", b"7", good[0]]],
        "too_long": [[b"", number, b"\x81" * (MESSAGE_BYTES + 1)], [b"t" * MESSAGE_BYTES, number, good[0]]],
        "malformed": [
            [b"", number, payload]
            for payload in (
                *(b"", b"\xc1", good[0][:-1], good[0] + good[1], msgspec.msgpack.encode([1, "w"])),
                msgspec.msgpack.encode(record(1, float("nan"))),
            )
        ],
        "version": [[b"", number, payload] for payload in maps([record(1, 0.1, version=2)])],
    }

    async def body():
        async with publishing() as at:
            await at.send(*(message for messages in junk.values() for message in messages))
            await at.send([b"", number, good[1]])
            await at.done(1 + sum(map(len, junk.values())))
            (source,) = at.recorder.publishers
            assert source.refused == {cause: len(messages) for cause, messages in junk.items()}
            assert source.records == 1
            # Each cause is said once.
            assert [re.search(r"\((\w+)\)", text)[1] for text in at.recorder.news()] == list(junk)
            assert at.recorder.news() == []

    asyncio.run(body())


def test_sequence_gaps_are_lost_messages(publishing):
    async def body():
        async with publishing() as at:
            good = maps(steps(6))
            # 5 to 9 never come; what was sent before the first one is not known; the second life begins at 0 and loses
            # 1.
            for number, payload in zip([3, 4, 10, 0, 2, 2**63], good, strict=True):
                await at.send([b"", number.to_bytes(8, "big"), payload])
            await at.done(6)
            assert at.recorder.publishers[0].lost_messages == 5 + 1

    asyncio.run(body())


def test_a_frame_that_is_too_long_is_a_gap(publishing):
    async def body():
        async with publishing() as at:
            good = maps(steps(2))
            await at.send([b"", (0).to_bytes(8, "big"), good[0]])
            await at.done(1)
            await at.send([b"", (1).to_bytes(8, "big"), bytes(1 << 20)])
            # It connects and subscribes again, by itself.
            await at.resubscribed()
            await at.send([b"", (2).to_bytes(8, "big"), good[1]])
            await at.done(2)
            (source,) = at.recorder.publishers
            assert (source.records, source.lost_messages, source.refused.total()) == (2, 1, 0)

    asyncio.run(body())


def test_records_that_wait_for_the_disk_are_bounded(publishing, monkeypatch, tmp_path):
    monkeypatch.setattr(forward_pass_metrics, "_QUEUED_LINES", 5)
    most = []

    class Counting(TraceStore):
        def commit(self, received):
            received = list(received)
            most.extend(spans.spans for spans in received)
            return super().commit(received)

    async def body():
        async with publishing(store=Counting(tmp_path, rotation=Rotation())) as at:
            await at.send(*numbered(maps(steps(200))))
            await at.done(200)
            assert at.recorder.publishers[0].lost_messages == 0

    asyncio.run(body())
    assert max(most) == 5


def test_records_that_the_disk_does_not_take_are_counted(publishing, tmp_path):
    class Full(TraceStore):
        def commit(self, received):
            return {spans.sender: OSError(28, "No space left on device") for spans in received}

    async def body():
        async with publishing(store=Full(tmp_path, rotation=Rotation())) as at:
            await at.send(*numbered(maps(steps(3))))
            await at.done(3)
            assert at.recorder.publishers[0].refused == {"disk": 3}

    asyncio.run(body())


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:1", "tcp://127.9.9.9:65535", "tcp://localhost:20380", "tcp://[::1]:20380"],
)
def test_loopback_is_allowed(endpoint):
    ReceiveOptions(forward_pass_metrics=(endpoint,)).require_safe()


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.7:20380", "tcp://engine:20380", "tcp://[2001:db8::1]:20380"])
def test_other_machines_need_insecure(endpoint):
    with pytest.raises(UsageError, match="no authentication") as refused:
        ReceiveOptions(forward_pass_metrics=(endpoint,)).require_safe()
    assert "\n" not in str(refused.value)
    ReceiveOptions(forward_pass_metrics=(endpoint,), insecure=True).require_safe()


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://*:5",
        "ipc:///tmp/x",
        "tcp://a b:1",
        "tcp://a:1\n",
    ],
)
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(UsageError, match="not an endpoint"):
        ReceiveOptions(forward_pass_metrics=(endpoint,), insecure=True).require_safe()


@pytest.mark.slow
def test_the_command_shows_records_losses_and_what_was_not_kept(start, tmp_path):
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        receiver = start(tmp_path, "--forward-pass-metrics", endpoint, "--model", "m", "--set", "backend=sglang")
        publisher.recv()
        first, *rest = numbered(maps(steps(40)))
        for message in (first, *rest[2:], [b"", (40).to_bytes(8, "big"), b"junk"]):
            publisher.send_multipart(message)
        # The junk is the last: when it is refused all others are read.
        warning = next(line for line in receiver.popen.stderr if "are refused" in line)
        assert f"messages of {endpoint} are refused (malformed)" in warning
        code, out, _ = receiver.end()
        publisher.close(linger=0)
    assert code == 3
    assert re.search(rf"{endpoint} +38 +2 +1 \(malformed 1\)", out)
    folder = run_folder(tmp_path, endpoint)
    assert [path.name.partition("-")[0] for path in sorted(folder.iterdir())] == ["exp", "fpm"]
    assert tracefit.ingest([folder], tmp_path / "tables").runs[0].steps == 38
