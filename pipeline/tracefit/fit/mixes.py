"""Requests that are not plain text: models hold for the mix that was recorded, and say so."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from tracefit.text import in_words, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    import polars as pl

    from tracefit.fit.fitted import DeploymentTables
    from tracefit.server.context import Deployment
    from tracefit.server.settings import ServerSettings

_KV_SETTINGS = ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "cpu_offload_gb")
"""Settings of vLLM that move KV blocks, or weights, between media or servers."""
_KV_COLUMNS = ("kv_blocks_offloaded", "kv_blocks_loaded")
_MOST_NAMES = 4
_HOLDS = "the coefficients hold for this mix"


def mixes(deployment: Deployment, tables: DeploymentTables) -> Iterator[str]:
    """Yield a sentence for each of LoRA adapters, KV blocks that move, and inputs that are not text, as far as a run
    shows them.
    """
    settings = deployment.context.settings
    yield from _adapters(settings, tables.runs)
    yield from _moved_blocks(settings, tables)
    yield from _other_inputs(settings)


def _adapters(settings: ServerSettings, runs: pl.DataFrame) -> Iterator[str]:
    if not settings.has_adapters:
        return  # several names of a server without are doubts of `tables.named_models`
    listed = runs["models"].drop_nulls().unique() if "models" in runs.columns else ()
    named = Counter[str]()
    for each in listed:
        for _, _, name, spans in json.loads(each):
            named[name] += spans
    if len(named) < 2:
        yield f"the server has LoRA adapters, and spans do not say which requests use them: {_HOLDS}"
        return
    total = named.total()
    shares = [f"{name} {100 * spans / total:.0f} %" for name, spans in named.most_common(_MOST_NAMES)]
    more = f" and {len(named) - _MOST_NAMES} more" if len(named) > _MOST_NAMES else ""
    yield (
        f"the server has LoRA adapters: spans name {in_words(shares)}{more}; an adapter adds products to each layer "
        f"of the steps that have one of its requests, and {_HOLDS}"
    )


def _moved_blocks(settings: ServerSettings, tables: DeploymentTables) -> Iterator[str]:
    stated = [name for name in _KV_SETTINGS if settings.other.get(name) not in (None, "", 0, 0.0, "0", False)]
    moved = {
        name: total
        for name in _KV_COLUMNS
        if name in tables.timeline.columns and (total := tables.timeline[name].sum())
    }
    waits = tables.requests["kv_transfer_us"].count() if "kv_transfer_us" in tables.requests.columns else 0
    seen = [f"{name} {total:,}" for name, total in moved.items()]
    seen += [f"{plural(waits, 'request')} waited for KV blocks of another server"] if waits else []
    if stated or seen:
        yield (
            f"KV blocks leave the GPU's cache ({'; '.join([*stated, *seen])}): their way back is in the steps or the "
            f"waits of the requests that need them, and {_HOLDS}"
        )


def _other_inputs(settings: ServerSettings) -> Iterator[str]:
    if _takes_more_than_text(settings.other.get("limit_mm_per_prompt")):
        yield (
            "the server takes images or other inputs besides text (limit_mm_per_prompt), and spans do not say which "
            f"requests have them: an encoder's time is in the steps of their prompts, and {_HOLDS}"
        )


def _takes_more_than_text(limit: object) -> bool:
    """Return whether a stated limit of inputs per prompt is not 0 for all of their kinds."""
    if limit in (None, ""):
        return False
    try:
        limits = json.loads(str(limit))
    except ValueError:
        return True
    return any(limits.values()) if isinstance(limits, dict) else bool(limits)
