"""Hand-written forward and backward pass of a `ConvNet` over a few samples, in preallocated buffers.

3x3 convolutions are computed in tiles: each 2x2 block of outputs from its 4x4 patch of inputs.

A tile is also a pooling window. Outputs are therefore stored as four planes (position in the tile; tile; channel), and
pooling is a maximum over planes. The axes of images are (sample, row, column, channel). Two classes compute tiles from
patches:

* `DenseTiles`, for few input channels: a patch (16 c numbers) times the weights of the four outputs, which are zero
  outside an output's window. This needs 16/9 of the multiplications of a plain convolution, but in one large product.
* `WinogradTiles`, for many input channels: F(2x2, 3x3) of Winograd (Lavin and Gray 2016), in one dimension
      y = A'[(G g) * (B'd)],  A' = (1 1 1 0; 0 1 -1 -1),  G = (1 0 0; .5 .5 .5; .5 -.5 .5; 0 0 1),
      B' = (1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1),
  with 4/9 of the multiplications of a plain convolution, as 16 matrix products. The transforms multiply by the
  Kronecker squares of A', B' and G; their transposes propagate gradients.

In exact arithmetic, both give the convolution. They are modules so that `threads.scripted` can compile them. Buffers
and their views are created once for a number of samples and reused: a pass consists of a hundred short operations, and
creating a view takes as long as starting an operation.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from sifu.engines.sim.networks import ConvLayer, ConvNet

FEWEST_CHANNELS = 16
"""Minimum number of input channels for Winograd tiles; with fewer, the matrices are too narrow for fast products."""


def tiles_of(layer: ConvLayer) -> tuple[int, int]:
    """Return the rows and columns of tiles.

    Pooling ignores an odd last row or column; without pooling, a tile may extend beyond the image.
    """
    if layer.pool:
        return layer.height // 2, layer.width // 2
    return (layer.height + 1) // 2, (layer.width + 1) // 2


def padded_shape(layer: ConvLayer) -> tuple[int, int, int]:
    """Return the shape of a padded input image, enlarged by zeros where tiles extend beyond it."""
    rows, columns = tiles_of(layer)
    return (
        max(layer.height_in + 2 * layer.padding, 2 * rows + 2),
        max(layer.width_in + 2 * layer.padding, 2 * columns + 2),
        layer.channels_in,
    )


def inside(layer: ConvLayer, padded: Tensor) -> Tensor:
    """Return a view of the images without their padding."""
    edge = layer.padding
    return padded[:, edge : edge + layer.height_in, edge : edge + layer.width_in]


class Tiles(nn.Module):
    """Base class of both kinds of tiles, with the padded images, their gradient and their patches.

    The caller writes `images`. `planes` (2, 2, samples, rows, columns, channels) is the result and, in the backward
    pass, its gradient.
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
        """Return the 4x4 patches as a view (4, 4, samples, rows, columns, channels)."""
        samples, rows, columns, channels = self._grid
        sample, row, column, _ = images.stride()
        return images.as_strided(
            (4, 4, samples, rows, columns, channels), (row, column, sample, 2 * row, 2 * column, 1)
        )

    def _will_add_up(self, patch_gradient: Tensor) -> None:
        """Prepare `_add_up` for a patch gradient (4, 4, samples, rows, columns, channels)."""
        if self.gradient is None:
            return
        _, rows, columns, _ = self._grid
        self._never_first = [self.gradient[:, 2 * rows :], self.gradient[:, :, 2 * columns :]]
        places, low, high = self._patches(self.gradient), slice(0, 2), slice(2, 4)
        # Patches overlap by two pixels, so each of these four blocks covers every pixel at most once.
        blocks = [(low, low), (low, high), (high, low), (high, high)]
        self._places = [places[block] for block in blocks]
        self._found = [patch_gradient[block] for block in blocks]

    def _add_up(self) -> None:
        """Sum the gradient of the patches into the gradient of the images."""
        for strip in self._never_first:
            strip.zero_()
        self._places[0].copy_(self._found[0])
        for block in range(1, 4):
            self._places[block].add_(self._found[block])


