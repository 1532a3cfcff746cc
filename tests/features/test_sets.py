"""Feature sets: the built-in ones, a user's own, and what they become over a frame."""

from __future__ import annotations

import json

import polars as pl
import pytest

from tracefit.errors import UsageError
from tracefit.features.roofline import ROOFLINE_TERMS
from tracefit.features.sets import (
    AUTO,
    BUILT_IN,
    FREE_FEATURES,
    QUEUED_FEATURES,
    Feature,
    FeatureSet,
    add_features,
    feature_sets,
    parse_feature_set,
)
from tracefit.models.formulas import names_in, parse_formula

CONSTANTS = {
    "layers": 4.0,
    "tensor_parallel": 2.0,
    "size_proxy": 256.0,
    "kv_bytes_per_token": 1024.0,
    "is_moe": 0.0,
    "compute_to_bandwidth": 295.0,
    "gpu_memory_gb": 80.0,
    "max_num_seqs": 64.0,
    "max_num_batched_tokens": 2048.0,
}


def row_for(name, **values):
    """A row with every column a built-in set needs: those given, and 1 for the others."""
    needed = frozenset().union(*(names_in(parse_formula(f.formula, where="x")) for f in BUILT_IN[name].features))
    return {**dict.fromkeys(sorted(needed - CONSTANTS.keys()), 1.0), **values}


BATCH_VALUES = {
    "prefill_tokens": 30,
    "decode_tokens": 10,
    "num_prefill_reqs": 1,
    "num_decode_reqs": 10,
    "running_depth": 11,
    "waiting_depth": 2,
    "kv_usage_ratio": 0.5,
    "kv_blocks_used": 7,
}
QUEUE_VALUES = {"prompt_tokens": 100, "waiting_depth": 4, "running_depth": 16, "kv_usage_ratio": 0.5}
BATCH_ROW = row_for("batch", **BATCH_VALUES)
QUEUE_ROW = row_for("queue", **QUEUE_VALUES)


def one_row(name, row):
    return add_features(pl.DataFrame([row]), BUILT_IN[name], CONSTANTS).row(0, named=True)


def one(*features):
    return FeatureSet("mine", tuple(Feature(name, "1", formula) for name, formula in features))


def test_batch_set_by_hand():
    values = one_row("batch", BATCH_ROW)

    assert values["prefill_tokens"] == 30.0
    assert values["scheduled_tokens"] == 40.0
    assert values["prefill_share"] == 0.75
    assert values["decode_tokens_x_kv_blocks"] == 70.0
    assert values["prefill_tokens_x_layers"] == 120.0
    assert values["tensor_parallel"] == 2.0


def test_queue_set_by_hand():
    values = one_row("queue", QUEUE_ROW)

    assert values["batch_fullness"] == 0.25
    assert values["waiting_depth_x_kv_usage_ratio"] == 2.0
    assert values["prompt_tokens_x_batch_fullness"] == 25.0
    assert values["gpu_memory_gb"] == 80.0


def test_admission_and_departure_sets_by_hand():
    departure = row_for("departure", num_prefill_reqs=1, num_decode_reqs=3, finishing_reqs=2)
    admission = row_for("admission", prompt_tokens=100)
    left = one_row("departure", departure)

    assert (left["batch_requests"], left["finishing_reqs"]) == (4.0, 2.0)
    assert one_row("admission", admission)["prompt_tokens"] == 100.0


def test_step_without_tokens_has_no_share_of_prefill():
    empty = dict.fromkeys(BATCH_ROW, 0)

    assert one_row("batch", empty)["prefill_share"] == 0.0


def test_unknown_constants_make_their_features_null():
    values = add_features(pl.DataFrame([QUEUE_ROW]), BUILT_IN["queue"], dict.fromkeys(CONSTANTS)).row(0, named=True)

    assert values["waiting_depth"] == 4.0
    assert values["batch_fullness"] is values["size_proxy"] is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets_are_whole(name):
    feature_set = BUILT_IN[name]

    assert feature_set.name == name
    assert len(set(feature_set.names)) == len(feature_set.names)
    assert all(feature.name.isidentifier() and feature.unit and feature.reason for feature in feature_set.features)


