"""Descriptions of convolutional networks: parameters, initial weights, keyed masks, and errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sifu.data.client_data import ClientData
from sifu.engines.sim import (
    ConvNet,
    Convolution,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
    make_model,
)
from sifu.engines.sim.networks import KeyedDropout, cnn, kept_units
from sifu.errors import InputError
from sifu.theory.participation import base_key, fractions, place_key, scores


def federation(model: Any, shape: tuple[int, ...], strategy: Any = "auto") -> SimulatedFederation:
    client = ClientData("client-0", np.zeros((5, *shape)), np.arange(5) % 4)
    return SimulatedFederation([client], model, LocalTraining(0.05, 3, 5), SimulationSettings(strategy=strategy))


def test_the_parameters_of_cnn():
    """The parameter count equals that computed by hand."""
    assert cnn((1, 28, 28), 10).parameters == 160 + 4640 + 32 * 7 * 7 * 64 + 64 + 650


def test_initial_weights_are_torchs_own():
    """Initial weights equal those of torch layers made one after the other."""
    model = make_model("cnn", (3, 16, 16), 2)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Linear(512, 64), nn.Linear(64, 2)]
    expected = torch.cat([p.detach().reshape(-1) for layer in layers for p in layer.parameters()])
    assert torch.equal(nn.utils.parameters_to_vector(model.build("float32").parameters()).detach(), expected)
    assert model.layout("float32").names[:3] == ("conv1.weight", "conv1.bias", "conv2.weight")
    assert model.layout("float32").names[-2:] == ("fc2.weight", "fc2.bias")


def test_masks_are_drawn_by_place():
    """Dropout masks agree with the rule written out number by number."""
    rate, seed, units = 0.3, 11, 6
    key = place_key(base_key(seed, "dropout"), 2, 7, 4, 1, 0)
    kept = kept_units(key, 0, 5, units, rate)
    for sample, unit in itertools.product(range(5), range(units)):
        assert kept[sample, unit] == (fractions(scores(key, sample * units + unit)) >= rate)
    many = kept_units(key, 0, 400, 100, rate)
    assert abs(many.mean() - 0.7) < 4 * (0.21 / many.size) ** 0.5
    module = KeyedDropout(rate)
    module.key = int(key)
    dropped = module(torch.ones(5, units))
    assert torch.equal(dropped, torch.from_numpy(kept).float().mul(1 / (1 - rate)))
    assert torch.equal(module.eval()(torch.ones(5, units)), torch.ones(5, units))


def test_descriptions_that_cannot_be_are_sentences():
    with pytest.raises(InputError, match="images of 2x2 are too small: no pixels are left after convolution 2"):
        make_model("cnn", (3, 2, 2), 10)
    with pytest.raises(InputError, match=r"'cnn' needs images .* found samples of shape \(64,\)"):
        make_model("cnn", (64,), 2)
    network = ModuleModel(ConvNet((1, 8, 8), (Convolution(3),), (), 2))
    with pytest.raises(InputError, match=r"'client-0' \(shape \(12, 12\)"):
        federation(network, (12, 12))
    with pytest.raises(InputError, match=r"outputs of shape \(2,\), 4 are needed"):
        federation(network, (8, 8))
