"""Comparison of two releases: the attack finds the deleted record if nothing protects it, and finds none if none was
deleted.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

import sifu
from run_tools import Command
from sifu.audit import AuditOptions, audit_run
from sifu.audit.before_after import Attempt, BeforeAfterAttack, Candidates, TwoHeads, attempt
from sifu.errors import InputError

RIDGE_SPEC = {"data": {"clients": 40, "samples_per_client": 10}, "model": {"kind": "ridge"}}


def with_constant(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1)


def gaussian_records(count: int, features: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    mixing = np.random.default_rng(0).normal(size=(features, features))
    return with_constant(generator.normal(size=(count, features)) @ mixing / np.sqrt(features) + 0.5)


def ridge(phi: np.ndarray, targets: np.ndarray, relative: float) -> np.ndarray:
    """Return the ridge head of docs/theory.md, section 14.4, by least squares with extra rows for the penalty."""
    width = phi.shape[1]
    penalty = relative * np.sum(phi * phi) / width
    rows = np.concatenate([phi, np.sqrt(penalty) * np.eye(width)])
    return np.asarray(
        np.linalg.lstsq(rows, np.concatenate([targets, np.zeros((width, targets.shape[1]))]), rcond=None)[0]
    )


def one_hot(labels: np.ndarray, outputs: int) -> np.ndarray:
    return np.asarray(np.eye(outputs)[labels])


def trained(kind: str, phi: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return a penalised softmax or logistic head at its minimum, by an optimiser that is independent of the attack."""
    shape = (phi.shape[1], targets.shape[1])

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(shape)
        scores = phi @ weights
        if kind == "softmax":
            top = scores.max(axis=1, keepdims=True)
            powers = np.exp(scores - top)
            shares = powers / powers.sum(axis=1, keepdims=True)
            value = float(np.sum(np.log(powers.sum(axis=1)) + top[:, 0]) - np.sum(targets * scores))
        else:
            shares = 1.0 / (1.0 + np.exp(-scores))
            value = float(np.sum(np.logaddexp(0.0, scores)) - np.sum(targets * scores))
        return value + 0.5 * np.sum(flat**2), (phi.T @ (shares - targets) + weights).ravel()

    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 5000})  # fmt: skip # noqa: E501
    return np.asarray(found.x.reshape(shape))


def problem(kind: str, count: int = 300) -> tuple[Candidates, np.ndarray]:
    """Return candidates whose labels follow a hidden head, and public samples of the same distribution."""
    phi, public = gaussian_records(count, 12, 1), gaussian_records(400, 12, 2)
    hidden = np.random.default_rng(3).normal(size=(13, 4 if kind == "softmax" else 1))
    noisy = phi @ hidden + np.random.default_rng(4).normal(size=(count, hidden.shape[1]))
    targets = one_hot(noisy.argmax(axis=1), 4) if kind == "softmax" else (noisy > 0.0).astype(float)
    return Candidates(phi, targets, np.arange(count)), public


