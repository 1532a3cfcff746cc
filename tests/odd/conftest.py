"""Odd runs: valid OTLP of a small generated run, with content that nobody expects, taken through every command.

`make test-all` tries 2 of them. Try more with `ODD_RUNS` after a change to what is read, fitted or exported; see
docs/maintaining.md.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import math
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import polars as pl
import pytest
import typer.main

from clients import EXPERIMENT, FORMS, planned, request_log
from recorded import WRITERS, csv_lines, records_of
from tracefit import consumers
from tracefit.cli import main
from tracefit.models.targets import TARGETS
from tracefit.synth import LengthMix, SynthOptions, synth, write_run
from tracefit.tables import dialects

# The parser of the command line is the same for every call; to make it takes longer than some commands.
typer.main.get_command = functools.cache(typer.main.get_command)

SCHEMAS = Path(__file__).parents[2] / "schemas"

_SMALL = SynthOptions(name="odd", seed=5, requests=60, rate_per_s=30.0, max_num_seqs=16, num_blocks=600)
_SHORT = LengthMix(((1.0, 20.0, 0.6),), maximum=60)
_BASE = replace(_SMALL, output_tokens=_SHORT, rich_sampling=0.3, prefix_fraction=0.3, prefix_tokens=32)
SHAPES: dict[str, SynthOptions] = {
    "busy": _BASE,
    "one request": replace(_BASE, requests=1),
    "few requests": replace(_BASE, requests=4),
    "one step": replace(_BASE, requests=1, output_tokens=LengthMix(((1.0, 1.0, 0.0),))),
    "all aborted": replace(_BASE, abort_fraction=1.0),
    "preempted and aborted": replace(_BASE, num_blocks=60, abort_fraction=0.1),
    "no decode": replace(_BASE, output_tokens=LengthMix(((1.0, 1.0, 0.0),))),
    "no prefill": replace(_BASE, prompt_tokens=LengthMix(((1.0, 1.0, 0.0),)), prefix_fraction=0.0),
    "two servers": replace(_BASE, servers=2, requests=40),
    "three epochs": replace(_BASE, epochs=3),
    "steps sampled": replace(_BASE, step_sampling=0.2),
    "journeys sampled": replace(_BASE, journey_sampling=0.5),
    "events dropped": replace(_BASE, span_event_limit=20),
    "whole durations": replace(_BASE, duration="step", requests=80),
    "unmodified vLLM": replace(_BASE, form="stock", requests=150),
    "SGLang": replace(_BASE, form="sglang", requests=100),
}
"""Runs that hold less, or more, than a run should: what is changed in them comes on top."""


@functools.cache
def _lines(shape: str, folder: Path) -> tuple[str, ...]:
    written = write_run(synth(SHAPES[shape]), folder / shape)
    return tuple((written / "traces.json").read_text().splitlines())


@dataclass
class OddRun:
    """A generated run whose records can be changed before it is written."""

    shape: str
    root: Path
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self):
        self.records = [json.loads(line) for line in _lines(self.shape, self.root / "bases")]

    def spans(self):
        """Return the spans, in the order they were sent."""
        return [
            span
            for record in self.records
            for resource in record["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def carriers(self, name, key):
        """Return the spans (of no name) or events of this name that have an attribute."""
        holders = self.spans()
        if name:
            holders = [e for span in holders for e in span.get("events", ()) if e["name"].endswith(name)]
        return [h for h in holders if any(a["key"] == key for a in h["attributes"])]

    def attributes(self):
        """Return every attribute that it may have: event (none: of a span), key."""
        own = {("", a["key"]) for span in self.spans() for a in span["attributes"]}
        return sorted({*attributes_of_events(), *own})

    def strip(self, name, key):
        """Leave an attribute out of every event whose name ends so (of any name, and the spans: empty); return of how
        many."""
        holders = self.carriers(name, key)
        if not name:
            holders = holders + [e for span in self.spans() for e in span.get("events", ())]
        for holder in holders:
            holder["attributes"] = [a for a in holder["attributes"] if a["key"] != key]
        return len(holders)

    def write(self, folder):
        """Write the run beside its configuration."""
        base = self.root / "bases" / self.shape / "odd"
        folder.mkdir(parents=True)
        for name in ("config.json", "exp-config.yaml"):
            (folder / name).write_bytes((base / name).read_bytes())
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        (folder / "traces.json").write_text(text)
        return folder


def call(*arguments):
    """Run the entry point in this process: exit code, stdout, stderr. A Python warning is an error.

    stderr has what libraries write to its file descriptor, past Python, too.
    """
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["tracefit", "--log-level", "warning", *map(str, arguments)]
    try:
        with (
            _descriptor_2(err),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            try:
                main()
            except SystemExit as ended:
                code = ended.code or 0
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _descriptor_2(err):
    """Append to `err` what is written to file descriptor 2."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as taken:
        os.dup2(taken.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            taken.seek(0)
            err.write(taken.read().decode(errors="replace"))


def _no_constant(text):
    raise AssertionError(f"{text} in a JSON file")


def read_json(path):
    """Read a JSON file; NaN and infinity are not JSON."""
    return json.loads(path.read_text(), parse_constant=_no_constant)


@functools.cache
def _validator(name):
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema)


