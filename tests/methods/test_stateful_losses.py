"""Users' losses and factories: a loss keeps no state between clients, and a factory is not one of sifu's models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

import sifu
from shared_state_modules import LATCH, Network, constant, nothing_held  # noqa: F401  a fixture
from shared_state_runs import OWN, clients_of, released
from sifu.engines.sim import ModuleModel
from sifu.engines.sim.models import Recipe, make_model
from sifu.engines.sim.networks import mlp
from sifu.errors import InputError
from sifu.theory import facts as fact


class LatchedLoss:
    """Loss with state, in an attribute or in a variable that copies share."""

    def __init__(self, shared: bool) -> None:
        self.held: dict[str, float] = {}
        self.shared = shared

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        held = LATCH if self.shared else self.held
        if len(labels) == 6:
            held["on"] = 1.0
        return nn.functional.cross_entropy(scores, labels) * (1.1 if held and len(labels) == 7 else 1.0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_loss_begins_afresh_with_every_client(shared: bool, tmp_path: Path) -> None:
    models = []
    for name, rows in (("six rows", 6), ("five rows", 5)):  # only a client of six rows turns it on
        clients = {client.name: (client.x[:5], client.y[:5]) for client in clients_of()}
        clients["client-2"] = (clients_of()[2].x, clients_of()[2].y)
        clients["client-1"] = (clients_of()[1].x[:rows], clients_of()[1].y[:rows])
        model = ModuleModel(lambda: Network(constant), custom_loss=LatchedLoss(shared))
        run = sifu.train(OWN, run=tmp_path / name, model=model, clients=clients)
        run.forget(["client-1"], "gone", method="scratch")
        models.append(released(run.folder))
    del clients["client-1"]
    models.append(released(sifu.train(OWN, run=tmp_path / "never", model=model, clients=clients).folder))
    assert all(np.array_equal(each, models[-1]) for each in models)


def test_a_factory_of_ones_own_is_not_a_model_of_sifu() -> None:
    """Only sifu's own networks are known to have no state, so only they lack the premise on the module."""
    make_model("mlp", (64,), 3)
    for factory, loss in ((lambda: Network(constant), None), (Recipe(Network, (constant,)), None), (OURS, LatchedLoss)):
        with pytest.raises(InputError, match="only for models of sifu"):
            ModuleModel(factory, custom_loss=loss, initial_source=fact.DRAWN_FROM_SEED)


OURS = Recipe(mlp, ((64,), 3, 4))
