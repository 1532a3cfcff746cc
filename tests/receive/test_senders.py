"""Servers come and go: silent ones are forgotten, their spans stay counted, and active ones have a limit."""

from __future__ import annotations

import asyncio
from pathlib import Path

from google.rpc.error_details_pb2 import RetryInfo

from receive.test_monitoring import CHECK, SERVING, call, get, samples
from receive.test_protocols import PROTOBUF, export, in_thread, post
from tracefit.receive.intake import Intake
from tracefit.receive.observed import Observed
from tracefit.receive.options import IntakeLimits, Rotation
from tracefit.receive.senders import Senders
from tracefit.receive.spans import PrivacyFilter, Sender
from tracefit.receive.store import TraceStore
from tracefit.reports.terminal_results import receive_text
from tracefit.results.traces import ReceivedFrom, ReceiveResult

LIMITS = IntakeLimits(senders=2, sender_idle_s=600)
A, B, C, D = (Sender("vllm", name) for name in "abcd")


def test_a_new_sender_takes_the_place_of_the_one_silent_longest():
    now = [0.0]
    senders = Senders(LIMITS, lambda: now[0])
    assert senders.admit([A])
    now[0] = 100.0
    assert senders.admit([B])
    senders.count(A, 5)
    senders.count(B, 7)
    now[0] = 599.9
    assert not senders.admit([C])
    assert senders.active() == 2
    now[0] = 600.0
    assert senders.active() == 1
    assert senders.admit([C])
    senders.count(C, 1)
    assert dict(senders.spans) == {B: 7, C: 1}
    assert (senders.forgotten, senders.forgotten_spans) == (1, 5)


def test_a_sender_that_sends_is_not_forgotten():
    now = [0.0]
    senders = Senders(LIMITS, lambda: now[0])
    assert senders.admit([A, B])
    for now[0] in (300.0, 600.0, 900.0):
        assert senders.admit([A])
    assert senders.admit([C])
    assert not senders.admit([D])
    assert senders.admit([A, C])


def test_a_request_with_new_servers_is_taken_as_a_whole_or_not_at_all():
    """Two new ones need two places; refused, they take none, and the one that is known was heard all the same."""
    now = [0.0]
    senders = Senders(LIMITS, lambda: now[0])
    assert senders.admit([A])
    now[0] = 300.0
    assert senders.admit([B])
    now[0] = 650.0
    assert not senders.admit([B, C, D])
    assert senders.active() == 1
    assert senders.admit([C])
    now[0] = 949.9
    assert not senders.admit([D])


def test_spans_of_a_sender_forgotten_before_its_acknowledgement_count():
    now = [0.0]
    senders = Senders(IntakeLimits(senders=1), lambda: now[0])
    assert senders.admit([A])
    now[0] = 600.0
    assert senders.admit([B])
    senders.count(A, 3)
    assert (dict(senders.spans), senders.forgotten_spans) == ({}, 3)


def test_a_server_beyond_the_limit_is_asked_to_try_again_and_all_can_see_it(lib, tmp_path):
    """The cause is in the answer, in the health check and in the metrics; the servers that are known are served."""

    async def main():
        async with lib.running(tmp_path, limits=LIMITS, has_metrics=True) as at:
            for name in ("a", "b"):
                assert (await in_thread(export, at.grpc_port, lib.request(1, instance=name)))[0] == "OK"
            health = [await in_thread(get, at.http_port, "/healthz")]
            body = lib.request(2, instance="c")
            refused = await in_thread(export, at.grpc_port, body)
            refused_http = await in_thread(post, at.http_port, body.SerializeToString(), PROTOBUF)
            known = await in_thread(export, at.grpc_port, lib.request(3, instance="a"))
            health.append(await in_thread(get, at.http_port, "/healthz"))
            grpc_health = await in_thread(call, at.grpc_port, CHECK)
            metrics = samples((await in_thread(get, at.http_port, "/metrics"))[1])
            return refused, refused_http, known[0], health, grpc_health, metrics, at.intake.observed.refusals

    (code, text, trailers), (status, headers, _), known, health, grpc_health, metrics, refusals = asyncio.run(main())
    assert (code, text) == ("UNAVAILABLE", "2 servers are active, and no more may be")
    assert RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"]).retry_delay.seconds == 5
    assert (status, headers["retry-after"]) == (503, "5")
    assert (known, grpc_health) == ("OK", SERVING)
    assert health == [(200, "ok\n"), (200, "ok\nrefused within the last minute: senders\n")]
    assert metrics["tracefit_receive_refused_total", "senders"] == 2
    assert metrics["tracefit_receive_senders",] == metrics["tracefit_receive_senders_limit",] == 2
    assert metrics["tracefit_receive_forgotten_senders_total",] == 0
    assert refusals.news()[0].startswith("requests are refused (senders): 2 servers are active")
    assert sorted(path.name for path in (tmp_path / "vllm").iterdir()) == ["a", "b"]


