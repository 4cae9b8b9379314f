"""Convolutional networks: the hand-written passes agree with the plain loop up to rounding, for
every model and option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from networks import NETWORKS
from torch import nn

from covering import covering
from sifu.core.engine import Position
from sifu.engines.sim import (
    ConvNet,
    Convolution,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
)
from sifu.engines.sim.networks import image_shape, kept_units
from sifu.errors import InputError
from sifu_kernels import conv_trainer
from sifu_kernels.conv_pass import (
    ConvPass,
    DenseTiles,
    WinogradTiles,
    padded_images,
    parameter_views,
    pass_order,
    prepare,
    tiles_kind,
)

SHAPES = {  # the smallest valid images, with odd sizes so that pooling drops a row
    "cnn": (8, 9),
    "dropout": (1, 7, 8),
    "three": (3, 19, 18),
    "three wide": (3, 20, 21),
    "no hidden layer": (3, 11, 16),
}
USUAL = {"dropout": (1, 28, 28), "three": (3, 32, 32), "three wide": (3, 32, 32)} | {
    "no hidden layer": (3, 64, 64),
}
MOMENTUM = (0.0, 0.9, 0.5)
TOLERANCE = {"float64": 1e-10, "float32": 2e-3}
"""Relative tolerance of a round's change. In float32 a near tie of pooling or ReLU may be decided differently."""


@dataclass
class Client:
    name: str
    x: Any
    y: Any


def images(shape: tuple[int, ...], sizes: tuple[int, ...] = (3, 7, 12), outputs: int = 4) -> list[Client]:
    generator = np.random.default_rng(3)
    clients = [
        Client(f"client-{number}", generator.standard_normal((size, *shape)), generator.integers(0, outputs, size))
        for number, size in enumerate(sizes)
    ]
    clients[0].y[0] = outputs - 1
    return clients


def federation(model: Any, clients: list[Client], strategy: str, dtype: str = "float64", **options: Any) -> Any:
    if isinstance(model, str):
        model = ModuleModel(NETWORKS[model](image_shape(model, clients[0].x.shape[1:]), 4))
    options = {"rate": 0.05, "steps": 3, "batch_size": 5} | options
    return SimulatedFederation(
        clients, model, LocalTraining(**options), SimulationSettings(dtype=dtype, seed=5, strategy=strategy)
    )


def relative(vector: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm((vector - other).astype(np.float64)) / np.linalg.norm(other.astype(np.float64)))


def disagreement(model: Any, clients: list[Client], dtype: str, **options: Any) -> float:
    """Return the largest relative difference of the change in a round between both implementations, over clients and
    mean.
    """
    loop, fast = (federation(model, clients, strategy, dtype, **options) for strategy in ("loop", "auto"))
    start, everyone = loop.initial_model(0), np.arange(len(clients))
    errors = [0.0]
    for position in (Position(0, 0), Position(2, 5)):
        expected, other = (engine.run_round(start, position, everyone) for engine in (loop, fast))
        assert other.model.dtype == dtype
        errors += [relative(other.model - start, expected.model - start), relative(other.drifts, expected.drifts)]
    return max(errors)


@pytest.fixture(params=(1, 2, 3))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "dtype", "momentum", "weight_decay", "batch_size"),
    covering(list(SHAPES), ("float64", "float32"), MOMENTUM, (0.0, 0.1), (None, 5)),
)
def test_a_round_agrees_with_the_loop(name, dtype, momentum, weight_decay, batch_size):
    options = {"momentum": momentum, "weight_decay": weight_decay, "batch_size": batch_size}
    assert disagreement(name, images(SHAPES[name]), dtype, **options) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", USUAL)
def test_usual_sizes_agree(name):
    clients = images(USUAL[name], sizes=(9, 4))
    assert disagreement(name, clients, "float64", batch_size=4, steps=2, momentum=0.9) < 1e-10
    fast = federation(name, clients, "auto")
    assert fast.layout.size == sum(p.numel() for p in NETWORKS[name](USUAL[name], 4)().parameters())


