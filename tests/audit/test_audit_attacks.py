"""Attacks on released models: scores agree with the engine, areas with scikit-learn, and counterfactuals are told
apart.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import sifu
from run_tools import small_spec
from sifu.audit import AuditOptions, Replays, audit_run
from sifu.audit.membership import attack_rates, bound_rates, lira, relearn_rounds
from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.engines.sim.scorers import Scorer, stacked
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.theory.calibration import exact_multiplier

SMALL_ATTACKS = AuditOptions(replays=Replays(replays=2000, losses=40), shadows=6, relearn_rounds=5, seed=2)


@pytest.mark.parametrize("kind", ["softmax", "least_squares", "mlp"])
def test_scores_agree_with_the_engine(kind: str) -> None:
    spec = Spec.from_mapping(small_spec(model={"kind": kind}, local={"rate": 0.01}))
    clients = clients_from_spec(spec)
    engine, _ = engine_from_spec(spec, clients)
    everyone = np.arange(len(clients))
    model = engine.run_round(engine.initial_model(0), Position(0, 0), everyone).model
    scorer = Scorer(engine.model, engine.layout.dtype)  # type: ignore[attr-defined]
    for chosen in ([3], [0, 5, 7]):
        samples, evaluation = stacked(clients, chosen), engine.evaluate(model, np.array(chosen))
        assert scorer.losses(model, samples).mean() == pytest.approx(evaluation.loss, rel=1e-9)
        if scorer.labels:
            assert scorer.accuracy(model, samples) == pytest.approx(evaluation.accuracy)
            hits = scorer.predictions(model, samples.x) == samples.y
            assert hits.mean() == pytest.approx(evaluation.accuracy)
            right = np.exp(-scorer.losses(model, samples))
            assert scorer.confidences(model, samples) == pytest.approx(np.log(right / (1 - right)), rel=1e-6)


def test_attack_rates_agree_with_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    members, others = generator.normal(0.7, 1, 400).round(1), generator.normal(0, 1, 300).round(1)
    rates = attack_rates(members, others)
    labels = np.repeat([1, 0], [400, 300])
    assert rates.area == pytest.approx(roc_auc_score(labels, np.concatenate([members, others])))
    for rate, at in ((0.01, rates.at_1_percent), (0.1, rates.at_10_percent)):
        allowed = [t for t in np.unique(others) if (others > t).mean() <= rate]
        assert at == pytest.approx((members > min(allowed)).mean())


def test_shadow_models_distinguish_federations_as_far_as_they_differ() -> None:
    generator = np.random.default_rng(1)
    noise = generator.standard_normal((4, 60, 100))
    separate, _ = lira((noise[0] + 2.0, noise[1]), [])
    alike, shares = lira((noise[2], noise[3]), [noise[0][0], noise[1][0]])
    best = bound_rates(0.5)  # mu = 2
    assert separate.at_10_percent == pytest.approx(best.at_10_percent, abs=0.06)
    assert separate.at_1_percent <= best.at_1_percent + 0.05
    assert alike.at_10_percent == pytest.approx(0.1, abs=0.03)
    assert all(share < 0.25 for share in shares)


def test_the_bound_is_the_certificates() -> None:
    rates = bound_rates(exact_multiplier(10.0, 0.01))
    assert rates.at_1_percent == pytest.approx(0.70, abs=0.005)
    assert rates.at_1_percent < rates.at_10_percent < 1.0


def test_relearning_counts_rounds() -> None:
    spec = Spec.from_mapping(small_spec())
    engine, _ = engine_from_spec(spec, clients_from_spec(spec))
    everyone, forgotten = np.arange(12), np.array([2])
    start = engine.initial_model(0)
    goal = (0.5, 0.0)
    rounds = relearn_rounds(engine, start, goal, forgotten, everyone, 1, 30)
    assert rounds is not None
    assert rounds > 0
    assert relearn_rounds(engine, start, goal, forgotten, everyone, 1, rounds - 1) is None
    assert relearn_rounds(engine, start, (0.0, 1e9), forgotten, everyone, 1, 0) == 0


def test_attacks_on_a_marked_run(tmp_path: Path) -> None:
    """An audit with attacks reports every kind of result."""
    run = sifu.train(small_spec(), run=tmp_path / "run")
    run.forget(["client-000", "client-001"], sigma=0.5)
    report = audit_run(run, SMALL_ATTACKS)
    assert report.holds, report.contradictions
    attacks = report.attacks
    assert attacks is not None
    assert attacks.membership is not None
    forgetting, membership = attacks.forgetting, attacks.membership
    assert set(forgetting.accuracy) == {"before", "released", "scratch"}
    assert set(forgetting.disagreement) == {"forgotten", "held out"}
    assert forgetting.distance_to_scratch > 0.0
    assert membership.samples == 20
    assert membership.held_out == 197
    assert membership.loss is not None
    assert membership.lira is not None
    assert membership.bound is not None
    assert membership.shadows == 6
    text = json.dumps(report.values())
    assert "epsilon_shown" in text


def test_a_release_that_forgets_nothing_is_told_by_the_shadows(tmp_path: Path) -> None:
    """Negative control: with hardly any noise, an attack that knows each sample's scores with and without the client
    succeeds.
    """
    run = sifu.train(small_spec(data={"partition": "one_class"}), run=tmp_path / "run")
    run.forget(["client-000"], sigma=0.01, epsilon=1000.0, max_rounds=1)
    report = audit_run(run, SMALL_ATTACKS)
    assert report.attacks is not None
    assert report.attacks.membership is not None
    assert report.attacks.membership.lira is not None
    assert report.attacks.membership.lira.at_10_percent > 0.5
