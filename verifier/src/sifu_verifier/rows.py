"""Clients' samples as rows (docs/store.md, section 5a), and their statistics in exact integers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from sifu_verifier.run_folder import RunFolder

BITS = 16
"""Features and targets are integers in units of 2^-BITS (section 5a)."""
Rows = tuple[np.ndarray, np.ndarray]
"""Features (n, k) of a client's samples without the constant, and their targets (n, outputs)."""


def rows_of(numbers: np.ndarray, k: int, outputs: int) -> Rows:
    """Return the rows in a file's numbers: the features of all samples, followed by their targets."""
    split = len(numbers) // (k + outputs) * k
    return numbers[:split].reshape(-1, k), numbers[split:].reshape(-1, outputs)


def words_of_rows(clients: Iterable[Rows], k: int, outputs: int) -> np.ndarray | None:
    """Return the lower triangle of G, H, n and Q of all clients together, or None if a sample is too long.

    Products of float64 numbers are exact while sums of squares stay below 2^53, so samples are multiplied in batches.
    """
    gram, cross = np.zeros((k + 1, k + 1), dtype=np.int64), np.zeros((k + 1, outputs), dtype=np.int64)
    count = energy = 0
    for values, targets in clients:
        features, wanted = np.full((len(values), k + 1), 2.0**BITS), targets.astype(float)
        features[:, :k] = values
        longest = max(float(np.max((each * each).sum(axis=1), initial=1.0)) for each in (features, wanted))
        if longest > 2**53:
            return None
        step = int(2**53 // longest)
        for first in range(0, len(features), step):
            some, of_some = features[first : first + step], wanted[first : first + step]
            gram += (some.T @ some).astype(np.int64)
            cross += (some.T @ of_some).astype(np.int64)
            energy += int((of_some * of_some).sum())
        count += len(features)
    return np.concatenate([gram[np.tril_indices(k + 1)], cross.ravel(), np.array([count, energy], dtype=np.int64)])


def sums(run: RunFolder, words: Any) -> tuple[Any, Any]:
    """Return G and H from statistics (section 5a)."""
    k, outputs = json.loads(run.entries["layout"])["shapes"][0]
    triangle = (k + 1) * (k + 2) // 2
    gram = np.zeros((k + 1, k + 1))
    gram[np.tril_indices(k + 1)] = words[:triangle]
    gram = np.ldexp(gram + np.tril(gram, -1).T, -2 * BITS)
    return gram, np.ldexp(words[triangle:-2].reshape(k + 1, outputs).astype(float), -2 * BITS)
