"""Random generators by purpose and place, so that no draw depends on the order of the others."""

from __future__ import annotations

import hashlib

import numpy as np


def keyed(seed: int, purpose: str, *place: int) -> np.random.Generator:
    """Return the generator of one purpose at one place.

    >>> a, b, c = (keyed(7, "participants", 0, number).random() for number in (3, 3, 4))
    >>> a == b, a == c
    (True, False)
    """
    text = ":".join([str(seed), purpose, *map(str, place)])
    key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key.copy()))
