"""Nothing acknowledged is lost: kills, full disks, failing disks, restarts.

Disks fill up for real, by a limit on the size of files or a small file system. Only a sync that is slow or fails is put
in place (`on_sync`), as is the clock of rotation.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tracefit import ingest, inspect
from tracefit.receive.options import Rotation
from tracefit.receive.runs import RunFolders, folder_name
from tracefit.receive.spans import Sender, SenderSpans
from tracefit.receive.store import TraceStore
from tracefit.synth import SynthOptions, synth

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SENDER = Sender("vllm", "engine")
CONFIG = b"model: m\n"


def part(lib, *numbers, sender=SENDER):
    message = lib.request(*numbers, service=sender.service, instance=sender.instance)
    return SenderSpans(sender, message.SerializeToString(), len(numbers))


def numbers_in(lib, folder):
    return sorted(int.from_bytes(trace_id, "big") for trace_id, _ in lib.span_ids(folder))


def store_at(tmp_path, clock=time.monotonic, **rotation):
    runs = RunFolders(tmp_path, {"exp-config.yaml": CONFIG})
    return TraceStore(tmp_path, rotation=Rotation(**rotation), runs=runs, clock=clock)


@contextmanager
def file_size_limit(size_bytes, process=0):
    """No file of a process, by default this one, grows beyond a size: what fits is written, as on a full disk."""
    soft, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def on_sync(suffix, action):
    """Something happens whenever a file of a suffix is synced: after its write, before its answer."""

    def fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix == suffix:
            action(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def fails(_):
    raise OSError(errno.EIO, "Input/output error")


class Sending:
    """Threads that send requests of ten spans until the receiver is gone, and note what was acknowledged.

    They do it for as many instances as are given, one after another.
    """

    def __init__(self, lib, port, first, threads=4, instances=1):
        self.acknowledged = []
        self._instances = instances
        self.enough = threading.Semaphore(0)
        self._lib, self._port = lib, port
        self._threads = [threading.Thread(target=self._send, args=(first + n * 1_000_000,)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _send(self, number):
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{self._port}", options) as channel:
            call = channel.unary_unary(EXPORT)
            while True:
                numbers = range(number, number + 10)
                try:
                    instance = f"i{number // 10 % self._instances}"
                    call(self._lib.request(*numbers, instance=instance).SerializeToString(), timeout=30)
                except grpc.RpcError:
                    return
                self.acknowledged += numbers
                self.enough.release()
                number += 10

    def join(self):
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 80], ids=["files stay open", "files are closed and opened again"])
def test_kill_loses_nothing_acknowledged(lib, start, tmp_path, instances):
    """Three times over the same folder: every start goes on with new files."""
    rng, acknowledged = random.Random(), []
    for life in range(3):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.binpb")}
        receiver = start(tmp_path, "--rotate", "20KiB,1s")
        sending = Sending(lib, receiver.grpc_port, first=1 + life * 10_000_000, instances=instances)
        for _ in range(rng.randrange(1, 60) * (1 if instances == 1 else 8)):
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
def test_sigterm_keeps_everything_acknowledged(lib, start, tmp_path):
    receiver = start(tmp_path)
    sending = Sending(lib, receiver.grpc_port, first=1)
    for _ in range(20):
        assert sending.enough.acquire(timeout=30)
    code, out, err = receiver.end()
    sending.join()
    assert (code, err) == (0, "")
    assert set(sending.acknowledged) <= set(numbers_in(lib, tmp_path))
    assert f"{len(numbers_in(lib, tmp_path)):,}" in out


@pytest.fixture
def slow_disk():
    """Return a disk whose syncs wait until `gate` is open: `busy` is set once one waits, `order` notes their ends."""
    disk = SimpleNamespace(busy=threading.Event(), gate=threading.Event(), order=[])

    def sync(_):
        disk.busy.set()
        disk.gate.wait(30)
        disk.order.append("sync")

    with on_sync(".binpb", sync):
        yield disk


@pytest.mark.parametrize("is_closed", [False, True], ids=["running", "closed by SIGTERM"])
def test_requests_that_wait_for_the_disk_share_a_sync(lib, tmp_path, slow_disk, is_closed):
    async def main():
        async with lib.running(tmp_path) as at:

            async def send(number):
                await at.intake.write([part(lib, number)])
                slow_disk.order.append(number)

            first = asyncio.ensure_future(send(1))
            await lib.until(slow_disk.busy.is_set)
            later = [asyncio.ensure_future(send(number)) for number in (2, 3, 4)]
            await asyncio.sleep(0)  # each has begun to wait
            if is_closed:
                at.intake.close()
            slow_disk.gate.set()
            await asyncio.gather(first, *later)

    asyncio.run(main())
    assert slow_disk.order.index(1) > 0
    slow_disk.order.remove(1)
    assert slow_disk.order == ["sync", "sync", 2, 3, 4]
    assert numbers_in(lib, tmp_path) == [1, 2, 3, 4]


def test_export_is_answered_after_the_sync(lib, tmp_path, slow_disk):
    async def main():
        async with (
            lib.running(tmp_path) as at,
            grpc.aio.insecure_channel(f"127.0.0.1:{at.grpc_port}") as channel,
        ):
            call = channel.unary_unary(EXPORT)(lib.request(1, 2).SerializeToString())
            call.add_done_callback(lambda _: slow_disk.order.append("answer"))
            await lib.until(slow_disk.busy.is_set)
            slow_disk.gate.set()
            await call

    asyncio.run(main())
    assert slow_disk.order == ["sync", "answer"]


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        (lambda path: file_size_limit(path.stat().st_size + 20), errno.EFBIG),
        (lambda path: on_sync(path.suffix, fails), errno.EIO),
    ],
    ids=["half a write", "sync"],
)
def test_failed_write_is_taken_back(lib, tmp_path, fault, number):
    """The sender hears of it, and what it sends again is there once."""
    store = store_at(tmp_path)
    assert store.commit([part(lib, 1, 2)]) == {}
    (path,) = store.files
    before = path.read_bytes()
    with fault(path):
        assert store.commit([part(lib, 3)])[SENDER].errno == number
    assert path.read_bytes() == before
    assert store.commit([part(lib, 3)]) == {}
    store.close()
    assert path.read_bytes() == before
    assert numbers_in(lib, tmp_path) == [1, 2, 3]


def test_full_disk_collects_no_empty_files(lib, tmp_path):
    store = store_at(tmp_path)
    with file_size_limit(len(CONFIG)):  # the configuration fits, a record does not
        for _ in range(3):
            assert SENDER in store.commit([part(lib, 1)])
    assert list(tmp_path.rglob("*.binpb")) == list(store.files) == []
    assert store.file_count == 0


def test_failing_sender_does_not_hold_up_another(lib, tmp_path):
    store = store_at(tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "engine").write_text("a file where a folder should be")
    failed = store.commit([part(lib, 1), part(lib, 2, sender=Sender("vllm", "other"))])
    assert set(failed) == {SENDER}
    assert numbers_in(lib, tmp_path) == [2]


@pytest.mark.slow
def test_full_disk_makes_the_sdk_wait_and_loses_nothing(lib, start, tmp_path):
    """The disk is full for a while; the SDK tries again until there is room."""
    receiver = start(tmp_path)
    spans = lib.sdk_spans(synth(SynthOptions(requests=40)))
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{receiver.grpc_port}", timeout=60)
    results = []
    thread = threading.Thread(target=lambda: results.append(exporter.export(spans)))
    with file_size_limit(100, receiver.popen.pid):
        thread.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}")
        with channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(EXPORT)(lib.request(*range(1, 200)).SerializeToString())
    thread.join()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "cannot be written (File too large)"
    assert (receiver.end()[0], results) == (3, [SpanExportResult.SUCCESS])
    assert len(lib.span_ids(tmp_path)) == len(set(lib.span_ids(tmp_path))) == len(spans)


@pytest.fixture
def small_disk(tmp_path):
    """Return the folder of a file system of 256 KiB."""
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_receiver_on_a_small_disk_goes_on_when_there_is_room(lib, start, small_disk):
    receiver, sent = start(small_disk), []
    with grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}") as channel:

        def send(first):
            numbers = range(first, first + 200)
            message = lib.request(*numbers)
            for span in message.resource_spans[0].scope_spans[0].spans:
                noise = random.randbytes(100).hex()  # does not get shorter by compression
                span.attributes.extend(lib.pairs({"gen_ai.request.id": noise}))
            channel.unary_unary(EXPORT)(message.SerializeToString(), timeout=30)
            sent.extend(numbers)

        (small_disk / "ballast").write_bytes(b"x" * (180 << 10))
        with pytest.raises(grpc.RpcError, match="No space left") as refused:
            any(send(first) for first in range(1, 1_000_000, 200))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        (small_disk / "ballast").unlink()
        send(10_000_001)
    receiver.end()
    assert sorted(sent) == numbers_in(lib, small_disk)


@pytest.mark.slow
def test_record_cut_by_a_kill_is_one_reject(tmp_path, new_traces):
    store = TraceStore(tmp_path / "runs", rotation=Rotation())
    store.commit([SenderSpans(SENDER, new_traces().request(1, 0, step=1).protobuf(), 2)])
    store.close()
    (path,) = store.files
    path.write_bytes(path.read_bytes() + path.read_bytes()[:40])
    (run,) = ingest([tmp_path / "runs"], tmp_path / "tables").runs
    assert (run.spans, run.rejects) == (2, 1)


def test_files_rotate_by_size_and_another_store_does_not_open_them(lib, tmp_path):
    store, again = store_at(tmp_path, size_bytes=100), store_at(tmp_path, size_bytes=100)
    for number in range(1, 6):
        store.commit([part(lib, *range(number * 100, number * 100 + 20))])
    again.commit([part(lib, 1)])
    assert len(store.files) == store.file_count == 5
    assert list(store.files) == sorted(store.files)
    assert set(again.files).isdisjoint(store.files)
    assert len(numbers_in(lib, tmp_path)) == 5 * 20 + 1


@pytest.mark.parametrize(
    ("commits_at", "files"),
    [([1000, 1299], 1), ([1000, 1300], 2), ([1000, 1300, 1301], 2)],
    ids=["younger", "as old", "age of the new file"],
)
def test_files_rotate_by_time(lib, tmp_path, commits_at, files):
    now = [0.0]
    store = store_at(tmp_path, lambda: now[0], seconds=300)
    for now[0] in commits_at:
        store.commit([part(lib, now[0])])
    assert len(store.files) == files


def fleet(lib, instances, first=1):
    return [part(lib, first + n, sender=Sender("vllm", f"i{n}")) for n in range(instances)]


def open_below(folder):
    return [path for path in Path("/proc/self/fd").iterdir() if folder in path.resolve().parents]


def test_many_senders_hold_64_files_open_and_have_one_each(lib, tmp_path):
    """A file that was closed for another is opened again; its size and its age go on."""
    now = [0.0]
    store = store_at(tmp_path, lambda: now[0], seconds=300)
    for now[0] in (0.0, 100.0, 299.0):
        assert store.commit(fleet(lib, 70, first=1 + int(now[0]))) == {}
        assert len(open_below(tmp_path)) == 64
    assert len(list(tmp_path.rglob("*.binpb"))) == store.file_count == 70
    now[0] = 300.0
    assert store.commit(fleet(lib, 70, first=301)) == {}
    store.close()
    assert open_below(tmp_path) == []
    assert store.file_count == 140
    firsts = [first for first in (1, 101, 300, 301) for _ in range(70)]
    assert sorted(numbers_in(lib, tmp_path)) == sorted(
        first + n for first, n in zip(firsts, [*range(70)] * 4, strict=True)
    )


def test_a_file_opened_again_rotates_by_size(lib, tmp_path):
    """Each file is full with its second record."""
    probe = store_at(tmp_path / "probe")
    assert probe.commit(fleet(lib, 1)) == {}
    store = store_at(tmp_path / "out", size_bytes=probe.written_bytes * 3 // 2)
    for turn in range(6):
        assert store.commit(fleet(lib, 65, first=1 + 100 * turn)) == {}
    assert store.file_count == 65 * 3
    assert {len(lib.records(path)) for path in store.files} == {2}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_another(path):
    content = path.read_bytes()
    path.rename(path.with_suffix(".moved"))
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (cut, 2),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), 2),
        (replace_by_another, 2),
        (Path.unlink, 1),
        (lambda path: path.rename(path.with_suffix(".moved")), 1),
        (
            lambda path: (
                path.rename(path.with_suffix(".moved")),
                path.symlink_to(path.with_suffix(".moved")),
            ),
            2,
        ),
    ],
    ids=["cut", "longer", "replaced", "removed", "renamed", "a link"],
)
def test_a_closed_file_that_is_not_as_it_was_is_left_alone(lib, tmp_path, change, kept):
    store = store_at(tmp_path)
    assert store.commit([part(lib, 1)]) == {}
    (path,) = store.files
    assert store.commit(fleet(lib, 64)) == {}
    assert open_below(tmp_path / "vllm" / "engine") == []
    change(path)
    before = path.read_bytes() if path.exists() else None
    assert store.commit([part(lib, 2)]) == {}
    assert (path.read_bytes() if path.exists() else None) == before
    assert store.file_count == 66
    assert 2 in numbers_in(lib, tmp_path / "vllm" / "engine")
    assert len(list((tmp_path / "vllm" / "engine").glob("traces-*.binpb"))) == kept


def test_a_failed_write_to_a_file_opened_again_is_taken_back(lib, tmp_path):
    store = store_at(tmp_path)
    assert store.commit([part(lib, 1)]) == {}
    (path,) = store.files
    assert store.commit(fleet(lib, 64, first=100)) == {}
    before = path.read_bytes()
    with file_size_limit(len(before) + 20):
        assert store.commit([part(lib, 2)])[SENDER].errno == errno.EFBIG
    assert path.read_bytes() == before
    assert store.commit([part(lib, 2)]) == {}
    assert path.read_bytes() == before
    assert [n for n in numbers_in(lib, tmp_path) if n < 100] == [1, 2]


def test_a_receiver_that_runs_for_long_keeps_few_names_of_files(lib, tmp_path, monkeypatch):
    monkeypatch.setattr("tracefit.receive.store._NAMED_FILES", 3)
    store = store_at(tmp_path, size_bytes=1)
    for number in range(1, 8):
        assert store.commit([part(lib, number)]) == {}
    assert (len(store.files), store.file_count) == (3, 7)
    assert list(store.files) == sorted(tmp_path.rglob("*.binpb"))[-3:]


def test_a_folder_that_cannot_be_synced_costs_no_descriptor_and_leaves_no_file(lib, tmp_path, monkeypatch):
    store = store_at(tmp_path)
    monkeypatch.setattr("tracefit.receive.store.sync_folder", fails)
    for _ in range(3):
        assert store.commit([part(lib, 1)])[SENDER].errno == errno.EIO
    assert open_below(tmp_path) == list(tmp_path.rglob("*.binpb")) == []


@pytest.mark.parametrize("gone", ["vllm", "vllm/engine", "."])
def test_removed_folder_is_made_again(lib, tmp_path, gone):
    store = store_at(tmp_path / "out")
    assert store.commit([part(lib, 1)]) == {}
    shutil.rmtree(tmp_path / "out" / gone)
    assert store.commit([part(lib, 2)]) == {}
    assert numbers_in(lib, tmp_path) == [2]
    assert (tmp_path / "out" / "vllm" / "exp-config.yaml").exists()


def test_moved_folder_gets_no_more_spans(lib, tmp_path):
    """Every commit rotates: it does not look for the folder that was there."""
    store = store_at(tmp_path, size_bytes=1)
    for number in (1, 2, 3):
        assert store.commit([part(lib, number)]) == {}
        (tmp_path / "vllm").rename(tmp_path / f"moved-{number}")
    assert [numbers_in(lib, tmp_path / f"moved-{n}") for n in (1, 2, 3)] == [[1], [2], [3]]
    assert not (tmp_path / "vllm").exists()


@pytest.mark.parametrize(
    ("times", "refused", "kept"),
    [(1, set(), [2, 3]), (2, {SENDER}, [3])],
    ids=["moved once", "moved twice"],
)
def test_spans_are_written_again_if_the_folder_moves(lib, tmp_path, times, refused, kept):
    store, names = store_at(tmp_path), [f"moved-{n}" for n in range(times)]
    assert store.commit([part(lib, 1)]) == {}
    with on_sync(".binpb", lambda _: names and (tmp_path / "vllm").rename(tmp_path / names.pop(0))):
        assert set(store.commit([part(lib, 2)])) == refused
    assert store.commit([part(lib, 3)]) == {}
    assert numbers_in(lib, tmp_path / "moved-0") == [1]
    assert numbers_in(lib, tmp_path / "vllm") == kept
    assert all(path.stat().st_size for path in store.files if path.exists())


HOSTILE = [
    *("../../etc", "/etc/passwd", "..", ".", "", ".hidden", "a/b", "a\\b", "a\0b", "CON:", "x" * 5000, "é"),
    *("\u202ea", "-rf", "config.json", "exp-config.yaml", "$(reboot)", "a\nb", "2026", "year=2026", "a."),
    *("traces.json", "manifest.json", "run.yaml", "alpha.json", "a-b-c8687a08"),
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:20])
def test_no_service_name_leads_out_of_the_folder(lib, tmp_path, name):
    store = store_at(tmp_path / "out")
    for number, sender in enumerate((Sender(name, "i"), Sender("s", name or "j"), Sender(name, name)), 1):
        assert store.commit([part(lib, number, sender=sender)]) == {}
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert numbers_in(lib, tmp_path / "out") == [1, 2, 3]
    made = list((tmp_path / "out").rglob("*"))
    assert all(path.name.isascii() and len(path.name) < 120 for path in made)
    assert not [path for path in made if path.name == "exp-config.yaml" and path.is_dir()]


def test_cleaned_names_stay_apart():
    names = ["a/b", "a\\b", "a-b", "a b", "é", "è", "x" * 200, "x" * 201, "manifest.json"]
    names += [folder_name(name) for name in names if folder_name(name) != name]  # a sender may be named so
    assert len({folder_name(name) for name in names}) == len(names)


def test_plain_name_is_kept():
    assert folder_name("7b8b12f1-d6ca-4761-95c1-357ffa2c3a31") == "7b8b12f1-d6ca-4761-95c1-357ffa2c3a31"


@pytest.mark.slow
def test_inspect_reads_a_service_named_manifest_json(tmp_path, new_traces):
    """A folder with a manifest.json is a folder of tables."""
    store = store_at(tmp_path)
    data = new_traces().request(1, 0, step=1).protobuf()
    store.commit([SenderSpans(Sender("manifest.json", ""), data, 2)])
    store.close()
    assert [run.run_id for run in inspect(tmp_path).runs] == [folder_name("manifest.json")]


def test_existing_configuration_stays(lib, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "exp-config.yaml").write_text("model: mine\n")
    store_at(tmp_path).commit([part(lib, 1)])
    assert (tmp_path / "vllm" / "exp-config.yaml").read_text() == "model: mine\n"


def test_configuration_appears_only_once_synced(lib, tmp_path):
    store = store_at(tmp_path)
    with on_sync(".yaml", fails):
        assert SENDER in store.commit([part(lib, 1)])
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert store.commit([part(lib, 1)]) == {}
    assert (tmp_path / "vllm" / "exp-config.yaml").read_bytes() == CONFIG


def test_two_receivers_of_one_millisecond_share_no_file(lib, tmp_path, monkeypatch):
    class StoppedClock:
        @staticmethod
        def now(_):
            return datetime(2026, 2, 3, tzinfo=UTC)

    monkeypatch.setattr("tracefit.receive.store.datetime", StoppedClock)
    stores = [store_at(tmp_path), store_at(tmp_path)]
    for number, store in enumerate(stores, 1):
        assert store.commit([part(lib, number)]) == {}
    names = [path.name for store in stores for path in store.files]
    assert names == [f"traces-2026-02-03T00-00-00.000Z-{number}.binpb" for number in (1, 2)]
    assert numbers_in(lib, tmp_path) == [1, 2]
