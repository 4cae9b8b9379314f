"""Features of a public network and of copies of it that groups tuned separately (docs/theory.md, section 15.5).

`TunedNetwork` is the model that groups train: the public network, with only the tuned layers as parameters, and a last
layer that is discarded. `TunedFeatures` is the feature map of the closed-form head: the public network's features next
to a block of features of each group's network (blocks), or next to the features of the merged network (merge).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import vector_to_parameters

from sifu.core.closed_form_engine import GroupNetwork
from sifu.core.layout import Vector
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps.deep_network import DeepNetwork, FeatureExtractor, output_width
from sifu.data.feature_maps.feature_map import FeatureMap, Floats
from sifu.data.feature_maps.fixed_networks import NetworkFeatures, Probes
from sifu.data.fresh_modules import fresh_copy
from sifu.errors import InputError
from sifu.theory.closed_form.blocks import Blocks, projection
from sifu.theory.merging import merge, move_on

LORA = re.compile(r"lora\(([1-9][0-9]{0,3})\)")
HEAD_GAIN = math.sqrt(10.0)
"""Factor on the scores, which has the effect of a tenfold learning rate for the last layer."""


class TunedNetwork(nn.Module):
    """A copy of a public network with parameters in the `trainable` layers only, and a last layer of `outputs` scores.

    With deep features, tuning fits the output of the network's last layer only.

    Layers that normalise by batch or instance statistics stay in evaluation mode. Batch statistics would make a
    sample's features depend on other samples, and running statistics are not parameters, so averaging models would not
    cover them.
    """

    def __init__(self, public: nn.Module, width: int, outputs: int, trainable: str) -> None:
        super().__init__()
        self.network = fresh_copy(public).requires_grad_(True)
        if not any(True for _ in self.network.parameters()):
            raise InputError('the network has no parameters to tune: set features.tune = "none"')
        keep_parameters(self.network, trainable)
        kind = next(iter(self.network.state_dict().values())).dtype
        self.scores = nn.Linear(width, outputs, dtype=kind if kind.is_floating_point else torch.float32)
        nn.init.zeros_(self.scores.weight)
        nn.init.zeros_(self.scores.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of samples."""
        scores: Tensor = self.scores(self.network(x).flatten(1))
        return HEAD_GAIN * scores

    def train(self, mode: bool = True) -> TunedNetwork:
        """Set the training mode of all layers except batch and instance normalisation."""
        super().train(mode)
        for part in self.modules():
            if isinstance(part, _NormBase):
                part.eval()
        return self

    def flat(self) -> Vector:
        """Return the parameters as a flat vector: before tuning, the public network's and zeros for the last layer."""
        return torch.cat([value.detach().reshape(-1) for value in self.parameters()]).numpy().copy()

    def tuned_by(self, vector: Vector) -> nn.Module:
        """Return a copy of the network with the parameters of a flat vector, without the last layer."""
        tuned = fresh_copy(self)
        vector_to_parameters(torch.tensor(vector), tuned.parameters())
        return tuned.network.eval().requires_grad_(False)


def keep_parameters(network: nn.Module, trainable: str) -> None:
    """Turn all parameters that are not trainable into buffers.

    Args:
        network: The network to change.
        trainable: `all`, `last`, `lora(RANK)`, or names separated by commas. `last` means the layers that the module
            lists in `last_layers`; without that list, its last child with a weight matrix and all children after it.
    """
    if trainable.strip() == "all":
        return
    low_rank = LORA.fullmatch(trainable.strip())
    if low_rank:
        wanted: Sequence[str] = _adapted(network, int(low_rank[1]))
    elif trainable.strip() == "last":
        wanted = _last_layers(network)
    else:
        wanted = [part.strip() for part in trainable.split(",")]
    held = [
        (f"{path}.{own}" if path else own, module, own, parameter)
        for path, module in network.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
    ]
    names = [name for name, *_ in held]
    for part in wanted:
        if not any(name == part or name.startswith(f"{part}.") for name in names):
            raise InputError(
                f"features.trainable names {part!r}, and the network has no parameters of that name: it has "
                f"{', '.join(names[:4])}{'...' if len(names) > 4 else ''}"
            )
    is_wanted = {name: any(name == part or name.startswith(f"{part}.") for part in wanted) for name in names}
    tuned = {id(parameter): name for name, _, _, parameter in held if is_wanted[name]}
    for name, module, own, parameter in held:
        if is_wanted[name]:
            continue
        if id(parameter) in tuned:
            raise InputError(
                f"features.trainable names {tuned[id(parameter)]!r}, which shares its values with {name!r}: name both, "
                "or neither"
            )
        del module._parameters[own]
        module.register_buffer(own, parameter.detach().clone())


