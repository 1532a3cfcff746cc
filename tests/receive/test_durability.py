"""Nothing acknowledged is lost: kills, full disks, failing disks, restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tracefit import ingest, inspect
from tracefit.receive.options import Rotation
from tracefit.receive.spans import Sender, SenderSpans
from tracefit.receive.store import TraceStore, folder_name
from tracefit.synth import SynthOptions, synth

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SENDER = Sender("vllm", "engine")


def part(lib, *numbers, sender=SENDER):
    message = lib.request(*numbers, service=sender.service, instance=sender.instance)
    return SenderSpans(sender, message.SerializeToString(), len(numbers))


def numbers_in(lib, folder):
    return sorted(int.from_bytes(trace_id, "big") for trace_id, _ in lib.span_ids(folder))


def store_at(tmp_path, **rotation):
    return TraceStore(tmp_path, rotation=Rotation(**rotation), configs={"exp-config.yaml": b"model: m\n"})


class Sending:
    """Threads that send requests of ten spans until the receiver is gone, and note what was acknowledged."""

    def __init__(self, lib, port, first, threads=4):
        self.acknowledged = []
        self.enough = threading.Semaphore(0)
        self._lib, self._port = lib, port
        self._threads = [
            threading.Thread(target=self._send, args=(first + n * 1_000_000,)) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, number):
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{self._port}", options) as channel:
            call = channel.unary_unary(EXPORT)
            while True:
                numbers = range(number, number + 10)
                try:
                    call(self._lib.request(*numbers).SerializeToString(), timeout=30)
                except grpc.RpcError:
                    return
                self.acknowledged += numbers
                self.enough.release()
                number += 10

    def join(self):
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing_acknowledged(lib, start, tmp_path):
    """Five times over the same folder: every start goes on with new files."""
    rng, acknowledged = random.Random(), []
    for life in range(5):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.binpb")}
        receiver = start(tmp_path, "--rotate", "20KiB,1s")
        sending = Sending(lib, receiver.grpc_port, first=1 + life * 10_000_000)
        for _ in range(rng.randrange(1, 60)):
            assert sending.enough.acquire(timeout=30)
        receiver.end(signal.SIGKILL)
        sending.join()
        acknowledged += sending.acknowledged
        assert {path: path.read_bytes() for path in before} == before
    found = numbers_in(lib, tmp_path)
    assert set(acknowledged) <= set(found)
    assert len(acknowledged) >= 50
    result = ingest([tmp_path], tmp_path / "tables")
    assert sum(run.spans for run in result.runs) == len(set(found))


@pytest.mark.slow
def test_sigterm_ends_in_order_and_keeps_what_was_acknowledged(lib, start, tmp_path):
    receiver = start(tmp_path)
    sending = Sending(lib, receiver.grpc_port, first=1)
    for _ in range(20):
        assert sending.enough.acquire(timeout=30)
    code, out, err = receiver.end()
    sending.join()
    assert (code, err) == (0, "")
    assert set(sending.acknowledged) <= set(numbers_in(lib, tmp_path))
    assert f"{len(numbers_in(lib, tmp_path)):,}" in out


def test_sigterm_waits_for_requests_that_wait_for_the_disk(lib, tmp_path, monkeypatch):
    gate, store = threading.Event(), store_at(tmp_path)
    commit = store.commit
    monkeypatch.setattr(store, "commit", lambda parts: (gate.wait(30), commit(parts))[1])

    async def main():
        async with (
            lib.running(tmp_path, store=store) as at,
            grpc.aio.insecure_channel(f"127.0.0.1:{at.grpc_port}") as channel,
        ):
            call = channel.unary_unary(EXPORT)(lib.request(1, 2).SerializeToString())
            waiting = asyncio.ensure_future(call)
            await lib.until(lambda: at.intake._pending_bytes)
            at.intake.close()
            gate.set()
            return await waiting

    assert asyncio.run(main()) == b""
    assert numbers_in(lib, tmp_path) == [1, 2]


def test_an_acknowledgement_comes_after_the_sync(lib, tmp_path, monkeypatch):
    """One sync for all requests that came while the disk was busy, and none of them answered before it."""
    gate, synced, order = threading.Event(), [], []
    fsync = os.fsync

    def slow(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix == ".binpb":
            gate.wait(30)
            synced.append(path)
            order.append("sync")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)

    async def main():
        async with (
            lib.running(tmp_path) as at,
            grpc.aio.insecure_channel(f"127.0.0.1:{at.grpc_port}") as channel,
        ):

            async def send(number):
                await channel.unary_unary(EXPORT)(lib.request(number).SerializeToString())
                order.append(number)

            tasks = [asyncio.ensure_future(send(n)) for n in range(1, 5)]
            await lib.until(lambda: len(at.intake._pending) == 3)  # the first is with the disk
            assert order == []
            gate.set()
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order[0] == "sync"
    assert order.count("sync") == 2
    assert numbers_in(lib, tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_what_a_failing_disk_did_not_take_is_taken_back(lib, tmp_path, monkeypatch, call):
    """A write fails half-way, or the sync does: the sender hears of it, and what it sends again is there once."""
    store = store_at(tmp_path)
    assert store.commit([part(lib, 1, 2)]) == {}
    real, (path,) = getattr(os, call), store.files

    def fails(descriptor, *data):
        real(descriptor, *(bytes(data[0])[:20],) if data else ())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    failed = store.commit([part(lib, 3)])
    assert failed[SENDER].errno == errno.ENOSPC
    monkeypatch.setattr(os, call, real)
    assert numbers_in(lib, tmp_path) == [1, 2]
    whole = path.read_bytes()
    assert store.commit([part(lib, 3)]) == {}
    store.close()
    assert path.read_bytes() == whole
    assert numbers_in(lib, tmp_path) == [1, 2, 3]


def test_a_disk_that_stays_full_does_not_collect_empty_files(lib, tmp_path, monkeypatch):
    store = store_at(tmp_path)

    def fails(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fails)
    for _ in range(3):
        assert SENDER in store.commit([part(lib, 1)])
    assert list(tmp_path.rglob("*.binpb")) == store.files == []


def test_one_sender_that_cannot_be_written_does_not_hold_up_another(lib, tmp_path):
    store = store_at(tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "engine").write_text("a file where a folder should be")
    other = Sender("vllm", "other")
    failed = store.commit([part(lib, 1), part(lib, 2, sender=other)])
    assert set(failed) == {SENDER}
    assert numbers_in(lib, tmp_path) == [2]


@pytest.mark.slow
def test_a_full_disk_makes_the_sdk_wait_and_loses_nothing(lib, start, tmp_path):
    """A limit on the size of files stands for the disk's end; it is lifted while the SDK tries again."""
    receiver = start(tmp_path)
    spans = lib.sdk_spans(synth(SynthOptions(requests=40)))
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{receiver.grpc_port}", timeout=60)
    _, hard = resource.prlimit(receiver.popen.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(receiver.popen.pid, resource.RLIMIT_FSIZE, (100, hard))
    results = []
    thread = threading.Thread(target=lambda: results.append(exporter.export(spans)))
    thread.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}")
    with channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(EXPORT)(lib.request(*range(1, 200)).SerializeToString())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "cannot be written (File too large)"
    resource.prlimit(receiver.popen.pid, resource.RLIMIT_FSIZE, (hard, hard))
    thread.join()
    code, _, _ = receiver.end()
    assert (code, results) == (3, [SpanExportResult.SUCCESS])
    assert len(lib.span_ids(tmp_path)) == len(set(lib.span_ids(tmp_path))) == len(spans)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk needs root")
