"""One forward and backward pass of a `ConvNet` over a few samples, written out, in buffers that are made once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sifu.engines.sim.cpu_conv.tiled_convolution import inside, padded_shape, tiles_kind, tiles_of
from sifu.engines.sim.networks import ConvLayer, ConvNet

Parameters = list[tuple[Tensor, Tensor]]
"""Weight and bias of every layer: views into a flat vector in pass order."""


def pass_order(network: ConvNet) -> Tensor:
    """Places in the module's flat vector, in the order a pass uses: `vector[pass_order(network)]`.

    Convolutions have weights (3, 3, in, out), and the first linear layer takes (row, column, channel) features.
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
    """The layers' parameters as views of a flat vector in pass order."""
    views = []
    for layer in network.layers:
        shape = layer.weight_shape
        weight = flat[layer.weight_at : layer.bias_at]
        views.append(
            (weight.view((3, 3, shape[1], shape[0]) if len(shape) == 4 else shape), flat[layer.bias_at : layer.end])
        )
    return views


def room_to_prepare(network: ConvNet, dtype: torch.dtype) -> list[Tensor]:
    """Memory for `prepare`, to be used again and again."""
    return [tiles_kind(layer).room(layer, dtype) for layer in network.convolution_layers]


def prepare(network: ConvNet, parameters: Parameters, room: list[Tensor] | None = None) -> list[Tensor]:
    """The convolutions' weights as their tiles want them, in `room` where there is some; needed once for a model."""
    prepared = room_to_prepare(network, parameters[0][0].dtype) if room is None else room
    for layer, (weight, _), place in zip(network.convolution_layers, parameters, prepared, strict=False):
        tiles_kind(layer).prepare(weight, place)
    return prepared


def padded_images(network: ConvNet, images: Tensor) -> Tensor:
    """Images (n, channels, height, width) as the first convolution takes them."""
    first = network.convolution_layers[0]
    padded = torch.zeros((images.shape[0], *padded_shape(first)), dtype=images.dtype)
    inside(first, padded).copy_(images.permute(0, 2, 3, 1))
    return padded


class ConvPass(nn.Module):
    """The buffers for `samples` samples at a time, and what is done in them.

    Written so that `threads.scripted` can compile it: lists and numbers instead of the network's description.
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
        """What dropout multiplies the features by; the first ones are never dropped."""
        self._scales = [1.0 / (1.0 - layer.dropout) for layer in linear]
        self.scores = torch.empty((samples, network.outputs), dtype=dtype)
        self._minus_one = torch.full((samples, 1), -1.0, dtype=dtype)

    def forward(self, data: Tensor, rows: Tensor, parameters: Parameters, prepared: list[Tensor]) -> None:
        """Fill `scores` for some rows of the `padded_images`, without dropout."""
        self._score(data, rows, None, parameters, prepared)

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
        """Write the rows' part of the gradient of the mean loss over a batch of `batch` samples into `gradients`.

        `kept` has for each hidden layer the units that dropout keeps; None without dropout.
        """
        self._score(data, rows, kept, parameters, prepared)
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

    def _score(
        self,
        data: Tensor,
        rows: Tensor,
        kept: list[Tensor] | None,
        parameters: Parameters,
        prepared: list[Tensor],
    ) -> None:
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


class _Stage(nn.Module):
    """A convolution and what follows it up to the next one."""

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
    """Bias, ReLU (where there is one) and the maximum of each tile, from `planes` into `target`.

    Bias comes after the maximum: adding a number changes no order, and a quarter is left to add it to. The maximum is
    a tournament in which the earlier place wins a tie, as torch's first maximum does; played again backward, it sends
    the gradient to the winner. A maximum that ReLU sets to zero sends none.
    """

    def __init__(self, layer: ConvLayer, planes: Tensor, target: Tensor, target_gradient: Tensor) -> None:
        super().__init__()
        self._relu = layer.relu
        self._target, self._target_gradient = target, target_gradient
        self._left, self._right = planes[:, 0], planes[:, 1]
        self._pairs = torch.empty_like(planes[0])
        self._upper, self._lower = self._pairs[0], self._pairs[1]
        self._top = torch.empty_like(planes[0, 0])
        self._top_rows = self._top.view(-1, layer.channels_out)

    def forward(self, bias: Tensor) -> None:
        torch.maximum(self._left, self._right, out=self._pairs)
        torch.maximum(self._upper, self._lower, out=self._top)
        if self._relu:
            torch.clamp_min(self._top.add_(bias), 0.0, out=self._target)
        else:
            torch.add(self._top, bias, out=self._target)

    def backward(self, bias_gradient: Tensor) -> None:
        if self._relu:
            torch.ops.aten.threshold_backward(self._target_gradient, self._top, 0.0, grad_input=self._top)
        else:
            self._top.copy_(self._target_gradient)
        torch.sum(self._top_rows, 0, out=bias_gradient)
        self._upper.ge_(self._lower).mul_(self._top)
        torch.sub(self._top, self._upper, out=self._lower)
        self._left.ge_(self._right).mul_(self._pairs)
        torch.sub(self._pairs, self._left, out=self._right)


class _Plain(nn.Module):
    """Bias and ReLU (where there is one) without pooling, from `planes` into `target`.

    What sticks out of the image is left out.
    """

    def __init__(self, layer: ConvLayer, planes: Tensor, target: Tensor, target_gradient: Tensor) -> None:
        super().__init__()
        self._relu = layer.relu
        self._planes, self._target, self._target_gradient = planes, target, target_gradient
        rows, columns = tiles_of(layer)
        samples, outputs = planes.shape[2], layer.channels_out
        self._image = torch.zeros((samples, 2 * rows, 2 * columns, outputs), dtype=planes.dtype)
        self._by_plane = self._image.view(samples, rows, 2, columns, 2, outputs).permute(2, 4, 0, 1, 3, 5)
        self._inner = self._image[:, : layer.height, : layer.width]
        self._outer = [self._image[:, layer.height :], self._image[:, :, layer.width :]]

    def forward(self, bias: Tensor) -> None:
        torch.add(self._planes, bias, out=self._by_plane)
        if self._relu:
            torch.clamp_min(self._inner, 0.0, out=self._target)
        else:
            self._target.copy_(self._inner)

    def backward(self, bias_gradient: Tensor) -> None:
        if self._relu:
            torch.ops.aten.threshold_backward(self._target_gradient, self._inner, 0.0, grad_input=self._inner)
        else:
            self._inner.copy_(self._target_gradient)
        for outer in self._outer:
            outer.zero_()
        torch.sum(self._image.flatten(0, 2), 0, out=bias_gradient)
        self._planes.copy_(self._by_plane)
