"""Conformance suite for every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import SameNoise, copy_run, query, scalars, spec_for, state
from secret_draws import fix_groups
from sifu.errors import InputError
from sifu.methods.registry import METHODS, method_named
from sifu.run.training import Progress

LEVELS = ("none", "conditional", "proven", "exact")


@pytest.fixture(params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def train_for_each(root: Path, noise: Any = None) -> dict[str, Path]:
    """Train a run for each method; methods without special needs share one."""
    folders = {name: root / name for name in ("sifu", "closed_form", "groups") if name in METHODS}
    for name, folder in folders.items():
        sifu.train(spec_for(name), run=folder, noise=noise)
    return {name: folders.get(name, folders["sifu"]) for name in METHODS}


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a trained run for each method; tests only read them."""
    return train_for_each(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def seeded_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Return two runs of the same seed, noise and groups for each method; tests only read them."""
    with pytest.MonkeyPatch.context() as patch:
        fix_groups(patch)
        pairs = [train_for_each(tmp_path_factory.mktemp("seeded"), SameNoise()) for _ in range(2)]
    return {name: [runs[name] for runs in pairs] for name in METHODS}


@pytest.fixture
def method_run(method: str, trained_runs: dict[str, Path]) -> Path:
    """Return a trained run for this method; tests only read it."""
    return trained_runs[method]


@pytest.fixture
def own_run_of_method(method_run: Path, tmp_path: Path) -> Path:
    """Return a copy of `method_run` that a test may change."""
    return copy_run(method_run, tmp_path / "own")


class TestEveryMethod:
    """Sequential requests, sets, resumption, participation, plans, verification."""

    def test_it_describes_itself(self, method: str) -> None:
        described = method_named(method)
        assert described.info.name == method
        assert len(described.info.summary) > 10

    def test_requests_one_after_the_other(self, method: str, own_run_of_method: Path) -> None:
        run = sifu.open_run(own_run_of_method)
        for number, clients in enumerate((["client-000"], ["client-001", "client-002"], ["client-003"]), start=1):
            (outcome,) = run.forget(clients, method=method, sigma=0.15, level="none")
            assert outcome.method == method
            assert outcome.request == f"r{number}"
            assert outcome.clients == tuple(clients)
            assert outcome.level in LEVELS
            assert outcome.rounds == outcome.cost.rounds == rounds_of(method)
            assert run.verify().problems == []
        check_nobody_comes_back(own_run_of_method)
        assert [outcome.request for outcome in run.outcomes()] == ["r1", "r2", "r3"]

    def test_sets(self, method: str, own_run_of_method: Path) -> None:
        run = sifu.open_run(own_run_of_method)
        clients = [f"client-{k:03d}" for k in (1, 4, 7, 10)]
        run.forget(clients, method=method, sigma=0.4, level="none", retention="strict")
        subjects = query(own_run_of_method, "SELECT clients FROM subjects ORDER BY subject")
        assert len(subjects) == 4
        assert run.verify().problems == []
        check_nobody_comes_back(own_run_of_method)

    def test_the_plan_is_what_is_then_done(self, method: str, own_run_of_method: Path) -> None:
        run = sifu.open_run(own_run_of_method)
        for terms in (
            {"sigma": 0.07},
            {"sigma": "auto"},
            {"sigma": 0.3},
        ):
            first = len(query(own_run_of_method, "SELECT 1 FROM subjects"))
            clients = [f"client-{first + k:03d}" for k in range(2)]
            before = state(own_run_of_method)
            plan = run.plan(clients, method=method, level="none", **terms)
            assert state(own_run_of_method) == before
            (outcome,) = run.forget(clients, method=method, level="none", **terms)
            row = query(
                own_run_of_method,
                "SELECT source_node, noise_std, wanted_node, multiplier FROM requests WHERE request = ?",
                (outcome.request,),
            )[0]
            assert row == (plan.source_node, plan.noise_std, plan.wanted_node, plan.multiplier)
            assert (outcome.level, outcome.sigma, outcome.psi) == (plan.level, plan.noise_std, plan.psi)
            assert outcome.rollback_to == plan.source_rounds

    def test_it_goes_on_after_an_interruption(self, method: str, method_run: Path, tmp_path: Path) -> None:
        def stop(update: Progress) -> None:
            raise KeyboardInterrupt

        folder = copy_run(method_run, tmp_path / "stopped")
        run = sifu.open_run(folder)
        with pytest.raises(KeyboardInterrupt):
            run.forget(["client-005"], "mine", method=method, sigma=0.1, level="none", progress=stop)
        noised = query(folder, "SELECT digest FROM models WHERE node = (SELECT noise_node FROM requests)")
        assert noised, "the noised model is on disk"
        assert run.verify().problems == []
        with pytest.raises(KeyboardInterrupt):
            sifu.open_run(folder).forget(progress=stop)
        sifu.open_run(folder).forget()
        # The noise was drawn once: a continued request never rolls back a second time.
        assert query(folder, "SELECT COUNT(*) FROM events WHERE kind = 'rolled back'") == [(1,)]
        assert query(folder, "SELECT status, final_node FROM requests")[0][0] == "done"
        assert run.verify().problems == []
        check_nobody_comes_back(folder)

    def test_queued_requests_are_executed_in_order(self, method: str, own_run_of_method: Path) -> None:
        run = sifu.open_run(own_run_of_method)
        run.request(["client-006"], "b", method=method, sigma=0.2, level="none")
        run.request(["client-002", "client-003"], "a", method=method, sigma=0.2, level="none")
        outcomes = run.forget()
        assert [outcome.request for outcome in outcomes] == ["b", "a"]
        assert run.verify().problems == []
        check_nobody_comes_back(own_run_of_method)
        assert run.forget() == []

    def test_nothing_to_do_for_a_request_that_is_done(self, method: str, own_run_of_method: Path) -> None:
        run = sifu.open_run(own_run_of_method)
        first = run.forget(["client-006"], "mine", method=method, sigma=0.2, level="none")
        before = state(own_run_of_method)
        again = sifu.open_run(own_run_of_method).forget(["client-006"], "mine", method=method, sigma=0.2, level="none")
        assert again == first
        assert state(own_run_of_method) == before
        with pytest.raises(InputError, match="already forgotten"):
            run.forget(["client-006"], method=method)

    def test_the_same_seed_gives_the_same_run(
        self, method: str, seeded_pairs: dict[str, list[Path]], tmp_path: Path
    ) -> None:
        recorded: list[Any] = []
        for trained, name in zip(seeded_pairs[method], ("one", "two"), strict=True):
            run = sifu.open_run(copy_run(trained, tmp_path / name), noise=SameNoise())
            run.forget(["client-001"], method=method, sigma=0.1, level="none")
            recorded.append(scalars(tmp_path / name))
        assert recorded[0] == recorded[1]

    def test_before_training_is_done(self, method: str, tmp_path: Path) -> None:
        """A request is executed after an interrupted first training."""

        def stop(update: Progress) -> None:
            if update.rounds == min(3, update.max_rounds):
                raise KeyboardInterrupt

        spec = spec_for(method)
        with pytest.raises(KeyboardInterrupt):
            sifu.train(spec, run=tmp_path / "run", progress=stop)
        run = sifu.open_run(tmp_path / "run")
        (outcome,) = run.forget(["client-001"], method=method, sigma=0.1, level="none")
        # The head was interrupted before any client sent statistics, so all remaining clients send them now.
        assert outcome.rounds == (1 if method == "closed_form" else rounds_of(method))
        assert run.verify().problems == []
        check_nobody_comes_back(tmp_path / "run")
        before = state(tmp_path / "run")
        sifu.train(spec, run=tmp_path / "run")
        assert state(tmp_path / "run") == before


def rounds_of(method: str) -> int:
    """Return the number of rounds a request takes here: kept statistics need none."""
    return 0 if method == "closed_form" else 8


def check_nobody_comes_back(folder: Path) -> None:
    """Check that no client takes part in a round after its request was received (a merge is not a round)."""
    by_name = dict(query(folder, "SELECT name, client FROM clients"))
    for (text,) in query(folder, "SELECT payload FROM events WHERE kind = 'request received'"):
        request = json.loads(text)["request"]
        seq = query(folder, "SELECT seq FROM events WHERE kind = 'request received' AND payload = ?", (text,))[0][0]
        earlier = [
            json.loads(payload)["rows"]["last"]
            for (payload,) in query(folder, "SELECT payload FROM events WHERE seq < ?", (seq,))
            if "rows" in json.loads(payload)
        ]
        for name in request["clients"]:
            later = query(
                folder,
                "SELECT node FROM participation WHERE client = ? AND node > ? "
                "AND node NOT IN (SELECT node FROM merges)",
                (by_name[name], max(earlier)),
            )
            assert later == [], f"{name} took part in nodes {later} after it asked"


def test_waiting_clients_are_not_sampled_while_others_are_forgotten(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    run.request(["client-009"], "waits")
    run.forget(["client-001"], "now", sigma=0.2)
    assert query(own_trained, "SELECT status FROM requests WHERE request = 'waits'") == [("received",)]
    check_nobody_comes_back(own_trained)
    late = query(own_trained, "SELECT MAX(node) FROM participation WHERE client = 9")[0][0]
    assert late <= 8
    assert run.verify().problems == []
    run.forget()
    assert run.verify().problems == []


def test_unknown_methods_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean scratch"):
        method_named("scrach")


def test_every_method_reaches_a_useful_model(tmp_path: Path) -> None:
    """With enough clients every method keeps a useful model: the accuracy stays near that of training."""
    spec = spec_for("sifu", data={"clients": 60, "samples_per_client": 10}, stop={"target": 0.85, "max_rounds": 300})
    sifu.train(spec, run=tmp_path / "trained")
    for name in sorted(set(METHODS) - {"closed_form", "groups"}):  # these need another training
        (outcome,) = sifu.open_run(copy_run(tmp_path / "trained", tmp_path / name)).forget(["client-003"], method=name)
        assert outcome.accuracy is not None
        assert outcome.accuracy >= 0.85
        assert not np.isnan(outcome.psi)