TRIED = ("beta", *(target.model for target in TARGETS))


def through_every_command(folder, work, *, features="batch", commands=("inspect", "report", "verify")):
    """Take a run through every command; return what train left, if anything could be fitted.

    Each command ends with a documented exit code and at most one line of error; a warning of Python or an unforeseen
    error never occurs.
    """
    said = {}

    def command(*arguments, codes):
        code, stdout, stderr = call(*arguments)
        what = " ".join(map(str, arguments))
        assert code in codes, f"exit code {code} of `{what}`: {stderr}"
        assert "Traceback" not in stderr
        for line in stderr.splitlines():
            assert line.startswith(("tracefit: ", "warning: ")), line
        said[arguments[0]] = stdout + stderr
        return code

    out = work / "out"
    if "inspect" in commands:
        command("inspect", folder, codes=(0, 1))
    code = command("run", folder, "--out", out, "--fast", "--features", features, codes=(0, 1, 3))
    if (out / "tables").is_dir() and (out / "tables" / "manifest.json").is_file():
        command("requests", out, codes=(0, 1))
    if code == 1:
        # Nothing can be fitted, and the line says why; what was read is in the tables all the same.
        assert not (out / "models").exists()
        for consumer in ("report", "verify"):
            command(consumer, out, codes=(2,))
        command("predict", out / "models", "--batch", 4, codes=(2,))
        command("export", out, "--to", "csv", "--out", work / "csv", codes=(2,))
        return None, said
    # `run` has written the report already.
    if "report" in commands:
        command("report", out, codes=(0,))
    if "verify" in commands:
        command("verify", out, codes=(0,))
    command("predict", out / "models", "--batch", 4, "--context", 100, "--prefill", 16, codes=(0, 1))
    command("predict", out / "models", "--prompt", 50, "--output", 5, codes=(0, 1))
    for consumer in consumers.CONSUMERS:
        command("export", out, "--to", consumer, "--out", work / consumer, codes=(0, 1))
    return _checked(out), said


def _checked(out):
    """Return the evaluation: valid files without NaN, in which each model is there or has the reason why it is not."""
    evaluation = read_json(out / "evaluation.json")
    _validator("evaluation").validate(evaluation)
    for kind in ("alpha", "beta"):
        _validator("coefficients").validate(read_json(out / "models" / f"{kind}.json"))
    for deployment in evaluation["deployments"]:
        named = {*deployment["models"], *(m["name"] for m in deployment["not_fitted"])}
        assert all(any(name.startswith(tried) for name in named) for tried in TRIED), named
        assert all(m["reason"] for m in deployment["not_fitted"])
        assert not [m["reason"] for m in deployment["not_fitted"] if "unexpected" in m["reason"]]
        assert "unexpected" not in (deployment["latency_missing"] or "")
    return evaluation


