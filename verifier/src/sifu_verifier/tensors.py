"""Reader of safetensors files."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np


def tensors_of(data: bytes, number: str) -> dict[str, Any]:
    """Return the flat tensors of a safetensors file, by name."""
    end = 8 + struct.unpack_from("<Q", data)[0]
    places = {name: entry["data_offsets"] for name, entry in json.loads(data[8:end]).items()
              if name not in ("salts", "__metadata__")}  # fmt: skip
    return {name: np.frombuffer(data[end + a : end + b], number).astype(float) for name, (a, b) in places.items()}
