"""Generators for everything that is replayed: one independent stream for each purpose and place.

A round must draw the same participants and batches whether the run was interrupted or not, and a
client's batches must not depend on who else takes part (the counterfactual of docs/theory.md, section 2.2 is "the
same schedule, W absent"). So nothing is drawn from a running generator: each stream is keyed by what it
is for. Certified noise never comes from here, see `sifu.core.noise`.
"""

from __future__ import annotations

import hashlib

import numpy as np


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator for `purpose` at place `key`, independent of every other purpose and place.

    >>> a = keyed_generator(7, "participation", 0, 3).random()
    >>> b = keyed_generator(7, "participation", 0, 3).random()
    >>> c = keyed_generator(7, "participation", 0, 4).random()
    >>> a == b, a == c
    (True, False)
    """
    text = ":".join([str(int(seed)), purpose, *(str(int(part)) for part in key)])
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").copy()))
