"""Rows kept for testing: each drawn by what it is, so that no row ever changes the side of another.

A table with a column of identities draws by identity, every other table by what a row holds. Equal rows of one client
are then on the same side: leaving one of them out moves none of the others. Runs recorded before rows were drawn by
content number the rows of each client instead (`data.held_out_by = "number"`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sifu.theory.arrays import Array


def contents_of(x: Array, y: Array) -> Array:
    """Return a digest of each row's features and label, the same in every format the row is read from."""
    # Whether labels are whole numbers is decided by all rows together, so both are digested as float64; 0.0 turns -0.0.
    rows, labels = (np.ascontiguousarray(part, dtype=np.float64).reshape(len(y), -1) + 0.0 for part in (x, y))
    return np.array(
        [
            hashlib.sha256(row.tobytes() + b"|" + label.tobytes()).hexdigest()
            for row, label in zip(rows, labels, strict=True)
        ]
    )


def numbers_of(owners: Sequence[str]) -> Array:
    """Return each row's number among the rows of its client, counted from 0, as text."""
    numbers: Counter[str] = Counter()
    identities = []
    for owner in owners:
        identities.append(str(numbers[owner]))
        numbers[owner] += 1
    return np.array(identities)


def held_out_rows(client: Array, key: Array, share: float, seed: int) -> Array:
    """Return which rows are kept for testing, each drawn by its client and its key alone.

    Each client keeps at least one row to train on.

    Args:
        client: The client of each row.
        key: What a row is drawn by: its identity, the digest of its content or its number.
        share: The expected share of rows kept for testing.
        seed: The seed of the run.
    """
    held = np.zeros(len(client), dtype=bool)
    for row, (owner, name) in enumerate(zip(client, key, strict=True)):
        digest = hashlib.sha256(json.dumps(["held out", seed, str(owner), str(name)]).encode()).digest()
        held[row] = int.from_bytes(digest[:6]) < share * 2**48
    for owner in np.unique(client):
        rows = np.flatnonzero(client == owner)
        if held[rows].all():
            held[rows[0]] = False
    return held
