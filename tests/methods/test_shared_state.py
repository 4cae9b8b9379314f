"""Networks that keep state where copies of a module share it: it reaches no other round, and no features.

Repeating the training of a few clients does not reveal state that one client sets and another one reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import sifu
import stateful_modules
from shared_state_modules import HARMLESS, LATCHED, SHARED, CopiesItself, Network, constant, nothing_held  # noqa: F401  a fixture
from shared_state_runs import OWN, clients_of, frozen, own_model, released
from sifu.engines.sim.plain_loop import LoopTrainer
from sifu.errors import InputError


def outcome_of(factor: Callable[..., float], folder: Path) -> str:
    """Return `refused`, or whether a model from scratch is the `same` as if the leaver had never existed."""
    try:
        never = own_model(factor, folder / "others", without="client-4")
        run = own_model(factor, folder)
    except InputError as error:
        return "refused" if "between clients" in str(error) else str(error)
    (outcome,) = run.forget(["client-4"], "gone", method="scratch")
    assert outcome.level == "exact"
    return "same" if np.array_equal(released(run.folder), released(never.folder)) else "different"


@pytest.mark.parametrize("what", SHARED)
def test_shared_state_of_a_round_reaches_no_other_round(what: str, tmp_path: Path) -> None:
    assert outcome_of(SHARED[what], tmp_path) in ("same", "refused")


@pytest.mark.parametrize("what", LATCHED)
def test_a_latch_of_a_round_reaches_no_other_round(what: str, tmp_path: Path) -> None:
    assert outcome_of(LATCHED[what], tmp_path) == "same"


def test_a_latch_in_one_process_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a latch that is neither forked away nor refused gives another model."""
    monkeypatch.setattr(LoopTrainer, "forks", False)
    monkeypatch.setattr("sifu.engines.sim.plain_loop.refuse_changed_state", lambda *given: None)
    assert outcome_of(SHARED["a latch in a file's variable"], tmp_path) == "different"


@pytest.mark.parametrize("what", SHARED)
def test_features_that_depend_on_shared_state_are_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of a record must not depend on the client's other records either."""
    monkeypatch.setitem(stateful_modules.CLASSES, "shared", lambda: Network(SHARED[what]))
    stateful_modules.choose(stateful_modules.Kind("shared", "forward", "scale"))
    with pytest.raises(
        InputError, match=r"between clients|depends on other samples|no longer gives the same features|cannot be copied"
    ):
        frozen(tmp_path)


def test_a_module_whose_copies_are_itself_is_refused(tmp_path: Path) -> None:
    clients = {client.name: (client.x, client.y) for client in clients_of()}
    with pytest.raises(InputError, match=r"between clients|share their parameters"):
        sifu.train(OWN, run=tmp_path / "run", model=CopiesItself, clients=clients)


@pytest.mark.parametrize("what", HARMLESS)
def test_state_of_a_copy_and_constants_are_allowed(what: str, tmp_path: Path) -> None:
    """Negative control: state that no other client reads keeps the level `exact`."""
    run = own_model(HARMLESS[what], tmp_path)
    (outcome,) = run.forget(["client-4"], "gone", method="scratch")
    assert outcome.level == "exact"


class ScalesItsInput(Network):
    """Network that changes its input in place, while it trains or while it does not."""

    def __init__(self, in_training: bool) -> None:
        super().__init__(constant)
        self.in_training = in_training

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of scaled samples."""
        if self.training is self.in_training:
            x.mul_(1.5)
        return super().forward(x)


@pytest.mark.parametrize("in_training", [True, False])
def test_a_module_that_changes_its_input_changes_no_clients_data(in_training: bool, tmp_path: Path) -> None:
    """The module is tried on samples of the first client, which is another one if the first one never existed."""
    clients = {client.name: (client.x, client.y) for client in clients_of()}
    run = sifu.train(OWN, run=tmp_path / "run", model=lambda: ScalesItsInput(in_training), clients=clients)
    (outcome,) = run.forget(["client-0"], "gone", method="scratch")
    assert outcome.level == "exact"
    del clients["client-0"]
    sifu.train(OWN, run=tmp_path / "never", model=lambda: ScalesItsInput(in_training), clients=clients)
    np.testing.assert_array_equal(released(tmp_path / "run"), released(tmp_path / "never"))
