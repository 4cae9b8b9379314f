"""Aliases for the array types used throughout the package."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Words = NDArray[np.uint64]
"""64-bit words for draws and masks."""
Array = NDArray[Any]
"""Array of any element type, for data that have not been converted yet."""
