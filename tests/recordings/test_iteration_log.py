"""vLLM's log with a line for each step: every form of a line, the clock of its steps, damage."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from datetime import UTC, datetime

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracefit
import wrapped
from decoding import decoded_block
from together import Recorded, together
from tracefit.inputs.blocks import Block, inspect_file, load, read_blocks
from tracefit.inputs.discovery import open_inputs
from tracefit.inputs.files import TraceFile
from tracefit.recordings import iteration_log
from tracefit.reports.terminal_results import inspect_text
from tracefit.synth import SynthOptions, synth, write_run

AT = 1_795_424_149.573491
"""2026-11-23 08:55:49.573491 UTC."""


def message(step, batch=(0, 0, 4, 4), *, elapsed_ms=11.9, engine="Engine 000: ", rest=", GPU KV cache usage: 0.5%"):
    """Return what vLLM writes of a step; `batch` is context requests, their tokens, generation requests, their
    tokens."""
    names = ("context requests", "context tokens", "generation requests", "generation tokens")
    counts = ", ".join(f"{count} {name}" for count, name in zip(batch, names, strict=True))
    return f"{engine}Iteration({step}): {counts}, iteration elapsed time: {elapsed_ms:.2f} ms{rest}"


def line(step, at=AT, **fields):
    return f"{at:.6f} INFO 21570 {message(step, **fields)}\n"


def of_the_time(at, form):
    return datetime.fromtimestamp(at, UTC).strftime(form)


FORMS = {
    "default": lambda m: f"INFO {of_the_time(AT, '%m-%d %H:%M:%S')} [loggers.py:198] {m}",
    "process": lambda m: f"(APIServer pid=77) INFO {of_the_time(AT, '%m-%d %H:%M:%S')} [loggers.py:198] {m}",
    "colours": lambda m: (
        f"\x1b[0;36m(APIServer pid=7)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m{of_the_time(AT, '%m-%d %H:%M:%S')}\x1b[0m "
        f"\x1b[90m[loggers.py:198]\x1b[0m {m}"
    ),
    "json": lambda m: json.dumps({"message": m, "asctime": of_the_time(AT, "%Y-%m-%d %H:%M:%S,573"), "level": "INFO"}),
    "docker": lambda m: json.dumps(
        {
            "log": f"INFO {of_the_time(AT, '%m-%d %H:%M:%S')} {m}\n",
            "time": of_the_time(AT, "%Y-%m-%dT%H:%M:%S.573491000Z"),
        }
    ),
    "kubernetes": lambda m: f"{of_the_time(AT, '%Y-%m-%dT%H:%M:%S.573491000Z')} stdout F {m}",
    "created": lambda m: f"{AT:.6f} INFO 21570 {m}",
    "zone": lambda m: f"{of_the_time(AT + 19800, '%Y-%m-%dT%H:%M:%S.573491+05:30')} {m}",
    "milliseconds": lambda m: json.dumps({"ts": int(AT * 1000), "msg": m}),
    "journal": lambda m: f"Nov 23 08:55:49.573491 INFO 11-23 08:55:49 [loggers.py:198] {m}",
    "syslog": lambda m: f"Nov 23 08:55:49 [gpu-1] {m}",
    "bare": lambda m: m,
}
SECOND = 1_795_424_149
STAMPS = {
    # A time without a year is in 2000: 957 years of 365.25 days less make 8:55:49 on the same day.
    **dict.fromkeys(
        ("default", "process", "colours", "syslog"),
        int(datetime(2000, 11, 23, 8, 55, 49, tzinfo=UTC).timestamp()) * 10**9,
    ),
    **dict.fromkeys(("json", "milliseconds"), SECOND * 10**9 + 573_000_000),
    **dict.fromkeys(("docker", "kubernetes", "created", "zone"), SECOND * 10**9 + 573_491_000),
    "journal": int(datetime(2000, 11, 23, 8, 55, 49, tzinfo=UTC).timestamp()) * 10**9 + 573_491_000,
    "bare": None,
}


def decoded(content, *, show_values=False):
    block = Block("f", "lines", "text", 1000, None, 0, None, "log")
    return decoded_block(iteration_log.decode, block, content, show_values=show_values)


def recorded(*contents, **settings):
    """Return a run of these logs, for a test that yields it."""
    logs = (content if isinstance(content, bytes) else content.encode() for content in contents)
    return Recorded(json.dumps({"model": "m"} | settings), tuple(logs), "server-{}")


@pytest.fixture
def ingested(tmp_path):
    """Ingest logs as one run; return its tables, and the result as `result`."""

    def of(*contents, **settings):
        folder = tmp_path / "runs" / "r"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(json.dumps({"model": "m"} | settings))
        for number, content in enumerate(contents):
            (folder / f"server-{number}").write_bytes(content if isinstance(content, bytes) else content.encode())
        result = tracefit.ingest([folder], tmp_path / "t")
        result_of = {n: pl.read_parquet(tmp_path / f"t/{n}/run_id=r/*.parquet") for n in ("steps", "runs", "rejects")}
        tracefit.inspect(tmp_path / "t")
        return result_of | {
            "timeline": pl.read_parquet(tmp_path / "t/timeline/run_id=r/*.parquet"),
            "result": result,
        }

    return of


# -- forms of a line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_line_is_a_step_however_the_log_is_formatted(form):
    content = FORMS[form](message(204, (2, 96, 4, 5))).encode() + b"\n"
    found = decoded(b"Some other output\n" + content + b"Iteration( is a word\n")
    assert found.rejects == []
    step = found.steps.row(0, named=True)
    wanted = {
        "source_offset": 1000 + len("Some other output\n"),
        "server": "unknown.dp0",
        "step_id": 204,
        "unix_ns": STAMPS[form],
        "cycle_us": 11_900.0,
        "num_prefill_reqs": 2,
        "prefill_tokens": 96,
        "num_decode_reqs": 4,
        "decode_tokens": 5,
        "scheduled_tokens": 101,
        "running_depth": 6,
        "waiting_depth": None,
        "kv_usage_ratio": 0.005,
    }
    assert {name: step[name] for name in wanted} == wanted


def test_lines_of_engine_processes_have_neither_engine_nor_usage():
    old = message(3, engine="", rest="")
    texts = [
        f"(EngineCore_DP1 pid=9) INFO 11-23 08:55:49 [core.py:88] {old}",
        message(3, engine="Engine 002: "),
        old,
    ]
    steps = decoded("\n".join(texts).encode()).steps
    assert steps["server"].to_list() == ["unknown.dp1", "unknown.dp2", "unknown.dp0"]
    assert steps["kv_usage_ratio"].to_list() == [None, 0.005, None]


@together
def test_a_dummy_batch_is_an_empty_step():
    dummy = line(2, AT + 0.01, batch=(0, 0, 0, 0), rest=" (dummy), GPU KV cache usage: 0.5%")
    encoder = line(3, AT + 0.02, rest=", 1 encoder inputs, 50 encoder tokens, GPU KV cache usage: 0.5%")
    tables = yield recorded(line(1) + dummy + encoder + line(4, AT + 0.04))
    assert tables["steps"]["waiting_depth"].to_list() == [None, 0, None, None]
    assert tables["timeline"]["idle_after"].to_list() == [False, True, False, False]
    assert tables["timeline"]["cycle_us"].round(3).to_list() == [None, 10_000, 10_000, None]


@pytest.mark.parametrize("compress", [None, "gzip", "zstd"])
def test_a_log_is_found_by_its_content_in_any_name(tmp_path, compress):
    content = b"\nTriton is installed\n" + line(0).encode() * 3
    if compress:
        content = gzip.compress(content) if compress == "gzip" else pa.Codec("zstd").compress(content, asbytes=True)
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    assert inspect_file(TraceFile.local(path)).recording is iteration_log.FORMAT
    with open_inputs("-", stdin=io.BytesIO(content)) as inputs:
        assert inspect_file(inputs.runs[0].trace_files[0]).recording is iteration_log.FORMAT


# -- the clock ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@together
def test_time_between_lines_is_of_the_later_step():
    tables = yield recorded(line(0) + line(1, AT + 0.010) + line(2, AT + 0.025) + line(3, AT + 0.027))
    timeline = tables["timeline"]
    assert timeline["cycle_us"].round(3).to_list() == [None, 10_000, 15_000, None]
    assert timeline["cycle_source"].to_list() == [None, "log", "log", None]
    assert set(timeline["composition_source"]) == {"log"}


@together
def test_time_beyond_the_elapsed_time_is_a_pause():
    times = [0.010 * step for step in range(30)]
    fresh = [line(step, AT + at, elapsed_ms=9.0) for step, at in enumerate(times)]
    # Of two prompts that nothing ran before, the first came at once, the other after 200 ms.
    fresh.append(line(30, AT + 0.300, batch=(1, 50, 0, 0), elapsed_ms=9.0))
    fresh.append(line(31, AT + 0.510, batch=(1, 50, 0, 0), elapsed_ms=9.0))
    fresh.append(line(32, AT + 0.520))
    fresh.append(line(33, AT + 0.530))
    timeline = (yield recorded("".join(fresh)))["timeline"].filter(pl.col("step_id").is_between(29, 32))
    assert timeline["idle_after"].to_list() == [False, False, True, False]


@together
def test_steps_within_a_whole_second_are_one_interval():
    # 40 steps of 100 ms: the clock changes at steps 5, 15, 25 and 35. The elapsed time, half a step, is not used.
    texts = [FORMS["default"](message(step, elapsed_ms=50.0)) for step in range(40)]
    texts = [text.replace(":49 ", f":{49 + (step + 5) // 10} ") for step, text in enumerate(texts)]
    timeline = (yield recorded("\n".join(texts) + "\n"))["timeline"].drop_nulls("cycle_us")
    found = timeline.select("step_id", "cycle_source", "interval_steps", pl.col("cycle_us").round(6))
    assert found.rows() == [(step, "log_interval", 10, 100_000.0) for step in (5, 15, 25)]


@pytest.mark.slow
@together
def test_elapsed_times_that_add_up_are_used():
    # 90 and 110 ms in turn.
    texts = [FORMS["default"](message(step, elapsed_ms=100.0 + 10 * (-1) ** step)) for step in range(40)]
    texts = [text.replace(":49 ", f":{49 + (step + 5) // 10} ") for step, text in enumerate(texts)]
    timeline = (yield recorded("\n".join(texts) + "\n"))["timeline"]
    assert timeline["cycle_us"].to_list() == [110_000.0, 90_000.0] * 20
    assert set(timeline["cycle_source"]) == {"log"}


def steps_of(waits_us, seconds_from=0.3):
    """Return lines of whole seconds, and the times of their steps: each its wait, 1 ms of work, and 100 us for each
    request."""
    prompts, running = [step % 7 == 0 for step in range(1500)], [1 + step // 100 % 5 for step in range(1500)]
    times_us = [
        (12_000 + 3_000 * at if prompt else 6_000 + 500 * at) + 1_000 + 100 * (at + prompt)
        for prompt, at in zip(prompts, running, strict=True)
    ]
    texts, at_s = [], seconds_from
    for step, (time_us, prompt, decoding) in enumerate(zip(times_us, prompts, running, strict=True)):
        at_s += time_us / 1e6
        batch = (int(prompt), 50 * prompt, decoding, decoding)
        wait_us = time_us - 1_000 - 100 * (decoding + prompt) if waits_us is None else waits_us
        text = FORMS["default"](message(step, batch, elapsed_ms=wait_us / 1e3))
        texts.append(text.replace("08:55:49 ", of_the_time(int(AT) + int(at_s), "%H:%M:%S ")))
    return "\n".join(texts) + "\n", times_us


@pytest.mark.slow
@together
def test_waits_and_the_work_between_them_divide_whole_seconds():
    text, times_us = steps_of(None)
    timeline = (yield recorded(text))["timeline"]
    off = [abs(found / true - 1) for found, true in zip(timeline["cycle_us"], times_us, strict=True)]
    assert max(off) < 0.03
    assert set(timeline["cycle_source"]) == {"log"}
    # Each step has its place in time, at most a step off.
    begins = [0.3 + sum(times_us[:step]) / 1e6 for step in range(1500)]
    zero_ns = STAMPS["default"]
    assert (
        max(abs((ns - zero_ns) / 1e9 - begin) for ns, begin in zip(timeline["ts_start_ns"], begins, strict=True)) < 0.03
    )


@pytest.mark.slow
@together
def test_waits_of_almost_nothing_leave_whole_seconds_as_they_are():
    timeline = (yield recorded(steps_of(50)[0]))["timeline"]
    assert set(timeline["cycle_source"].drop_nulls()) == {"log_interval"}


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("elapsed_ms", [9.0, 0.02], ids=["waits", "asynchronous"])
@pytest.mark.parametrize("hours", [1, 1 / 60, -1])
def test_a_jump_of_the_clock_is_no_step(ingested, elapsed_ms, hours):
    """The idle 50 minutes before step 80, whose request is new, is not a jump."""
    texts = [
        line(step, AT + step / 100 + 3600 * hours * (step >= 50) + 3000 * (step >= 80), elapsed_ms=elapsed_ms)
        for step in range(120)
    ]
    texts[80] = line(80, AT + 0.8 + 3600 * hours + 3000, batch=(1, 50, 0, 0), elapsed_ms=elapsed_ms)
    tables = ingested("".join(texts))
    timeline = tables["timeline"]
    times = timeline.filter(~pl.col("idle_after"))["cycle_us"].drop_nulls()
    assert times.is_between(9_999, 10_001).all()
    assert len(times) == 116
    idle = timeline.filter("idle_after").select("step_id", (pl.col("cycle_us") / 1e6).round(2)).rows()
    assert idle == [(80, 3000.01)]
    assert tables["runs"]["epochs"].to_list() == [1]
    reasons = {"steps.unix_ns jumps: the time to the next step is not a step's": 1}
    if hours < 0:
        moved = "the clock of the log was set back, and later times were moved"
        reasons[f"steps.unix_ns goes back: {moved}"] = 1
    assert json.loads(tables["runs"]["implausible"][0]) == reasons
    assert tables["result"].exit_code == 3


CHUNK, NEW = (1, 2048, 0, 0), (1, 50, 0, 0)


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("before", "gap_s", "is_jump"),
    [(CHUNK, 100.0, True), (CHUNK, 3600.0, True), (NEW, 100.0, False), (NEW, 3000.0, False)],
)
@together
def test_a_jump_between_the_chunks_of_a_prompt_is_no_pause(before, gap_s, is_jump):
    """A step of new requests only follows one that left a prompt unfinished: the engine did not idle."""
    texts = [line(step, AT + step / 100 + gap_s * (step >= 60)) for step in range(120)]
    texts[20] = line(20, AT + 0.2, batch=(2, 2048, 1, 1))
    texts[59], texts[60] = line(59, AT + 0.59, batch=before), line(60, AT + 0.6 + gap_s, batch=NEW)
    tables = yield recorded("".join(texts))
    idle = tables["timeline"].filter("idle_after")["step_id"].to_list()
    reasons = {"steps.unix_ns jumps: the time to the next step is not a step's": 1}
    assert idle == ([] if is_jump else [60])
    assert json.loads(tables["runs"]["implausible"][0] or "{}") == (reasons if is_jump else {})
    assert tables["timeline"]["cycle_us"].filter(tables["timeline"]["step_id"] == 60).is_null().item() == is_jump


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("gap_s", [1800.0, 3600.0, 5 * 3600 + 1800.0])
def test_a_gap_of_whole_half_hours_may_be_a_jump(ingested, gap_s):
    texts = [line(step, AT + step / 100 + gap_s * (step >= 60)) for step in range(120)]
    texts[60] = line(60, AT + 0.6 + gap_s, batch=NEW)
    tables = ingested("".join(texts))
    assert not tables["timeline"]["idle_after"].any()
    times = tables["timeline"]["cycle_us"].drop_nulls()
    assert times.is_between(9_999, 10_001).all()
    assert len(times) == 117
    (reason,) = json.loads(tables["runs"]["implausible"][0])
    assert reason.startswith("steps.unix_ns may jump: a gap of whole half hours")
    assert tables["result"].exit_code == 3


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("back_s", [10.0, 3600.0])
@together
def test_two_halves_of_a_log_do_not_meet_where_the_clock_was_set_back(back_s):
    """At the end of daylight saving the second half has the times of the first."""
    texts = [line(step, AT + step / 10 - back_s * (step >= 150)) for step in range(300)]
    tables = yield recorded("".join(texts))
    assert tables["runs"].select("epochs", "steps", "lost_steps").rows() == [(1, 300, 0)]
    assert tables["timeline"]["cycle_us"].drop_nulls().is_between(99_999, 100_001).all()
    assert len(tables["timeline"]["cycle_us"].drop_nulls()) == 297


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("elapsed_ms", [100.0, 1.0])
@together
def test_a_jump_of_whole_seconds_is_no_step(elapsed_ms):
    """With waits that add up, each step has its own time, but that at the jump."""
    texts = [
        FORMS["default"](message(step, elapsed_ms=elapsed_ms)).replace(
            "08:55:49 ", of_the_time(int(AT) + step // 10 + 3600 * (step >= 205), "%H:%M:%S ")
        )
        for step in range(400)
    ]
    tables = yield recorded("\n".join(texts) + "\n")
    times = tables["timeline"]["cycle_us"].drop_nulls()
    assert times.is_between(40_000, 200_000).all()
    assert len(times) > (390 if elapsed_ms == 100 else 30)
    assert tables["runs"]["implausible"].is_not_null().all()


@pytest.mark.slow
def test_a_restart_is_an_epoch_and_engines_are_apart(ingested):
    first = "".join(line(step, AT + step / 100) for step in range(20))
    again = "".join(line(step, AT + 60 + step / 100) for step in range(20))
    other = first.replace("Engine 000", "Engine 001")
    runs, steps = (ingested(first + other + again)[name] for name in ("runs", "steps"))
    assert runs.select("server", "epochs", "steps", "lost_steps").rows() == [
        ("unknown.dp0", 2, 40, 0),
        ("unknown.dp1", 1, 20, 0),
    ]
    assert steps.group_by("server", "epoch").len().sort("server", "epoch")["len"].to_list() == [20, 20, 20]


# -- several servers in one log, or in one folder ----------------------------------------------------------


def default(step, second=49, batch=(0, 0, 4, 4), elapsed_ms=11.9):
    """Return a line as vLLM writes it; `second` counts from 8:55."""
    at = of_the_time(AT - 49 + second, "%m-%d %H:%M:%S")
    return f"INFO {at} [loggers.py:198] {message(step, batch, elapsed_ms=elapsed_ms)}"


PREFIXES = {
    "compose": ("vllm-{}-1  | (APIServer pid={}) ", "vllm-{}-1"),
    "compose, coloured": ("\x1b[36mvllm_{}  |\x1b[0m ", "vllm_{}"),
    "swarm": ("vllm.{}.8xk2@node-1    | ", "vllm.{}.8xk2@node-1"),
    "kubectl": ("[pod/vllm-{}/server] ", "vllm-{}/server"),
    "stern": ("vllm-7d9f-{} server ", "vllm-7d9f-{}/server"),
    "stern, all namespaces": ("prod vllm-7d9f-{} server 2026-11-25T08:55:49.1Z ", "vllm-7d9f-{}/server"),
    "syslog": ("Nov  5 08:55:49 gpu-{} vllm[{}]: ", "gpu-{}/vllm"),
    "journal": ("2026-11-25T08:55:49+0000 gpu-{}.lan vllm[{}]: ", "gpu-{}.lan/vllm"),
    "rfc 5424": ("<34>1 2026-11-25T08:55:49.1Z gpu-{} vllm {} - - ", "gpu-{}/vllm"),
    "fluent bit": (
        '{{"kubernetes":{{"pod_name":"vllm-{}","container_name":"server","host":"n"}},"log":"',
        "vllm-{}/server",
    ),
    "docker driver": ('{{"container_name": "/vllm-{}", "pid": {}, "log": "', "vllm-{}"),
    "loki": ('{{pod="vllm-{}", job="x"}} ', "vllm-{}"),
    "host": ('{{"host":"gpu{}","message":"', "gpu{}"),
}


def prefixed(kind, name, pid=1):
    return PREFIXES[kind][0].format(name, pid)


@pytest.mark.mostly_slow(every=7)
@pytest.mark.parametrize("kind", PREFIXES)
@together
def test_servers_of_one_log_are_told_apart_by_what_is_before_their_lines(kind):
    pairs = [(prefixed(kind, "a") + default(step), prefixed(kind, "b") + default(7 * step)) for step in range(30)]
    tables = yield recorded("".join(f"{a}\n{b}\n" for a, b in pairs))
    a, b = (f"{PREFIXES[kind][1].format(name)}.dp0" for name in "ab")
    found = tables["runs"].select("server", "epochs", "steps", "lost_steps").rows()
    assert found == [(a, 1, 30, 0), (b, 1, 30, 6 * 29)]
    assert tables["rejects"].height == 0


@together
def test_a_server_that_restarts_in_a_log_of_several_is_one_server():
    """A restart changes the process."""
    texts = [prefixed("syslog", "a", 1) + default(step) for step in range(20)]
    texts += [prefixed("syslog", "b", 1) + default(step) for step in range(20)]
    texts += [prefixed("syslog", "a", 2) + default(step, second=80) for step in range(20)]
    runs = (yield recorded("\n".join(texts) + "\n"))["runs"]
    assert runs.select("server", "epochs", "steps").rows() == [
        ("gpu-a/vllm.dp0", 2, 40),
        ("gpu-b/vllm.dp0", 1, 20),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_line_of_one_server_has_no_name_of_it(form):
    assert decoded(FORMS[form](message(1)).encode()).steps["server"].to_list() == ["unknown.dp0"]


def interleaved(ahead, *, a=200, b=200, turn=1):
    """Return a log of two `Engine 000`: one at steps from 0, the other, with a line after each `turn` of it, at steps
    from `ahead`."""
    texts = []
    for step in range(a):
        texts.append(line(step, AT + step / 100))
        if step % turn == 0 and step // turn < b:
            texts.append(line(ahead + step // turn, AT + step / 100 + 0.004, batch=(0, 0, 2, 2), elapsed_ms=6.0))
    return "".join(texts)


@pytest.mark.mostly_slow(every=7)
@pytest.mark.parametrize(("ahead", "turn"), [(0, 1), (1, 1), (5, 1), (60, 1), (100_000, 1), (70_000, 20), (0, 20)])
def test_steps_of_two_engines_with_one_name_are_left_out(tmp_path, ingested, tracefit, ahead, turn):
    other = "".join(line(step, AT + step / 100).replace("Engine 000", "Engine 001") for step in range(30))
    tables = ingested(interleaved(ahead, turn=turn), other)
    count = 200 + 200 // turn
    assert tables["runs"].select("server", "epochs", "steps", "lost_steps").rows() == [("unknown.dp1", 1, 30, 0)]
    says = f"r: two engines share a name in one file: give one file each; {count} steps of them were left out"
    assert (tables["result"].warnings, tables["result"].exit_code) == ((says,), 3)
    assert set(tables["rejects"]["reason"]) == {"two engines share a name in one file: give one file each"}
    # Without any other step there is nothing to train on.
    (tmp_path / "runs" / "r" / "server-1").unlink()
    code, _, stderr = tracefit("run", tmp_path / "runs", "--out", tmp_path / "out")
    assert code == 1
    assert "two engines share a name in one file); give one file each" in stderr


@pytest.mark.slow
def test_two_engines_with_one_file_each_are_two_servers(ingested):
    """Lines of the second log were rotated away to a third file, and a part of them is in both."""
    first = "".join(line(step, AT + step / 100) for step in range(100))
    second = [line(900 + step, AT + step / 100, elapsed_ms=5.0) for step in range(100)]
    tables = ingested(first, "".join(second[50:]), "".join(second[:60]))
    assert tables["runs"].select("server", "epochs", "steps", "lost_steps").rows() == [
        ("server-0.dp0", 1, 100, 0),
        ("server-2.dp0", 1, 100, 0),
    ]
    assert tables["result"].runs[0].duplicate_spans == 10


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize(
    "logs",
    [
        pytest.param(lambda lines: [lines[:60], lines[60:]], id="rotated"),
        pytest.param(lambda lines: [lines[60:], lines[:60]], id="rotated, newest first"),
        pytest.param(lambda lines: [lines, lines], id="copied"),
        pytest.param(lambda lines: [lines[:60], lines[50:]], id="overlapping"),
        pytest.param(lambda lines: [[*lines, *lines[20:]]], id="sent again"),
        pytest.param(lambda lines: [[x for n, x in enumerate(lines) if n % 7 not in (3, 5)]], id="lines lost"),
        pytest.param(lambda lines: [[lines[n ^ 1] for n in range(100)]], id="pairs swapped"),
        pytest.param(
            lambda lines: [
                [
                    *lines,
                    *(
                        line(step, AT + 60 + 10 * loop + step / 100, elapsed_ms=7 + loop)
                        for loop in range(9)
                        for step in range(3 + 4 * loop)
                    ),
                ]
            ],
            id="restarting again and again",
        ),
    ],
)
def test_one_engine_is_one_server(ingested, logs):
    lines = [line(step, AT + step / 100, elapsed_ms=5 + step / 100) for step in range(100)]
    tables = ingested(*("".join(log) for log in logs(lines)))
    assert tables["runs"]["server"].to_list() == ["unknown.dp0"]
    assert not [text for text in tables["result"].warnings if "share a name" in text]


# -- damage ------------------------------------------------------------------------------------------------


def test_a_cut_line_costs_itself_alone(ingested):
    lines = [line(step, AT + step / 100) for step in range(8)]
    # Step 2 is cut in the middle and step 3 glued to it; step 5 is cut before its number, where nothing shows it; the
    # last has no end.
    text = "".join([*lines[:2], lines[2][:60], lines[3], lines[4], lines[5][:30], lines[6], lines[7][:-40]])
    tables = ingested(text)
    assert tables["steps"]["step_id"].to_list() == [0, 1, 3, 4, 6]
    assert tables["steps"]["unix_ns"].diff().drop_nulls().to_list() == [
        10_000_000,
        20_000_000,
        10_000_000,
        20_000_000,
    ]
    assert tables["result"].exit_code == 3
    assert tables["rejects"]["source_offset"].to_list() == [
        2 * len(lines[0]),
        text.index(lines[7][:-40]),
    ]
    assert tables["runs"]["lost_steps"].to_list() == [2]


@pytest.mark.slow
@together
def test_absurd_numbers_are_rejects():
    text = "".join(line(step, AT + step / 100) for step in range(20))
    odd = [
        (10**17, (0, 0, 1, 1)),
        (20, (0, 0, 10**15, 1)),
        (10**18, (0, 0, 1, 1)),
        (500_000_000, (0, 0, 1, 1)),
    ]
    text += "".join(line(step, AT + 0.2, batch=batch) for step, batch in odd)
    tables = yield recorded(text + line(21, AT + 0.21) + line(22, AT + 0.22) + line(23, AT + 0.23))
    assert tables["steps"]["step_id"].to_list() == [*range(20), 21, 22, 23]
    assert tables["rejects"].height == 4


def test_a_line_of_any_length_is_bounded_in_time():
    long = b"Iteration(1): " * 100_000
    found = decoded(long + b"\n" + line(1).encode())
    assert (found.steps.height, [reject.reason for reject in found.rejects]) == (
        1,
        ["line of the log too long"],
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(
    steps=st.lists(st.tuples(*[st.integers(0, 2**40)] * 5, st.integers(0, 10**8)), min_size=1, max_size=20),
    noise=st.lists(st.binary(max_size=60).filter(lambda b: b"\n" not in b and b"Iteration(" not in b), max_size=5),
    form=st.sampled_from(sorted(FORMS)),
    cut=st.integers(0, 400),
)
def test_what_is_written_is_read_whatever_is_around_it(steps, noise, form, cut):
    texts = [FORMS[form](message(step, batch, elapsed_ms=ms / 100)).encode() for step, *batch, ms in steps]
    whole = b"\n".join([*texts[:1], *noise, *texts[1:]]) + b"\n"
    found = decoded(whole + texts[0][:cut])
    rows = found.steps.select("step_id", *iteration_log._LINE_FIELDS[:4], pl.col("cycle_us").round(3)).rows()
    wanted = [(*step[:5], round(step[5] / 100 * 1e3, 3)) for step in steps]
    assert rows in (wanted, [*wanted, wanted[0]])
    assert len(found.rejects) <= 1


# -- the command line ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inspect_of_a_piped_log_says_what_it_lacks():
    content = b"".join(line(step, AT + step / 100).encode() for step in range(80))
    code = "from tracefit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "inspect", "-"], input=content, capture_output=True, check=False)
    shown = " ".join(done.stdout.decode().split())
    assert done.returncode == 0
    assert "78 steps from a line of the log to the next" in shown
    assert "every step, from the lines of the log" in shown
    assert "the log does not have them; spans of the same requests" in shown


@pytest.mark.slow
def test_log_with_spans_of_another_server_asks_for_no_spans(tmp_path):
    for form, seed in (("log", 5), ("stock", 6)):
        options = SynthOptions(name=form, form=form, seed=seed, requests=60)
        write_run(synth(options), tmp_path, formats=("json",))
    (tmp_path / "stock/traces.json").rename(tmp_path / "log/traces.json")
    shown = " ".join(inspect_text(tracefit.inspect(tmp_path / "log")).split())
    assert "requests of the run could be assigned to the lines of the log" in shown
    assert "start the server with --otlp-traces-endpoint" not in shown


# -- logs in containers -----------------------------------------------------------------------------------

STORES = {
    "docker": (wrapped.docker, None, "unknown.dp0"),
    "cri": (wrapped.cri, None, "unknown.dp0"),
    "loki": (wrapped.loki, 1, "vllm-0/vllm.dp0"),
    "cloudwatch": (wrapped.cloudwatch, 10**6, "vllm-server-1.dp0"),
    "insights": (wrapped.insights, 10**6, "unknown.dp0"),
    "subscription": (wrapped.subscription, 10**6, "vllm-server-1.dp0"),
    "google": (wrapped.google, 1, "vllm-0/vllm.dp0"),
    "journal": (wrapped.journal, 1000, "gpu-1/vllm.dp0"),
}
"""Container to its writer, the resolution of its times in ns (null if all lines have one time), and the server that it
names."""


@pytest.mark.parametrize("store", STORES)
def test_a_log_that_a_store_exports_is_read_whole(tmp_path, store):
    """Every step, at the finest time that the store has."""
    write, resolution_ns, server = STORES[store]
    steps_of_log = (f"\x1b[36m(EngineCore pid=7)\x1b[0m {default(step, second=1)}" for step in range(30))
    content = "\n".join(["Starting the server {", *steps_of_log])
    (tmp_path / "log").write_bytes(write(content.encode() + b"\n"))
    blocks = list(read_blocks(TraceFile.local(tmp_path / "log")))
    (block,) = blocks
    assert (block.recording, block.encoding) == ("log", "text")
    steps = decoded(load(block)).steps.sort("step_id")
    assert steps["step_id"].to_list() == list(range(30))
    assert set(steps["server"]) == {server}
    wanted = [1_790_000_000_223_456_789 + 10**8 * step for step in range(30)]
    if resolution_ns:
        wanted = [ns // resolution_ns * resolution_ns for ns in wanted]
    else:
        wanted = [int(datetime.fromisoformat(f"{wrapped.TIME[:19]}Z").timestamp()) * 10**9 + 123_456_789] * 30
    assert steps["unix_ns"].to_list() == wanted


@pytest.mark.parametrize("indent", [None, 4])
def test_an_export_in_which_a_record_is_cut_keeps_the_others(tmp_path, indent):
    entries = json.loads(wrapped.google("\n".join(default(step) for step in range(9)).encode()))
    content = json.dumps(entries, indent=indent).encode().replace(b'"insertId"', b'"insertId', 5)
    content = content.replace(b'"insertId', b'"insertId"', 4)
    (tmp_path / "log").write_bytes(content)
    blocks = list(read_blocks(TraceFile.local(tmp_path / "log")))
    steps = [step for block in blocks if isinstance(block, Block) for step in decoded(load(block)).steps["step_id"]]
    assert len(steps) == 8
    assert len(blocks) > 1
