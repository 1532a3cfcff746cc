"""Server settings: values, where they come from, and how they are put together."""

from __future__ import annotations

import json

import pytest

from tracefit.errors import UsageError
from tracefit.server.settings import (
    ALIASES,
    DEFAULTS,
    SETTINGS,
    ServerSettings,
    assume_defaults,
    canonical_name,
    merge,
    settings_from,
)


def test_nothing_is_known_of_nothing():
    settings = ServerSettings()

    assert settings.values() == settings.knobs() == {}
    assert settings == settings_from({}, where="x")


@pytest.mark.parametrize(
    "spelling",
    [
        "tensor_parallelism",
        "tensor_parallel_size",
        "--tensor-parallel-size",
        "tp",
        "-tp",
        "TP",
        "tensor-parallel",
    ],
)
def test_spellings_of_a_setting(spelling):
    assert settings_from({spelling: 4}, where="x").tensor_parallel == 4


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_of_a_setting(alias):
    assert canonical_name(alias) in SETTINGS


def test_values_have_sources_and_unknown_ones_are_kept():
    settings = settings_from(
        {
            "max_num_seqs": 64,
            "note": "hot day",
            "load_seconds": 9.5,
            "lora": ["a", {"b": 1}],
            "nothing": None,
        },
        where="run.yaml",
        source="read",
    )

    assert settings.sources == {"max_num_seqs": "read"}
    assert settings.other == {"note": "hot day", "load_seconds": 9.5, "lora": json.dumps(["a", {"b": 1}])}


def test_null_is_unset():
    settings = settings_from({"max_num_seqs": None, "gpu": None}, where="x")

    assert settings == ServerSettings()


def test_spellings_that_agree_are_one_and_those_that_contradict_are_refused():
    assert settings_from({"tp": 2, "tensor_parallelism": 2}, where="x").tensor_parallel == 2
    with pytest.raises(UsageError, match=r"run\.yaml: tp 2 and tensor_parallel_size 4 contradict"):
        settings_from({"tp": 2, "tensor_parallel_size": 4}, where="run.yaml")


@pytest.mark.parametrize(
    "key",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "tensor_parallelism",
        "block_size",
        "num_gpu_blocks_override",
    ],
)
@pytest.mark.parametrize("value", [0, -1, "64", 1.5, True, float("nan"), float("inf"), 10**30, [64], ""])
def test_count_that_cannot_be_names_key_and_file(key, value):
    with pytest.raises(
        UsageError, match=rf"^run\.yaml: {key} must be (a whole number|greater|less)"
    ) as caught:
        settings_from({key: value}, where="run.yaml")

    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("gpu_memory_utilization", [0.9, 1, 0.01], [0, -0.1, 1.01, "0.9", float("nan"), True]),
        ("step_tracing_sample_rate", [0, 0.1, 1.0], [-0.1, 1.5, "all", float("inf")]),
        ("enforce_eager", [True, False], [0, 1, "true", "no"]),
        ("enable_prefix_caching", [True, False], ["yes", 1.0]),
        ("model", ["org/name"], ["", "  ", 7, "x" * 600, "a\nb", ["m"]]),
        ("dtype", ["bfloat16"], [16, False]),
    ],
)
def test_kinds_of_values(key, good, bad):
    for value in good:
        assert settings_from({key: value}, where="x").values() == {key: value}
    for value in bad:
        with pytest.raises(UsageError, match=f"^x: {key} must "):
            settings_from({key: value}, where="x")


def test_given_wins_over_read_and_keeps_its_source():
    read = settings_from(
        {"max_num_seqs": 64, "tp": 2, "note": "a", "other": 1}, where="run.yaml", source="read"
    )
    given = settings_from({"max_num_seqs": 128, "note": "b"}, where="options")
    merged = merge(read, given)

    assert (merged.max_num_seqs, merged.tensor_parallel) == (128, 2)
    assert merged.sources == {"tensor_parallel": "read", "max_num_seqs": "given"}
    assert merged.other == {"note": "b", "other": 1}


def test_merging_nothing_changes_nothing():
    settings = settings_from({"max_num_seqs": 64, "note": "a"}, where="x", source="read")

    assert merge(settings, ServerSettings()) == merge(ServerSettings(), settings) == settings


def test_defaults_fill_in_what_is_not_said():
    settings = assume_defaults(settings_from({"block_size": 32}, where="x", source="read"))

    assert (settings.block_size, settings.tensor_parallel, settings.enforce_eager) == (32, 1, False)
    assert settings.sources["block_size"] == "read"
    assert {name for name, source in settings.sources.items() if source == "assumed"} == DEFAULTS.keys() - {
        "block_size"
    }
    assert settings.max_num_seqs is None  # its default depends on version and hardware


def test_defaults_are_those_of_the_engine():
    assert DEFAULTS == {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "gpu_memory_utilization": 0.9,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "block_size": 16,
        "kv_cache_dtype": "auto",
    }


def test_ranks_are_fewer_than_tokens():
    assert settings_from({"max_model_len": 1_000_000, "tp": 65_536}, where="x").tensor_parallel == 65_536
    with pytest.raises(UsageError, match="tp must be less than or equal to 65536, not 1000000"):
        settings_from({"tp": 1_000_000}, where="x")


def test_values_and_sources_are_in_the_same_order_whatever_order_they_came_in():
    there = settings_from({"max_num_seqs": 64, "tp": 2, "model": "m", "dtype": "half"}, where="x")
    back = settings_from({"dtype": "half", "model": "m", "tp": 2, "max_num_seqs": 64}, where="x")

    assert (
        list(there.values()) == list(back.values()) == ["model", "tensor_parallel", "max_num_seqs", "dtype"]
    )
    assert list(there.sources) == list(back.sources)
    assert json.dumps(there.knobs()) == json.dumps(back.knobs())


def test_knobs_tell_scopes_apart_and_leave_out_what_only_changes_the_view():
    settings = settings_from(
        {
            "model": "m",
            "gpu": "H100",
            "tp": 2,
            "pp": 2,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "kv_cache_dtype": "fp8",
            "journey_tracing_sample_rate": 0.5,
            "step_tracing_sample_rate": 0.5,
            "step_tracing_rich_subsample_rate": 0.5,
            "note": "n",
        },
        where="x",
    )

    assert settings.knobs() == {
        "pipeline_parallel": 2,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "kv_cache_dtype": "fp8",
    }
