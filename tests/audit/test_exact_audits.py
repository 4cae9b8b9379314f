"""Exact certificates against the counterfactual without the client: equal digests, attacks at chance level."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from forged_runs import rebuild_chain
from run_tools import small_spec
from sifu.api import start_run
from sifu.audit import AuditOptions, audit_run
from sifu.audit.exact_releases import ExactAudit
from sifu.cli.audit import exact_words
from sifu.engines.sim import linear
from sifu.run import clients_and_engine as federation

ATTACKS = AuditOptions(seed=1)
RIDGE: dict[str, Any] = {
    "data": {"clients": 12},
    "model": {"kind": "ridge"},
    "features": {"kind": "random_fourier", "count": 64, "bandwidth": 3.0},
    "ridge": {"regularisation": 0.01},
}


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that exactly forgets two clients and then some records of a third."""
    folder = tmp_path_factory.mktemp("audit") / "run"
    run = sifu.train(RIDGE, run=folder)
    run.forget(["client-001", "client-002"])
    run.forget(["client-003"], records=[0, 1, 5, 6, 7])
    return folder


def test_a_closed_form_is_bit_for_bit_the_federation_without_the_client(solved: Path) -> None:
    report = audit_run(sifu.open_run(solved), ATTACKS)
    assert report.contradictions == ()
    assert {release.request for release in report.exact} == {"r1", "r2"}
    (latest,) = (release for release in report.exact if release.request == "r2")
    assert latest.same_model
    assert latest.sum_recorded == latest.sum_without is not None
    # The second request erased the first release, so no file is left to compare.
    assert {release.without for release in report.exact if release.request == "r1"} == {None}
    assert report.values()["exact"][-1]["same_model"]


@pytest.mark.parametrize(("request_id", "samples"), [("r1", None), ("r2", 5)])
def test_membership_is_at_chance_against_an_exact_release(solved: Path, request_id: str, samples: int | None) -> None:
    """The attack is as successful against the release as against a model that never saw the samples: at chance."""
    options = AuditOptions(seed=1, request=request_id)
    report = audit_run(sifu.open_run(solved), options)
    membership = report.membership
    assert membership is not None
    assert membership.bound == 0.01
    if samples is None:
        assert membership.released < 0.05
        assert membership.before is not None
        assert membership.before >= membership.released
    else:
        assert membership.samples == samples


def test_another_sum_than_that_of_those_who_stay_is_a_contradiction(tmp_path: Path) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run")
    run.forget(["client-001"])

    def change(kind: str, content: dict[str, Any]) -> None:
        if "solve" in content:
            content["solve"]["sum"] = "0" * 64

    rebuild_chain(run.folder, change)
    report = audit_run(sifu.open_run(tmp_path / "run"), AuditOptions(attacks=False, seed=1))
    assert any(
        "was not solved from the sum over the remaining clients" in sentence for sentence in report.contradictions
    )


def test_groups_are_replayed_with_and_without_the_client(tmp_path: Path) -> None:
    spec = small_spec(groups={"count": 3, "rounds": 2}, stop={"max_rounds": 4, "target": 0.0})
    run = sifu.train(spec, run=tmp_path / "run")
    run.forget(["client-001"], method="groups")
    run.forget(["client-004"], method="groups")
    report = audit_run(sifu.open_run(tmp_path / "run"), ATTACKS)
    assert report.contradictions == ()
    assert report.nodes_missed == 0
    first, latest = report.exact
    assert (first.request, first.without) == ("r1", None), "the second request erased the first release"
    assert (latest.request, latest.same_model) == ("r2", True)
    assert report.membership is not None


def test_a_hit_group_left_in_is_a_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a merge that keeps the model of the client's own group is contradicted."""
    from sifu.run import group_state

    spec = small_spec(groups={"count": 3, "rounds": 2}, stop={"max_rounds": 4, "target": 0.0})
    run = sifu.train(spec, run=tmp_path / "run")
    monkeypatch.setattr(group_state, "contains_any", lambda row, clients: False)
    run.forget(["client-001"], method="groups")
    monkeypatch.undo()
    report = audit_run(sifu.open_run(tmp_path / "run"), AuditOptions(attacks=False, seed=1))
    assert any("gives another model" in sentence for sentence in report.contradictions)


WIDE = small_spec(
    data={"clients": 5, "preprocessing": "fixed"},
    model={"kind": "softmax", "outputs": 3, "dtype": "float32"},
    local={"rate": 0.05, "steps": 6},
    stop={"target": 0.0, "max_rounds": 5},
)
"""Spec whose sums have enough terms for their order to change the last bits."""


def unequal_clients(sizes: tuple[int, ...] = (21, 30, 64, 17, 26)) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(2)
    return {
        f"client-{number}": (generator.normal(size=(size, 700)), generator.integers(0, 3, size))
        for number, size in enumerate(sizes)
    }


@pytest.mark.parametrize("leaver", ["client-2", "client-0"])
def test_a_release_is_recomputed_by_an_engine_that_never_had_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaver: str
) -> None:
    built: list[int] = []
    make = federation.engine_from_spec

    def watched(spec: Any, clients: Any, *others: Any) -> Any:
        built.append(len(clients))
        return make(spec, clients, *others)

    clients = unequal_clients()
    run = sifu.train(WIDE, run=tmp_path / "run", clients=clients, device="cpu")
    run.forget([leaver], method="scratch")
    monkeypatch.setattr(start_run, "engine_from_spec", watched)
    report = audit_run(sifu.open_run(run.folder, clients=clients, device="cpu"), AuditOptions(attacks=False, seed=1))
    assert report.contradictions == ()
    assert [release.same_model for release in report.exact] == [True]
    assert sorted(built) == [4, 5], "one engine of the run, and one without the client"


def test_a_layout_by_the_largest_client_is_a_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a layout padded to the leaver's size, as in earlier versions, is contradicted."""
    monkeypatch.setattr(linear, "padded_rows", lambda samples, batch=None: np.full_like(samples, samples.max()))
    clients = unequal_clients()
    run = sifu.train(WIDE, run=tmp_path / "run", clients=clients, device="cpu")
    run.forget(["client-2"], method="scratch")
    report = audit_run(run, AuditOptions(attacks=False, seed=1))
    assert any("gives another model" in sentence for sentence in report.contradictions)
    assert not any(release.same_model for release in report.exact)


def test_what_cannot_be_recomputed_is_said(tmp_path: Path) -> None:
    """An audit notes that it cannot build an engine without the client if the run's engine was passed in."""
    spec = sifu.Spec.from_mapping(small_spec(local={"rate": 0.05, "steps": 3}))
    engine, _ = federation.engine_from_spec(spec, federation.clients_from_spec(spec))
    run = sifu.train(spec, run=tmp_path / "run", engine=engine)
    run.forget(["client-001"], method="scratch")
    report = audit_run(sifu.open_run(run.folder, engine=engine), AuditOptions(attacks=False, seed=1))
    assert [release.without for release in report.exact] == [None]
    assert any("was not recomputed without the clients" in note for note in report.notes)


def test_the_line_of_a_release_says_equal_only_of_equal_models() -> None:
    same = ExactAudit("r1", ("client-001",), "1f", "1f")
    assert exact_words(same) == "equals the model trained without them, to the bit"
    assert "not compared" in exact_words(replace(same, without=None))
    other = exact_words(replace(same, without="another model"))
    assert "equals" not in other
    assert "contradictions" in other
