"""Audits by `audit_run`, of runs that keep their promises and of runs that break them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from designed_runs import DELTA, LEAVING, HalfNoise, LaterNode, designed_run, executed_by
from scipy import stats

import sifu
from random_runs import random_run
from run_tools import connect, small_spec
from sifu.audit import AuditOptions, audit_run
from sifu.audit.releases import _likelihood_ratios
from sifu.audit.replay_evidence import noise_drawn
from sifu.core.round import SystemNormals
from sifu.methods.registry import METHODS
from sifu.methods.sifu import Sifu
from sifu.theory.history import PathNode

QUICK = AuditOptions(attacks=False, replays=4000, seed=1)


def certified_seeds(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize(
    "seed",
    [*certified_seeds(500, 3), *(pytest.param(s, marks=pytest.mark.slow) for s in certified_seeds(503, 17))],
)
def test_random_certified_runs_are_not_contradicted(tmp_path: Path, seed: int) -> None:
    """Twenty random runs with operating-system noise are not contradicted; nodes whose models were erased are counted
    as missed.
    """
    run = random_run(seed, tmp_path / "run")
    report = audit_run(run, QUICK)
    assert report.contradictions == ()
    assert report.observations == ()
    assert report.subjects
    with closing(run.reader()) as reader:
        assert report.nodes_replayed + report.nodes_missed == len(reader.nodes())
    for subject in report.subjects:
        assert subject.closest <= 1.0 + 1e-9
        if subject.releases is not None:
            assert subject.releases.epsilon_true <= subject.releases.epsilon_certified * (1 + 1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
@pytest.mark.parametrize("method", [Sifu, HalfNoise, LaterNode])
def test_every_cheat_is_caught_and_the_honest_operator_is_not(
    tmp_path: Path, method: type[Sifu], epsilon: float
) -> None:
    """The empirical epsilon alone catches a cheat, and shows most of the certified epsilon of an honest run."""
    with executed_by(method):
        run = designed_run(tmp_path / "run", epsilon)
    report = audit_run(run, AuditOptions(attacks=False, seed=1))
    releases = report.subjects[0].releases
    assert releases is not None
    if method is Sifu:
        assert report.holds
        assert releases.epsilon_true == pytest.approx(epsilon, rel=1e-3)
        assert 0.6 * epsilon < releases.epsilon_shown <= epsilon
    else:
        assert not report.holds
        assert releases.epsilon_shown > epsilon
    assert METHODS["sifu"] is Sifu


def test_half_the_noise_is_seen_in_an_ordinary_run(tmp_path: Path) -> None:
    """Half the recorded noise is found in an ordinary run, without a designed task, because the model contains the
    drawn noise.
    """
    with executed_by(HalfNoise):
        run = sifu.train(small_spec(), run=tmp_path / "run")
        run.forget(["client-000"], sigma=0.5)
    report = audit_run(run, QUICK)
    assert not report.holds
    assert any("0.5 is recorded" in sentence for sentence in report.contradictions)


def test_a_changed_model_on_disk_is_not_what_the_rounds_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that does something other than the records state is found."""
    from sifu.engines.sim.simulator import SimulatedFederation

    honest = SimulatedFederation.run_round

    def shifted(self, model, position, active, **wants):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        result = honest(self, model, position, active, **wants)
        return replace(result, model=result.model + 0.01)

    monkeypatch.setattr(SimulatedFederation, "run_round", shifted)
    run = sifu.train(small_spec(), run=tmp_path / "run")
    run.forget(["client-000"], sigma=1.0)
    monkeypatch.undo()
    report = audit_run(run, QUICK)
    assert any("not what the recorded rounds give" in sentence for sentence in report.contradictions)


def test_drifts_that_were_halved_are_a_contradiction(tmp_path: Path) -> None:
    run = designed_run(tmp_path / "run", 1.0)
    assert audit_run(run, QUICK).holds
    with closing(connect(run.folder)) as connection:
        connection.execute("UPDATE participation SET drift = drift / 2 WHERE client = 0")
    report = audit_run(run, QUICK)
    assert any("above Psi" in sentence for sentence in report.contradictions)


def test_clients_that_did_not_ask_are_watched_too(own_trained: Path) -> None:
    report = audit_run(own_trained, QUICK)
    assert report.holds
    assert len(report.subjects) == 3
    assert all(subject.request is None and subject.nodes for subject in report.subjects)
    with closing(connect(own_trained)) as connection:
        connection.execute("UPDATE participation SET drift = drift / 3")
    assert not audit_run(own_trained, QUICK).holds


def test_two_releases_count_together_in_scope_all(tmp_path: Path) -> None:
    """After a second noised release, the audit covers all releases since the first request, and every claim holds."""
    run = designed_run(tmp_path / "run", 3.0)
    with closing(run.reader()) as reader:
        sigma = reader.requests()[0].noise_std
    run.forget(["other-01"], sigma=sigma * 4.0, epsilon=3.0, delta=DELTA)
    report = audit_run(run, QUICK)
    assert report.holds
    leaving = next(subject for subject in report.subjects if subject.clients == (LEAVING,))
    assert leaving.releases is not None
    assert leaving.releases.missed == 0


def test_noise_is_told_from_other_noise() -> None:
    node = PathNode(1, 0, "noise", 1, 0, noise_std=0.7, order=1)
    drawn = SystemNormals().standard_normal(4000)
    assert noise_drawn(node, 0.7 * drawn).as_recorded
    assert not noise_drawn(node, 0.6 * drawn).as_recorded
    gone = np.where(np.arange(4000) < 400, 0.0, 0.7 * drawn / np.sqrt(0.9))
    assert not noise_drawn(node, gone).as_recorded
    uniform = 0.7 * np.sqrt(3.0) * np.random.default_rng(0).uniform(-1, 1, 20_000)
    assert not noise_drawn(node, uniform).as_recorded


def test_one_draw_a_replay_has_the_law_of_whole_models() -> None:
    """A Kolmogorov-Smirnov test on 20,000 draws cannot distinguish projected model noise from the single normal that
    replaces it.
    """
    generator = np.random.default_rng(5)
    difference = generator.standard_normal(40) * 0.05
    sigma = 0.3
    mu = float(np.linalg.norm(difference)) / sigma
    whole = sigma * generator.standard_normal((20_000, 40)) + difference
    ratios = whole @ difference / sigma**2 - 0.5 * mu**2
    short, _ = _likelihood_ratios(mu, generator, 20_000)
    assert stats.ks_2samp(ratios, short).pvalue > 1e-3
    # negative control: a shift by a tenth of a deviation is found
    assert stats.ks_2samp(ratios, short + 0.1 * mu).pvalue < 1e-3