def test_features_of_the_regimes_are_in_the_queue_set():
    assert {*QUEUED_FEATURES, *FREE_FEATURES} <= set(BUILT_IN["queue"].names)


def test_roofline_set_is_the_roofline_terms_but_the_constant():
    assert set(BUILT_IN["roofline"].names) == set(ROOFLINE_TERMS) - {"one"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets_can_be_written_and_read_again(name):
    feature_set = BUILT_IN[name]
    fields = [
        {"name": f.name, "unit": f.unit, "formula": f.formula, "reason": f.reason}
        | ({"sign": f.sign} if f.sign else {})
        | ({"shrunk": True} if f.shrunk else {})
        for f in feature_set.features
    ]
    ratios = {"ratios": feature_set.ratios} if feature_set.ratios else {}
    text = json.dumps(
        {
            "name": name,
            "features": fields,
            "defining": feature_set.defining,
            "is_relative": feature_set.is_relative,
            **ratios,
        }
    )

    assert parse_feature_set(text, where="x", is_json=True) == feature_set
    assert parse_feature_set(text, where="x") == feature_set


@pytest.mark.parametrize(
    ("unit", "coefficient"),
    [
        ("token", "us/token"),
        ("us", "1"),
        ("1", "us"),
        ("ratio", "us"),
        ("flag", "us"),
        ("token*block", "us/token*block"),
    ],
)
def test_unit_of_a_coefficient(unit, coefficient):
    assert Feature("x", unit, "x").coefficient_unit == coefficient


def test_columns_are_float64_and_rows_keep_their_order():
    frame = pl.DataFrame({"a": [3, 1, 2], "other": ["x", "y", "z"]})
    added = add_features(frame, one(("a", "a"), ("half", "a / 2")), {})

    assert added.columns == ["a", "other", "half"]
    assert added.schema["a"] == added.schema["half"] == pl.Float64
    assert added["half"].to_list() == [1.5, 0.5, 1.0]


def test_column_wins_over_a_constant_of_the_same_name():
    assert add_features(pl.DataFrame({"a": [1]}), one(("b", "a")), {"a": 5.0})["b"].to_list() == [1.0]


def test_unknown_name_is_one_line_with_the_known_ones():
    frame = pl.DataFrame(schema={"prefill_tokens": pl.Int64, "y": pl.Float64})
    with pytest.raises(UsageError) as caught:
        add_features(frame, one(("x", "prefil_tokens * layers")), {"layers": 2.0})

    assert str(caught.value) == (
        "feature x of set mine: needs prefil_tokens, which is not known; did you mean prefill_tokens? "
        "known: layers, prefill_tokens, y"
    )


def test_feature_may_not_overwrite_a_column_it_is_not():
    with pytest.raises(UsageError, match="feature y of set mine: has the name of a column and other values"):
        add_features(pl.DataFrame({"y": [1], "a": [2]}), one(("y", "a")), {})


def test_column_of_text_is_refused():
    frame = pl.DataFrame({"a": ["x"], "b": [1]})
    with pytest.raises(UsageError, match="feature y of set mine: a is a column of String, not of numbers"):
        add_features(frame, one(("x", "b"), ("y", "a * b")), {})


def test_columns_of_counts_flags_and_nulls_are_numbers():
    frame = pl.DataFrame({"a": [True], "b": [None], "c": [3]})
    added = add_features(frame, one(("x", "a * c"), ("y", "b")), {})
    assert added.select("x", "y").row(0) == (3.0, None)


def test_set_is_found_by_name():
    assert feature_sets("queue") == (BUILT_IN["queue"],)
    with pytest.raises(
        UsageError,
        match="feature set 'kew' is not known; known: batch, power, roofline, roofline_max, work_max, line, ",
    ):
        feature_sets("kew")


# -- files -----------------------------------------------------------------------------------------------

OWN = """
name: mine
features:
  - name: work
    unit: token
    formula: prefill_tokens + 2 * decode_tokens
    reason: because
  - {name: constant, unit: 1, formula: 1}
"""


@pytest.mark.parametrize("features", AUTO, ids=lambda one: one.name)
def test_no_set_for_step_times_reads_the_queue(features):
    """A closed loop whose steps grow with its queue runs away: a low load seemed to have a capacity below itself."""
    read = frozenset().union(*(names_in(parse_formula(f.formula, where="x")) for f in features.features))
    assert read.isdisjoint({"waiting_depth", "waiting_tokens", "queue", "waiting"})


def test_a_batch_costs_its_number_to_a_power():
    """Twice the requests cost 2 ** 0.85 = 1.8 times as much."""
    rows = pl.DataFrame([row_for("power", num_decode_reqs=n) for n in (10.0, 20.0)])
    few, many = add_features(rows, BUILT_IN["power"], CONSTANTS)["num_decode_reqs_power"]
    assert many / few == pytest.approx(1.8025, abs=1e-3)


def test_own_set(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    work = Feature("work", "token", "prefill_tokens + 2 * decode_tokens", "because")

    assert feature_sets(str(path)) == (FeatureSet("mine", (work, Feature("constant", "1", "1"))),)


def test_own_set_as_json(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"features": [{"name": "a", "unit": "1", "formula": "b"}]}))

    assert feature_sets(str(path)) == (FeatureSet("custom", (Feature("a", "1", "b"),)),)


