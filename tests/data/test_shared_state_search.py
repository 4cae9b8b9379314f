"""Search for state outside a module: found in hidden places of the user's code, not searched in installed packages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shared_state_modules import LATCH, REACHED, Network, constant, latch, nothing_held  # noqa: F401  a fixture
from sifu.data.shared_state import refuse_changed_state, shared_state
from sifu.errors import InputError


@pytest.mark.parametrize("what", REACHED)
def test_state_in_hidden_places_is_found(what: str) -> None:
    """A forward pass that changes state outside the module is refused."""
    network = Network(REACHED[what])
    before = shared_state(network)
    network(torch.full((2, 64), 3.0))
    with pytest.raises(InputError, match="between clients"):
        refuse_changed_state(before, network)


def test_a_hook_for_every_module_is_found() -> None:
    def remember(module: nn.Module, inputs: Any) -> None:
        LATCH["rows"] = float(len(inputs[0]))

    network = Network(constant)
    handle = nn.modules.module.register_module_forward_pre_hook(remember)
    try:
        before = shared_state(network)
        network(torch.ones(2, 64))
        with pytest.raises(InputError, match="LATCH"):
            refuse_changed_state(before, network)
    finally:
        handle.remove()


def test_variables_of_installed_packages_are_not_searched() -> None:
    """A package fills caches while it works; only the code of the user's own files is searched."""
    layer = nn.TransformerEncoderLayer(4, 2).eval()
    before = shared_state(layer)
    for rows in (2, 3):
        copy.deepcopy(layer)(torch.ones(rows, 5, 4))
    refuse_changed_state(before, layer)
    network = Network(latch)
    before = shared_state(network)
    assert any(name.endswith(".LATCH") for name in before)
    refuse_changed_state(before, network)
    LATCH["on"] = 1.0
    with pytest.raises(InputError, match="LATCH"):
        refuse_changed_state(before, network)