def test_a_small_disk_that_is_full_refuses_and_goes_on_when_there_is_room(lib, start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        receiver, sent = start(disk), []
        with grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}") as channel:
            call = channel.unary_unary(EXPORT)

            def send(first):
                numbers = range(first, first + 200)
                message = lib.request(*numbers)
                for span in message.resource_spans[0].scope_spans[0].spans:
                    noise = random.randbytes(100).hex()  # does not get shorter by compression
                    span.attributes.extend(lib.pairs({"gen_ai.request.id": noise}))
                call(message.SerializeToString(), timeout=30)
                sent.extend(numbers)

            (disk / "ballast").write_bytes(b"x" * (180 << 10))
            with pytest.raises(grpc.RpcError) as refused:
                any(send(first) for first in range(1, 1_000_000, 200))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "No space left" in refused.value.details()
            (disk / "ballast").unlink()
            send(10_000_001)
        receiver.end()
        assert sorted(sent) == numbers_in(lib, disk)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_last_record_that_a_kill_cut_is_ordinary_damage(lib, tmp_path, new_traces):
    store = TraceStore(tmp_path / "runs", rotation=Rotation(), configs={})
    data = new_traces().request(1, 0, step=1).protobuf()
    store.commit([SenderSpans(SENDER, data, 2)])
    store.close()
    (path,) = store.files
    path.write_bytes(path.read_bytes() + path.read_bytes()[:40])
    result = ingest([tmp_path / "runs"], tmp_path / "tables")
    assert [(run.spans, run.rejects) for run in result.runs] == [(2, 1)]


