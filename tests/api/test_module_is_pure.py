"""Modules of the operator: known, declared or neither, and the checks of each (docs/theory.md, section 6.6)."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sifu
import sifu_verifier
from run_tools import run_cli
from sifu.core.engine import Position
from sifu.data import ClientData
from sifu.data.own_modules import is_known
from sifu.engines.sim import LocalTraining, ModuleModel, SimulatedFederation
from sifu.errors import InputError
from sifu.store.reader import RunReader

SPEC: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "local": {"rate": 0.1, "steps": 2},
    "regularity": {"kind": "assumed"},
    "stop": {"max_rounds": 2, "target": 0.0},
}
FILE_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


class Own(nn.Module):
    """Linear model of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.layer(x)
        return scores


def plain() -> nn.Module:
    """Return a network of torch's layers."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def hooked() -> nn.Module:
    """Return a network of torch's layers with a hook."""
    module = plain()
    module[2].register_forward_hook(lambda *given: None)  # type: ignore[index, operator]
    return module


def rebound() -> nn.Module:
    """Return a layer whose `forward` is set on the object."""
    module = nn.Linear(4, 3)
    module.forward = functools.partial(nn.Linear.forward, module)  # type: ignore[method-assign]
    return module


class Scaled:
    """A callable object that keeps what it computed."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the scores."""
        self.last = x
        return x


def activated(function: Any) -> nn.Module:
    """Return a layer that stores an activation function."""
    return nn.TransformerEncoderLayer(4, 2, activation=function)


def squared(scores: Tensor, labels: Tensor) -> Tensor:
    """Return a loss of the operator's own."""
    return (scores - nn.functional.one_hot(labels, 3)).square().mean()


def clients_of(count: int = 4, without: int = -1) -> dict[str, tuple[Any, Any]]:
    generator = np.random.default_rng(0)
    drawn = {f"c{k}": (generator.normal(size=(6 + k, 4)), np.arange(6 + k) % 3) for k in range(count)}
    return {name: pair for name, pair in drawn.items() if name != f"c{without}"}


def premise_of(run: sifu.Run) -> tuple[str, str]:
    """Forget a client from scratch; return the level, and the status of the premise on the module."""
    (outcome,) = run.forget(["c2"], method="scratch")
    certificate = json.loads((run.folder / "certificates" / f"{outcome.request}.public.json").read_text())
    named = [row["status"] for row in certificate["body"]["premises"] if row["name"] == "module"]
    assert run.verify().problems == []
    assert sifu_verifier.verify(run.folder) == []
    return outcome.level, "".join(named)


@pytest.mark.parametrize(
    ("model", "pure", "expected"),
    [
        (plain, False, ("exact", "met")),
        (plain, True, ("exact", "met")),
        (Own, False, ("conditional", "assumed")),
        (Own, True, ("exact", "trusted")),
        (hooked, False, ("conditional", "assumed")),
        (rebound, False, ("conditional", "assumed")),
        (ModuleModel(plain, custom_loss=squared), False, ("conditional", "assumed")),
        (ModuleModel(plain, custom_loss=squared), True, ("exact", "trusted")),
    ],
    ids=["known", "known and declared", "own", "own declared", "hook", "forward", "loss", "loss declared"],
)
def test_the_level_follows_from_what_is_known_or_declared(
    model: Any, pure: bool, expected: tuple[str, str], tmp_path: Path
) -> None:
    run = sifu.train(SPEC, run=tmp_path / "run", model=model, clients=clients_of(), module_is_pure=pure)
    assert premise_of(run) == expected


@functools.wraps(nn.functional.relu)
def renamed(x: Tensor) -> Tensor:
    """Return what relu returns, under its name."""
    return nn.functional.relu(x)


def watched() -> nn.Module:
    """Return a layer with a hook on the gradient of a parameter."""
    module = nn.Linear(4, 3)
    module.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    return module


class Watching(Tensor):
    """Tensor of a class of the user's, which torch asks before every function."""


def observed() -> nn.Module:
    """Return a normalisation whose buffer has a class of the user's."""
    module = nn.BatchNorm1d(3)
    module.running_mean = torch.zeros(3).as_subclass(Watching)
    return module


OWN_CALLABLES = (
    renamed,
    MethodType(lambda self, x: x, nn.ReLU()),
    functools.partial(nn.ReLU(), Own()),
    lambda x: x,
    Scaled(),
    Scaled().__call__,
    functools.partial(Scaled()),
    [].append,
    Own(),
)


@pytest.mark.parametrize(
    "part",
    [
        Own(),
        hooked(),
        watched(),
        observed(),
        rebound(),
        nn.Sequential(nn.Linear(4, 4), Own()),
        *map(activated, OWN_CALLABLES),
    ],
)
def test_a_module_with_a_part_of_the_users_is_not_known(part: nn.Module) -> None:
    assert not is_known(part)


@pytest.mark.parametrize("function", [nn.functional.relu, torch.tanh, functools.partial(nn.functional.gelu), nn.GELU()])
def test_a_module_with_functions_of_libraries_is_known(function: Any) -> None:
    assert is_known(activated(function))


