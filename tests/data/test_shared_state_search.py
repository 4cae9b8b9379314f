"""Search for state outside a module: found in hidden places of the user's code, not searched in installed packages."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
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


READS_ENVIRONMENT = """
import os, torch

class Reads(torch.nn.Module):
    def forward(self, x):
        {write}
        return x * float(os.environ.get("OWN_SCALE", "1"))
"""
COMPARES = """
import torch
from own_reads import Reads
from sifu.data.shared_state import changed_state, shared_state

module, weight = Reads(), torch.ones(2, requires_grad=True)
before = shared_state(module)
module(weight).sum().backward()
torch.optim.SGD([weight], lr=0.1)
print(changed_state(before, module))
"""


@pytest.mark.parametrize("write", ["pass", 'os.environ["OWN_SCALE"] = "2"'], ids=["reads", "writes"])
def test_a_variable_that_torch_sets_is_not_the_modules(write: str, tmp_path: Path) -> None:
    """Torch changes the environment when a process makes its first optimizer; a module that reads it is not refused."""
    (tmp_path / "own_reads.py").write_text(READS_ENVIRONMENT.format(write=write))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    program = [sys.executable, "-c", COMPARES]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("[]" if write == "pass" else "['os.environ']")


class Remembering(torch.Tensor):
    """Tensor whose class remembers the largest value that any copy of it was multiplied with."""

    remembers = True
    largest = 0.0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is nn.functional.linear and cls.remembers:
            cls.largest = max(cls.largest, float(args[0].max()))
        return result


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("held", ["parameter", "buffer"])
def test_the_class_of_a_tensor_is_searched(held: str, remembers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions run whenever the tensor is used. Reading the tensor runs none of them."""
    monkeypatch.setattr(Remembering, "remembers", remembers)
    monkeypatch.setattr(Remembering, "largest", 0.0)
    network, values = nn.Sequential(nn.Linear(4, 2)), torch.ones(2, 4).as_subclass(Remembering)
    if held == "parameter":
        network[0].weight = nn.Parameter(values)
    else:
        del network[0].weight
        network[0].register_buffer("weight", values)
    before = shared_state(network)
    refuse_changed_state(before, network)
    network(torch.full((3, 4), 7.0))
    if not remembers:
        refuse_changed_state(before, network)
        return
    with pytest.raises(InputError, match=r"changed Remembering\.largest"):
        refuse_changed_state(before, network)
