"""Models as flat vectors, and the names and shapes that convert them to named arrays.

Norms, means and noise cover *all* parameters at once, so models are passed as flat vectors. Files and engines store the
layout as well. A client's reply contains its model as several arrays; `ModelPieces` reads them in place as
one flat vector, which saves a copy of every reply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError

Vector = NDArray[np.floating]


@dataclass(frozen=True)
class ModelLayout:
    """Names, shapes and element type of a model's parameters, in the order of flattening."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float64"

    @property
    def size(self) -> int:
        """Number of parameters, d."""
        return sum(math.prod(shape) for shape in self.shapes)

    def own_copy(self, model: Vector) -> Vector:
        """Return a copy of a flat model in the element type of this layout; refuse a model of the wrong size."""
        vector: Vector = np.array(model, dtype=self.dtype)
        self._check_size(vector)
        return vector

    def flatten(self, arrays: Mapping[str, NDArray[np.floating]]) -> Vector:
        """Return one vector of all arrays, in order; refuse a missing name or a wrong shape."""
        parts = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in arrays:
                raise InputError(f"the model has no parameter {name!r}; it has {sorted(arrays)}")
            if tuple(arrays[name].shape) != shape:
                raise InputError(f"parameter {name!r} has shape {tuple(arrays[name].shape)}, not {shape}")
            parts.append(np.asarray(arrays[name], dtype=self.dtype).reshape(-1))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=self.dtype)

    def unflatten(self, vector: Vector) -> dict[str, Vector]:
        """Return the named arrays of a flat vector (views where possible)."""
        self._check_size(vector)
        arrays, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            stop = start + math.prod(shape)
            arrays[name] = vector[start:stop].reshape(shape)
            start = stop
        return arrays

    def _check_size(self, vector: Vector) -> None:
        if vector.shape != (self.size,):
            raise InputError(f"a model of {self.size} parameters was expected, found shape {vector.shape}")


@dataclass(frozen=True, eq=False)
class ModelPieces:
    """Model whose flat vector is split into one or more arrays of the same type, which must not be modified.

    >>> model = ModelPieces((np.array([1.0, 2.0]), np.array([3.0])))
    >>> part = np.empty(2)
    >>> model.read(1, part)
    >>> part.tolist(), np.asarray(model).tolist()
    ([2.0, 3.0], [1.0, 2.0, 3.0])
    """

    pieces: tuple[Vector, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of every element."""
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the flat vector."""
        return (sum(piece.size for piece in self.pieces),)

    def read(self, first: int, part: Vector) -> None:
        """Fill `part` with the entries from index `first` on, converted to its type."""
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
        """Yield views of at most `length` entries that cover the model once."""
        for piece in self.pieces:
            for first in range(0, piece.size, length):
                yield piece[first : first + length]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return a copy as one flat vector."""
        return np.concatenate(self.pieces).astype(dtype or self.dtype, copy=False)


def model_pieces(arrays: Mapping[str, NDArray[Any]], layout: ModelLayout) -> ModelPieces:
    """Return named arrays as one model; if they do not fit the layout, return a model that `ReplyGate` refuses."""
    ours = [array.dtype for name, array in arrays.items() if name in layout.names]
    other = next((dtype for dtype in ours if dtype != np.dtype(layout.dtype)), None)
    if other is not None:
        return ModelPieces((np.zeros(layout.size, dtype=other),))
    shapes = [arrays[name].shape if name in arrays else None for name in layout.names]
    if not shapes or shapes != list(layout.shapes):
        return ModelPieces((np.zeros(0, dtype=layout.dtype),))
    return ModelPieces(tuple(arrays[name].reshape(-1) for name in layout.names))
