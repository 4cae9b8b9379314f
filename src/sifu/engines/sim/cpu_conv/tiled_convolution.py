"""3x3 convolutions by tiles: each 2x2 block of outputs from its 4x4 patch of inputs, forward and backward by hand.

A tile is also a pooling window, so outputs are kept as four planes (place in the tile; tile; channel) and pooling is a
maximum over planes. Images are (sample, row, column, channel). Two ways from patches to tiles:

* `DenseTiles`, for few input channels: a patch (16 c numbers) times the weights of the four outputs, zeros where an
  output does not look. 16/9 of the multiplications of a plain convolution, but in one large product.
* `WinogradTiles`, for many: F(2x2, 3x3) of Winograd (Lavin and Gray 2016), in one dimension
      y = A'[(G g) * (B'd)],  A' = (1 1 1 0; 0 1 -1 -1),  G = (1 0 0; .5 .5 .5; .5 -.5 .5; 0 0 1),
      B' = (1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1),
  4/9 of the multiplications of a plain convolution, as 16 products of matrices. The transforms multiply by the
  Kronecker squares of A', B' and G; their transposes carry gradients back.

Both are exact in exact arithmetic. They are modules so that `threads.scripted` can compile them. Buffers and views
of them are made once for a number of samples and used again: a pass is a hundred short operations, and making a view
costs as much as starting one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from sifu.engines.sim.networks import ConvLayer

FEWEST_CHANNELS = 16
"""With fewer input channels Winograd's products are too thin to be fast."""


def tiles_of(layer: ConvLayer) -> tuple[int, int]:
    """Rows and columns of tiles; pooling leaves an odd last row out, without pooling a tile may stick out."""
    if layer.pool:
        return layer.height // 2, layer.width // 2
    return (layer.height + 1) // 2, (layer.width + 1) // 2


def padded_shape(layer: ConvLayer) -> tuple[int, int, int]:
    """One input image with its padding, and with a row or column of zeros more where the tiles stick out."""
    rows, columns = tiles_of(layer)
    return (
        max(layer.height_in + 2 * layer.padding, 2 * rows + 2),
        max(layer.width_in + 2 * layer.padding, 2 * columns + 2),
        layer.channels_in,
    )


def inside(layer: ConvLayer, padded: Tensor) -> Tensor:
    """The images inside their padding."""
    edge = layer.padding
    return padded[:, edge : edge + layer.height_in, edge : edge + layer.width_in]


class Tiles(nn.Module):
    """What both ways share: the padded images, their gradient, and where patches lie in them.

    `images` are written by the caller, `planes` (2, 2, samples, rows, columns, channels) is the result and,
    going backward, the gradient in it.
    """

    def __init__(self, layer: ConvLayer, samples: int, dtype: torch.dtype, *, wants_input_gradient: bool) -> None:
        super().__init__()
        rows, columns = tiles_of(layer)
        self.count = samples * rows * columns
        self.images = torch.zeros((samples, *padded_shape(layer)), dtype=dtype)
        self.gradient = torch.zeros_like(self.images) if wants_input_gradient else None
        self.planes = torch.empty((2, 2, samples, rows, columns, layer.channels_out), dtype=dtype)
        self._flat_planes = self.planes.view(4, self.count, layer.channels_out)
        self._grid = (samples, rows, columns, layer.channels_in)

    def _patches(self, images: Tensor) -> Tensor:
        """The 4x4 patches as a view (4, 4, samples, rows, columns, channels)."""
        samples, rows, columns, channels = self._grid
        sample, row, column, _ = images.stride()
        return images.as_strided(
            (4, 4, samples, rows, columns, channels), (row, column, sample, 2 * row, 2 * column, 1)
        )

    def _will_add_up(self, patch_gradient: Tensor) -> None:
        """Say where the gradient in the patches (4, 4, samples, rows, columns, channels) will be."""
        if self.gradient is None:
            return
        _, rows, columns, _ = self._grid
        self._never_first = [self.gradient[:, 2 * rows :], self.gradient[:, :, 2 * columns :]]
        places, low, high = self._patches(self.gradient), slice(0, 2), slice(2, 4)
        # Patches overlap by two, so within one of these four blocks no place is touched twice.
        blocks = [(low, low), (low, high), (high, low), (high, high)]
        self._places = [places[block] for block in blocks]
        self._found = [patch_gradient[block] for block in blocks]

    def _add_up(self) -> None:
        """The gradient in the images from that in the patches."""
        for strip in self._never_first:
            strip.zero_()
        self._places[0].copy_(self._found[0])
        for block in range(1, 4):
            self._places[block].add_(self._found[block])