@pytest.mark.parametrize(
    "network",
    [
        ConvNet((2, 6, 7), (Convolution(5, 1, False),), (), 3),
        ConvNet((1, 9, 8), (Convolution(18, 0, False), Convolution(3, 2, True), Convolution(17, 1, False)), (7, 6), 3),
        ConvNet((17, 5, 5), (Convolution(4, 1, True), Convolution(20, 1, False)), (5,), 4),
        ConvNet((20, 7, 9), (Convolution(16, 0, False), Convolution(6, 0, True)), (), 2),
    ],
)
def test_gradients_are_autograds(network):
    """Gradients agree with autograd for odd sizes, padding, pooling, few and many channels, and up to two hidden
    layers.
    """
    generator = torch.Generator().manual_seed(1)
    module = ModuleModel(network).build("float64")
    x = torch.randn((6, *network.input_shape), dtype=torch.float64, generator=generator)
    y = torch.randint(0, network.outputs, (6,), generator=generator)
    nn.functional.cross_entropy(module(x), y).backward()
    expected = nn.utils.parameters_to_vector(parameter.grad for parameter in module.parameters())
    order = pass_order(network)
    assert torch.equal(order.sort().values, torch.arange(network.parameters))
    parameters = parameter_views(
        network, nn.utils.parameters_to_vector(module.parameters()).detach()[order].contiguous()
    )
    gradient = torch.full((network.parameters,), torch.nan, dtype=torch.float64)
    conv_pass, rows = ConvPass(network, 6, torch.float64), torch.arange(6)
    for _ in range(2):  # the second time with used buffers
        conv_pass.gradient(
            padded_images(network, x),
            rows,
            y,
            6,
            None,
            parameters,
            prepare(network, parameters),
            parameter_views(network, gradient),
        )
        assert relative(gradient.numpy(), expected[order].numpy()) < 1e-13


def test_what_the_network_cannot_take_is_named():
    network = ModuleModel(ConvNet((1, 8, 8), (Convolution(3),), (), 2))
    with pytest.raises(InputError, match=r"'client-0' \(shape \(9, 9\)\): it takes images of shape \(1, 8, 8\)"):
        federation(network, images((9, 9)), "auto")
    with pytest.raises(InputError, match=r"outputs of shape \(2,\), 4 are needed"):
        federation(network, images((8, 8)), "auto")


def test_both_kinds_of_tiles_are_tried():
    kinds = [tiles_kind(layer) for layer in NETWORKS["three"]((3, 32, 32), 10).convolution_layers]
    assert kinds == [DenseTiles, WinogradTiles, WinogradTiles]


def change_after_ties(name: str, strategy: str) -> np.ndarray:
    """Return a step from a model whose convolutions copy single pixels, on images of zeros and ones.

    Most pooling windows are then exact ties between positions with different neighbours, so the step shows which
    position receives the gradient.
    """
    clients = images(SHAPES[name])
    for client in clients:
        client.x = (client.x > 0).astype(np.float64)
    engine = federation(name, clients, strategy, steps=1)
    start = engine.initial_model(0)
    for layer in NETWORKS[name](clients[0].x.shape[-3:] if len(SHAPES[name]) == 3 else (1, *SHAPES[name]), 4).layers:
        if len(layer.weight_shape) == 4:
            weight = np.zeros(layer.weight_shape)
            outputs = np.arange(layer.weight_shape[0])
            weight[outputs, outputs % layer.weight_shape[1], 1, 1] = 1.0
            start[layer.weight_at : layer.bias_at] = weight.reshape(-1)
            start[layer.bias_at : layer.end] = 0.25
    return engine.run_round(start, Position(0, 0), np.arange(3)).model - start


@pytest.mark.parametrize("name", SHAPES)
def test_ties_go_to_the_first_maximum(name, monkeypatch):
    expected = change_after_ties(name, "loop")
    assert relative(change_after_ties(name, "auto"), expected) < 1e-12
    # Negative control: the later position wins.
    monkeypatch.setattr("sifu_kernels.conv_pass._Pooled.backward", _last_maximum_wins)
    assert relative(change_after_ties(name, "auto"), expected) > 1e-3


