"""Other readers of JSON: DuckDB's and ClickHouse's (chdb), each writing the event columns that ingestion writes.

A process of its own: `python readers.py duckdb|chdb PATH OUT COLUMNS`, with the columns as JSON: family of events to
attribute key to `int`, `float` or `str`. They are given what a user would have to find out: which keys there are, how
they are spelled, and their kinds. They drop everything else, damage included, and write one Parquet file per family
with an event's span, name, times and attributes. Prints the rows per family.
"""
# ruff: noqa: S608 - paths and keys are the benchmark's own

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

Columns = Mapping[str, Mapping[str, str]]

_SCOPES = {
    "api": "scope = 'vllm.api'",
    "journey": "scope = 'vllm.scheduler'",
    "step": "event = 'step.BATCH_SUMMARY'",
    "snapshot": "event = 'step.REQUEST_SNAPSHOT'",
}
_SPAN = ("trace_id", "span_id", "parent_span_id", "span", "start_unix_ns", "end_unix_ns", "event", "unix_ns")


def with_duckdb(path: Path, out: Path, columns: Columns) -> dict[str, int]:
    """Write the columns with DuckDB's `read_json`; return the rows of each family."""
    import duckdb  # noqa: PLC0415

    value = "STRUCT(stringValue VARCHAR, intValue BIGINT, doubleValue DOUBLE)"
    event = f'STRUCT(timeUnixNano BIGINT, name VARCHAR, attributes STRUCT("key" VARCHAR, "value" {value})[])'
    span = (
        "STRUCT(traceId VARCHAR, spanId VARCHAR, parentSpanId VARCHAR, name VARCHAR, "
        f"startTimeUnixNano BIGINT, endTimeUnixNano BIGINT, events {event}[])"
    )
    resource_spans = f"STRUCT(scopeSpans STRUCT(scope STRUCT(name VARCHAR), spans {span}[])[])[]"
    connection = duckdb.connect()
    connection.execute(f"SET temp_directory = '{out}'")
    connection.execute("SET preserve_insertion_order = false")
    connection.execute(f"""
        CREATE TEMP TABLE events AS
        SELECT scope, s.traceId AS trace_id, s.spanId AS span_id, s.parentSpanId AS parent_span_id, s.name AS span,
            s.startTimeUnixNano AS start_unix_ns, s.endTimeUnixNano AS end_unix_ns,
            e.name AS event, e.timeUnixNano AS unix_ns,
            list_transform(e.attributes, lambda a: a.key) AS keys,
            list_transform(e.attributes, lambda a: a.value.stringValue) AS str,
            list_transform(e.attributes, lambda a: a.value.intValue) AS int,
            list_transform(e.attributes, lambda a: a.value.doubleValue) AS float
        FROM (SELECT scope, s, unnest(s.events) AS e FROM (
            SELECT ss.scope.name AS scope, unnest(ss.spans) AS s FROM (
                SELECT unnest(r.scopeSpans) AS ss FROM (
                    SELECT unnest(resourceSpans) AS r FROM read_json('{path}', format = 'newline_delimited',
                        maximum_object_size = 268435456, columns = {{resourceSpans: '{resource_spans}'}})))))
    """)
    rows = {}
    for family, keys in columns.items():
        chosen = [f"{kind}[list_position(keys, '{key}')] AS \"{key}\"" for key, kind in keys.items()]
        query = f"SELECT {', '.join([*_SPAN, *chosen])} FROM events WHERE {_SCOPES[family]}"
        found = connection.execute(f"COPY ({query}) TO '{out / family}.parquet' (FORMAT parquet)").fetchone()
        rows[family] = int(found[0]) if found else 0
    return rows


def with_chdb(path: Path, out: Path, columns: Columns) -> dict[str, int]:
    """Write the columns with ClickHouse's `file` function; return the rows of each family."""
    from chdb.session import Session  # noqa: PLC0415

    value = "Tuple(stringValue Nullable(String), intValue Nullable(Int64), doubleValue Nullable(Float64))"
    event = f"Tuple(timeUnixNano Int64, name String, attributes Array(Tuple(key String, value {value})))"
    span = (
        "Tuple(traceId String, spanId String, parentSpanId String, name String, "
        f"startTimeUnixNano Int64, endTimeUnixNano Int64, events Array({event}))"
    )
    scope_spans = f"Tuple(scope Tuple(name String), spans Array({span}))"
    structure = f"resourceSpans Array(Tuple(scopeSpans Array({scope_spans})))"
    with Session(str(out / "session")) as session:  # type: ignore[no-untyped-call]
        session.query("CREATE DATABASE d")
        session.query(f"""
            CREATE TABLE d.events ENGINE = Memory AS
            SELECT scope, s.traceId AS trace_id, s.spanId AS span_id, s.parentSpanId AS parent_span_id,
                s.name AS span, s.startTimeUnixNano AS start_unix_ns, s.endTimeUnixNano AS end_unix_ns,
                e.name AS event, e.timeUnixNano AS unix_ns, e.attributes.key AS keys,
                e.attributes.value.stringValue AS str, e.attributes.value.intValue AS int,
                e.attributes.value.doubleValue AS float
            FROM (SELECT scope, s, arrayJoin(s.events) AS e FROM (
                SELECT ss.scope.name AS scope, arrayJoin(ss.spans) AS s FROM (
                    SELECT arrayJoin(r.scopeSpans) AS ss FROM (
                        SELECT arrayJoin(resourceSpans) AS r FROM file('{path}', JSONEachRow, '{structure}')))))
            SETTINGS input_format_parallel_parsing = 1
        """)
        rows = {}
        for family, keys in columns.items():
            chosen = [f"{kind}[indexOf(keys, '{key}')] AS `{key}`" for key, kind in keys.items()]
            query = f"SELECT {', '.join([*_SPAN, *chosen])} FROM d.events WHERE {_SCOPES[family]}"
            session.query(f"INSERT INTO FUNCTION file('{out / family}.parquet', Parquet) {query}")
            counted = session.query(f"SELECT count() FROM d.events WHERE {_SCOPES[family]}", "CSV")
            rows[family] = int(str(counted))
    return rows


if __name__ == "__main__":
    reader = with_duckdb if sys.argv[1] == "duckdb" else with_chdb
    print(json.dumps(reader(Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))))