def test_files_are_rotated_by_size_and_never_written_again(lib, tmp_path):
    store = store_at(tmp_path, size_bytes=100)
    for number in range(1, 6):
        store.commit([part(lib, *range(number * 100, number * 100 + 20))])
    assert len(store.files) == 5
    assert [path.name for path in store.files] == sorted(path.name for path in store.files)
    again = store_at(tmp_path, size_bytes=100)
    again.commit([part(lib, 1)])
    assert set(again.files).isdisjoint(store.files)
    assert len(numbers_in(lib, tmp_path)) == 101


def test_files_are_rotated_by_time(lib, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("tracefit.receive.store.time.monotonic", lambda: now[0])
    store = store_at(tmp_path, seconds=300)
    for at, files in ((1000.0, 1), (1299.0, 1), (1300.0, 2), (1301.0, 2)):
        now[0] = at
        store.commit([part(lib, int(at))])
        assert len(store.files) == files


@pytest.mark.slow
def test_many_senders_do_not_hold_many_files_open(lib, tmp_path):
    store = store_at(tmp_path)
    store.commit([part(lib, n, sender=Sender("vllm", f"i{n}")) for n in range(1, 100)])
    open_files = [
        path
        for path in map(os.path.realpath, Path("/proc/self/fd").iterdir())
        if path.startswith(str(tmp_path)) and path.endswith(".binpb")
    ]
    assert len(open_files) == 64
    store.close()
    assert numbers_in(lib, tmp_path) == list(range(1, 100))


@pytest.mark.parametrize("gone", ["vllm", "vllm/engine", "."])
def test_after_a_folder_is_removed_spans_go_to_a_new_one(lib, tmp_path, gone):
    store = store_at(tmp_path / "out")
    assert store.commit([part(lib, 1)]) == {}
    shutil.rmtree(tmp_path / "out" / gone)
    assert store.commit([part(lib, 2)]) == {}
    assert numbers_in(lib, tmp_path) == [2]
    assert (tmp_path / "out" / "vllm" / "exp-config.yaml").exists()


def test_after_a_folder_is_moved_spans_go_to_a_new_one_alone(lib, tmp_path):
    """Rotation, too, must not look for the folder that was there."""
    store = store_at(tmp_path, size_bytes=1)
    for number in (1, 2, 3):
        assert store.commit([part(lib, number)]) == {}
        (tmp_path / "vllm").rename(tmp_path / f"moved-{number}")
    assert [numbers_in(lib, tmp_path / f"moved-{n}") for n in (1, 2, 3)] == [[1], [2], [3]]
    assert not (tmp_path / "vllm").exists()


@pytest.mark.parametrize("times", [1, 2])
def test_spans_of_a_moved_folder_are_written_again(lib, tmp_path, monkeypatch, times):
    """Moved once, they are written again; twice, the sender has to send them again."""
    store, write, moved = store_at(tmp_path), os.write, []
    assert store.commit([part(lib, 1)]) == {}

    def moves(descriptor, data):
        if len(moved) < times:
            moved.append((tmp_path / "vllm").rename(tmp_path / f"moved-{len(moved)}"))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", moves)
    failed = store.commit([part(lib, 2)])
    assert set(failed) == ({SENDER} if times == 2 else set())
    assert numbers_in(lib, tmp_path) == ([1] if failed else [1, 2])
    assert store.commit([part(lib, 3)]) == {}
    store.close()
    assert numbers_in(lib, tmp_path) == ([1, 3] if failed else [1, 2, 3])
    assert numbers_in(lib, tmp_path / "moved-0") == [1]
    assert all(path.stat().st_size for path in store.files if path.exists())


HOSTILE = [
    "../../etc",
    "/etc/passwd",
    "..",
    ".",
    "",
    ".hidden",
    "a/b",
    "a\\b",
    "a\0b",
    "CON:",
    "x" * 5000,
    "é",
    "\u202ea",
    "-rf",
]
HOSTILE += ["config.json", "exp-config.yaml", "$(reboot)", "a\nb", "2026", "year=2026", "a.", "traces.json"]
HOSTILE += ["manifest.json", "run.yaml", "alpha.json", "a-b-c8687a08"]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda n: ascii(n)[:20])
def test_no_name_leads_out_of_the_folder(lib, tmp_path, name):
    store = store_at(tmp_path / "out")
    for number, sender in enumerate((Sender(name, "i"), Sender("s", name or "j"), Sender(name, name)), 1):
        assert store.commit([part(lib, number, sender=sender)]) == {}
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert numbers_in(lib, tmp_path / "out") == [1, 2, 3]
    for path in (tmp_path / "out").rglob("*"):
        assert path.name.isascii()
        assert len(path.name) < 120
    assert sorted(p.name for p in (tmp_path / "out").rglob("exp-config.yaml") if p.is_dir()) == []


