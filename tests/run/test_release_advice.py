"""Advice on noise: accuracy against protection, which more records make cheaper, and which an attack confirms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command
from sifu.advice.release_options import BUDGETS, ReleaseAdvice, advise_releases
from sifu.audit import AuditOptions, audit_run
from sifu.core.spec import Spec

SPEC: dict[str, Any] = {
    "model": {"kind": "ridge"},
    "data": {"clients": 40, "samples_per_client": 30},
    "ridge": {"regularisation": 1.0},
    "release": {"noise": 0.01},
}


@pytest.fixture(scope="module")
def advice() -> ReleaseAdvice:
    return advise_releases(Spec.from_mapping(SPEC), None, None)


def test_stronger_protection_and_larger_units_cost_more(advice: ReleaseAdvice) -> None:
    by_unit = {unit: [each for each in advice.options if each.unit == unit] for unit in ("record", "client")}
    for options in by_unit.values():
        assert [(each.epsilon, each.delta) for each in options] == list(BUDGETS)
        accuracies = [each.accuracy for each in options]
        assert accuracies == sorted(accuracies)
    for record, client in zip(*by_unit.values(), strict=True):
        assert record.accuracy >= client.accuracy
        assert record.accuracy <= advice.accuracy
        assert record.noise > 0.0
    assert advice.clients == 40


def test_protection_wants_a_larger_penalty(advice: ReleaseAdvice) -> None:
    strong, weak = advice.options[0], advice.options[2]
    assert strong.relative_penalty >= weak.relative_penalty >= advice.relative_penalty


def test_the_verdict_says_when_there_are_too_few(advice: ReleaseAdvice) -> None:
    assert "Noise hides a record at epsilon 3 " in advice.verdict
    assert "Noise hides a client at epsilon 10 " in advice.verdict
    few = SPEC | {"data": {"clients": 4, "samples_per_client": 20}}
    verdict = advise_releases(Spec.from_mapping(few), None, None).verdict
    assert "80 records are too few to hide one" in verdict
    assert "4 clients are too few to hide one" in verdict


def test_the_command_shows_it(tmp_path: Path, cli: Command) -> None:
    spec = tmp_path / "spec.toml"
    assert cli("init", spec).code == 0
    settings = ("model.kind=ridge", "ridge.regularisation=1.0", "release.noise=0.01", "data.clients=10")
    answer = cli("advise", spec, *(word for each in settings for word in ("--set", each)))
    assert answer.code == 0, answer.err
    assert "Noise on releases" in answer.out
    assert "too few to hide one" in answer.out


@pytest.mark.parametrize("hides", ["record", "client"])
def test_what_the_advised_noise_hides_is_not_found(tmp_path: Path, advice: ReleaseAdvice, hides: str) -> None:
    """At (1, 1e-5) the attack names no more than guessing does; without noise it names nearly everything."""
    option = next(each for each in advice.options if each.unit == hides)
    named = {}
    for noise in (0.0, option.noise):
        spec = SPEC | {"release": {"noise": noise}, "ridge": {"regularisation": option.relative_penalty}}
        run = sifu.train(spec, run=tmp_path / f"run-{noise}")
        report = audit_run(run, AuditOptions(only_before_after=True, trials=40, seed=3))
        found = next(each for each in report.before_after if each.what == hides)
        assert found.attempts == 40
        named[noise] = found.identified, max(found.control_identified, 1.0 / found.candidates)
    assert named[0.0][0] > 0.9
    # Three or more of 40 guesses among 40 clients are right with a probability below 0.1.
    assert named[option.noise][0] <= named[option.noise][1] + 2.0 / 40.0


def test_the_advised_noise_keeps_what_it_promises(tmp_path: Path, advice: ReleaseAdvice) -> None:
    """The study holds out the same rows as the run, so no record is farther away; epsilon is rounded up."""
    option = advice.options[1]
    spec = SPEC | {"release": {"noise": option.noise}, "ridge": {"regularisation": option.relative_penalty}}
    run = sifu.train(spec, run=tmp_path / "run")
    names = [f"client-{number:03d}" for number in np.random.default_rng(2).permutation(40)[:4]]
    for name in names:
        stated = run.plan([name], records=[0]).before_after
        assert stated is not None
        assert stated.epsilon <= 1.1 * option.epsilon
