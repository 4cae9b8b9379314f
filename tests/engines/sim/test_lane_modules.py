"""One copy of a module for all clients of a lane: it must keep no state, and certificates state this."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shared_state_modules import Network, nothing_held  # noqa: F401  a fixture
from sifu.core.premises import before_training_premises
from sifu.engines.sim import ModuleModel
from sifu.engines.sim.gpu.module_program import ModulePass
from sifu.errors import InputError
from sifu.theory import facts as fact
from sifu.theory.participation import Participation

BEST_FACTS = fact.TrainingFacts(0.1, 0.0, False, 0.0, None, 1.0, Participation("all"), "float64", True, True)


class Attribute(nn.Module):
    """Linear model that counts its calls in an attribute, in a closure or nowhere."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place, self.calls = nn.Linear(4, 3), place, 0
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        if self.place == "attribute":
            self.calls += 1
        if self.place == "closure":
            self.counted()
        if self.place == "class":
            Network.largest += 1.0
        scores: Tensor = self.layer(x)
        return scores


@pytest.mark.parametrize("place", ["attribute", "closure", "class", "nowhere"])
def test_a_module_that_all_clients_of_a_lane_share_keeps_no_state(place: str) -> None:
    """Lanes map one copy of a module over clients, so a module with state is left to the plain loop."""
    tried = ModulePass(ModuleModel(lambda: Attribute(place)), "float32", torch.device("cpu"))
    if place == "nowhere":
        assert tried.try_out(torch.zeros(4), 3) == 3
        return
    with pytest.raises(InputError, match=r"keeps state \((calls|count of|Network.largest)"):
        tried.try_out(torch.zeros(4), 3)


def test_a_certificate_says_that_clients_share_one_copy() -> None:
    """The premise of a lane differs from the premise of fresh copies."""
    said = {}
    for module in (fact.FRESH_COPIES, fact.ONE_COPY):
        premises = before_training_premises(replace(BEST_FACTS, module=module), "given")
        (said[module],) = [premise.statement for premise in premises if premise.name == "module"]
    assert "fresh copy" in said[fact.FRESH_COPIES]
    assert "one copy for all clients" in said[fact.ONE_COPY]