def test_no_module_is_known_under_a_hook_for_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert not is_known(plain())
    handle.remove()
    assert is_known(plain())


def test_the_declaration_names_the_function_and_the_digest_of_its_file(tmp_path: Path) -> None:
    model = ModuleModel(Own, custom_loss=squared)
    run = sifu.train(SPEC, run=tmp_path / "run", model=model, clients=clients_of(), module_is_pure=True)
    (premise,) = [each for each in run.plan(["c1"], method="scratch").premises if each.name == "module"]
    for name in ("Own", "squared"):
        assert f"{__name__}:{name} (SHA-256 of its file {FILE_DIGEST})" in premise.statement
    again = sifu.open_run(tmp_path / "run", model=model, clients=clients_of())
    assert premise_of(again) == ("exact", "trusted")
    with pytest.raises(InputError, match="certificates would describe a different training"):
        sifu.open_run(tmp_path / "run", model=hooked_own, clients=clients_of()).forget(["c1"], method="scratch")
    unfiled = eval("lambda: Own()", {"Own": Own})
    with pytest.raises(InputError, match="whose file cannot be read"):
        sifu.train(SPEC, run=tmp_path / "other", model=unfiled, clients=clients_of(), module_is_pure=True)


def hooked_own() -> nn.Module:
    """Return the same network from another function."""
    return Own()


class Counts(nn.Module):
    """Module that scales its scores by a counter, which lies in its class or in an attribute."""

    calls = 0

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place, self.own = nn.Linear(4, 3), place, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        if self.place == "class":
            Counts.calls += 1
        self.own += 1
        count = Counts.calls if self.place == "class" else self.own
        scores: Tensor = self.layer(x) * (1.0 + 0.01 * count)
        return scores


@pytest.mark.parametrize("count", [1, 4], ids=["a node", "all clients"])
def test_a_training_that_does_not_repeat_is_refused(count: int, tmp_path: Path) -> None:
    """Negative control: a counter that all copies share changes the second training of the same client."""
    clients = [ClientData(name, x, y) for name, (x, y) in clients_of(count).items()]
    for place in ("class", "attribute"):
        engine = SimulatedFederation(clients, ModuleModel(lambda place=place: Counts(place)), LocalTraining(0.1, 2))
        start = engine.initial_model(0)
        if place == "class":
            with pytest.raises(InputError, match="keeps state between clients"):
                engine.run_round(start, Position(0, 0), np.arange(count))
        else:
            engine.run_round(start, Position(0, 0), np.arange(count))


def test_state_in_a_copy_ends_with_the_client(tmp_path: Path) -> None:
    """A model trained without the leaver has the bits of a federation that never had it."""

    def make() -> nn.Module:
        torch.manual_seed(5)  # the same initial model on every branch
        return Counts("attribute")

    run = sifu.train(SPEC, run=tmp_path / "run", model=make, clients=clients_of())
    run.forget(["c0"], method="scratch")
    sifu.train(SPEC, run=tmp_path / "never", model=make, clients=clients_of(without=0))
    models = []
    for name in ("run", "never"):
        with RunReader(tmp_path / name) as reader:
            models.append(reader.load_model(reader.tip).tobytes())
    assert models[0] == models[1]


FEATURES = """
import torch

class Own(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x.flatten(1)){more}

make = Own
"""


@pytest.fixture
def own_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a spec and a file with a feature module of an own class into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_pure.py").write_text(FEATURES.format(more=""))
    (tmp_path / "spec.toml").write_text(
        '[data]\nname = "digits"\nclients = 6\n[model]\nkind = "ridge"\n[features]\nkind = "module"\n'
        'module = "own_pure:make"\n'
    )
    yield tmp_path
    sys.modules.pop("own_pure", None)


def test_a_declaration_is_no_consent_to_import(own_features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIFU_ALLOW_CODE", raising=False)
    declared = ("--set", "model.module_is_pure=true")
    refused = run_cli("train", "spec.toml", "--run", "run", *declared)
    assert refused.code == 2
    assert "--allow-code own_pure:make" in refused.err
    assert "own_pure" not in sys.modules
    for name, more, level in (("declared", declared, "exact"), ("not declared", (), "conditional")):
        assert run_cli("--allow-code", "own_pure:make", "train", "spec.toml", "--run", name, *more).code == 0
        answer = run_cli("--allow-code", "own_pure:make", "forget", name, "--client", "client-003", "--format", "json")
        assert json.loads(answer.out)["requests"][0]["level"] == level
        assert sifu_verifier.verify(own_features / name) == []


@pytest.mark.parametrize("more", [" - x.flatten(1).mean(0)", " + torch.rand(1)"], ids=["batch", "draws"])
def test_features_that_depend_on_the_batch_are_refused(own_features: Path, more: str) -> None:
    (own_features / "own_pure.py").write_text(FEATURES.format(more=more))
    sifu.allow_code("own_pure:make")
    with pytest.raises(InputError, match="depends on other samples"):
        sifu.train("spec.toml", run="run")
