"""Compiled passes: they give the same bits as the Python code they were compiled from, and are optional."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from networks import NETWORKS

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, ModuleModel, SimulatedFederation, SimulationSettings
from sifu.engines.sim.networks import ConvNet, Convolution
from sifu.engines.sim.threads import scripted
from sifu_kernels import conv_trainer as trainer
from sifu_kernels.conv_pass import ConvPass, padded_images, parameter_views, prepare

PASSES = [
    NETWORKS["three"]((3, 19, 18), 4),
    NETWORKS["dropout"]((1, 7, 8), 4),
    ConvNet((17, 5, 5), (Convolution(4, 1, True), Convolution(20, 1, False)), (5, 6), 4, dropout=0.3),
    ConvNet((2, 6, 7), (Convolution(5, 1, False),), (), 3),
]


@dataclass
class Client:
    name: str
    x: Any
    y: Any


def gradients(conv_pass: ConvPass, network: ConvNet, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of six samples, computed ten times, because TorchScript optimises its code after a few
    calls.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((6, *network.input_shape), generator=generator).to(dtype)
    labels = torch.randint(0, network.outputs, (6,), generator=generator)
    parameters = parameter_views(network, (0.1 * torch.randn(network.parameters, generator=generator)).to(dtype))
    kept = [torch.rand((6, units), generator=generator) > 0.3 for units in network.hidden]
    results = []
    for _ in range(10):
        flat = torch.full((network.parameters,), torch.nan, dtype=dtype)
        conv_pass.gradient(
            padded_images(network, x),
            torch.tensor([5, 0, 1, 4, 2, 3]),
            labels,
            20,
            kept if network.dropout else None,
            parameters,
            prepare(network, parameters),
            parameter_views(network, flat),
        )
        conv_pass.forward(padded_images(network, x), torch.arange(6), None, parameters, prepare(network, parameters))
        results += [flat, conv_pass.scores.clone()]
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network", PASSES)
def test_compiled_passes_make_the_same_bits(network, dtype):
    plain, compiled = ConvPass(network, 6, dtype), scripted(ConvPass(network, 6, dtype))
    assert isinstance(compiled, torch.jit.ScriptModule)
    expected = gradients(plain, network, dtype)
    assert all(map(torch.equal, gradients(compiled, network, dtype), expected))
    assert not torch.equal(expected[0], torch.zeros_like(expected[0]))


def test_compiling_says_nothing():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert isinstance(scripted(ConvPass(PASSES[3], 2, torch.float32)), torch.jit.ScriptModule)
    assert said == []


def rounds(clients: int = 5) -> list[bytes]:
    """Return the models of eight rounds."""
    generator = np.random.default_rng(3)
    data = [
        Client(f"{number}", generator.standard_normal((12 + number, 1, 9, 8)), generator.integers(0, 4, 12 + number))
        for number in range(clients)
    ]
    federation = SimulatedFederation(
        data,
        ModuleModel(NETWORKS["dropout"]((1, 9, 8), 4)),
        LocalTraining(0.05, 4, 5, 0.9),
        SimulationSettings(dtype="float32", seed=5),
    )
    model, models = federation.initial_model(0), []
    for number in range(8):
        model = federation.run_round(model, Position(0, number), np.arange(clients)).model
        models.append(model.tobytes())
    return models


def test_a_run_does_not_show_when_its_passes_were_compiled(monkeypatch):
    """A run that is killed and continued compiles at another round, and its models are the same."""
    compiled: list[bool] = []

    def watched(module):
        script = scripted(module)
        compiled.append(isinstance(script, torch.jit.ScriptModule))
        return script

    monkeypatch.setattr(trainer, "scripted", watched)
    histories = []
    for after in (2, 17, 10**9):
        monkeypatch.setattr(trainer, "SCRIPT_AFTER", after)
        histories.append(rounds())
        assert bool(compiled) == (after < 10**9)
        assert all(compiled)
        compiled.clear()
    assert histories[0] == histories[1] == histories[2]
    assert len(set(histories[0])) == 8


def test_without_torchscript_the_same_code_runs(monkeypatch):
    monkeypatch.setattr(trainer, "SCRIPT_AFTER", 2)
    expected = rounds()

    def gone(*_: Any) -> None:
        raise RuntimeError("torch.jit.script is no more")

    monkeypatch.setattr(torch.jit, "script", gone)
    module = ConvPass(PASSES[3], 2, torch.float32)
    assert scripted(module) is module
    assert rounds() == expected
