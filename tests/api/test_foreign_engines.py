"""Engines from outside sifu: state that they keep between rounds cannot be seen (docs/theory.md, section 12.1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import small_spec
from sifu.core.engine import Position, RoundResult
from sifu.core.spec import Spec
from sifu.engines.sim import SimulatedFederation
from sifu.errors import InputError
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.run.devices import engine_kind
from sifu.theory.facts import BY_PARTICIPANTS, UNKNOWN
from sifu_verifier import verify

SPEC = small_spec(local={"rate": 0.05, "steps": 3}, stop={"target": 0.0, "max_rounds": 6})


class ServerMomentum(SimulatedFederation):
    """FedAvg with server momentum from round `since` on; the velocity survives every request."""

    since = 0
    velocity: Any = 0.0

    def run_round(self, model: np.ndarray, position: Position, active: np.ndarray, **wanted: Any) -> RoundResult:
        done = super().run_round(model, position, active, **wanted)
        if position.round < self.since:
            return done
        self.velocity = 0.9 * self.velocity + (done.model - model)
        return replace(done, model=model + self.velocity, mean_shift=1.001 * float(np.linalg.norm(self.velocity)))


class LateMomentum(ServerMomentum):
    """Engine that keeps no state in the first rounds, so that a probe of these rounds finds none."""

    since = 3


def engine_of(kind: type[SimulatedFederation]) -> Any:
    spec = Spec.from_mapping(SPEC)
    engine, _ = engine_from_spec(spec, clients_from_spec(spec))
    engine.__class__ = kind
    return engine


def test_an_engine_that_repeats_a_round_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gave a different result when its first round was repeated"):
        sifu.train(SPEC, run=tmp_path / "run", engine=engine_of(ServerMomentum))
    assert not (tmp_path / "run").exists()
    sifu.train(SPEC, run=tmp_path / "own", engine=engine_of(SimulatedFederation))


@pytest.mark.parametrize("terms", [{"method": "scratch"}, {"sigma": 1.0}])
def test_what_a_probe_cannot_see_is_assumed(tmp_path: Path, terms: dict[str, Any]) -> None:
    """The velocity of rounds with the client changes the fresh model, so the level is conditional."""
    run = sifu.train(SPEC, run=tmp_path / "run", engine=engine_of(LateMomentum))
    (outcome,) = run.forget(["client-001"], **terms)
    assert outcome.level == "conditional"
    with run.reader() as reader:
        released = reader.load_model(reader.tip)
    premises = {premise["name"]: premise["status"] for premise in run.certificate(outcome.request).body["premises"]}
    assert premises["engine"] == "assumed"
    assert run.verify().problems == []
    assert verify(tmp_path / "run") == []
    if "method" in terms:
        never, model = engine_of(LateMomentum), engine_of(LateMomentum).initial_model(1)
        others = np.setdiff1d(np.arange(len(never.clients)), [1])
        for place in range(6):
            model = never.run_round(model, Position(1, place), others).model
        assert not np.array_equal(released, model), "the engine did keep something of the client"


@pytest.mark.parametrize("terms", [{"method": "scratch"}, {"sigma": 1.0}])
def test_the_same_with_an_engine_of_sifu_is_certified(tmp_path: Path, terms: dict[str, Any]) -> None:
    run = sifu.train(SPEC, run=tmp_path / "run", engine=engine_of(SimulatedFederation))
    (outcome,) = run.forget(["client-001"], **terms)
    assert outcome.level in ("exact", "proven")


def test_whose_an_engine_is_follows_from_its_class_and_methods() -> None:
    own = engine_of(SimulatedFederation)
    assert engine_kind(own) == BY_PARTICIPANTS
    assert engine_kind(engine_of(LateMomentum)) == UNKNOWN
    own.run_round = own.run_round
    assert engine_kind(own) == UNKNOWN


def test_a_run_of_sifus_engine_does_not_go_on_with_another(tmp_path: Path) -> None:
    run = sifu.train(SPEC, run=tmp_path / "run")
    with pytest.raises(InputError, match="an engine whose rounds follow from"):
        sifu.open_run(run.folder, engine=engine_of(LateMomentum)).forget(["client-001"], method="scratch")
