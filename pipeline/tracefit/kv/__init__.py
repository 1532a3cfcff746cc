"""Read KV-cache recordings of vLLM servers into the `kv_events` table and columns of requests, runs and steps."""

from __future__ import annotations

import re

KV_NAME = re.compile(r"kv_events.*\.(jsonl|json|msgpack|bin)(\.(gz|zst))?")
"""Names of recordings in a run folder."""


def is_kv_file(name: str) -> bool:
    """Return whether a file of this name, given without its folder, is a KV-cache recording."""
    return KV_NAME.fullmatch(name) is not None