def _last_maximum_wins(self, bias_gradient):
    torch.ops.aten.threshold_backward.grad_input(self._target_gradient, self._top, 0.0, grad_input=self._top)
    torch.sum(self._top_rows, 0, out=bias_gradient)
    self._upper.gt_(self._lower).mul_(self._top)
    torch.sub(self._top, self._upper, out=self._lower)
    self._left.gt_(self._right).mul_(self._pairs)
    torch.sub(self._pairs, self._left, out=self._right)


def test_dropout_agrees_in_two_layers_and_pieces(monkeypatch):
    network = ConvNet((1, 6, 6), (Convolution(3, 1),), (9, 8), 4, dropout=0.4)
    assert disagreement(ModuleModel(network), images((6, 6)), "float64", momentum=0.9, batch_size=None) < 1e-10
    monkeypatch.setattr(conv_trainer, "PIECE_BYTES", 1)  # one sample per piece
    assert disagreement(ModuleModel(network), images((6, 6)), "float64", momentum=0.9, batch_size=None) < 1e-10
    fast = federation(ModuleModel(network), images((6, 6)), "auto")
    assert fast.facts.outside == ("dropout",)
    assert not fast.facts.smooth_model


def test_a_wrong_mask_would_be_found_out(monkeypatch):
    """Negative control: the mask of the next sample is noticed."""
    monkeypatch.setattr(conv_trainer, "kept_units", lambda key, first, *others: kept_units(key, first + 1, *others))
    assert disagreement("dropout", images(SHAPES["dropout"]), "float64") > 1e-3


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_evaluation_agrees_and_keeps_the_order_asked_for(name, dtype):
    loop, fast = (federation(name, images(SHAPES[name]), strategy, dtype) for strategy in ("loop", "auto"))
    model = loop.initial_model(3)
    for clients in (np.arange(3), np.array([2, 0]), np.arange(0)):
        expected, evaluation = loop.evaluate(model, clients), fast.evaluate(model, clients)
        assert (evaluation.clients == clients).all()
        assert (evaluation.correct == expected.correct).all()
        assert evaluation.loss_sum == pytest.approx(expected.loss_sum, rel=1e-12 if dtype == "float64" else 1e-5)


def test_a_round_replays_bit_for_bit_on_any_number_of_threads(threads, monkeypatch):
    """Rounds replay bit for bit with more or fewer clients than threads, and with whole batches in many pieces."""
    monkeypatch.setattr(conv_trainer, "CLIENTS_AHEAD", 3)
    clients = images(SHAPES["dropout"], sizes=(3, 7, 12, 31, 5))
    for piece in (1, 2**20):
        monkeypatch.setattr(conv_trainer, "PIECE_BYTES", piece)
        fast = federation("dropout", clients, "auto", "float32", batch_size=None, momentum=0.9)
        start = fast.initial_model(0)
        for active in (np.arange(5), np.array([3]), np.array([0, 3]), np.arange(0)):
            first, again = (fast.run_round(start, Position(1, 4), active) for _ in range(2))
            assert first.model.tobytes() == again.model.tobytes()
            assert first.drifts.tobytes() == again.drifts.tobytes()
            several = [rows for _, rows in fast._trainer.train(start, Position(1, 4), active)]
            torch.set_num_threads(1)
            alone = [rows for _, rows in fast._trainer.train(start, Position(1, 4), active)]
            torch.set_num_threads(threads)
            assert all(map(torch.equal, several, alone))
        evaluations = [fast.evaluate(start, np.arange(5)).loss_sum.tobytes() for _ in range(2)]
        assert evaluations[0] == evaluations[1]
        assert torch.get_num_threads() == threads


def test_an_error_in_a_thread_reaches_the_caller(threads, monkeypatch):
    monkeypatch.setattr(conv_trainer, "PIECE_BYTES", 1)  # many pieces, so that several threads share the client
    fast = federation("cnn", images(SHAPES["cnn"], sizes=(20,)), "auto", batch_size=None)
    monkeypatch.setattr(ConvPass, "gradient", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
    with pytest.raises(MemoryError, match="no memory"):
        fast.run_round(fast.initial_model(0), Position(0, 0), np.array([0]))