def attributes_of_events():
    """Return every attribute of every event, and of the spans, as the table of dialects has them: event, key."""
    found = [("", key) for key in ("gen_ai.request.id", "http.route", "gen_ai.usage.prompt_tokens")]
    found += [("", "gen_ai.request.max_tokens"), ("", "gen_ai.usage.completion_tokens")]
    found += [("", "gen_ai.response.model")]
    for kind in dialects.EVENT_KINDS:
        keys = [k[0] for k in dialects.JOURNEY_KEYS.values()] if kind.layer == "core" else ["reason"]
        clock = ("ts.monotonic_ns", "ts.monotonic") if kind.layer == "core" else ("event.ts.monotonic",)
        found += [(f"{kind.event}", key) for key in (*keys, *clock)]
    found += [(dialects.STEP_EVENT, k[0]) for k in dialects.STEP_KEYS.values()]
    found += [(dialects.SNAPSHOT_EVENT, k[0]) for k in dialects.SNAPSHOT_KEYS.values()]
    return found


ODD_NUMBERS = (
    0,
    -1,
    1,
    1.5,
    10**9,
    2**31,
    2**53 + 1,
    2**62,
    2**64,
    math.nan,
    math.inf,
    1e-300,
    "",
    "many",
    None,
    True,
)

ODD_VALUES = (
    *({"intValue": str(n)} for n in (0, -1, 1, 10**9, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))),
    *({"doubleValue": x} for x in (0.0, -0.5, 1e-300, 1e18, 1.7e308, "NaN", "Infinity", "-Infinity")),
    *({"stringValue": s} for s in ("", "NaN", "12", "FIRST", "length", "many")),
    {"boolValue": True},
    {"arrayValue": {"values": [{"intValue": "3"}]}},
    {},
)


def damage(run, rng):
    """Change some of a run, in one of the ways that odd servers have; return what was done."""
    once = (_strip, _swap, _times, _epoch, _merge_servers, _without_events, _repeat, *_CLOCKS_AND_IDS)
    return rng.choice((_set, _set, _set, _scatter, _scatter, *once))(run, rng)


def _some(holders, rng):
    if not holders:
        return []
    most = max(1, round(len(holders) * rng.choice((0.0, 0.05, 0.3, 1.0))))
    return rng.sample(holders, min(most, len(holders)))


def _set(run, rng):
    name, key = rng.choice(run.attributes())
    value = rng.choice(ODD_VALUES)
    chosen = _some(run.carriers(name, key), rng)
    for holder in chosen:
        for attribute in holder["attributes"]:
            if attribute["key"] == key:
                attribute["value"] = copy.copy(value)
    return f"{len(chosen)} x {name} {key} = {value}"


def recorded(shape, rng, folder, root):
    """Write the steps of a run as ForwardPassMetrics of some encoding, some of them odd; return the folder."""
    truth = pl.read_csv(root / "bases" / shape / "odd" / "truth_steps.csv.gz")
    records = records_of(truth)
    for one in _some(records, rng)[: rng.choice((0, 1, 40, 400))]:
        part = rng.choice((one, one["scheduled_requests"], one["queued_requests"]))
        part[rng.choice(list(part))] = rng.choice(ODD_NUMBERS)
    if rng.random() < 0.3:
        rng.shuffle(records)
    if rng.random() < 0.3:
        records += _some(records, rng)
    name = rng.choice(list(WRITERS))
    parts = [part for one in records for part in _written(name, one)]
    for place in rng.sample(range(len(parts)), min(rng.choice((0, 0, 3)), len(parts))):
        parts[place] = parts[place][: rng.randrange(len(parts[place]) + 1)]
    folder.mkdir(parents=True)
    settings = {"model": "m", "gpu": rng.choice(("H100", "X9000")), "dp": rng.choice((1, 2))}
    (folder / "run.yaml").write_text(json.dumps(settings))
    if rng.random() < 0.7:
        config = json.loads((root / "bases" / shape / "odd" / "config.json").read_text())
        config.pop(rng.choice([*config, "nothing"]), None)
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "recorded").write_bytes(b"".join([*_heads(name), *parts]))
    return folder