class DenseTiles(Tiles):
    """Tiles computed by one large matrix that holds the kernel at its four positions."""

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
        """Allocate the output of `prepare`, of shape (position in the tile, 4 x 4 x in, out)."""
        return torch.zeros((4, 16 * layer.channels_in, layer.channels_out), dtype=dtype)

    @staticmethod
    def prepare(weights: Tensor, room: Tensor) -> None:
        """Copy weights (3, 3, in, out) to their four positions in `room`, which must be zero elsewhere."""
        spread = room.view(2, 2, 4, 4, *weights.shape[2:])
        for down in (0, 1):
            for right in (0, 1):
                spread[down, right, down : down + 3, right : right + 3] = weights

    def forward(self, prepared: Tensor) -> None:
        """Compute `planes` from `images`."""
        self._cut.copy_(self._cut_view)
        torch.bmm(self._four_times, prepared, out=self._flat_planes)

    def backward(self, prepared: Tensor, weight_gradient: Tensor) -> None:
        """Turn the gradient in `planes` into gradients of the weights (3, 3, in, out) and, if wanted, of the images."""
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


@functools.cache
def _from_weights(dtype: torch.dtype) -> Tensor:
    return _square([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]).to(dtype)


class WinogradTiles(Tiles):
    """Tiles computed by Winograd transforms, which turn a convolution into 16 matrix products."""

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
        """Allocate the output of `prepare`, of shape (16, in, out)."""
        return torch.empty((16, layer.channels_in, layer.channels_out), dtype=dtype)

    @staticmethod
    def prepare(weights: Tensor, room: Tensor) -> None:
        """Transform weights (3, 3, in, out) into `room`."""
        torch.mm(_from_weights(weights.dtype), weights.view(9, -1), out=room.view(16, -1))

    def forward(self, prepared: Tensor) -> None:
        """Compute `planes` from `images`."""
        self._cut.copy_(self._cut_view)
        torch.mm(self._from_patches, self._cut_rows, out=self._patch_rows)
        torch.bmm(self._patches16, prepared, out=self._products)
        torch.mm(self._to_tiles, self._product_rows, out=self._plane_rows)

    def backward(self, prepared: Tensor, weight_gradient: Tensor) -> None:
        """Turn the gradient in `planes` into gradients of the weights (3, 3, in, out) and, if wanted, of the images."""
        torch.mm(self._from_tiles, self._plane_rows, out=self._product_rows)
        torch.bmm(self._patches_transposed, self._products, out=self._weight_gradient16)
        torch.mm(self._to_weights, self._weight_gradient_rows, out=weight_gradient.view(9, -1))
        if self.gradient is not None:
            torch.bmm(self._products, prepared.transpose(1, 2), out=self._patches16)
            torch.mm(self._to_patches, self._patch_rows, out=self._cut_rows)
            self._add_up()


def tiles_kind(layer: ConvLayer) -> type[DenseTiles] | type[WinogradTiles]:
    """Return the faster kind of tiles for a layer."""
    return WinogradTiles if layer.channels_in >= FEWEST_CHANNELS else DenseTiles


def bytes_a_sample(layer: ConvLayer, item: int) -> int:
    """Return the number of bytes of one sample in a layer's largest buffer, for elements of `item` bytes."""
    rows, columns = tiles_of(layer)
    outputs = 16 if tiles_kind(layer) is WinogradTiles else 4
    return item * rows * columns * max(16 * layer.channels_in, outputs * layer.channels_out)


Parameters = list[tuple[Tensor, Tensor]]
"""Weight and bias of every layer, as views into a flat vector in pass order."""


def pass_order(network: ConvNet) -> Tensor:
    """Return the permutation from the module's flat vector to pass order: `vector[pass_order(network)]`.

    In pass order, convolutions have weights (3, 3, in, out), and the first linear layer takes (row, column, channel)
    features.
    """
    last = network.convolution_layers[-1]
    order = []
    for number, layer in enumerate(network.layers):
        weight = torch.arange(math.prod(layer.weight_shape))
        if isinstance(layer, ConvLayer):
            weight = weight.view(layer.weight_shape).permute(2, 3, 1, 0).reshape(-1)
        elif number == len(network.convolution_layers):
            shape = (layer.features_out, last.channels_out, last.height_out, last.width_out)
            weight = weight.view(shape).permute(0, 2, 3, 1).reshape(-1)
        order += [layer.weight_at + weight, torch.arange(layer.bias_at, layer.end)]
    return torch.cat(order)


def parameter_views(network: ConvNet, flat: Tensor) -> Parameters:
    """Return the layers' parameters as views of a flat vector in pass order."""
    views = []
    for layer in network.layers:
        shape = layer.weight_shape
        weight = flat[layer.weight_at : layer.bias_at]
        views.append(
            (weight.view((3, 3, shape[1], shape[0]) if len(shape) == 4 else shape), flat[layer.bias_at : layer.end])
        )
    return views


