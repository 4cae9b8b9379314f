"""Statements in certificates of the baselines, and statements that must not occur there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sifu
from run_tools import query, small_spec, spec_for
from sifu.api import restore, verify_certificate
from sifu.core.engine import Position
from sifu.engines.sim.client_updates import Clipping
from sifu_verifier import verify

TINY = {"data": {"clients": 6, "samples_per_client": 6}, "stop": {"target": 0.0, "max_rounds": 2}}


def test_the_size_of_training_noise_tells_who_took_part_so_nothing_is_certified(tmp_path: Path) -> None:
    """With ten equal clients an average's noise has variance 0.0250, and 0.0278 without one of them (z C = 0.5)."""
    clipping = Clipping(0.5, 1.0, "seeded", 3)
    updates, samples = np.zeros((10, 20_000)), np.full(10, 10)
    everyone = clipping.average(updates, Position(0, 0), np.arange(10), samples, False).step
    without = clipping.average(updates[1:], Position(0, 1), np.arange(1, 10), samples[1:], False).step
    assert np.var(everyone) == pytest.approx(0.0250, rel=0.05)
    assert np.var(without) == pytest.approx(0.0278, rel=0.05)
    # A test of the variance alone distinguishes the two without error on 20,000 numbers.
    assert np.var(everyone) < 0.0264 < np.var(without)
    run = sifu.train(small_spec(server={"clip": 0.3, "noise": 3.0}), run=tmp_path / "run")
    (outcome,) = run.forget(["client-001"], "dp", method="dp", level="none")
    assert outcome.level == "none"
    failed = [premise for premise in run.certificate("dp").body["premises"] if premise["status"] == "failed"]
    assert [premise["name"] for premise in failed] == ["training noise"]
    assert run.verify().problems == []
    assert verify(run.folder) == []


def test_noisy_scratch_with_automatic_noise_is_not_exact(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    (outcome,) = run.forget(["client-001"], "auto", method="noisy_scratch")
    assert outcome.level == "conditional"
    (outcome,) = run.forget(["client-002"], "given", method="noisy_scratch", sigma=0.2)
    assert outcome.level == "exact"
    # A size copied from a plan with sigma auto cannot be recognised.
    said = {premise["name"]: premise["status"] for premise in run.certificate("given").body["premises"]}
    assert said["noise size"] == "trusted"
    for form in ("auditor", "public"):
        for name in ("auto", "given"):
            assert verify_certificate(own_trained / "certificates" / f"{name}.{form}.json").problems == []
    assert run.verify().problems == []
    assert verify(own_trained) == []


def test_stored_updates_of_whoever_took_a_request_back_are_replayed(tmp_path: Path) -> None:
    run = sifu.train(small_spec(**TINY, keep={"updates_every": 1}), run=tmp_path / "run")
    run.request(["client-004"], "taken-back")
    run.decide("taken-back", "withdrawn", actor="desk")
    run.request(["client-005"], "not-theirs")
    run.decide("not-theirs", "refused", "another person", actor="desk")
    run.forget(["client-001"], "replayed", method="fed_accum", level="none")
    assert run.verify().problems == []
    assert verify(run.folder) == []


def test_noise_of_training_that_led_to_a_model_that_is_gone_is_held_against_nobody(tmp_path: Path) -> None:
    """After Scratch the model never saw client 2, and the certificate claims nothing about the earlier training with
    it.
    """
    spec = small_spec(**TINY, server={"participation": "poisson(0.5)", "clip": 0.5, "noise": 1.0})
    run = sifu.train(spec | {"seed": 3}, run=tmp_path / "run")
    run.forget(["client-000"], "fresh", method="scratch", max_rounds=1)
    with run.reader() as reader:
        on_path = {int(row[0]) for row in reader.query("SELECT client FROM participation WHERE node > 3")}
    absent = next(f"client-{number:03d}" for number in range(1, 6) if number not in on_path)
    (outcome,) = run.forget([absent], "untouched", method="dp", epsilon=0.5, level="none")
    assert outcome.level in ("exact", "conditional")
    assert run.verify().problems == []
    assert verify(run.folder) == []
    for form in ("auditor", "public"):
        certificate = run.folder / "certificates" / f"untouched.{form}.json"
        assert sifu.verify_certificate(certificate).problems == []


def test_no_noise_of_finite_size_reaches_a_delta_of_zero(tmp_path: Path) -> None:
    """At a large epsilon the formula underflows, but noise in floating point guarantees no delta below 1e-10."""
    spec = small_spec(**TINY, server={"clip": 0.5, "noise": 5.0})
    run = sifu.train(spec, run=tmp_path / "run")
    plan = run.plan(["client-001"], method="dp", epsilon=5000.0)
    (outcome,) = run.forget(["client-001"], "large", method="dp", epsilon=5000.0, level="none")
    stated = (outcome.delta_at_most, outcome.delta_reached, plan.delta_at_most, plan.delta_reached)
    assert stated == (1e-10, 1e-10, 1e-10, 1e-10)
    (outcome,) = run.forget(["client-002"], "small", method="dp", epsilon=1.0, level="none")
    assert outcome.delta_at_most > 1e-5
    assert run.verify().problems == []
    assert verify(run.folder) == []
    for name in ("large", "small"):  # a smaller delta is found in the certificate alone
        path = run.folder / "certificates" / f"{name}.public.json"
        assert sifu.verify_certificate(path).problems == []
        certificate = json.loads(path.read_text())
        certificate["body"]["delta_at_most"] *= 0.5
        (tmp_path / "changed.json").write_text(json.dumps(certificate))
        problems = sifu.verify_certificate(tmp_path / "changed.json").problems
        assert any("epsilon_composed makes it" in problem for problem in problems)


def test_updates_of_the_others_stay_and_can_be_replayed(tmp_path: Path) -> None:
    run = sifu.train(spec_for("fed_eraser", privacy={"noise": "seeded"}), run=tmp_path / "run")
    run.backup(tmp_path / "old.zip")
    run.forget(["client-003"], "since", method="fed_accum", level="none")
    back = tmp_path / "back"
    restore(tmp_path / "old.zip", back, certificates=[run.folder / "certificates" / "since.public.json"])
    rows = query(back, "SELECT clients FROM updates")
    assert rows
    assert all(len(json.loads(clients)) == 11 for (clients,) in rows)
    again = sifu.open_run(back)
    # Another request comes first and rewrites the files that the restoration had rewritten.
    again.forget(["client-004"], "other", method="sifu", sigma=0.5, level="none")
    again.forget(["client-003"], "since", method="fed_accum", level="none")
    assert again.verify().problems == []
    assert verify(back) == []
