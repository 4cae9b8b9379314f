"""A method and a spec key of another package: sifu finds them through entry points and needs no other change."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

import sifu
from run_tools import Command, small_spec
from sifu.core import extensions
from sifu.core.method_info import METHOD_INFOS, MethodInfo, find_method_info
from sifu.methods.base import Method, plan_from
from sifu.methods.registry import METHODS
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView


class Newcomer(Method):
    """Method of another package that starts from a fresh model."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "newcomer",
        "a fresh model, for a test",
        certifies=True,
        protection="noise",
        starts_from="fresh",
        preserves=70,
        figures="unused",
    )

    def plan(self, view: RunView, terms: sifu.RequestTerms) -> Plan:
        """Plan to start from a fresh model."""
        return plan_from(self, view, terms, None)


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the method in this process until the test ends."""
    monkeypatch.setitem(METHOD_INFOS, "newcomer", Newcomer.info)
    monkeypatch.setitem(METHODS, "newcomer", Newcomer)
    return "newcomer"


def test_a_new_method_plans_executes_verifies_and_purges(own_trained: Path, newcomer: str, cli: Command) -> None:
    run = sifu.open_run(own_trained)
    # it preserves the most training, as its own description says
    assert run.plan(["client-001"], level="exact").terms.method == newcomer
    (outcome,) = run.forget(["client-001"], "one", level="exact")
    assert (outcome.method, outcome.level) == (newcomer, "exact")
    assert run.verify().problems == []
    assert newcomer in cli("methods").out
    run.purge()
    assert run.verify().problems == []


def test_without_the_package_verification_says_what_is_missing(
    own_trained: Path, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sifu.open_run(own_trained).forget(["client-001"], "one", method="go_on")
    assert cli("verify", own_trained).code == 0
    monkeypatch.setattr(extensions, "_entries", lambda group: {})
    monkeypatch.delitem(METHOD_INFOS, "go_on")
    assert find_method_info("go_on") is None
    answer = cli("verify", own_trained)
    assert answer.code == 5
    assert "'go_on' is recorded, but no installed package provides it" in " ".join(answer.err.split())


def test_without_the_package_a_run_with_its_key_says_what_is_missing(
    tmp_path: Path, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sifu.train(small_spec(keep={"updates_every": 2}), run=tmp_path / "run")
    assert cli("verify", tmp_path / "run").code == 0
    monkeypatch.setattr(extensions, "_entries", lambda group: {})
    monkeypatch.setattr(extensions, "_KEYS", {})
    answer = cli("verify", tmp_path / "run")
    assert answer.code == 5
    assert "keep.updates_every = 2, which needs a package that is not installed" in " ".join(answer.err.split())


def test_specs_of_older_runs_state_keys_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_entries", lambda group: {})
    monkeypatch.setattr(extensions, "_KEYS", {})
    older = {"server": {"clip": 0.0, "noise": 0.0}, "keep": {"updates_every": 0}, "local": {"calibration_steps": 0}}
    assert sifu.Spec.from_mapping(older) == sifu.Spec()
    with pytest.raises(sifu.MissingExtensionError, match=r"server\.clip = 0\.4"):
        sifu.Spec.from_mapping({"server": {"clip": 0.4}})
