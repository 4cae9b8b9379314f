"""Rows held out for testing, each drawn by its own key, so that rows do not affect each other.

Rows are drawn by identity if the table has a column of identities, and by their content otherwise. Equal rows of one
client are then either all held out or all used for training. Removing a row does not change whether another row is held
out. The only exception is a client whose rows would all be held out: its first row is used for training.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sifu.theory.arrays import Array


def contents_of(x: Array, y: Array) -> Array:
    """Return a digest of each row's features and label, the same for every file format."""
    # The type of labels depends on all rows, so samples and labels are hashed as float64. Adding 0.0 makes -0.0 0.0.
    rows, labels = (np.ascontiguousarray(part, dtype=np.float64).reshape(len(y), -1) + 0.0 for part in (x, y))
    return np.array(
        [
            hashlib.sha256(row.tobytes() + b"|" + label.tobytes()).hexdigest()
            for row, label in zip(rows, labels, strict=True)
        ]
    )


def numbers_of(owners: Sequence[str]) -> Array:
    """Return each row's number among the rows of its client, counted from 0, as a string."""
    numbers: Counter[str] = Counter()
    identities = []
    for owner in owners:
        identities.append(str(numbers[owner]))
        numbers[owner] += 1
    return np.array(identities)


def held_out_rows(client: Array, key: Array, share: float, seed: int) -> Array:
    """Return a mask of the rows held out for testing; each draw depends only on the row's client, its key and the seed.

    The key is the row's identity or the digest of its content. If all rows of a client are drawn, its first row is kept
    for training.
    """
    held = np.zeros(len(client), dtype=bool)
    limit, written = share * 2**48, json.encoder.encode_basestring_ascii
    starts = {str(owner): f'["held out", {seed}, {written(str(owner))}, ' for owner in np.unique(client)}
    for row, (owner, name) in enumerate(zip(client.tolist(), key.tolist(), strict=True)):
        digest = hashlib.sha256(f"{starts[str(owner)]}{written(str(name))}]".encode()).digest()
        held[row] = int.from_bytes(digest[:6]) < limit
    for owner in np.unique(client):
        rows = np.flatnonzero(client == owner)
        if held[rows].all():
            held[rows[0]] = False
    return held
