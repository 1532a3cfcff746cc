"""Array types for type checkers. Shapes are stated in the docstrings of the functions that take or return the arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
