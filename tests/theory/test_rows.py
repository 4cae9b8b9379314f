"""Rows of samples and their statistics: they add the same integers to a sum, whatever the blocks of the product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Rows, statistics_of, sums, total
from sifu.theory.closed_form.rows import rows_of_chunks

FIXED = FixedPoint(features=9, outputs=2, norm=4.0)
LONG = FixedPoint(features=9, outputs=2, feature_bits=25, target_bits=20, norm=1.0)
"""Fixed point at which the products of two samples may exceed 2^53 together."""


def samples(fixed: FixedPoint, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    phi, targets = generator.normal(size=(count, fixed.features)), generator.normal(size=(count, fixed.outputs))
    phi *= fixed.norm / np.linalg.norm(phi, axis=1, keepdims=True)
    return phi, targets * fixed.target_norm / np.linalg.norm(targets, axis=1, keepdims=True)


@given(
    seed=st.integers(0, 999),
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    block=st.integers(1, 9),
    fixed=st.sampled_from([FIXED, LONG]),
)
def test_rows_of_many_clients_give_the_sum_of_their_statistics(
    seed: int, counts: list[int], block: int, fixed: FixedPoint
) -> None:
    data = [samples(fixed, seed + number, count) for number, count in enumerate(counts)]
    expected = total(fixed, [statistics_of(fixed, *pair) for pair in data])
    rows = [rows_of_chunks(fixed, [pair]) for pair in data]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCK_ROWS", "STRIP", "TILE"):
            patch.setattr(sums, name, block)
        assert total(fixed, rows).digest() == expected.digest()
        mixed = [statistics_of(fixed, *data[0]), *rows[1:]]
        assert total(fixed, mixed).digest() == expected.digest()
        assert total(fixed, rows) - rows[0] == total(fixed, rows[1:])
    # The same with Python integers.
    phi = np.concatenate([part.features for part in rows]).astype(object)
    phi = np.hstack([phi, np.full((len(phi), 1), fixed.unit, dtype=object)])
    assert np.array_equal(phi.T @ phi if len(phi) else np.zeros_like(expected.gram), expected.gram)


def test_a_value_that_differs_gives_another_sum() -> None:
    rows = rows_of_chunks(FIXED, [samples(FIXED, 0, 3)])
    honest = total(FIXED, [rows])
    for array in ("features", "targets"):
        for place in np.ndindex(getattr(rows, array).shape):
            values = {"features": rows.features.copy(), "targets": rows.targets.copy()}
            values[array][place] += 1
            assert total(FIXED, [Rows(FIXED, **values)]) != honest


def test_rows_longer_than_the_norm_are_refused() -> None:
    rows = rows_of_chunks(FIXED, [samples(FIXED, 0, 3)])
    rows.check("a client")
    for array in ("features", "targets"):
        values = {"features": rows.features.copy(), "targets": rows.targets.copy()}
        values[array][1] = 2**30
        with pytest.raises(InputError, match="the rows of a client are refused"):
            Rows(FIXED, **values).check("a client")
