"""A digest of a client's samples in their order: it tells whether a later command reads what the run was made with.

Requests for records name rows by their number, so the same rows in another order are other data. Where a feature map
makes a model's inputs, what is digested are the samples before it: not every map gives the same bits on every machine.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from sifu.theory.arrays import Array

PIECE_BYTES = 1 << 24
"""So many bytes of an array are in memory at a time, where it lies in a file or has to be copied."""


def sample_digest(client: Any) -> str:
    """SHA-256 over type, shape and bytes of `x` and `y`; of the samples behind `x` where a map made it.

    >>> from types import SimpleNamespace
    >>> x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    >>> digests = [sample_digest(SimpleNamespace(x=x[rows], y=y[rows])) for rows in ([0, 1, 2], [0, 2, 1])]
    >>> digests[0][:8], digests[0] == digests[1]
    ('43b0e34b', False)
    """
    mapped = getattr(client, "mapped_from", None)
    digest = hashlib.sha256()
    for values in (np.asarray(client.x) if mapped is None else mapped, np.asarray(client.y)):
        stored = values.dtype.newbyteorder("<")
        digest.update(f"{stored.str} {values.shape} ".encode())
        rows = max(1, PIECE_BYTES // max(1, values[:1].nbytes))
        for start in range(0, len(values), rows):
            digest.update(np.ascontiguousarray(values[start : start + rows], dtype=stored).data)
    return digest.hexdigest()


def row_digests(x: Array) -> Array:
    """SHA-256 of each sample by itself, as rows of 32 bytes, to be kept where features take the samples' place."""
    stored = x.dtype.newbyteorder("<")
    rows = (hashlib.sha256(np.ascontiguousarray(row, dtype=stored).data).digest() for row in x)
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(x), hashlib.sha256().digest_size)
