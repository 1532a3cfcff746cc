"""Configurations with values that nobody expects: they are read, or refused in one line, and never end a command."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.test_layer_kinds import MODELS
from tracefit.features.roofline import roofline_formulas
from tracefit.server.hardware import find_gpu
from tracefit.server.model_config import UnknownModelError, as_served, parse_architecture

_SECTIONS = [
    {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*self_attn.*": {}}},
    {"quant_method": "exl3", "bits": 4.25, "head_bits": 6},
    {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn", "re:.*mlp.*"]},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "g": {"targets": ["re:.*attn.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
        },
        "ignore": ["lm_head"],
    },
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}},
    {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
        "exclude": ["*self_attn*"],
    },
]

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**9, 10**30, 0.5, 1.5, -0.0, 1e308, float("nan"), float("inf")]),
    st.sampled_from(
        [
            "",
            "8",
            "auto",
            "M*E-",
            "re:(a+)+$",
            "re:(",
            "*" * 40,
            "model.layers.1.self_attn*",
            "\x00",
            "x" * 5000,
        ]
    ),
    st.sampled_from([[], {}, [None], [[]], [1, 2], [8] * 4, ["full_attention"] * 4, [1e9] * 61, {"a": 1}, [{}] * 80]),
)


def _places(value, path=()):
    """Yield the paths of all values in a configuration, of lists only the first two items."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value[:2]):
            yield from _places(item, (*path, i))


@st.composite
def configurations(draw):
    config = copy.deepcopy(draw(st.sampled_from(sorted(MODELS.items())))[1][0])
    if draw(st.booleans()):
        config["quantization_config"] = copy.deepcopy(draw(st.sampled_from(_SECTIONS)))
    for _ in range(draw(st.integers(1, 3))):
        places = [path for path in _places(config) if path]
        *parents, last = draw(st.sampled_from(places))
        part = config
        for key in parents:
            part = part[key]
        if draw(st.booleans()) and isinstance(part, dict):
            del part[last]
        else:
            part[last] = copy.deepcopy(draw(ODD))
        if not config:
            break
    return config


def _read(config):
    try:
        return as_served(parse_architecture(json.dumps(config), where="config.json"))
    except UnknownModelError as error:
        return error.line()


@pytest.mark.slow
@given(config=configurations(), tp=st.sampled_from([1, 2, 7]))
def test_an_odd_configuration_is_read_or_refused(config, tp):
    arch = _read(config)
    if isinstance(arch, str):
        assert "\n" not in arch
        assert len(arch) < 600
        return
    gpu = find_gpu("H100")
    assert 0 < arch.active_parameters <= arch.parameters
    assert arch.weight_bytes > 0
    assert arch.kv_bytes_per_token >= 0
    assert json.loads(json.dumps(arch.facts(), allow_nan=False))["layers"] <= 4096
    assert set(map(type, roofline_formulas(arch, gpu, tp=tp).values())) == {str}


def test_a_list_that_would_fill_the_memory_is_not_made():
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"):
        config = MODELS["seed-oss-36b"][0] | {key: 10**9}
        with pytest.raises(UnknownModelError, match=f"{key} must be less than or equal to"):
            parse_architecture(json.dumps(config), where="x")


def test_an_expression_that_takes_for_ever_elsewhere_is_matched_at_once():
    config = MODELS["seed-oss-36b"][0] | {
        "quantization_config": {
            "quant_method": "fp8",
            "ignore": ["re:(a+)+$", "re:(.*)*zz", "re:(?=look)", "re:("],
        }
    }

    assert parse_architecture(json.dumps(config), where="x").attention_weight_bytes == 1.0