class LowRankLinear(nn.Linear):
    """Linear layer W x + b plus an adapter B A x, where A is drawn from a fixed seed and B is initially zero."""

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype)
        self.load_state_dict(layer.state_dict())
        drawn = torch.randn(rank, layer.in_features, generator=generator, dtype=layer.weight.dtype)
        self.lora_a = nn.Parameter(drawn / math.sqrt(layer.in_features))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=layer.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layer's and the adapter's outputs."""
        return super().forward(x) + nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)


def _adapted(network: nn.Module, rank: int) -> list[str]:
    """Add an adapter to every `nn.Linear` layer and return the names of the adapters' parameters."""
    layers = [(path, part) for path, part in network.named_modules() if type(part) is nn.Linear]
    if not layers or not layers[0][0]:
        raise InputError(
            f"features.trainable = 'lora({rank})' needs nn.Linear layers inside the network, and it has none: name the "
            "layers to tune, or write the adapters into your module"
        )
    for part in network.modules():  # the fused evaluation pass would bypass the adapters
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
    generator = torch.Generator().manual_seed(0)
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, LowRankLinear(layer, rank, generator))
    return [f"{path}.{part}" for path, _ in layers for part in ("lora_a", "lora_b")]


def _last_layers(network: nn.Module) -> Sequence[str]:
    named: Sequence[str] = getattr(network, "last_layers", ())
    if named:
        return named
    children = [(name, child) for name, child in network.named_children() if any(True for _ in child.parameters())]
    for place in range(len(children) - 1, -1, -1):
        if any(parameter.ndim >= 2 for parameter in children[place][1].parameters()):
            return [name for name, _ in children[place:]]
    raise InputError('features.trainable = "last" finds no layer with a weight matrix: name the layers to tune')


