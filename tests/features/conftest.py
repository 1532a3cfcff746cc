"""Models, GPUs and configs that the tests of this room share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import polars as pl
import pytest

from tracefit.features.architecture import ModelArchitecture
from tracefit.features.hardware import Gpu
from tracefit.features.model_config import parse_architecture, read_architecture

CONFIGS = Path(__file__).parent / "configs"


class Load(Protocol):
    def __call__(self, name: str) -> ModelArchitecture: ...


class Parse(Protocol):
    def __call__(self, *, without: tuple[str, ...] = (), **changes: Any) -> ModelArchitecture: ...


@pytest.fixture
def load() -> Load:
    """Read one of the published configs by name."""
    return lambda name: read_architecture(CONFIGS / f"{name}.json")


@pytest.fixture
def config_of():
    """Return a published config as a dictionary to change."""
    return lambda name: json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.fixture
def parse() -> Parse:
    """Parse a small llama config with some keys changed and others left out."""

    def parse_changed(*, without: tuple[str, ...] = (), **changes: Any) -> ModelArchitecture:
        config: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 100,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        }
        config.update(changes)
        for key in without:
            config.pop(key)
        return parse_architecture(json.dumps(config), where="config.json")

    return parse_changed


@pytest.fixture
def dense() -> ModelArchitecture:
    """2 layers of attention 8·(16 + 8) = 192 and FFN 3·8·16 = 384 parameters; embeddings 2·80."""
    return ModelArchitecture(
        name="tiny",
        model_type="llama",
        hidden=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        ffn=16,
        layer_windows=(None, None),
        vocabulary=10,
    )


@pytest.fixture
def moe(dense: ModelArchitecture) -> ModelArchitecture:
    """3 layers of attention 256; 1 dense FFN 384; 2 MoE: 4 experts of 144, shared 96, router 32; embedding 80."""
    return replace(
        dense,
        kv_heads=2,
        layer_windows=(None, None, None),
        moe_layer_ids=(1, 2),
        experts=4,
        experts_per_token=2,
        expert_ffn=6,
        shared_ffn=4,
        tied_embeddings=True,
    )


@pytest.fixture
def gpu() -> Gpu:
    """1000 FLOP/us, 1000 bytes/us of memory and, one way, of link."""
    return Gpu(
        name="toy",
        compute_tflops_fp16=0.001,
        memory_gb=1.0,
        memory_bandwidth_gb_s=1.0,
        link_gb_s=2.0,
        sources={},
    )


@pytest.fixture
def step() -> pl.DataFrame:
    """One step: 20 prompt tokens of 2 requests with 10 computed before, 3 decodes with 30 tokens cached."""
    return pl.DataFrame(
        {
            "num_prefill_reqs": [2],
            "num_decode_reqs": [3],
            "prefill_tokens": [20],
            "decode_tokens": [3],
            "context_tokens": [30],
            "prefill_context_tokens": [10],
        }
    )


@pytest.fixture
def config_names() -> list[str]:
    """Names of the published configs."""
    return [path.stem for path in CONFIGS.glob("*.json")]