def head(kind: str, phi: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return ridge(phi, targets, 0.01) if kind == "ridge" else trained(kind, phi, targets)


@pytest.mark.parametrize("kind", ["ridge", "softmax", "logistic"])
def test_a_deleted_record_is_found_from_public_samples(kind: str) -> None:
    candidates, public = problem(kind)
    before, found = head(kind, candidates.phi, candidates.targets), []
    for number in range(0, 300, 15):
        stays = np.arange(300) != number
        after = head(kind, candidates.phi[stays], candidates.targets[stays])
        heads = TwoHeads(before, after, public, kind, 0.01 if kind == "ridge" else 1e-3)
        found.append(attempt(heads, candidates, [number], (number + 7) % 300))
    attack = BeforeAfterAttack.of(found, "trials", candidates, len(public))
    assert attack.identified >= 0.9
    assert attack.cosine > 0.9
    assert attack.cosine > attack.nearest_public  # type: ignore[operator]
    assert (attack.control_identified, abs(attack.control_cosine) < 0.5) == (0.0, True)


def test_with_the_gram_matrix_of_the_others_the_record_itself_comes_back() -> None:
    candidates, _ = problem("ridge")
    before = ridge(candidates.phi, candidates.targets, 1e-3)
    stays = np.arange(300) != 11
    after = ridge(candidates.phi[stays], candidates.targets[stays], 1e-3)
    heads = TwoHeads(before, after, candidates.phi[stays], "ridge", 1e-3)
    assert attempt(heads, candidates, [11], 12).cosine > 0.999
    assert heads.reconstruction == pytest.approx(candidates.phi[11], abs=0.1)


def test_noise_between_two_releases_names_no_one() -> None:
    """Negative control: nothing was deleted, and the heads differ by noise as large as a deletion."""
    candidates, public = problem("ridge")
    before = ridge(candidates.phi, candidates.targets, 0.01)
    stays = np.arange(300) != 0
    size = np.std(before - ridge(candidates.phi[stays], candidates.targets[stays], 0.01))
    generator, found = np.random.default_rng(5), []
    for number in range(100):
        heads = TwoHeads(before, before + generator.normal(0.0, size, before.shape), public, "ridge", 0.01)
        found.append(attempt(heads, candidates, [number], number + 100))
    attack = BeforeAfterAttack.of(found, "trials", candidates, len(public))
    assert attack.identified <= 0.04  # 1 of 300 by chance; 4 of 100 have probability 4e-4
    assert abs(attack.cosine) < 0.2


def test_releases_that_cannot_be_compared_are_refused() -> None:
    candidates, public = problem("ridge")
    before = ridge(candidates.phi, candidates.targets, 0.01)
    for after, samples, message in (
        (before, public, "the same head"),
        (before + 1.0, public[:1], "needs public samples, found 1"),
    ):
        with pytest.raises(InputError, match=message):
            TwoHeads(before, after, samples, "ridge")


def test_a_summary_counts_attempts() -> None:
    candidates, _ = problem("ridge")
    found = [Attempt(True, False, 0.9, 0.5, False, 0.1), Attempt(False, False, 0.7, 0.5, True, 0.0)]
    attack = BeforeAfterAttack.of(found, "trials", candidates, 9)
    assert (attack.what, attack.identified, attack.reconstructed, attack.control_identified) == ("record", 0.5, 0, 0.5)
    assert attack.cosine == pytest.approx(0.8)


@pytest.fixture(scope="module")
def head_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that forgets a client, then a record."""
    run = sifu.train(RIDGE_SPEC, run=tmp_path_factory.mktemp("heads") / "run")
    run.forget(["client-003"], request="whole")
    run.forget(["client-005"], records=[4], request="one")
    return run.folder


def test_the_audit_finds_what_exact_requests_deleted(head_run: Path, cli: Command) -> None:
    answer = cli("audit", head_run, "--only-releases", "--trials", 20, "--format", "json")
    assert answer.code == 0  # no certificate covers this observer, so none is contradicted
    of_request, records, clients = json.loads(answer.out)["before_after"]
    assert (of_request["what"], of_request["source"], of_request["candidates"]) == ("record", "request one", 390)
    assert of_request["identified"] == 1.0
    for found, count in ((records, 389), (clients, 39)):
        assert (found["attempts"], found["candidates"], found["public"]) == (20, count, 197)
        assert found["identified"] >= 0.9
        assert found["control_identified"] <= 0.1
        assert found["cosine"] > abs(found["control_cosine"]) + 0.4


def test_the_audit_of_a_whole_client_says_so_for_people(head_run: Path, cli: Command) -> None:
    answer = cli("audit", head_run, "--only-releases", "--request", "whole", "--trials", 0)
    text = " ".join(answer.out.split())
    assert "client request whole 100.0 % 40" in text
    assert "no certificate covers this" in text


def test_a_whole_audit_compares_releases_too(head_run: Path) -> None:
    options = AuditOptions(trials=5, seed=1)
    assert {found.what for found in audit_run(head_run, options).before_after} == {"record", "client"}
    assert audit_run(head_run, AuditOptions(attacks=False, seed=1)).before_after == ()


def test_a_softmax_head_trained_in_rounds_reveals_the_client(tmp_path: Path) -> None:
    spec = {
        "data": {"clients": 12, "samples_per_client": 20},
        "model": {"kind": "softmax"},
        "local": {"steps": 5, "batch": 0, "rate": 0.1},
        "server": {"participation": "all"},
        "stop": {"target": 0.0, "min_rounds": 150, "max_rounds": 150},
    }
    run = sifu.train(spec, run=tmp_path / "run")
    run.forget(["client-004"], method="scratch", request="whole")
    options = AuditOptions(only_before_after=True, seed=1)
    (found,) = audit_run(run, options).before_after
    assert (found.what, found.source, found.candidates) == ("client", "request whole", 12)
    assert found.identified == 1.0
    assert found.cosine > found.control_cosine


def test_a_network_is_not_compared_and_the_audit_says_why(tmp_path: Path) -> None:
    spec = {
        "data": {"clients": 4, "samples_per_client": 10},
        "model": {"kind": "mlp"},
        "regularity": {"kind": "assumed"},
        "local": {"rate": 0.05},
        "stop": {"target": 0.0, "min_rounds": 1, "max_rounds": 1},
    }
    sifu.train(spec, run=tmp_path / "run")
    report = audit_run(tmp_path / "run", AuditOptions(only_before_after=True))
    assert report.before_after == ()
    assert any("the model is a mlp" in note for note in report.notes)


def test_noise_on_every_release_hides_records(tmp_path: Path) -> None:
    """Noise on every release hides the records; the same run without noise, where nearly all are
    named, is the control.
    """
    spec = {**RIDGE_SPEC, "ridge": {"regularisation": 0.01}, "release": {"noise": 0.1}}
    run = sifu.train(spec, run=tmp_path / "run")
    records, _ = audit_run(run, AuditOptions(only_before_after=True, trials=50, seed=1)).before_after
    assert records.identified <= 0.1  # 1 of 400 by chance
    plain = {**RIDGE_SPEC, "ridge": {"regularisation": 0.01}}
    run = sifu.train(plain, run=tmp_path / "plain")
    records, _ = audit_run(run, AuditOptions(only_before_after=True, trials=50, seed=1)).before_after
    assert records.identified >= 0.9


HOSPITALS = Path(__file__).resolve().parents[3] / "shared" / "data" / "hospitals"


@pytest.mark.skipif(not HOSPITALS.is_dir(), reason="the hospitals' files are not beside the repository")
def test_a_patient_of_four_hospitals_is_named_from_a_table(tmp_path: Path, cli: Command) -> None:
    """On the UCI files as a table, the attack named 96 % of deleted patients among 726 with 182 public ones."""
    lines = ["hospital,age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,ill"]
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        for line in (HOSPITALS / f"processed.{name}.data").read_text(encoding="utf-8").splitlines()[1:]:
            values = [part.strip().replace("?", "") for part in line.split(",")]
            coded = [repr(float(value)) if value else "" for value in values[:-1]]
            lines.append(",".join([name, *coded, "yes" if float(values[-1]) > 0 else "no"]))
    (tmp_path / "patients.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = tmp_path / "spec.toml"
    columns = ("--label", "ill", "--client-column", "hospital")
    assert cli("init", spec, "--from", tmp_path / "patients.csv", *columns).code == 0
    assert cli("train", spec, "--run", tmp_path / "run").code == 0
    answer = cli("audit", tmp_path / "run", "--only-releases", "--trials", 25, "--format", "json")
    records, clients = json.loads(answer.out)["before_after"]
    assert records["candidates"] > 700
    assert records["identified"] >= 0.8  # of 25; fewer than 20 have probability 4e-4 at 96 %
    assert records["control_identified"] <= 0.04
    assert clients["identified"] == 1.0
