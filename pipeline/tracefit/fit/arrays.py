"""Types of arrays, for type checkers: shapes are in the docstrings of what takes and returns them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
