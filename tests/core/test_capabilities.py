"""Optional methods of engines: declared by inheriting their capability, and refused if undeclared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import small_spec
from sifu.core.capabilities import CAPABILITIES, REQUIRED, check_capabilities
from sifu.core.engine import LeavesOut, Position, RunsGroupRounds, run_group_rounds
from sifu.core.round_stream import RunsAhead
from sifu.core.spec import Spec
from sifu.engines.sim import SimulatedFederation
from sifu.errors import InputError
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec

SPEC = small_spec(local={"rate": 0.05, "steps": 3}, stop={"target": 0.0, "max_rounds": 2})


class Misspelt(SimulatedFederation):
    """Engine whose misspelt optional method would never be called."""

    def leaves_out(self, clients: Any) -> None:
        raise AssertionError("never called")


class Undeclared(SimulatedFederation):
    """Engine whose optional method is spelt correctly but not declared."""

    def leave_out(self, clients: Any) -> None:
        raise AssertionError("never called")


class Declared(SimulatedFederation, LeavesOut, RunsGroupRounds):
    """Engine that declares its optional methods, with another method that resembles none of them."""

    asked = 0

    def leave_out(self, clients: Any) -> None:
        self.gone = set(clients)

    def run_group_rounds(self, models: Any, position: Position, groups: Any) -> list[Any]:
        self.asked += 1
        return [self.run_round(model, position, members) for model, members in zip(models, groups, strict=True)]

    def describe(self) -> str:
        return "declared"


class PassedOn:
    """Wrapper that forwards missing attributes to another engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def engine_of(kind: type[SimulatedFederation]) -> Any:
    spec = Spec.from_mapping(SPEC)
    engine, _ = engine_from_spec(spec, clients_from_spec(spec))
    engine.__class__ = kind
    return engine


@pytest.mark.parametrize(("kind", "found"), [(Misspelt, "leaves_out"), (Undeclared, "leave_out")])
def test_an_optional_method_that_is_not_declared_is_refused(tmp_path: Path, kind: Any, found: str) -> None:
    with pytest.raises(InputError, match=f"has '{found}' but does not declare .*inherit sifu.core.engine.LeavesOut"):
        sifu.train(SPEC, run=tmp_path / "run", engine=engine_of(kind))
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_continued_with_a_misspelt_engine(tmp_path: Path) -> None:
    sifu.train(SPEC, run=tmp_path / "run", engine=engine_of(Declared))
    with pytest.raises(InputError, match="leaves_out"):
        sifu.open_run(tmp_path / "run", engine=engine_of(Misspelt)).forget(["client-001"])


def test_an_engine_that_passes_on_whom_to_leave_out_must_declare_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="PassedOn has 'leave_out' but does not declare"):
        sifu.train(SPEC, run=tmp_path / "run", engine=PassedOn(engine_of(Declared)))
    check_capabilities(PassedOn(engine_of(SimulatedFederation)))  # type: ignore[arg-type]


def test_a_declared_capability_is_used() -> None:
    engine, plain = engine_of(Declared), engine_of(SimulatedFederation)
    check_capabilities(engine)
    models, groups = [engine.initial_model(0)] * 2, [np.array([0, 1]), np.array([2, 3])]
    ours = run_group_rounds(engine, models, Position(0, 0), groups)
    assert engine.asked == 1
    theirs = run_group_rounds(plain, models, Position(0, 0), groups)
    assert [done.model.tobytes() for done in ours] == [done.model.tobytes() for done in theirs]


def test_a_declared_capability_must_be_implemented() -> None:
    class Ahead(RunsAhead):
        def run_round_s(self) -> None: ...

    with pytest.raises(TypeError, match="run_rounds"):
        Ahead()  # type: ignore[abstract]


def test_every_capability_is_listed_under_its_own_members() -> None:
    for name, capability in CAPABILITIES.items():
        assert name in vars(capability), (name, capability)
        assert name not in REQUIRED
        abstract = getattr(capability, "__abstractmethods__", frozenset())
        assert abstract <= set(CAPABILITIES), capability
