"""Random numbers one at a time, at the price of an array draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

_CHUNK = 4_096


class Draws:
    """Standard normal and uniform numbers from one generator, drawn ahead in chunks."""

    def __init__(self, rng: np.random.Generator) -> None:
        normal_rng, uniform_rng = rng.spawn(2)
        self._normal = _normals(normal_rng)
        self._uniform = _uniforms(uniform_rng)

    def normal(self) -> float:
        """Return a draw of the standard normal distribution."""
        return next(self._normal)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a draw between `low` and `high`."""
        return low + (high - low) * next(self._uniform)


def _normals(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.standard_normal(_CHUNK).tolist()


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(_CHUNK).tolist()