def test_names_that_are_cleaned_to_the_same_stay_apart():
    names = ["a/b", "a\\b", "a-b", "a b", "é", "è", "x" * 200, "x" * 201, "manifest.json"]
    names += [folder_name(name) for name in names if folder_name(name) != name]  # a sender may be named so
    assert len({folder_name(name) for name in names}) == len(names)
    assert folder_name("7b8b12f1-d6ca-4761-95c1-357ffa2c3a31") == "7b8b12f1-d6ca-4761-95c1-357ffa2c3a31"


def test_a_service_named_like_a_file_of_the_tables_can_be_inspected(tmp_path, new_traces):
    """As `inspect` does, which takes a folder with a manifest.json for tables."""
    store = store_at(tmp_path)
    data = new_traces().request(1, 0, step=1).protobuf()
    store.commit([SenderSpans(Sender("manifest.json", ""), data, 2)])
    store.close()
    assert [run.run_id for run in inspect(tmp_path).runs] == [folder_name("manifest.json")]


def test_a_configuration_that_is_there_stays(lib, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "exp-config.yaml").write_text("model: mine\n")
    store_at(tmp_path).commit([part(lib, 1)])
    assert (tmp_path / "vllm" / "exp-config.yaml").read_text() == "model: mine\n"


def test_a_configuration_is_in_place_only_once_the_disk_has_it(lib, tmp_path, monkeypatch):
    fsync = os.fsync

    def fails_for_files(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_for_files)
    store = store_at(tmp_path)
    assert SENDER in store.commit([part(lib, 1)])
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    monkeypatch.setattr(os, "fsync", fsync)
    assert store.commit([part(lib, 1)]) == {}
    assert (tmp_path / "vllm" / "exp-config.yaml").read_text() == "model: m\n"


def test_a_file_that_is_there_is_never_written_again(lib, tmp_path, monkeypatch):
    """Two receivers on one folder, started in the same millisecond."""

    class StoppedClock:
        @staticmethod
        def now(_):
            return datetime(2026, 2, 3, tzinfo=UTC)

    monkeypatch.setattr("tracefit.receive.store.datetime", StoppedClock)
    stores = [store_at(tmp_path), store_at(tmp_path)]
    for number, store in enumerate(stores, 1):
        assert store.commit([part(lib, number)]) == {}
    names = [path.name for store in stores for path in store.files]
    assert names == ["traces-2026-02-03T00-00-00.000Z-1.binpb", "traces-2026-02-03T00-00-00.000Z-2.binpb"]
    assert numbers_in(lib, tmp_path) == [1, 2]
