"""A fifth regime, added in this file alone: every client trains once, for long, and the average is the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import small_spec
from sifu.core import extensions
from sifu.core.engine import Engine, Position
from sifu.core.extensions import SpecKey
from sifu.core.spec import Spec, StopSpec
from sifu.core.spec import regime as regimes
from sifu.core.spec.regime import Demand, Regime
from sifu.errors import InputError
from sifu.run.clients_and_engine import ENGINES, clients_from_spec, engine_from_spec, rounds_engine
from sifu.run.regimes import BEHAVIOURS, RunInRounds
from sifu.run.training import RecordedTraining
from sifu.store.writer import RunWriter

LENGTH = SpecKey("local.one_shot", 0, "train once, for this many times the local steps")
SPEC = small_spec(local={"rate": 0.05, "steps": 2, "one_shot": 3}, stop={"target": 0.0, "max_rounds": 8})


class OneShot(Regime):
    """Regime with one round of long local training."""

    name = "one shot"

    @classmethod
    def is_for(cls, spec: Any) -> bool:
        return bool(spec.extension(LENGTH))

    def demands(self) -> Iterator[Demand]:
        yield "server.participation", self.spec.server.participation == "all", "all with local.one_shot"

    def most_rounds(self, release: str, max_rounds: int) -> float:
        return 1

    def check_method(self, name: str) -> None:
        if name != self.exact_method:
            raise InputError(f"method {name} goes back to rounds, and a run with local.one_shot has one: use scratch")


class OneShotRun(RunInRounds):
    """Behaviour of a run that ends after one round, regardless of its stop rule."""

    def training(self, engine: Engine, writer: RunWriter, stop: StopSpec | None = None) -> RecordedTraining:
        once = replace(stop or self.view.spec.stop, target=0.0, min_rounds=1, max_rounds=1, evaluate_every=1)
        return super().training(engine, writer, once)


def long_training(
    spec: Spec, clients: Any, model: Any = None, numbers: Sequence[int] | None = None
) -> tuple[Engine, Spec]:
    """Return the engine of rounds with longer local training, and its spec."""
    longer = replace(spec.local, steps=spec.local.steps * spec.extension(LENGTH))
    engine, settled = rounds_engine(replace(spec, local=longer), clients, model, numbers)
    return engine, replace(settled, local=replace(settled.local, steps=spec.local.steps))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register only the spec key; without the regime it has no effect."""
    monkeypatch.setattr(extensions, "_KEYS", dict(extensions._KEYS))
    sifu.register_key(LENGTH)


@pytest.fixture
def one_shot(key: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the regime for one test."""
    monkeypatch.setattr(regimes, "_REGIMES", list(regimes._REGIMES))
    regimes.add_regime(OneShot)
    monkeypatch.setitem(BEHAVIOURS, OneShot, OneShotRun)
    monkeypatch.setitem(ENGINES, OneShot, long_training)


@pytest.mark.usefixtures("one_shot")
@pytest.mark.parametrize("method", ["scratch", "auto"])
def test_a_fifth_regime_trains_forgets_and_verifies(tmp_path: Path, method: str) -> None:
    run = sifu.train(SPEC, run=tmp_path / "run")
    with run.reader() as reader:
        assert [node.kind for node in reader.nodes()] == ["initial", "round"]
    with pytest.raises(InputError, match="method sifu goes back to rounds"):
        run.plan(["client-003"], method="sifu")
    (outcome,) = run.forget(["client-003"], method=method)
    assert outcome.level == "exact"
    assert run.verify().problems == []

    spec = Spec.from_mapping(SPEC)
    others = np.setdiff1d(np.arange(12), [3])
    long = Spec.from_mapping(small_spec(local={"rate": 0.05, "steps": 6}, stop={"target": 0.0, "max_rounds": 8}))
    engine, _ = engine_from_spec(long, clients_from_spec(long))
    expected = engine.run_round(engine.initial_model(1), Position(1, 0), others).model
    with run.reader() as reader:
        assert reader.load_model(reader.tip).tobytes() == expected.tobytes()
    assert isinstance(spec.regime, OneShot)


@pytest.mark.usefixtures("one_shot")
def test_its_demands_are_those_of_the_spec() -> None:
    with pytest.raises(InputError, match=r"server.participation must be all with local.one_shot"):
        Spec.from_mapping(SPEC | {"server": {"participation": "poisson(0.5)"}})


@pytest.mark.usefixtures("one_shot")
def test_verification_asks_the_regime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if the regime allowed no round, the same run would not verify."""
    run = sifu.train(SPEC, run=tmp_path / "run")
    run.forget(["client-003"], method="scratch")
    monkeypatch.setattr(OneShot, "most_rounds", lambda self, release, max_rounds: 0)
    assert any("its terms allow 0 rounds, and it took 1" in problem for problem in run.verify().problems)


@pytest.mark.usefixtures("key")
def test_without_the_regime_the_same_spec_trains_in_rounds(tmp_path: Path) -> None:
    """Negative control: the key alone has no effect."""
    run = sifu.train(SPEC, run=tmp_path / "run")
    with run.reader() as reader:
        assert len(reader.nodes()) == 9
    assert Spec.from_mapping(SPEC).regime.name == "rounds"