def test_servers_that_come_and_go_are_all_received(lib, tmp_path, monkeypatch):
    """Twenty, four at a time, each for ten minutes, where eight may be active and two files may be open."""
    monkeypatch.setattr("tracefit.receive.store._OPEN_FILES", 2)
    now = [0.0]
    limits = IntakeLimits(senders=8, sender_idle_s=120)
    senders = Senders(limits, lambda: now[0])
    store = TraceStore(tmp_path, rotation=Rotation(seconds=300), clock=lambda: now[0])

    async def main():
        intake = Intake(store, PrivacyFilter(), Observed(), limits, senders)
        writing = asyncio.create_task(intake.run())
        number = 0
        for minute in range(50):
            now[0] = 60.0 * minute
            for pod in range(minute // 10 * 4, minute // 10 * 4 + 4):
                number += 1
                body = lib.request(number, instance=f"pod-{pod}").SerializeToString()
                await intake.take(lambda body=body: asyncio.sleep(0, body))
        intake.close()
        await writing
        return number, intake.observed.refusals.total

    assert asyncio.run(main()) == (200, 0)
    assert len({span for span, _ in lib.span_ids(tmp_path)}) == 200
    assert store.file_count == len(list(tmp_path.rglob("*.binpb"))) == 20 * 2
    assert (senders.forgotten, senders.forgotten_spans) == (12, 120)
    assert senders.spans.total() == 80


def test_long_names_are_cut_and_stay_apart(lib, tmp_path):
    """Every active sender's name is in memory."""
    names = ["x" * 256, "x" * 257, "x" * 1000 + "a", "x" * 1000 + "b"]

    async def main():
        async with lib.running(tmp_path) as at:
            for n, name in enumerate(names, 1):
                assert (await in_thread(export, at.grpc_port, lib.request(n, instance=name)))[0] == "OK"
            return [sender.instance for sender in at.intake.senders.spans]

    found = asyncio.run(main())
    assert found[0] == names[0]
    assert len(set(found)) == 4
    assert {len(name) for name in found} == {256}
    assert len(list((tmp_path / "vllm").iterdir())) == 4


def test_the_result_of_a_fleet_is_short_and_has_every_span():
    """Fifty rows, and one for 10 others and 7 that were forgotten: 10 * 2 + 30 spans."""
    heard = [ReceivedFrom("vllm", f"pod-{n}", 2) for n in range(60)]
    result = ReceiveResult(
        out=Path("out"),
        files=(),
        file_count=2000,
        bytes=1,
        spans=150,
        exports=9,
        refused=0,
        refused_by_cause={},
        dropped_events=0,
        received_from=tuple(heard),
        forgotten_senders=7,
        forgotten_spans=30,
    )
    lines = receive_text(result).splitlines()
    rows = [line.split() for line in lines[1:52]]
    assert rows[0] == ["vllm", "pod-0", "2"]
    assert rows[-2:] == [["vllm", "pod-49", "2"], ["17", "others", "50"]]
    assert lines[-1].startswith("written   2,000 files")
