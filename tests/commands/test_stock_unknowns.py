"""Facts that spans of an unmodified server cannot show are stated before training and in the verdict, and no
coefficient is wrong unsaid."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import polars as pl
import pytest

import tracefit
from tracefit.reports.terminal_results import inspect_text
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.options import LoadPhase

LOAD = SynthOptions(
    name="stock",
    form="stock",
    requests=320,
    rate_per_s=12.0,
    seed=4,
    abort_fraction=0.0,
    phases=(LoadPhase("steady", 1.0, 1.0),),
)
FAST = tracefit.TrainOptions(fast=True, features="batch")


@dataclass(frozen=True)
class Said:
    """Notes on a run, and its step model, null where none is fitted."""

    before: str
    step_time: str
    verdicts: dict[str, dict]
    after: str
    beta: dict | None

    def coefficient(self, feature):
        """Return the value of a term, 0 where the model is without it."""
        return sum(t["value"] for t in self.beta["terms"] if t["feature"] == feature)


def _said(folder, out):
    tracefit.ingest([folder], out / "tables", workers=1)
    inspection = tracefit.inspect(out / "tables")
    (deployment,) = inspection.deployments
    tracefit.run([folder], out, options=FAST, workers=1)
    (evaluation,) = json.loads((out / "evaluation.json").read_text())["deployments"]
    models = json.loads((out / "models/beta.json").read_text())["models"]
    return Said(
        " ".join(inspect_text(inspection).split()),
        next(each.verdict for each in deployment.allows if each.what == "step time"),
        evaluation["verdicts"],
        (out / "report.md").read_text(),
        next((m for m in models if m["name"] == "beta.cycle_time"), None),
    )


def _changed(folder, change):
    """Change the spans of a run, which `change` gets as a list in the order of their arrival, with the resource of
    each."""
    path = folder / "traces.json"
    spans = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                spans += [(span, resource["resource"], scope["scope"]) for span in scope["spans"]]
    spans.sort(key=lambda each: int(each[0]["startTimeUnixNano"]))
    with path.open("w") as file:
        for span, resource, scope in change(spans):
            scopes = [{"scope": scope, "spans": [span]}]
            file.write(json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}) + "\n")
    return folder


def _is_refused(said, reason):
    assert said.step_time == "no"
    assert reason in said.before
    assert said.beta is None
    assert reason in " ".join(said.after.split())
    for verdict in said.verdicts.values():
        assert verdict["answer"] == "no"
        assert "beta.cycle_time is not fitted" in verdict["reasons"]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, pytest.param(0.1, marks=pytest.mark.slow)])
def test_of_spans_sampled_at_the_head(tmp_path, rate):
    options = replace(LOAD, journey_sampling=rate, requests=round(150 / rate))
    said = _said(write_run(synth(options), tmp_path), tmp_path / "out")
    _is_refused(said, f"a sampler kept about {100 * rate:.0f} % of the traces")
    assert "OTEL_TRACES_SAMPLER=always_on" in said.before


@pytest.mark.slow
def test_of_data_parallel_ranks_behind_one_name(tmp_path):
    ranks = replace(LOAD, servers=2, instance_ids="none", requests=160)
    said = _said(write_run(synth(ranks), tmp_path), tmp_path / "out")
    _is_refused(said, "as often as those of several engines or front ends would be")
    assert "of one data-parallel rank" in said.before


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_several_front_ends_of_one_engine(tmp_path, named):
    """Each stamps the outputs of a step itself, 40 us apart; newer SDKs give each process an id of its own."""

    def share(spans):
        for number, (span, resource, scope) in enumerate(spans):
            if number % 2:
                for attribute in span["attributes"]:
                    if attribute["key"] in ("gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"):
                        attribute["value"]["doubleValue"] += 40e-6
            own = {"key": "service.instance.id", "value": {"stringValue": f"api-{number % 2}"}}
            attributes = [*resource["attributes"], *([own] if named else [])]
            yield span, {**resource, "attributes": attributes}, scope

    said = _said(_changed(write_run(synth(LOAD), tmp_path), share), tmp_path / "out")
    _is_refused(said, "prompts without a span were computed in them" if named else "engines or front ends")
    assert "--api-server-count 1" in said.before


@pytest.mark.slow
def test_of_requests_cut_at_the_edges(tmp_path):
    """A span is written when its request ends: the recording has those that end in the middle part of the run."""

    def cut(spans):
        ends = sorted(int(span["endTimeUnixNano"]) for span, *_ in spans)
        low, high = ends[len(ends) // 6], ends[-len(ends) // 6]
        return [each for each in spans if low <= int(each[0]["endTimeUnixNano"]) <= high]

    run = synth(LOAD)
    said = _said(_changed(write_run(run, tmp_path), cut), tmp_path / "out")
    assert "steps at the ends of the recording, where requests may be missing" in said.before
    assert "steps at the ends of the recording have no time" in said.after
    at_ends = int(str(said.beta["notes"]).partition(" steps at the ends")[0].rpartition("'")[2].replace(",", ""))
    # Some requests ran for longer than others: at either end as many steps as one of them took.
    assert at_ends > run.truth_requests.select((pl.col("finished_step") - pl.col("first_token_step")).max()).item()
    _is_right(said, run.law, prompts=0.1)


def _is_right(said, law, *, prompts):
    """Compare a model with the law: a batch of eight with 300 tokens of context each, and a prompt token."""
    step = said.beta["intercept"]["value"] + 8 * said.coefficient("num_decode_reqs")
    step += 2_400 * said.coefficient("context_tokens")
    assert step == pytest.approx(
        law.intercept_us + 8 * law.per_decode_req_us + 2_400 * law.per_context_token_us, rel=0.03
    )
    assert said.coefficient("prefill_tokens") == pytest.approx(law.per_prefill_token_us, rel=prompts)


def _reach(said):
    """Return the criterion of how far prompts in the training part fill a step."""
    criteria = said.verdicts["simulation"]["criteria"]
    return next(each for each in criteria if each["measure"] == "step_prefill_reach_pct")


@pytest.mark.slow
def test_of_prefix_cache_hits_in_some_prompts(tmp_path):
    """Prompts too short for a hit give the coefficient, which is right, and the verdict says how far they reach."""
    run = synth(replace(LOAD, prefix_fraction=0.4, requests=500))
    said = _said(write_run(run, tmp_path), tmp_path / "out")
    assert "batch composition limited" in said.before
    assert "prefix hits no they show in the times, and no span names them" in said.before
    assert "step times of prompts up to 128 tokens are without" in said.before
    assert "intervals with more than 128 prompt tokens, which may include hits, are left out" in said.after
    assert said.beta["training"]["exclusions"]["prefix_hit"] > 50
    assert _reach(said)["value"] == pytest.approx(100 * 128 / 2_048, abs=1)
    assert _reach(said)["answer"] == "with limits"
    _is_right(said, run.law, prompts=0.1)


@pytest.mark.slow
def test_of_prefix_cache_hits_in_nearly_every_prompt(tmp_path):
    """The coefficient of a prompt token is too low, and no verdict says to trust it."""
    run = synth(replace(LOAD, prefix_fraction=0.9, requests=500))
    said = _said(write_run(run, tmp_path), tmp_path / "out")
    assert "batch composition limited" in said.before
    assert "of prompts of any length: what a prompt token takes is uncertain" in said.before
    assert "the coefficient of a prompt token is uncertain, too low" in said.after
    assert "prefix_hit" not in said.beta["training"]["exclusions"]
    assert (_reach(said)["value"], _reach(said)["answer"]) == (0, "with limits")
    # Steps without a prompt do not suffer.
    _is_right(said, run.law, prompts=0.4)
    assert said.coefficient("prefill_tokens") < 0.95 * run.law.per_prefill_token_us


@pytest.mark.slow
def test_nothing_is_said_of_a_recording_that_lacks_nothing(tmp_path):
    run = synth(LOAD)
    said = _said(write_run(run, tmp_path), tmp_path / "out")
    assert said.step_time == "yes"
    assert "batch composition yes" in said.before
    assert "they show in the times" not in said.before
    assert "every prompt token counts as computed" in said.after
    assert "prefix_hit" not in said.beta["training"]["exclusions"]
    assert _reach(said)["answer"] == "yes"
    _is_right(said, run.law, prompts=0.05)
