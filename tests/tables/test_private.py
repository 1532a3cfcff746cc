"""Traces are private: what of them gets into the tables, and what more on request."""

from __future__ import annotations

import json

import pytest

from tracefit import IngestOptions, ingest
from tracefit.tables.store import TableStore

SECRETS = {
    "gen_ai.prompt": "SECRET prompt",
    "gen_ai.completion": "SECRET completion",
    "user.email": "SECRET@example.com",
    "http.target": "/v1/chat?key=SECRET",
}


@pytest.fixture
def folder(tmp_path, traces):
    """Return a run of one request whose spans say more than they should, beside spans of a web framework."""
    traces.request(1, 0, step=1, **SECRETS)
    event = traces.event("SECRET event", 0, {"SECRET key": "SECRET"})
    scope = dict(SECRETS, **{"http.route": "/health"})
    traces.span("fastapi", "GET /health", (7, 70, 0), [event], attributes=scope, server="web")
    traces.records += traces.records[-1:]
    folder = traces.write(tmp_path / "run")
    with (folder / "traces.json").open("a") as stream:
        stream.write('{"resourceSpans": [{"scopeSpans": [{"SECRET": "SECRET"\n')
    return folder


def tables_of(folder, out, **options):
    result = ingest([folder], out, options=IngestOptions(**options))
    return result, TableStore(out)


def everything_in(store):
    names = ("spans", "journey_events", "steps", "requests", "rejects", "runs")
    return "\n".join(str(store.read(name).to_dicts()) for name in names)


def attributes_of(store, name):
    rows = store.read("spans").filter(name=name)["attributes"].to_list()
    return [dict(row or {}) for row in rows]


def test_nothing_a_user_wrote_is_in_any_table(folder, tmp_path):
    _, store = tables_of(folder, tmp_path / "tables")
    assert "SECRET" not in everything_in(store)
    assert not [p for p in (tmp_path / "tables").rglob("*") if p.is_file() and b"SECRET" in p.read_bytes()]
    kept = {"gen_ai.request.id": "cmpl-1", "gen_ai.usage.prompt_tokens": "100"}
    assert attributes_of(store, "llm_request") == [kept]


@pytest.mark.slow
def test_more_attributes_are_kept_on_request(folder, tmp_path):
    _, store = tables_of(folder, tmp_path / "tables", keep_attributes=("user.email", "http.target"))
    (found,) = attributes_of(store, "llm_request")
    assert found["user.email"] == "SECRET@example.com"
    assert found["http.target"] == "/v1/chat?key=SECRET"
    assert "gen_ai.prompt" not in found


@pytest.mark.slow
def test_spans_of_other_services_are_counted_and_left_out(folder, tmp_path):
    result, store = tables_of(folder, tmp_path / "tables")
    assert result.runs[0].other_spans == 2
    assert set(store.read("spans")["scope"]) == {"vllm.api", "vllm.scheduler"}
    assert set(store.read("runs")["server"]) == {"engine"}


@pytest.mark.slow
def test_spans_of_other_services_are_kept_on_request(folder, tmp_path):
    _, plain = tables_of(folder, tmp_path / "plain")
    result, store = tables_of(folder, tmp_path / "tables", all_spans=True)
    assert result.runs[0].other_spans == 2
    spans = store.read("spans")
    other = spans.filter(scope="fastapi")
    assert other.select("span_id", "server", "name").rows() == [(f"{70:016x}", "web", "GET /health")]
    assert spans.filter(spans["scope"] != "fastapi").equals(plain.read("spans"))
    assert attributes_of(store, "GET /health") == [{"http.route": "/health"}]
    for name in ("journey_events", "steps", "requests"):
        assert store.read(name).equals(plain.read(name)), name
    assert store.read("runs").drop("run_id").equals(plain.read("runs").drop("run_id"))
    assert "SECRET" not in everything_in(store)


@pytest.mark.slow
def test_what_was_rejected_is_shown_on_request(folder, tmp_path):
    _, store = tables_of(folder, tmp_path / "tables")
    (hidden,) = store.read("rejects")["excerpt"]
    assert hidden == '{"resourceSpans":[{"scopeSpans":[{"…":"…"'
    _, store = tables_of(folder, tmp_path / "tables", show_values=True)
    (shown,) = store.read("rejects")["excerpt"]
    assert '"SECRET": "SECRET"' in shown


@pytest.mark.slow
def test_asking_for_less_again_takes_it_away(folder, tmp_path):
    """A folder's parts that were read with other options are not used for these."""
    tables_of(folder, tmp_path / "tables", all_spans=True, keep_attributes=tuple(SECRETS), show_values=True)
    _, store = tables_of(folder, tmp_path / "tables")
    assert "SECRET" not in everything_in(store)
    assert not [p for p in (tmp_path / "tables").rglob("*") if p.is_file() and b"SECRET" in p.read_bytes()]


@pytest.mark.slow
def test_dropped_attributes_are_counted(tmp_path, traces):
    traces.request(1, 0, step=1)
    traces.records[0]["scopeSpans"][0]["spans"][0]["droppedAttributesCount"] = 3
    ingest([traces.write(tmp_path / "run")], tmp_path / "tables")
    assert TableStore(tmp_path / "tables").read("runs")["dropped_attributes"].to_list() == [3]


def test_the_command_line_asks_for_the_same(folder, tmp_path, capsys, monkeypatch):
    from tracefit.cli import main  # noqa: PLC0415

    options = ["--keep-attributes", "user.email, http.target", "--keep-attributes", "gen_ai.prompt"]
    options += ["--all-spans", "--show-values", "--json"]
    arguments = ["tracefit", "ingest", str(folder), "--out", str(tmp_path / "tables"), *options]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert json.loads(capsys.readouterr().out)["runs"][0]["other_spans"] == 2
    store = TableStore(tmp_path / "tables")
    assert "fastapi" in set(store.read("spans")["scope"])
    (found,) = attributes_of(store, "llm_request")
    assert {"user.email", "http.target", "gen_ai.prompt"} <= found.keys()
    assert "gen_ai.completion" not in found
    assert "SECRET" in store.read("rejects")["excerpt"][0]