class DenseTiles(Tiles):
    """Patches times one large matrix with the kernel at its four places."""

    def __init__(self, layer: ConvLayer, samples: int, dtype: torch.dtype, *, wants_input_gradient: bool) -> None:
        super().__init__(layer, samples, dtype, wants_input_gradient=wants_input_gradient)
        _, rows, columns, channels = self._grid
        depth = 16 * channels
        self._cut = torch.empty((samples, rows, columns, 4, 4, channels), dtype=dtype)
        self._matrix = self._cut.view(self.count, depth)
        self._cut_view = self._patches(self.images).permute(2, 3, 4, 0, 1, 5)
        self._four_times = self._matrix.expand(4, self.count, depth)
        self._four_times_transposed = self._four_times.transpose(1, 2)
        self._spread_gradient = torch.empty((4, depth, layer.channels_out), dtype=dtype)
        spread = self._spread_gradient.view(2, 2, 4, 4, channels, layer.channels_out)
        self._kernels = [spread[i, j, i : i + 3, j : j + 3] for i in (0, 1) for j in (0, 1)]
        self._will_add_up(self._cut.permute(3, 4, 0, 1, 2, 5))

    @staticmethod
    def room(layer: ConvLayer, dtype: torch.dtype) -> Tensor:
        """Where `prepare` puts weights: (place in the tile, 4 x 4 x in, out)."""
        return torch.zeros((4, 16 * layer.channels_in, layer.channels_out), dtype=dtype)

    @staticmethod
    def prepare(weights: Tensor, room: Tensor) -> None:
        """Put weights (3, 3, in, out) to their four places; between them `room` stays zero."""
        spread = room.view(2, 2, 4, 4, *weights.shape[2:])
        for down in (0, 1):
            for right in (0, 1):
                spread[down, right, down : down + 3, right : right + 3] = weights

    def forward(self, prepared: Tensor) -> None:
        """Fill `planes` from `images`."""
        self._cut.copy_(self._cut_view)
        torch.bmm(self._four_times, prepared, out=self._flat_planes)

    def backward(self, prepared: Tensor, weight_gradient: Tensor) -> None:
        """From the gradient in `planes`: that of the weights (3, 3, in, out), and of the images if wanted."""
        torch.bmm(self._four_times_transposed, self._flat_planes, out=self._spread_gradient)
        torch.add(self._kernels[0], self._kernels[1], out=weight_gradient)
        weight_gradient.add_(self._kernels[2]).add_(self._kernels[3])
        if self.gradient is not None:
            torch.mm(self._flat_planes[0], prepared[0].t(), out=self._matrix)
            for place in range(1, 4):
                self._matrix.addmm_(self._flat_planes[place], prepared[place].t())
            self._add_up()


def _square(rows: list[list[float]]) -> Tensor:
    matrix = torch.tensor(rows, dtype=torch.float64)
    return torch.kron(matrix, matrix)


_TO_TILES = _square([[1, 1, 1, 0], [0, 1, -1, -1]])
_FROM_PATCHES = _square([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
_FROM_WEIGHTS = _square([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


@functools.cache
def _from_weights(dtype: torch.dtype) -> Tensor:
    return _FROM_WEIGHTS.to(dtype)


class WinogradTiles(Tiles):
    """Patches, weights and tiles transformed so that a convolution is 16 products of matrices."""

    def __init__(self, layer: ConvLayer, samples: int, dtype: torch.dtype, *, wants_input_gradient: bool) -> None:
        super().__init__(layer, samples, dtype, wants_input_gradient=wants_input_gradient)
        channels, outputs = layer.channels_in, layer.channels_out
        self._to_tiles, self._from_patches = _TO_TILES.to(dtype), _FROM_PATCHES.to(dtype)
        self._to_weights = _from_weights(dtype).t()
        self._from_tiles, self._to_patches = self._to_tiles.t(), self._from_patches.t()
        self._cut = torch.empty((4, 4, *self._grid), dtype=dtype)
        self._cut_rows = self._cut.view(16, -1)
        self._cut_view = self._patches(self.images)
        self._patches16 = torch.empty((16, self.count, channels), dtype=dtype)
        self._patch_rows, self._patches_transposed = self._patches16.view(16, -1), self._patches16.transpose(1, 2)
        self._products = torch.empty((16, self.count, outputs), dtype=dtype)
        self._product_rows, self._plane_rows = self._products.view(16, -1), self._flat_planes.view(4, -1)
        self._weight_gradient16 = torch.empty((16, channels, outputs), dtype=dtype)
        self._weight_gradient_rows = self._weight_gradient16.view(16, -1)
        self._will_add_up(self._cut)

    @staticmethod
    def room(layer: ConvLayer, dtype: torch.dtype) -> Tensor:
        """Where `prepare` puts weights: (16, in, out)."""
        return torch.empty((16, layer.channels_in, layer.channels_out), dtype=dtype)

    @staticmethod
    def prepare(weights: Tensor, room: Tensor) -> None:
        """Transform weights (3, 3, in, out)."""
        torch.mm(_from_weights(weights.dtype), weights.view(9, -1), out=room.view(16, -1))

    def forward(self, prepared: Tensor) -> None:
        """Fill `planes` from `images`."""
        self._cut.copy_(self._cut_view)
        torch.mm(self._from_patches, self._cut_rows, out=self._patch_rows)
        torch.bmm(self._patches16, prepared, out=self._products)
        torch.mm(self._to_tiles, self._product_rows, out=self._plane_rows)

    def backward(self, prepared: Tensor, weight_gradient: Tensor) -> None:
        """From the gradient in `planes`: that of the weights (3, 3, in, out), and of the images if wanted."""
        torch.mm(self._from_tiles, self._plane_rows, out=self._product_rows)
        torch.bmm(self._patches_transposed, self._products, out=self._weight_gradient16)
        torch.mm(self._to_weights, self._weight_gradient_rows, out=weight_gradient.view(9, -1))
        if self.gradient is not None:
            torch.bmm(self._products, prepared.transpose(1, 2), out=self._patches16)
            torch.mm(self._to_patches, self._patch_rows, out=self._cut_rows)
            self._add_up()


def tiles_kind(layer: ConvLayer) -> type[DenseTiles] | type[WinogradTiles]:
    """The faster of the two for a layer."""
    return WinogradTiles if layer.channels_in >= FEWEST_CHANNELS else DenseTiles


def bytes_a_sample(layer: ConvLayer, item: int) -> int:
    """What one sample takes in the largest buffer of a layer."""
    rows, columns = tiles_of(layer)
    outputs = 16 if tiles_kind(layer) is WinogradTiles else 4
    return item * rows * columns * max(16 * layer.channels_in, outputs * layer.channels_out)
