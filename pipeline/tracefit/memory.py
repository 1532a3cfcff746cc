"""Allocators that give back what is freed: memory that was needed once must not be kept for good."""

from __future__ import annotations

import os

SETTINGS = {
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:500,muzzy_decay_ms:0",  # polars
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Variables that polars and pyarrow read when they are imported."""


def keep_little() -> None:
    """Make polars and pyarrow keep little of what they free; of no effect once they are imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