def logged(rng, folder):
    """Write a log of a load generator, or of a server's requests, some numbers of it odd; return the folder."""
    plan = planned(rng.choice((1, 4, 60, 150)))
    forms = {**FORMS, **EXPERIMENT, "request_log": request_log}
    names = rng.sample(list(forms), rng.choice((1, 1, 2)))
    folder.mkdir(parents=True)
    if {*names} & {*EXPERIMENT}:
        names = [*EXPERIMENT]
    for name in names:
        content = forms[name](plan)
        places = [match.span() for match in re.finditer(rb"-?[0-9]+(?:[.][0-9]+)?(?:e-?[0-9]+)?", content)]
        for begin, end in sorted(rng.sample(places, min(rng.choice((0, 1, 5)), len(places))), reverse=True):
            content = content[:begin] + json.dumps(rng.choice(ODD_NUMBERS)).encode() + content[end:]
        if rng.random() < 0.2:
            # The rest shows what it is.
            content = content[: rng.randrange(len(content) // 2, len(content))]
        if rng.random() < 0.2:
            content += content
        (folder / name).write_bytes(content)
    (folder / "run.yaml").write_text(json.dumps({"model": "m", "gpu": "H100"}))
    return folder


def _heads(name):
    return csv_lines([]) if name == "csv" else []


def _written(name, one):
    """Return a record in an encoding; nothing where it cannot hold one of its values."""
    try:
        return WRITERS[name]([one])[len(_heads(name)) :]
    except (TypeError, ValueError, OverflowError):
        return []


def _scatter(run, rng):
    """Replace 50 to 300 values of any spans and events by odd ones, a tenth of them by none."""
    held = [a for span in run.spans() for e in (span, *span.get("events", ())) for a in e["attributes"]]
    count = min(rng.randint(50, 300), len(held))
    for attribute in rng.sample(held, count):
        attribute["value"] = copy.copy(rng.choice(ODD_VALUES))
        if rng.random() < 0.1:
            attribute["key"] = "nothing.known"
    return f"{count} values of any attribute"


def _strip(run, rng):
    pairs = rng.sample(run.attributes(), rng.choice((1, 10)))
    for name, key in pairs:
        run.strip(name, key)
    return f"without {pairs}"


def _swap(run, rng):
    """Give the values of an attribute to other events than their own."""
    name, key = rng.choice(run.attributes())
    held = [a for h in _some(run.carriers(name, key), rng) for a in h["attributes"] if a["key"] == key]
    values = [a["value"] for a in held]
    rng.shuffle(values)
    for attribute, value in zip(held, values, strict=True):
        attribute["value"] = value
    return f"{len(held)} x {name} {key} swapped"


def _times(run, rng):
    """Move events by odd times, on the wall clock."""
    events = _some([e for span in run.spans() for e in span.get("events", ())], rng)
    away = rng.choice((0, 10**6, 10**12, 10**17, -(10**12)))
    times = [str(max(0, int(e["timeUnixNano"]) + away)) for e in events]
    rng.shuffle(times)
    for event, time in zip(events, times, strict=True):
        event["timeUnixNano"] = time
    return f"times of {len(events)} events shuffled, {away} ns away"


def _span_times(run, rng):
    """Move spans, or their ends, by odd times: those of SGLang are its stages, and one of an unmodified vLLM is a
    request."""
    spans = _some(run.spans(), rng)
    away = rng.choice((0, 10**6, 10**9, 10**17, -(10**9)))
    keys = rng.choice((("startTimeUnixNano", "endTimeUnixNano"), ("endTimeUnixNano",)))
    for key in keys:
        times = [str(max(0, int(span[key]) + away)) for span in spans]
        rng.shuffle(times)
        for span, time in zip(spans, times, strict=True):
            span[key] = time
    return f"times of {len(spans)} spans shuffled, {away} ns away"


def _span_names(run, rng):
    """Give some spans the names, or the parents, of others, as stages that are missing or nested in another way."""
    spans = _some(run.spans(), rng)
    key = rng.choice(("name", "parentSpanId"))
    values = [span.get(key, "") for span in spans]
    rng.shuffle(values)
    for span, value in zip(spans, values, strict=True):
        span[key] = value
    return f"{key} of {len(spans)} spans swapped"


def _api_clock(run, rng):
    """Let the API process stamp its events on a clock that is ahead of the engine core's, or behind it."""
    ahead_s = rng.choice((0.002, 0.01, 0.05, 0.8, 60.0)) * rng.choice((1, -1))
    for name in (kind.event for kind in dialects.EVENT_KINDS if kind.layer == "api"):
        for event in run.carriers(name, "event.ts.monotonic"):
            for attribute in event["attributes"]:
                if attribute["key"] == "event.ts.monotonic" and "doubleValue" in attribute["value"]:
                    attribute["value"]["doubleValue"] += ahead_s
    return f"the API's clock is {ahead_s} s ahead"


def _one_time(run, rng):
    """Stop a clock: all of its stamps are equal."""
    name, key = rng.choice(
        (("", "ts.monotonic_ns"), ("", "event.ts.monotonic"), (dialects.STEP_EVENT, "step.ts_start_ns"))
    )
    held = [e for span in run.spans() for e in span.get("events", ()) if e["name"].endswith(name)]
    stamps = [a for e in held for a in e["attributes"] if a["key"] == key]
    for attribute in stamps:
        attribute["value"] = copy.copy(stamps[0]["value"])
    return f"{key} of {len(stamps)} events is the same"


def _wide_ids(run, rng):
    """Multiply the step ids of a part of the run."""
    factor, share = rng.choice((3, 1_000, 10**6)), rng.choice((0.0, 0.5, 0.9))
    held = [
        a["value"]
        for span in run.spans()
        for e in span.get("events", ())
        for a in e["attributes"]
        if a["key"] in ("step.id", "scheduler.step") and "intValue" in a["value"]
    ]
    least = sorted(int(value["intValue"]) for value in held)[int(len(held) * share)] if held else 0
    for value in held:
        if int(value["intValue"]) >= least:
            value["intValue"] = str(int(value["intValue"]) * factor)
    return f"step ids from {least} on times {factor}"


_CLOCKS_AND_IDS = (_api_clock, _one_time, _wide_ids, _span_times, _span_names)


def _epoch(run, rng):
    """Start the step counter again in the middle of the run."""
    for key, names in (
        ("step.id", (dialects.STEP_EVENT, dialects.SNAPSHOT_EVENT)),
        ("scheduler.step", ("",)),
    ):
        for name in names:
            spans = [e for span in run.spans() for e in span.get("events", ()) if e["name"].endswith(name)]
            for event in spans[len(spans) // 2 :]:
                for attribute in event["attributes"]:
                    if attribute["key"] == key and "intValue" in attribute["value"]:
                        attribute["value"] = {"intValue": str(int(attribute["value"]["intValue"]) // 2)}
    return "the step counter starts again"


def _merge_servers(run, rng):
    """Take away what tells servers apart: their counters mix."""
    for record in run.records:
        for resource in record["resourceSpans"]:
            held = resource["resource"]["attributes"]
            resource["resource"]["attributes"] = [a for a in held if a["key"] != "service.instance.id"]
    return "no server has an id"


def _without_events(run, rng):
    """Leave out all events of a name, or all spans of a scope."""
    if rng.random() < 0.3:
        scope = rng.choice(("vllm.api", "vllm.scheduler", "vllm.scheduler.step"))
        for record in run.records:
            for resource in record["resourceSpans"]:
                resource["scopeSpans"] = [s for s in resource["scopeSpans"] if s["scope"]["name"] != scope]
        return f"without {scope}"
    name = rng.choice([*(k.event for k in dialects.EVENT_KINDS), dialects.STEP_EVENT])
    for span in run.spans():
        if "events" in span:
            span["events"] = [e for e in span["events"] if not e["name"].endswith(name)]
    return f"without {name}"


def _repeat(run, rng):
    """Send some spans again under other ids: requests that share their names and their steps."""
    for span in _some(run.spans(), rng)[:40]:
        again = copy.deepcopy(span)
        again["spanId"] = f"{rng.getrandbits(64):016x}"
        last = run.records[-1]["resourceSpans"]
        for resource in last:
            for scope in resource["scopeSpans"][:1]:
                scope["spans"].append(again)
    return "spans again, under other ids"


@pytest.fixture(scope="session")
def odd():
    """Return the tools that make odd runs and take them through every command."""
    return SimpleNamespace(
        run=OddRun,
        recorded=recorded,
        logged=logged,
        damage=damage,
        shapes=tuple(SHAPES),
        through=through_every_command,
        call=call,
    )


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Return the folder of the runs as they were generated."""
    return tmp_path_factory.mktemp("bases")