def _features(number):
    return json.dumps({"features": [{"name": f"a{n}", "unit": "1", "formula": "b"} for n in range(number)]})


def _with(**changes):
    feature = {"name": "a", "unit": "token", "formula": "b", **changes}
    return json.dumps({"features": [{key: value for key, value in feature.items() if value is not ...}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_with(name=...), "features[0].name is missing; keys: formula, name, reason, shrunk, sign, unit"),
        (_with(unit=None), "features[0].unit must be text, not null"),
        (_with(formula=...), "features[0].formula is missing"),
        (_with(name="a b"), "features[0].name 'a b' is not a plain identifier"),
        (_with(name="1a"), "is not a plain identifier"),
        (_with(name="a-b"), "is not a plain identifier"),
        (_with(name="λ"), "is not a plain identifier"),
        (_with(name="__class__"), "is not a plain identifier"),
        (_with(name="a" * 81), "is not a plain identifier: at most 80 letters, digits and _"),
        (_with(unit="x" * 41), "unit must have at most 40 characters"),
        (_with(unit=["token"]), "unit must be text"),
        (_with(formula=True), "formula must be text"),
        (_with(formula="__import__('os')"), "which is not allowed"),
        (_with(reason=["x"]), "reason must be text"),
        (
            _with(weight=3),
            "features[0].weight is not a known key; keys: formula, name, reason, shrunk, sign, unit",
        ),
        ('{"features": []}', "features must have 1 or more items"),
        ('{"features": {}}', "features must be a list, not an object"),
        ("{}", "features is missing"),
        ('{"features": [3]}', "features[0] must be an object, not 3"),
        (
            '{"features": ' + json.dumps([{"name": "a", "unit": "1", "formula": "b"}] * 2) + "}",
            "features have the feature a twice",
        ),
        ('{"features": ' + json.dumps([{}] * 201) + "}", "features[0].name is missing"),
        ('{"name": 3, "features": [{"name": "a", "unit": "1", "formula": "b"}]}', "name must be text"),
        (_features(201), "features must have at most 200 items"),
        ('{"sets": []}', "features is missing; keys: defining, features, is_relative, name, ratios"),
        ("a: &a [x]\nb: *a", "uses YAML aliases"),
        ("[", "is not YAML"),
    ],
)
def test_file_that_is_no_set_is_one_line(text, message):
    with pytest.raises(UsageError) as caught:
        parse_feature_set(text, where="set.yaml")

    assert message in str(caught.value)
    assert str(caught.value).startswith("set.yaml")
    assert "\n" not in str(caught.value)


