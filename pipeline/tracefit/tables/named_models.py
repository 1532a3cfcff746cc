"""The models that spans name, by server: servers of different models in one run are two deployments that are read as
one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from tracefit.errors import printable
from tracefit.tables.dialects import MODEL_KEYS
from tracefit.text import in_words, plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_MOST_MODELS = 64
"""How many models a run lists: those that most spans name."""

_MOST_SHOWN = 3
_MOST_CHARS = 80

_MODEL_FAMILIES = (
    *("llama", "qwen", "mistral", "mixtral", "gemma", "phi", "deepseek", "falcon", "granite", "bloom", "opt"),
    *("gpt", "glm", "olmo", "nemotron", "starcoder", "mamba", "jamba", "cohere", "kimi", "minimax", "yi"),
)
_LEAST_WITHIN_CHARS = 5
"""Shorter families are whole words only."""

_NAME_WORDS = re.compile(r"[a-z]+|[0-9]+(?:\.[0-9]+)?b(?![a-z])")


class NamedModel(NamedTuple):
    """How many spans of a server and service name a model."""

    server: str
    service: str | None
    model: str
    spans: int


def named_models(spans: pl.DataFrame) -> pl.DataFrame:
    """Count the spans that name a model: server, service_name, model, spans.

    Args:
        spans: Rows of spans with `server`, `service_name` and `dialects.SPAN_KEYS`.
    """
    named = spans.select("server", "service_name", model=pl.coalesce(MODEL_KEYS)).drop_nulls("model")
    return named.group_by("server", "service_name", "model", maintain_order=True).agg(spans=pl.len())


def listed_models(counts: pl.DataFrame) -> list[NamedModel]:
    """Return the models of one run that most spans name, in the order of their servers; `counts` are rows of
    `named_models`.
    """
    summed = counts.group_by("server", "service_name", "model").agg(pl.col("spans").sum())
    most = summed.sort("spans", "server", "service_name", "model", descending=[True, False, False, False])
    ordered = most.head(_MOST_MODELS).sort("server", "service_name", "model", nulls_last=True)
    return [NamedModel(server, service, model, n) for server, service, model, n in ordered.iter_rows()]


class ModelDoubts(NamedTuple):
    """Texts about the models of a run: servers of different models, and signs that there may be some."""

    mixed: tuple[str, ...]
    possible: tuple[str, ...]


def model_doubts(
    named: Iterable[NamedModel], known: Collection[str], config: str | None, *, has_adapters: bool
) -> ModelDoubts:
    """Return a text for each sign that a run is not of one model.

    A server with LoRA adapters has several names. One is that of its base, which its settings state.

    Args:
        named: The result of `listed_models`.
        known: Names of the model that the run's settings state.
        config: The name in its config.json.
        has_adapters: Whether its settings name adapters.
    """
    models: defaultdict[tuple[str | None, str], Counter[str]] = defaultdict(Counter)
    for server, service, model, spans in named:
        models[service, server][model] += spans
    mixed, possible = [], []
    own = {plain_model_name(name) for name in known}
    # Aliases of one model, which the settings state, are one name.
    names = {each: {"" if plain_model_name(m) in own else plain_model_name(m) for m in models[each]} for each in models}
    apart = next(((a, b) for a, b in combinations(names, 2) if not names[a] & names[b]), None)
    if apart and not has_adapters:
        services = Counter(service for service, _ in models)
        texts = [f"{_service(*each, is_shared=services[each[0]] > 1)} names {_listed(models[each])}" for each in apart]
        mixed.append(
            f"servers of different models are in one run ({'; '.join(texts)}), and are read as one deployment: "
            "give the spans of each a run folder of its own"
        )
    # In order of the servers, and of one only: they are often replicas.
    several = next((each for each in names if len(names[each]) > 1 and "" not in names[each]), None)
    if several and not has_adapters:
        possible.append(
            f"spans of {_service(*several, is_shared=False)} name several models ({_listed(models[several])})"
            + (f", and none is {_shown(next(iter(known)))}" if known else "")
            + (
                ": if they are of several servers, give each a run folder of its own; if they are LoRA adapters, "
                "state model and enable_lora"
            )
        )
    total = sum(models.values(), Counter[str]())
    if config and total and all(_is_other(model, config) for model in total):
        possible.append(
            f"spans name {_listed(total)}, and config.json is of {_shown(config)}: features of the model are those "
            "of config.json"
        )
    return ModelDoubts(tuple(mixed), tuple(possible))


def _service(service: str | None, server: str, *, is_shared: bool) -> str:
    if service is None:
        return _shown(server)
    return f"{_shown(service)} ({_shown(server)})" if is_shared and service != server else _shown(service)


def _listed(models: Counter[str]) -> str:
    most = [f"{_shown(model)}, {plural(spans, 'span')}" for model, spans in models.most_common(_MOST_SHOWN)]
    return in_words([*most, *(["…"] if len(models) > _MOST_SHOWN else [])])


def _shown(name: str) -> str:
    return printable(name[:_MOST_CHARS])


def plain_model_name(name: str) -> str:
    """Return the name of a model without its folder or organisation: a path, a name of a hub and a short one may be of
    one model.
    """
    parts = [part for part in name.casefold().split("/") if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    return cached.rpartition("--")[2] if cached else parts[-1] if parts else ""


def _is_other(model: str, config: str) -> bool:
    """Return whether two names are of different models: of other families, or of one family in other sizes."""
    (families, sizes), (own_families, own_sizes) = _kind_of(model), _kind_of(config)
    if families and own_families and not families & own_families:
        return True
    return bool(families & own_families and sizes and own_sizes and not sizes & own_sizes)


def _kind_of(name: str) -> tuple[set[str], set[str]]:
    words = _NAME_WORDS.findall(plain_model_name(name))
    sizes = {word for word in words if word[0].isdigit()}
    families = {
        family
        for family in _MODEL_FAMILIES
        for word in words
        if word == family or (len(family) >= _LEAST_WITHIN_CHARS and family in word)
    }
    return families, sizes
