"""Attack on a released model: scores agree with the engine, rates with scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_curve

import sifu
from run_tools import small_spec
from sifu.audit import AuditOptions, audit_run
from sifu.audit.membership import attack_rate
from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.engines.sim.scorers import Scorer, stacked
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec


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
        if kind != "least_squares":
            hits = scorer.predictions(model, samples.x) == samples.y
            assert hits.mean() == pytest.approx(evaluation.accuracy)


def test_attack_rates_agree_with_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    members, others = generator.normal(0.7, 1, 400), generator.normal(0, 1, 300)
    false, true, _ = roc_curve(
        np.repeat([1, 0], [400, 300]), np.concatenate([members, others]), drop_intermediate=False
    )
    for alarms in (0.01, 0.1):
        assert attack_rate(members, others, alarms) == pytest.approx(true[false <= alarms].max())


def test_the_attack_is_reported_for_the_models_before_and_after(tmp_path: Path) -> None:
    """Without its only clients, a model is worse on a class than on any other: no sample of it is called a member."""
    run = sifu.train(small_spec(data={"partition": "one_class"}, local={"rate": 0.05}), run=tmp_path / "run")
    run.forget(["client-000"], method="scratch")
    found = audit_run(run, AuditOptions(replays=2000, seed=2)).membership
    assert found is not None
    assert (found.samples, found.held_out, found.bound) == (10, 197, 0.01)
    assert found.before is not None
    assert found.before >= found.released == 0.0