def _values(name, ratio, **columns):
    """Compute a set at a ratio over one row."""
    others = dict.fromkeys(
        ("weight_read_us", "moe_expert_read_us", "decode_kv_read_us", "prefill_kv_write_us", "tp_comm_us",
         "moe_dispatch_us", "batch_requests", "waiting_depth", "num_prefill_reqs", "num_decode_reqs"), 0.0,
    )  # fmt: skip
    frame = pl.DataFrame({**others, **columns})
    return add_features(frame, BUILT_IN[name].at(ratio), {}).row(0, named=True)


@pytest.mark.parametrize(
    ("ratio", "compute", "memory", "bound"), [(1.0, 30, 50, 50), (2.0, 30, 50, 60), (0.5, 30, 10, 15)]
)
def test_a_step_is_bound_by_compute_or_by_memory(ratio, compute, memory, bound):
    """The larger of ratio * compute and memory; never their sum."""
    columns = {"prefill_compute_us": compute - 5, "decode_compute_us": 5.0}
    memory_columns = {
        "weight_read_us": memory - 6,
        "decode_kv_read_us": 3.0,
        "prefill_kv_write_us": 1.0,
        "moe_expert_read_us": 2.0,
    }
    assert _values("roofline_max", ratio, **columns, **memory_columns)["step_bound_us"] == bound


@pytest.mark.parametrize(("ratio", "bound"), [(0.1, 40.0), (0.5, 50.0)])
def test_without_a_gpu_the_bound_is_an_amount_of_work(ratio, bound):
    """40 MFLOP and 100 kB: memory bounds a machine that does 0.5 MFLOP while it reads a kB."""
    columns = {
        "prefill_mflop": 30.0,
        "decode_mflop": 10.0,
        "weight_kb": 90.0,
        "kv_read_kb": 10.0,
        "expert_kb": 0.0,
        "kv_write_kb": 0.0,
    }
    assert _values("work_max", ratio, **columns)["step_bound_mflop"] == bound


@pytest.mark.parametrize(("reqs", "tokens", "first"), [(2, 2, 2), (2, 3, 0), (1, 1, 1), (0, 0, 0), (3, 400, 0)])
def test_prefills_of_one_token_each_are_first_decodes(reqs, tokens, first):
    (feature,) = (f for f in BUILT_IN["batch"].features if f.name == "first_decode_reqs")
    frame = pl.DataFrame({"num_prefill_reqs": [reqs], "prefill_tokens": [tokens]})
    assert add_features(frame, FeatureSet("x", (feature,)), {})["first_decode_reqs"].item() == first


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"ratios": [0]}, r"ratios\[0\] must be greater than 0"),
        ({"ratios": "2"}, "ratios must be a list"),
        ({"ratios": [1, True]}, r"ratios\[1\] must be a number, not true"),
        ({"ratios": list(range(1, 60))}, "ratios must have at most 50 items"),
    ],
)
def test_ratios_of_a_file_are_numbers(extra, message):
    text = json.dumps({"features": [{"name": "a", "unit": "us", "formula": "efficiency_ratio * b"}], **extra})
    with pytest.raises(UsageError, match=message):
        parse_feature_set(text, where="x", is_json=True)


def test_an_unknown_sign_is_refused():
    text = json.dumps({"features": [{"name": "a", "unit": "us", "formula": "b", "sign": "minus"}]})
    with pytest.raises(UsageError, match=r"features\[0\]\.sign must be 'non_negative', not text 'minus'"):
        parse_feature_set(text, where="x", is_json=True)