def room_to_prepare(network: ConvNet, dtype: torch.dtype) -> list[Tensor]:
    """Allocate reusable memory for `prepare`."""
    return [tiles_kind(layer).room(layer, dtype) for layer in network.convolution_layers]


def prepare(network: ConvNet, parameters: Parameters, room: list[Tensor] | None = None) -> list[Tensor]:
    """Convert the convolutions' weights to the format of their tiles, in `room` if given. Call this once per model."""
    prepared = room_to_prepare(network, parameters[0][0].dtype) if room is None else room
    for layer, (weight, _), place in zip(network.convolution_layers, parameters, prepared, strict=False):
        tiles_kind(layer).prepare(weight, place)
    return prepared


def padded_images(network: ConvNet, images: Tensor) -> Tensor:
    """Return images (n, channels, height, width) in the padded format of the first convolution."""
    first = network.convolution_layers[0]
    padded = torch.zeros((images.shape[0], *padded_shape(first)), dtype=images.dtype)
    inside(first, padded).copy_(images.permute(0, 2, 3, 1))
    return padded


class ConvPass(nn.Module):
    """Forward and backward pass for `samples` samples at a time, with its own buffers.

    The class stores lists and numbers instead of the network's description, so that `threads.scripted` can compile it.
    """

    def __init__(self, network: ConvNet, samples: int, dtype: torch.dtype) -> None:
        super().__init__()
        layers, linear = network.convolution_layers, network.linear_layers
        tiles = [
            tiles_kind(layer)(layer, samples, dtype, wants_input_gradient=layer is not layers[0]) for layer in layers
        ]
        features = [torch.empty((samples, layer.features_in), dtype=dtype) for layer in linear]
        slopes = [torch.empty_like(inputs) for inputs in features]
        last = layers[-1]
        image = (samples, last.height_out, last.width_out, last.channels_out)
        following = list(zip(layers[1:], tiles[1:], strict=True))
        targets = [inside(layer, own.images) for layer, own in following] + [features[0].view(image)]
        gradients = [inside(layer, own.gradient) for layer, own in following if own.gradient is not None]
        gradients.append(slopes[0].view(image))
        self._images = tiles[0].images
        self._stages = nn.ModuleList(
            _Stage(own, (_Pooled if layer.pool else _Plain)(layer, own.planes, target, gradient))
            for layer, own, target, gradient in zip(layers, tiles, targets, gradients, strict=True)
        )
        self._stages_backward = nn.ModuleList(reversed(list(self._stages)))
        self._first_linear = len(layers)
        self._features, self._slopes = features, slopes
        self._factors = [torch.empty_like(inputs) for inputs in features]
        """Factors that dropout applies to the features; the first features are never dropped."""
        self._scales = [1.0 / (1.0 - layer.dropout) for layer in linear]
        self.scores = torch.empty((samples, network.outputs), dtype=dtype)
        self._minus_one = torch.full((samples, 1), -1.0, dtype=dtype)

    def forward(
        self,
        data: Tensor,
        rows: Tensor,
        kept: list[Tensor] | None,
        parameters: Parameters,
        prepared: list[Tensor],
    ) -> None:
        """Compute `scores`; the arguments are those of `gradient`."""
        torch.index_select(data, 0, rows, out=self._images)
        for number, stage in enumerate(self._stages):
            stage(prepared[number], parameters[number][1])
        last = len(self._features) - 1
        for number in range(last + 1):
            weight, bias = parameters[self._first_linear + number]
            out = self.scores if number == last else self._features[number + 1]
            torch.addmm(bias, self._features[number], weight.t(), out=out)
            if number < last:
                out.clamp_min_(0.0)
                if kept is not None:
                    self._factors[number + 1].copy_(kept[number]).mul_(self._scales[number])
                    out.mul_(self._factors[number + 1])

    @torch.jit.export
    def gradient(
        self,
        data: Tensor,
        rows: Tensor,
        labels: Tensor,
        batch: int,
        kept: list[Tensor] | None,
        parameters: Parameters,
        prepared: list[Tensor],
        gradients: Parameters,
    ) -> None:
        """Write the rows' share of the gradient of the mean loss over `batch` samples into `gradients`.

        Args:
            data: All padded images.
            rows: Rows of `data` to use.
            labels: Labels of these rows.
            batch: Number of samples in the whole batch.
            kept: Units that dropout keeps, per hidden layer, or None without dropout.
            parameters: Weights and biases.
            prepared: Weights in the format of the tiles.
            gradients: Output of the gradients.
        """
        self.forward(data, rows, kept, parameters, prepared)
        torch.softmax(self.scores, 1, out=self.scores)
        slope = self.scores.scatter_add_(1, labels[:, None], self._minus_one).div_(batch)
        count = len(self._features)
        for back in range(count):
            number = count - 1 - back
            weight, _ = parameters[self._first_linear + number]
            weight_gradient, bias_gradient = gradients[self._first_linear + number]
            torch.mm(slope.t(), self._features[number], out=weight_gradient)
            torch.sum(slope, 0, out=bias_gradient)
            slope = torch.mm(slope, weight, out=self._slopes[number])
            if number > 0:
                if kept is not None:
                    slope.mul_(self._factors[number])
                torch.ops.aten.threshold_backward(slope, self._features[number], 0.0, grad_input=slope)
        for back, stage in enumerate(self._stages_backward):
            number = self._first_linear - 1 - back
            weight_gradient, bias_gradient = gradients[number]
            stage.backward(prepared[number], weight_gradient, bias_gradient)  # type: ignore[operator]


