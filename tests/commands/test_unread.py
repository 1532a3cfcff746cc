"""Files that are recognised, but whose lengths, times or settings all stay unread: the command says so and ends with
3."""

from __future__ import annotations

import json

import pytest

import clients
from tracefit import ingest, inspect
from tracefit.reports.terminal_results import inspect_text

STOCK = {
    "gen_ai.request.id": "cmpl-7",
    "gen_ai.usage.prompt_tokens": 120,
    "gen_ai.usage.completion_tokens": 31,
    "gen_ai.latency.time_to_first_token": 0.035,
    "gen_ai.latency.e2e": 0.335,
}


@pytest.fixture
def ingested(tmp_path):
    """Ingest one run with some files, and return the result."""

    def ingest_files(**files):
        for name, content in files.items():
            path = tmp_path / "run" / name.replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        return ingest(tmp_path / "run", tmp_path / "tables", workers=1)

    return ingest_files


def spans(traces, scope="vllm.tracing.otel", rename=None, without=(), errors=False, count=3):
    """Return requests as spans, with attributes renamed or left out."""
    rename = rename or {}
    facts = {rename.get(key, key): value for key, value in STOCK.items() if key not in without}
    begun = len(traces.records)
    for number in range(begun + 1, begun + count + 1):
        traces.span(scope, "llm_request", (number, number, 0), [], attributes=facts)
        if errors:
            traces.records[-1]["scopeSpans"][0]["spans"][0]["status"] = {"code": 2}
    return "\n".join(json.dumps({"resourceSpans": [record]}) for record in traces.records).encode()


def renamed(content: bytes, **names: str) -> bytes:
    """Return a log with other names of keys."""
    for old, new in names.items():
        content = content.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
    return content


def unread_of(result):
    """Return what a run says that it could not read, without the name of the file."""
    (run,) = result.runs
    assert all(f"{run.run_id}: {text}" in result.warnings for text in run.unread)
    assert result.exit_code == (3 if run.unread else 0)
    return [text.partition("read ")[2] for text in run.unread]


def test_requests_of_a_client_without_lengths_or_times(ingested):
    log = renamed(clients.inference_perf(clients.planned(8)), request_metrics="a", response_metrics="b")
    (said,) = unread_of(ingested(log=log))
    keys = "start_time, end_time, info.a.text.input_tokens, info.b.output_tokens, info.b.output_token_times, error"
    assert said == f"8 requests, none with lengths or times; keys seen: {keys}"


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize(
    ("write", "names", "lacks"),
    [
        (clients.guidellm, {"prompt_tokens": "in_tokens"}, "prompt tokens"),
        (clients.guidellm, {"prompt_tokens": "a", "output_tokens": "b"}, "lengths"),
        (clients.guidellm, {"first_token_iteration": "first"}, "times"),
        (clients.inference_perf, {"output_token_times": "token_times"}, "times"),
        (clients.aiperf, {"input_sequence_length": "isl", "output_sequence_length": "osl"}, "lengths"),
        (clients.aiperf, {"time_to_first_token": "ttft"}, "times"),
    ],
)
def test_each_format_with_optional_keys_is_under_the_rule(ingested, write, names, lacks):
    (said,) = unread_of(ingested(log=renamed(write(clients.planned(8)), **names)))
    assert said.startswith(f"8 requests, none with {lacks}; keys seen: ")
    assert any(new in said for new in names.values())


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("scope", ["vllm.llm_engine", "vllm.tracing.otel"])
def test_spans_with_other_names(ingested, traces, scope):
    names = {key: key.replace("gen_ai", "llm") for key in STOCK if "usage" in key}
    (said,) = unread_of(ingested(traces_json=spans(traces, scope, names)))
    keys = "gen_ai.request.id, llm.usage.prompt_tokens, llm.usage.completion_tokens, "
    assert said.startswith(f"3 requests, none with lengths; keys seen: {keys}")


@pytest.mark.slow
def test_spans_without_times(ingested, traces):
    without = [key for key in STOCK if "latency" in key]
    (said,) = unread_of(ingested(traces_json=spans(traces, without=without)))
    assert said.startswith("3 requests, none with times; keys seen: gen_ai.request.id, ")


@pytest.mark.slow
def test_a_file_counts_by_itself(ingested):
    good, plan = clients.inference_perf(clients.planned(8)), clients.planned(6)
    bad = renamed(clients.inference_perf(plan), input_tokens="a", output_tokens="b")
    result = ingested(good_json=good, bad_json=bad)
    (said,) = unread_of(result)
    assert said.startswith("6 requests, none with lengths")
    assert result.runs[0].unread[0].partition(": ")[0].endswith("bad.json")


@pytest.mark.slow
def test_a_second_ingest_says_it_again_and_inspect_too(ingested, tmp_path):
    log = renamed(clients.guidellm(clients.planned(8)), prompt_tokens="in_tokens")
    first, second = ingested(log=log), ingested(log=log)
    assert unread_of(first) == unread_of(second) != []
    for path in (tmp_path / "run", tmp_path / "tables"):
        found = inspect(path)
        assert found.runs[0].unread == first.runs[0].unread
        assert "none with prompt tokens" in " ".join(inspect_text(found).split())


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("name", clients.FORMS)
def test_a_log_as_its_program_writes_it_says_nothing(ingested, name):
    assert unread_of(ingested(log=clients.FORMS[name](clients.planned(8)))) == []


@pytest.mark.slow
def test_what_a_format_never_has_is_not_missed(ingested):
    plan = clients.planned(40)
    assert unread_of(ingested(**{n: write(plan) for n, write in clients.EXPERIMENT.items()})) == []


def test_requests_that_failed_need_no_times(ingested, traces):
    without = [key for key in STOCK if "latency" in key]
    assert unread_of(ingested(traces_json=spans(traces, without=without, errors=True))) == []


def test_one_request_that_is_read_is_enough(ingested, traces):
    spans(traces, rename={"gen_ai.usage.prompt_tokens": "a"}, count=5)
    assert unread_of(ingested(traces_json=spans(traces, count=1))) == []


@pytest.mark.slow
def test_settings_without_any_setting(ingested):
    log = clients.inference_perf(clients.planned(8))
    (said,) = unread_of(ingested(log=log, run_yaml=b"kind: Service\nspec: {ports: [8000]}\n"))
    assert said == "2 keys, none of them a setting; keys seen: kind, spec"
