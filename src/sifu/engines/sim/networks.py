"""Networks that a spec can name, and dropout with keyed masks; the networks' regularity is assumed, not proven.

Masks are keyed by position, so that every implementation and device drops the same units. In step k of a client's
round, dropout layer l keeps unit u of the b-th sample of the batch iff

    fraction(score(key, b * units + u)) >= p,    key = place(seed, "dropout"; branch, round, client, k, l),

and kept units are scaled by 1/(1 - p). Places are defined in `sifu.theory.participation`.

A `ConvNet` is only a description of a convolutional classifier. It yields the module that the plain loop trains, and
the shapes and offsets for hand-written trainers. All of them use the module's order of the flat parameter vector:
conv1.weight (out, in, 3, 3), conv1.bias, ..., fc1.weight (out, in), fc1.bias, ...
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from sifu.core.engine import Position
from sifu.errors import InputError
from sifu.theory.arrays import Booleans
from sifu.theory.participation import Scores, base_key, fractions, place_key, scores


def dropout_key(seed: int, position: Position, client: int, step: ArrayLike, layer: ArrayLike) -> Scores:
    """Return the key of one dropout layer in one step; `step` and `layer` may be arrays that broadcast."""
    return place_key(base_key(seed, "dropout"), position.branch, position.round, client, step, layer)


def kept_units(key: ArrayLike, first: int, samples: int, units: int, rate: float) -> Booleans:
    """Return a mask (samples, units) of the units that dropout keeps for a range of samples of a batch.

    >>> whole = kept_units(5, 0, 4, 3, 0.5)
    >>> bool((kept_units(5, 2, 2, 3, 0.5) == whole[2:]).all())
    True
    """
    places = np.arange(first * units, (first + samples) * units, dtype=np.uint64).reshape(samples, units)
    return fractions(scores(key, places)) >= rate


class KeyedDropout(_DropoutNd):
    """Dropout with a `key` that the trainer sets before each step. In evaluation it does nothing."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.key = 0

    def forward(self, activations: Tensor) -> Tensor:
        """Return the activations with dropped units set to zero and kept units scaled by 1/(1 - p)."""
        if not self.training or self.p == 0.0:
            return activations
        kept = kept_units(self.key, 0, activations.shape[0], activations[0].numel(), self.p)
        factors = torch.from_numpy(kept).to(activations.dtype).mul_(1.0 / (1.0 - self.p))
        return activations * factors.to(activations.device).reshape(activations.shape)


@dataclass(frozen=True)
class Convolution:
    """3x3 convolution of stride 1, followed by ReLU and, if `pool`, by 2x2 max pooling."""

    channels_out: int
    padding: int = 0
    pool: bool = True


class Layer(ABC):
    """Base class of layers; in the flat vector, a layer's weight of shape (out, ...) precedes its bias."""

    weight_at: int

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight: (out, in) for a linear layer, (out, in, 3, 3) for a convolution."""

    @property
    def bias_at(self) -> int:
        """Index of the first bias entry."""
        return self.weight_at + math.prod(self.weight_shape)

    @property
    def end(self) -> int:
        """Index of the next layer's first parameter."""
        return self.bias_at + self.weight_shape[0]


@dataclass(frozen=True)
class ConvLayer(Layer):
    """Convolution that maps (channels_in, height_in, width_in) to (channels_out, height_out, width_out).

    `height` and `width` are the sizes between convolution and pooling; pooling ignores an odd last row or column.
    """

    channels_in: int
    channels_out: int
    height_in: int
    width_in: int
    padding: int
    pool: bool
    weight_at: int

    @property
    def height(self) -> int:
        """Number of rows of the convolution's output."""
        return self.height_in + 2 * self.padding - 2

    @property
    def width(self) -> int:
        """Number of columns of the convolution's output."""
        return self.width_in + 2 * self.padding - 2

    @property
    def height_out(self) -> int:
        """Number of rows after pooling."""
        return self.height // 2 if self.pool else self.height

    @property
    def width_out(self) -> int:
        """Number of columns after pooling."""
        return self.width // 2 if self.pool else self.width

    @property
    def features_out(self) -> int:
        """Number of values per sample after this layer."""
        return self.channels_out * self.height_out * self.width_out

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight: (out, in, 3, 3)."""
        return (self.channels_out, self.channels_in, 3, 3)


@dataclass(frozen=True)
class LinearLayer(Layer):
    """Linear layer; ReLU and dropout at rate `dropout` follow a `hidden` layer."""

    features_in: int
    features_out: int
    hidden: bool
    dropout: float
    weight_at: int

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight: (out, in)."""
        return (self.features_out, self.features_in)


