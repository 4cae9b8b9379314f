"""The promise itself, on random runs: replay every run with and without the forgotten, and measure.

Both worlds share everything that is random (schedule, batches, initial models, noise); only the forgotten are
missing from one of them. The true distance of the two models must stay below the recorded Psi at every node, and
what it costs at the noise edges below what was charged. Nothing here trusts the bounds: distances come from training.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import sifu
import sifu.methods.noised as noised
from random_runs import random_run
from run_tools import connect, copy_run, small_spec
from sifu.api.run import Run
from sifu.audit.evidence import (
    Evidence,
    charged_edges,
    distance_rows,
    gather,
    too_far,
    watched_subjects,
    wrong_charges,
)
from sifu.core.layout import Vector
from sifu.core.noise import NormalSource, add_noise, noise_source
from sifu.store.reader import RunReader
from sifu.theory.history import PathNode

FAST = range(20, 28)  # in the run of seed 24 two noise edges are charged to one subject
SLOW = sorted(set(range(68)) - set(FAST))
EVERYONE = 1000
LAST_BIT = 2.0**-52
"""Of the model: a noise edge rounds the sum in each world, which no Psi counts."""


@pytest.fixture(autouse=True)
def replayable_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that can be drawn again, in runs that otherwise go the way of certified ones."""

    def seeded(_: str, seed: int, branch: int) -> NormalSource:
        return noise_source("seeded", seed, branch)

    monkeypatch.setattr(noised, "noise_source", seeded)


def replayed(run: Run) -> Evidence:
    """How far the forgotten moved every model; the replay must meet every model on disk, bit for bit."""
    seed = run.spec.seed

    def drawn_again(node: PathNode, source: Vector) -> Vector:
        return add_noise(source, node.noise_std, noise_source("seeded", seed, node.order))

    with closing(run.reader()) as reader:
        watched, _ = watched_subjects(reader, EVERYONE)
        evidence = gather(run.engine(), reader, watched, noised=drawn_again)
        assert evidence.missed == 0
        assert set(evidence.deviations) == set(reader.models())
        assert set(evidence.deviations.values()) == {0.0}
        assert all(value.as_recorded for value in evidence.noise.values())
        return evidence


def violations(folder: Path, evidence: Evidence) -> list[str]:
    """Every statement among the records that the true distances contradict, to the last bit of the models."""
    with closing(RunReader(folder)) as reader:
        watched, left_out = watched_subjects(reader, EVERYONE)
        assert left_out == 0
        rows = distance_rows(reader, watched, evidence)
        problems = [
            f"subject {subject.subject}: {node}"
            for subject in watched
            for node in too_far(rows[subject.subject], evidence, LAST_BIT)
        ]
        for subject in watched:
            problems += wrong_charges(subject, charged_edges(reader, subject), evidence, LAST_BIT)
        return problems


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_no_forgotten_client_is_further_away_than_certified(tmp_path: Path, seed: int) -> None:
    run = random_run(seed, tmp_path / "run")
    assert violations(run.folder, replayed(run)) == []
    assert run.verify().problems == []


def test_the_audit_notices_drifts_that_were_halved(tmp_path: Path) -> None:
    """The negative control: one client reports half of how far it went, and its Psi is caught."""
    run = sifu.train(small_spec(), run=tmp_path / "run")
    run.forget(["client-000"], sigma=1.0)
    evidence = replayed(run)
    assert violations(run.folder, evidence) == []
    with closing(connect(changed := copy_run(run.folder, tmp_path / "changed"))) as connection:
        connection.execute("UPDATE participation SET drift = drift / 2 WHERE client = 0")
    assert violations(changed, evidence)
