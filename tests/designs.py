"""Training rows from arrays: of one run, with equal weights."""

from __future__ import annotations

import numpy as np

from tracefit.features.sets import Feature
from tracefit.fit.select import Design


def plain_design(x, y, blocks):
    """Return rows of free coefficients, to be cross-validated over `blocks` of time."""
    features = [Feature(f"x{k}", "1", f"x{k}") for k in range(x.shape[1])]
    rows, ones = np.arange(len(y)), np.ones(len(y))
    return Design(features, np.asfortranarray(x), y, ones, ones, np.zeros_like(rows), rows, blocks)
