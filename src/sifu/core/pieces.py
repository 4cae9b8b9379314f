"""A model that lies in several arrays, read as one flat vector without being copied into one.

A client's reply holds its model array by array. Reading it where it lies saves a trip through memory for every reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.layout import Vector


@dataclass(frozen=True, eq=False)
class ModelPieces:
    """Flat arrays of one element type, at least one, that follow each other in a model; nobody writes to them.

    >>> model = ModelPieces((np.array([1.0, 2.0]), np.array([3.0])))
    >>> part = np.empty(2)
    >>> model.read(1, part)
    >>> part.tolist(), np.asarray(model).tolist()
    ([2.0, 3.0], [1.0, 2.0, 3.0])
    """

    pieces: tuple[Vector, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of every element."""
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the flat vector."""
        return (sum(piece.size for piece in self.pieces),)

    def read(self, first: int, part: Vector) -> None:
        """Fill `part` with the entries from number `first` on, as numbers of its own type."""
        done = 0
        for piece in self.pieces:
            if first < piece.size:
                count = min(piece.size - first, part.size - done)
                part[done : done + count] = piece[first : first + count]
                done += count
                if done == part.size:
                    return
            first = max(0, first - piece.size)

    def slices(self, length: int) -> Iterator[Vector]:
        """Every entry once, at most `length` together, as views."""
        for piece in self.pieces:
            for first in range(0, piece.size, length):
                yield piece[first : first + length]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """One flat vector, which is a copy."""
        return np.concatenate(self.pieces).astype(dtype or self.dtype, copy=False)