class _Stage(nn.Module):
    """Convolution with its activation and pooling."""

    def __init__(self, tiles: nn.Module, rectified: nn.Module) -> None:
        super().__init__()
        self.tiles, self.rectified = tiles, rectified

    def forward(self, prepared: Tensor, bias: Tensor) -> None:
        self.tiles(prepared)
        self.rectified(bias)

    @torch.jit.export
    def backward(self, prepared: Tensor, weight_gradient: Tensor, bias_gradient: Tensor) -> None:
        self.rectified.backward(bias_gradient)  # type: ignore[operator]
        self.tiles.backward(prepared, weight_gradient)  # type: ignore[operator]


class _Pooled(nn.Module):
    """Bias, ReLU and the maximum of each tile, from `planes` into `target`.

    The bias is added after the maximum, which gives the same result with a quarter of the additions. Ties go to the
    earlier position, as in torch. The backward pass repeats the comparisons and sends the gradient to the maximum,
    unless ReLU set it to zero.
    """

    def __init__(self, layer: ConvLayer, planes: Tensor, target: Tensor, target_gradient: Tensor) -> None:
        super().__init__()
        self._target, self._target_gradient = target, target_gradient
        self._left, self._right = planes[:, 0], planes[:, 1]
        self._pairs = torch.empty_like(planes[0])
        self._upper, self._lower = self._pairs[0], self._pairs[1]
        self._top = torch.empty_like(planes[0, 0])
        self._top_rows = self._top.view(-1, layer.channels_out)

    def forward(self, bias: Tensor) -> None:
        torch.maximum(self._left, self._right, out=self._pairs)
        torch.maximum(self._upper, self._lower, out=self._top)
        torch.clamp_min(self._top.add_(bias), 0.0, out=self._target)

    def backward(self, bias_gradient: Tensor) -> None:
        torch.ops.aten.threshold_backward(self._target_gradient, self._top, 0.0, grad_input=self._top)
        torch.sum(self._top_rows, 0, out=bias_gradient)
        self._upper.ge_(self._lower).mul_(self._top)
        torch.sub(self._top, self._upper, out=self._lower)
        self._left.ge_(self._right).mul_(self._pairs)
        torch.sub(self._pairs, self._left, out=self._right)


class _Plain(nn.Module):
    """Bias and ReLU without pooling, from `planes` into `target`.

    Values outside the image are ignored.
    """

    def __init__(self, layer: ConvLayer, planes: Tensor, target: Tensor, target_gradient: Tensor) -> None:
        super().__init__()
        self._planes, self._target, self._target_gradient = planes, target, target_gradient
        rows, columns = tiles_of(layer)
        samples, outputs = planes.shape[2], layer.channels_out
        self._image = torch.zeros((samples, 2 * rows, 2 * columns, outputs), dtype=planes.dtype)
        self._by_plane = self._image.view(samples, rows, 2, columns, 2, outputs).permute(2, 4, 0, 1, 3, 5)
        self._inner = self._image[:, : layer.height, : layer.width]
        self._outer = [self._image[:, layer.height :], self._image[:, :, layer.width :]]

    def forward(self, bias: Tensor) -> None:
        torch.add(self._planes, bias, out=self._by_plane)
        torch.clamp_min(self._inner, 0.0, out=self._target)

    def backward(self, bias_gradient: Tensor) -> None:
        torch.ops.aten.threshold_backward(self._target_gradient, self._inner, 0.0, grad_input=self._inner)
        for outer in self._outer:
            outer.zero_()
        torch.sum(self._image.flatten(0, 2), 0, out=bias_gradient)
        self._planes.copy_(self._by_plane)
