"""Honest runs that random requests (`benchmarks/random_audits.py`) showed to be called wrong: they verify now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sifu
from claims_against_truth import Findings, audit_journey
from independent_verifier import verify
from run_tools import small_spec
from sifu.theory.calibration import one_round_epsilon
from sifu.verify import certificate_file

TINY = {"data": {"clients": 6, "samples_per_client": 6}, "stop": {"target": 0.0, "max_rounds": 2}}


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
    """After Scratch the model never saw client 2; what training with it cost earlier is no claim of the certificate."""
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


@pytest.mark.parametrize("method", ["sifu", "scratch"])
def test_whoever_joins_later_changes_nothing_that_was_said_before(tmp_path: Path, method: str) -> None:
    """A client that joins again enlarges the population, and does not set the rate: earlier requests stay right."""
    spec = small_spec(**TINY, privacy={"accounting": "population"}) | {"seed": 5}
    run = sifu.train(spec, run=tmp_path / "run")
    run.forget(["client-000"], "before", sigma=0.02, epsilon=1.0, level="none")
    run.forget(["client-001"], "records", method=method, records=[0, 1, 2], level="none")
    run.forget(["client-002"], "after", method="scratch", level="none")
    assert run.verify().problems == []
    assert verify(run.folder) == []


def test_no_noise_of_finite_size_reaches_a_delta_of_zero(tmp_path: Path) -> None:
    """At a large epsilon the formula underflows; noise in floating point delivers no less than 1e-10."""
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
    for name in ("large", "small"):  # a smaller one is found in the certificate alone
        path = run.folder / "certificates" / f"{name}.public.json"
        assert sifu.verify_certificate(path).problems == []
        certificate = json.loads(path.read_text())
        certificate["body"]["delta_at_most"] *= 0.5
        (tmp_path / "changed.json").write_text(json.dumps(certificate))
        problems = sifu.verify_certificate(tmp_path / "changed.json").problems
        assert any("epsilon_composed makes it" in problem for problem in problems)


def test_training_that_a_client_took_no_part_in_reaches_a_delta_of_zero() -> None:
    noise = {"noise": 1.0, "epsilon_one_round": one_round_epsilon(1.0, 0.01, "exact"), "epsilon_composed": 0.0}
    body = {"training_noise": noise, "delta": 0.01, "calibration": "exact", "untouched": False, "epsilon": 1.0}
    body |= {"level": "none", "delta_at_most": 0.0}
    assert list(certificate_file._check_training_noise(body)) == []
    noise["epsilon_composed"] = 0.5
    assert any("epsilon_composed makes it" in problem for problem in certificate_file._check_training_noise(body))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "family"),
    [(144, "linear"), (670, "linear"), (629, "network"), (1031, "network"), (475, "training noise"),
     (411, "training noise"), (1309, "linear"), (197, "closed form")],
)  # fmt: skip
def test_the_journeys_that_showed_it(tmp_path: Path, seed: int, family: str) -> None:
    """An edge of a condition, population accounting, deltas of 1e-300: both verifiers say the same."""
    findings = Findings()
    audit_journey(seed, tmp_path, findings, [family])
    assert findings.violations == []
