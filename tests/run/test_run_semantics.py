"""Promises of a run: what it keeps, erases and releases, and the level of every kind of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import sifu
from run_tools import copy_run, numbers_of, query, scalars, small_spec
from sifu.run.run_view import RunView
from sifu.theory.rollback import is_covered

pytestmark = pytest.mark.long


def on_disk(folder: Path) -> set[int]:
    return {int(path.stem) for path in (folder / "models").glob("*.safetensors")}


def kept_nodes(folder: Path) -> set[int]:
    return {node for (node,) in query(folder, "SELECT node FROM models WHERE kept = 1")}


# -- kept models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "participation"), [(3, "all"), (3, "poisson(0.4)"), (5, "poisson(0.4)"), (64, "all")]
)
def test_at_most_so_many_models_are_kept(tmp_path: Path, limit: int, participation: str) -> None:
    spec = small_spec(
        keep={"models": limit}, server={"participation": participation}, stop={"target": 0.0, "max_rounds": 20}
    )
    run = sifu.train(spec, run=tmp_path / "run")
    assert len(kept_nodes(run.folder)) <= limit
    assert 0 in kept_nodes(run.folder)
    assert on_disk(run.folder) == {node for (node,) in query(run.folder, "SELECT node FROM models")}
    for number in range(3):
        run.forget([f"client-{number:03d}"], sigma=0.3)
        assert len(kept_nodes(run.folder)) <= limit, f"after request {number + 1}"
        assert on_disk(run.folder) == {node for (node,) in query(run.folder, "SELECT node FROM models")}
    assert run.verify().problems == []


@pytest.mark.parametrize(
    ("sigma", "participation"),
    [(0.1, "all"), (0.1, "poisson(0.4)"), (0.1, "fixed(4)"), (0.03, "poisson(0.4)"), (0.5, "poisson(0.4)")],
)
def test_a_fixed_sigma_keeps_at_most_one_model_a_client(tmp_path: Path, sigma: float, participation: str) -> None:
    spec = small_spec(
        privacy={"sigma": sigma}, server={"participation": participation}, stop={"target": 0.0, "max_rounds": 25}
    )
    run = sifu.train(spec, run=tmp_path / "run")
    assert len(kept_nodes(run.folder) - {0}) <= 12
    # The needed model is among them: no client must go back further than the budget requires.
    for number in range(12):
        plan = run.plan([f"client-{number:03d}"])
        assert plan.source_node == plan.wanted_node


# -- erasure -----------------------------------------------------------------------------------------------------------


def traces(folder: Path, client: int) -> dict[int, float]:
    """Return Psi(n, client) of every model n on disk that no noise covers."""
    run = sifu.open_run(folder)
    reader = run.reader()
    try:
        psi_of = {}
        for node in on_disk(folder):
            view = RunView(reader, tip=node)
            subject = next(subject for subject in view.earlier_subjects() if client in subject.clients)
            (exposure,) = view.exposures([subject])
            if not is_covered(view.path, view.path.tip, subject):
                psi_of[node] = exposure.curve.one(view.path.tip)
        return psi_of
    finally:
        reader.close()


@pytest.mark.parametrize("sigma", [0.05, 0.12, 5.0, "auto"])
def test_strict_retention_leaves_no_trace(own_trained: Path, sigma: Any) -> None:
    run = sifu.open_run(own_trained)
    run.forget(["client-003"], sigma=sigma, retention="strict")
    assert all(psi == 0.0 for psi in traces(own_trained, 3).values())
    run.forget(["client-005"], sigma=0.3)
    assert all(psi == 0.0 for psi in traces(own_trained, 3).values())
    assert run.verify().problems == []


def test_paper_retention_keeps_the_prefix_within_the_budget(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    (outcome,) = run.forget(["client-003"], sigma=0.1)
    left = traces(own_trained, 3)
    assert any(psi > 0.0 for psi in left.values())
    assert max(left.values()) <= outcome.psi_star


def test_erased_files_are_gone_and_listed(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    before = on_disk(own_trained)
    run.forget(["client-003"], "mine", sigma=0.05)
    body = json.loads((own_trained / "certificates" / "mine.auditor.json").read_text())["body"]
    erased, remaining = set(body["erased_nodes"]), set(body["remaining_nodes"])
    assert erased | remaining == before
    assert not erased & remaining
    assert not erased & on_disk(own_trained)
    assert remaining <= on_disk(own_trained) | {8}
    assert all(node > body["node"] for node in erased)
    public = (own_trained / "certificates" / "mine.public.json").read_text()
    for secret in ('"psi"', "psi_star", "digest", 'nonce"', "erased_nodes", "detail"):
        assert secret not in public


# -- releases ----------------------------------------------------------------------------------------------------------


def test_the_exported_model_is_the_released_one(own_trained: Path, tmp_path: Path) -> None:
    run = sifu.open_run(own_trained)
    run.forget(["client-003"], sigma=0.1)
    path = run.export(tmp_path / "model.safetensors")
    tip = query(own_trained, "SELECT value FROM run WHERE key = 'tip'")[0][0]
    assert path.read_bytes() == (own_trained / "models" / f"{tip}.safetensors").read_bytes()
    arrays = load_file(path)
    assert {name: array.shape for name, array in arrays.items()} == {"weight": (64, 10), "bias": (10,)}
    reader = run.reader()
    assert np.array_equal(np.concatenate([arrays["weight"].ravel(), arrays["bias"]]), reader.load_model(reader.tip))
    reader.close()


def test_a_rollback_starts_from_the_node_plus_the_stated_noise(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    plan = run.plan(["client-003"], sigma=0.1)
    reader = run.reader()
    source = reader.load_model(plan.source_node)
    reader.close()
    run.forget(["client-003"], sigma=0.1)
    noise_node = query(own_trained, "SELECT noise_node FROM requests")[0][0]
    reader = run.reader()
    noise = reader.load_model(noise_node) - source
    reader.close()
    # 650 normals: their standard deviation is within 20 % of sigma (7 standard errors).
    assert abs(noise.std() / 0.1 - 1.0) < 0.2
    assert abs(noise.mean()) < 0.1 * 5 / np.sqrt(noise.size)


def test_noise_differs_from_run_to_run(trained_run: Path, tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        run = sifu.open_run(copy_run(trained_run, tmp_path / name))
        run.forget(["client-003"], sigma=0.1)
        digests.add(numbers_of(run.folder)["models/9.safetensors"])
    assert len(digests) == 2


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    recorded = [
        scalars(sifu.train(small_spec(seed=seed, server={"participation": "poisson(0.5)"}), run=tmp_path / name).folder)
        for seed, name in ((5, "a"), (5, "b"), (6, "c"))
    ]
    assert recorded[0] == recorded[1]
    assert recorded[0]["participation"] != recorded[2]["participation"]
    # Events group rounds by time, so the comparison uses the numbers of every kept model.
    models = [numbers_of(tmp_path / name) for name in "abc"]
    assert models[0] == models[1] != models[2]


# -- budgets ------------------------------------------------------------------------------------------------------


# -- levels of every kind of training ----------------------------------------------------------------------------------

NETWORK = {"regularity": {"kind": "assumed"}}
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "convex": ({}, "convex", "proven"),
    "poisson": ({"server": {"participation": "poisson(0.5)"}}, "convex", "proven"),
    "fixed": ({"server": {"participation": "fixed(5)"}}, "convex", "conditional"),
    "momentum within the range": ({"local": {"momentum": 0.9}}, "convex", "proven"),
    "momentum, and a limit beyond it": ({"local": {"momentum": 0.9, "rate": 0.2}}, "convex", "proven"),
    "a limit beyond the safe steps": ({"local": {"rate": 0.4}}, "convex", "proven"),
    "weight decay at the safe steps": ({"local": {"weight_decay": 0.2, "rate": "auto"}}, "strongly convex", "proven"),
    "weight decay": ({"local": {"weight_decay": 0.2, "rate": 0.1}}, "strongly convex", "proven"),
    "mini-batches": ({"local": {"batch": 3}}, "convex", "proven"),
    "float32": ({"model": {"dtype": "float32"}}, "convex", "conditional"),
    "random start": ({"model": {"init": "random"}}, "convex", "proven"),
    "least squares": ({"model": {"kind": "least_squares"}}, "convex", "proven"),
    "mlp": ({**NETWORK, "model": {"kind": "mlp"}, "local": {"rate": 0.1}}, "assumed", "conditional"),
    "cnn": (
        {**NETWORK, "model": {"kind": "cnn", "dtype": "float32"}, "local": {"rate": 0.05}},
        "assumed",
        "conditional",
    ),
    "assumed expanding": (
        {"regularity": {"kind": "assumed", "factor": 1.05}, "local": {"rate": 0.1}},
        "assumed",
        "conditional",
    ),
    "one class a client": ({"data": {"partition": "one_class", "samples_per_client": 8}}, "convex", "proven"),
    "dirichlet": ({"data": {"partition": "dirichlet", "alpha": 0.5}}, "convex", "proven"),
    "standardised": ({"data": {"normalise": "standard"}}, "convex", "proven"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_training_forgets_and_verifies(tmp_path: Path, name: str) -> None:
    sections, regularity, level = KINDS[name]
    rounds = 3 if name in ("mlp", "cnn") else 5  # networks are slow
    local = {"rate": 0.03, **sections.get("local", {})}
    run = sifu.train(small_spec(stop={"max_rounds": rounds}, **{**sections, "local": local}), run=tmp_path / "run")
    reader = run.reader()
    assert RunView(reader).regularity.kind == regularity
    reader.close()
    # Just enough noise for the last model, so that noise determines the level and not an exact restart.
    probe = run.plan(["client-000", "client-001"], sigma=1e9)
    sigma = 1.01 * probe.psi * probe.multiplier
    plan = run.plan(["client-000", "client-001"], sigma=sigma)
    assert plan.source_rounds == plan.tip_rounds
    assert plan.noise_std == sigma > 0.0
    assert plan.level == level
    (outcome,) = run.forget(["client-000", "client-001"], sigma=sigma, level="none")
    assert outcome.level == level
    assert outcome.rounds == rounds
    (second,) = run.forget(["client-002", "client-003"], method="sifu", level="none")
    assert second.level in (level, "exact")
    (scratch,) = run.forget(["client-004"], method="scratch")
    assert scratch.level == "exact"
    assert run.verify().problems == []
    for number in range(5):
        late = query(
            run.folder,
            "SELECT COUNT(*) FROM participation p WHERE client = ? AND node > (SELECT MIN(noise_node) FROM requests r "
            "WHERE instr(r.terms, ?))",
            (number, f"client-{number:03d}"),
        )
        assert late == [(0,)]


def test_strong_convexity_lets_psi_fall_without_the_client(tmp_path: Path) -> None:
    """With L < 1 a client's Psi falls in rounds without it."""
    spec = small_spec(
        local={"weight_decay": 1.0}, server={"participation": "poisson(0.3)"}, stop={"target": 0.0, "max_rounds": 30}
    )
    run = sifu.train(spec, run=tmp_path / "run")
    reader = run.reader()
    view = RunView(reader)
    (subject, *_) = view.new_subjects(sifu.requests.filing.make_terms(view, ["client-002"], {}), 1)
    (exposure,) = view.exposures([subject])
    curve = exposure.curve.at(np.arange(view.path.tip + 1))
    reader.close()
    assert np.any(np.diff(curve) < 0.0)
    run.forget(["client-002"], sigma=0.05)
    assert run.verify().problems == []


def test_stop_rules(tmp_path: Path) -> None:
    run = sifu.train(small_spec(stop={"target": 0.5, "max_rounds": 100, "min_rounds": 4}), run=tmp_path / "a")
    rounds = len(run.reader().path()) - 1
    assert 4 <= rounds < 100
    run = sifu.train(small_spec(stop={"target": 0.0, "max_rounds": 7, "evaluate_every": 3}), run=tmp_path / "b")
    evaluations = query(run.folder, "SELECT node FROM evaluations WHERE subset = 'active' ORDER BY node")
    evaluated = [node for (node,) in evaluations]
    assert evaluated == [0, 3, 6, 7]