class Projected(FeatureExtractor):
    """Module that flattens a network's output and multiplies it by the projection P, if there is one."""

    project: Tensor | None

    def __init__(self, network: nn.Module, project: Tensor | None) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("project", project)

    @property
    def is_deep(self) -> bool:
        """True if the network's deep features are read."""
        return isinstance(self.network, DeepNetwork)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features as rows."""
        rows: Tensor = self.network(x).flatten(1)
        return rows if self.project is None else rows @ self.project.to(rows.dtype)


class TunedFeatures(FeatureMap):
    """Feature map [phi_0(x), P phi_1(x), ..., P phi_S(x)], or [phi_0(x), phi_m(x)] for a merge.

    phi_0 is the public network, phi_1 to phi_S are the networks of the groups, phi_m is their merge, and P is a
    projection. The features of a missing network are zero. The digest covers the plan (the public network, the
    projection and the layout of blocks), not the tuned networks.
    """

    exact = False

    def __init__(
        self, public: NetworkFeatures, features: FeaturesSpec, outputs: int, count: int, stretch: float
    ) -> None:
        width, self.tune = public.features, features.tune
        wide = features.block if 0 < features.block < width else width
        self.blocks = Blocks(width, wide, count) if self.tune == "blocks" else Blocks(width, width, 1)
        self.kind, self.features, self.norm = public.kind, self.blocks.features, self.blocks.norm(public.norm)
        self._deep = public.module if isinstance(public.module, DeepNetwork) else None
        backbone = public.module if self._deep is None else self._deep.backbone
        raw = width if self._deep is None else self._deep.width
        last = width if self._deep is None else output_width(backbone, public.shape)
        self.network = TunedNetwork(backbone, last, outputs, features.trainable)
        self._public = public
        self._plan: dict[str, str | int | float] = {
            "tune": self.tune,
            "block": self.blocks.block,
            "count": count,
            "trainable": features.trainable,
            "seed": features.seed,
            "stretch": stretch,
        }
        drawn = self.tune == "blocks" and self.blocks.block < width
        self._project = torch.tensor(projection(features.seed, raw, self.blocks.block)) if drawn else None
        self._networks: Mapping[int, Vector] = {}
        self._parts: dict[int, NetworkFeatures] = {}
        self._compared: dict[int, Probes] = {}

    def networks(self, backbones: Sequence[GroupNetwork]) -> dict[int, Vector]:
        """Return the parameters of the tuned networks that compute features, by group; a merged network has key 0."""
        if self.tune == "blocks" or not backbones:
            return {backbone.group: backbone.vector for backbone in backbones}
        in_order = sorted(backbones, key=lambda backbone: backbone.group)
        mean = merge([backbone.vector.astype(np.float64) for backbone in in_order], [t.samples for t in in_order])
        fresh = self.network.flat()
        moved = move_on(mean, fresh.astype(np.float64), float(self._plan["stretch"]))
        return {0: moved.astype(fresh.dtype)}

    def with_backbones(self, backbones: Sequence[GroupNetwork]) -> TunedFeatures:
        """Return the same map with these groups' networks."""
        return self.through(self.networks(backbones))

    def through(self, networks: Mapping[int, Vector]) -> TunedFeatures:
        """Return the same map with these networks, given by their parameters."""
        changed = copy.copy(self)
        changed._networks, changed._parts, changed._compared = networks, {}, {}
        return changed

    def _block(self, tuned: nn.Module) -> nn.Module:
        """Return the module that reads a tuned network like the public one and projects its output to a block."""
        if self._deep is not None:
            tuned = self._deep.of(tuned, projected=self._project is None)
        return Projected(tuned, self._project)

    @property
    def parts(self) -> tuple[NetworkFeatures, Mapping[int, NetworkFeatures]]:
        """Feature maps of the public network and, by group, of the tuned networks; a merged network has the key 0.

        A user's module is made with the tuned parameters of all groups here, so this process must not go on to train.
        """
        return self._public, {group: self._part(group) for group in self._networks}

    def _part(self, group: int) -> NetworkFeatures:
        """Return the feature map of one group's network; for a user's module, in a copy that serves no other group."""
        if group not in self._parts:
            block = self._block(self.network.tuned_by(self._networks[group]))
            self._parts[group] = self._public.of(block, self.blocks.block)
        if group in self._compared:
            self._parts[group].compared = self._compared[group]
        return self._parts[group]

    def on(self, device: str) -> TunedFeatures:
        """Return the same map computed on another device."""
        moved = self.through(self._networks)
        moved._public = self._public.on(device)
        return moved

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the concatenated blocks of features."""
        rows = np.zeros((len(x), self.features))
        rows[:, : self.blocks.frozen] = self._public(x)
        for group in self._networks:
            (rows[:, self.blocks.columns(group)],) = self._public.run(partial(self._features_here, group, x))
        return rows

    def _features_here(self, group: int, x: NDArray[Any]) -> Iterator[Floats]:
        yield self._part(group).features_here(x)

    def chunks(self, x: NDArray[Any]) -> Iterator[tuple[slice, Floats]]:
        """Yield the rows and the features of a client's samples; the networks are checked as in `NetworkFeatures`.

        Each network of a user's module runs in its own copy of the process (`forked`), all at the same time, so that
        nothing passes from the weights that one group tuned to the features of another network.
        """
        self._public.remember_first(x)
        if self._public.compared is not None:
            for group in sorted(self._networks.keys() - self._compared.keys()):
                (self._compared[group],) = self._public.run(partial(self._probes_here, group))
        places = [slice(0, self.blocks.frozen), *(self.blocks.columns(group) for group in self._networks)]
        with ExitStack() as stack:
            runs = (self._public.run(partial(self._chunks_here, group, x)) for group in self._networks)
            parts: list[Any] = [self._public.chunks(x), *runs]
            for part in parts:
                stack.callback(part.close)  # ends the copies if one of them fails, or if the caller stops
            for pieces in zip(*parts, strict=True):
                rows = pieces[0][0]
                features = np.zeros((rows.stop - rows.start, self.features))
                for columns, (_, values) in zip(places, pieces, strict=True):
                    features[:, columns] = values
                yield rows, features

    def _probes_here(self, group: int) -> Iterator[Probes]:
        """Yield what a tuned network gives for the samples that the public network remembers."""
        assert self._public.compared is not None
        samples, _ = self._public.compared
        yield self._part(group).probed(samples)

    def _chunks_here(self, group: int, x: NDArray[Any]) -> Iterator[tuple[slice, Floats]]:
        yield from self._part(group).chunks_here(x)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the public network, and the plan."""
        return self._public.settings() | self._plan

    def constants(self) -> Iterator[bytes]:
        """Return the constants of the public network."""
        return self._public.constants()
