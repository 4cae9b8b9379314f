"""Names for the array types that the whole package uses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Words = NDArray[np.uint64]
"""64-bit words, of which draws and masks are made."""
Array = NDArray[Any]
"""An array of any type: data as its source delivers it."""