@dataclass(frozen=True)
class ConvNet:
    """Convolutional classifier of images `input_shape` = (channels, height, width) into `outputs` classes.

    The layers are convolutions, a channel-first flattening as in `torch.flatten`, hidden linear layers of the given
    widths, each with ReLU and dropout at rate `dropout`, and a last linear layer. Calling a description makes its
    module with torch's initial weights, so a description can be the factory of a `ModuleModel`.

    >>> net = ConvNet((3, 32, 32), (Convolution(32), Convolution(64), Convolution(64, pool=False)), (64,), 10)
    >>> [layer.features_out for layer in net.convolution_layers], net.parameters
    ([7200, 2304, 1024], 122570)
    """

    input_shape: tuple[int, int, int]
    convolutions: tuple[Convolution, ...]
    hidden: tuple[int, ...]
    outputs: int
    dropout: float = 0.0
    convolution_layers: tuple[ConvLayer, ...] = field(init=False, repr=False, compare=False)
    linear_layers: tuple[LinearLayer, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        channels, height, width = self.input_shape
        at = 0
        layers: list[ConvLayer] = []
        for number, convolution in enumerate(self.convolutions, 1):
            layer = ConvLayer(channels, height_in=height, width_in=width, weight_at=at, **asdict(convolution))
            if min(layer.height_out, layer.width_out) < 1:
                raise InputError(
                    f"images of {self.input_shape[1]}x{self.input_shape[2]} are too small: no pixels are left after "
                    f"convolution {number} of {len(self.convolutions)}; use larger images or another model"
                )
            layers.append(layer)
            channels, height, width, at = layer.channels_out, layer.height_out, layer.width_out, layer.end
        object.__setattr__(self, "convolution_layers", tuple(layers))
        features = layers[-1].features_out
        linear: list[LinearLayer] = []
        for number, units in enumerate((*self.hidden, self.outputs)):
            hidden = number < len(self.hidden)
            linear.append(LinearLayer(features, units, hidden, self.dropout if hidden else 0.0, at))
            features, at = units, linear[-1].end
        object.__setattr__(self, "linear_layers", tuple(linear))

    @property
    def layers(self) -> tuple[ConvLayer | LinearLayer, ...]:
        """Layers with parameters, in their order in the flat vector."""
        return (*self.convolution_layers, *self.linear_layers)

    @property
    def parameters(self) -> int:
        """Length of the flat vector."""
        return self.linear_layers[-1].end

    def __call__(self) -> ConvNetModule:
        """Make the module, with torch's initial weights."""
        return ConvNetModule(self)


class ConvNetModule(nn.Module):
    """Torch module of a `ConvNet`; images are (n, channels, height, width), or (n, height, width) if grey."""

    def __init__(self, network: ConvNet) -> None:
        super().__init__()
        self._network = network
        for number, convolution in enumerate(network.convolution_layers, 1):
            self.add_module(
                f"conv{number}",
                nn.Conv2d(convolution.channels_in, convolution.channels_out, 3, padding=convolution.padding),
            )
        for number, layer in enumerate(network.linear_layers, 1):
            self.add_module(f"fc{number}", nn.Linear(layer.features_in, layer.features_out))
            if layer.dropout:
                self.add_module(f"dropout{number}", KeyedDropout(layer.dropout))

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        values = images.unsqueeze(1) if images.dim() == 3 else images
        for number, convolution in enumerate(self._network.convolution_layers, 1):
            values = functional.relu(self.get_submodule(f"conv{number}")(values))
            if convolution.pool:
                values = functional.max_pool2d(values, 2)
        values = torch.flatten(values, 1)
        for number, layer in enumerate(self._network.linear_layers, 1):
            values = self.get_submodule(f"fc{number}")(values)
            if layer.hidden:
                values = functional.relu(values)
            if layer.dropout:
                values = self.get_submodule(f"dropout{number}")(values)
        return values


def image_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of images as (channels, height, width); the error for other samples names the model."""
    if len(input_shape) == 2:
        return (1, input_shape[0], input_shape[1])
    if len(input_shape) != 3:
        raise InputError(
            f"the model {name!r} needs images of shape (height, width) or (channels, height, width); found samples of "
            f"shape {input_shape}"
        )
    return (input_shape[0], input_shape[1], input_shape[2])


def mlp(input_shape: tuple[int, ...], outputs: int, hidden: int) -> nn.Module:
    """Make a network with one hidden layer of `hidden` tanh units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def cnn(input_shape: tuple[int, int, int], outputs: int) -> ConvNet:
    """Describe the convolutional network that a spec names, for images of any size."""
    return ConvNet(input_shape, (Convolution(16, 1), Convolution(32, 1)), (64,), outputs)


class LinearScores(nn.Module):
    """Linear layer z = x W + b with W of shape (features, outputs) and parameters named `weight` and `bias`."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, samples: Tensor) -> Tensor:
        """Return the scores of a batch of flat samples."""
        return samples @ self.weight + self.bias
