"""Packed numbers: unpacked unchanged for every width, and refused if damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sifu.errors import InputError
from sifu.store.statistics_files import RUN, pack, unpack
from sifu_verifier.packed import unpacked

KINDS = (np.dtype("<i4"), np.dtype("<i8"))


def by_hand(content: bytes, size: int) -> list[int]:
    """Read packed content number by number, as docs/store.md describes it."""
    half, count = size // 2, int.from_bytes(content[:8], "little")
    runs = -(-count // 64)
    low = [content[8 + half * place : 8 + half * (place + 1)] for place in range(64 * runs)]
    widths = content[8 + 64 * half * runs :][:runs]
    rest, high = content[8 + 64 * half * runs + runs :], {run: [0] * 64 for run in range(runs)}
    for width in (1, 2, 4):
        for run in (run for run in range(runs) if widths[run] == width):
            high[run] = [int.from_bytes(rest[width * at :][:width], "little", signed=True) for at in range(64)]
            rest = rest[64 * width :]
    assert rest == b""
    return [
        (high[place // 64][place % 64] << 8 * half) + int.from_bytes(low[place], "little") for place in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
def test_the_numbers_come_back(kind: np.dtype, data: st.DataObject) -> None:
    bits = data.draw(st.integers(1, 8 * kind.itemsize - 1))
    numbers = data.draw(arrays(kind, st.integers(0, 3 * RUN + 1), elements=st.integers(-(2**bits), 2**bits - 1)))
    content = bytes(pack(numbers))
    assert unpack(content, kind).tolist() == numbers.tolist()
    assert by_hand(content, kind.itemsize) == numbers.tolist()
    assert unpacked(content, kind.itemsize).tolist() == numbers.tolist()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_width_occurs_and_extremes_come_back(kind: np.dtype) -> None:
    half = 4 * kind.itemsize
    edges = [
        0,
        1,
        -1,
        *(side * 2**bits + off for bits in range(1, 2 * half - 1) for side in (1, -1) for off in (-1, 0, 1)),
    ]
    numbers = np.repeat(np.array([*edges, np.iinfo(kind).min, np.iinfo(kind).max], dtype=kind), RUN)
    content = bytes(pack(numbers))
    runs = len(numbers) // RUN
    widths = set(content[8 + len(numbers) * kind.itemsize // 2 :][:runs])
    assert widths == ({0, 1, 2} if kind.itemsize == 4 else {0, 1, 2, 4})
    assert np.array_equal(unpack(content, kind), numbers)
    assert np.array_equal(unpacked(content, kind.itemsize), numbers)


def test_features_take_half_the_space_and_a_sum_two_thirds() -> None:
    features = np.random.default_rng(0).exponential(5000.0, (1000, 256)).astype("<i4")
    total = (features.T.astype("<i8") @ features)[np.tril_indices(256)]
    assert len(pack(features)) < 0.53 * features.nbytes
    assert len(pack(total)) < 0.75 * total.nbytes


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_damaged_content_is_refused(kind: np.dtype) -> None:
    numbers = (np.arange(3 * RUN) << (4 * kind.itemsize)).astype(kind)
    content = bytes(pack(numbers))
    widths_at = 8 + numbers.nbytes // 2
    other_width = bytearray(content)
    other_width[widths_at] = 3
    swapped = bytearray(content)
    swapped[widths_at] = 0
    for damaged in (b"", content[:7], content[:40], content[:-1], content + b"\0", bytes(other_width), bytes(swapped)):
        with pytest.raises(InputError, match="packed numbers"):
            unpack(damaged, kind)
        assert unpacked(damaged, kind.itemsize) is None
