"""Runs with noise on releases: their outputs, the statements of certificates, and detected tampering."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

import sifu
from run_tools import state
from sifu.core.ledger import RELEASE_DISTANCES
from sifu.core.request_terms import Terms
from sifu.core.spec import Spec
from sifu.errors import InputError, NotCertifiableError
from sifu.run.releases import guarantee_of_all
from sifu.store.release_files import release_path, released_model, releases
from sifu.theory.release_noise import epsilon_reached
from sifu_verifier import verify as second_opinion

NOISE = 0.05
SPEC = {
    "model": {"kind": "ridge"},
    "data": {"clients": 6, "samples_per_client": 60},
    "features": {"kind": "random_fourier", "count": 32, "bandwidth": 4.0},
    "ridge": {"regularisation": 0.05},
    "release": {"noise": NOISE},
}


def _spec(**release) -> dict:
    return SPEC | {"release": SPEC["release"] | release}


def _problems(folder: Path) -> list[str]:
    return [*sifu.open_run(folder).verify().problems, *second_opinion(folder)]


def test_train_three_requests_verify(tmp_path):
    run = sifu.train(_spec(), run=tmp_path / "run")
    run.forget(["client-001"])
    run.forget(["client-002"], records=[3, 5])
    run.forget(["client-003"], before_after="1e4,1e-5")
    assert _problems(tmp_path / "run") == []
    with run.reader() as reader:
        rows = releases(reader)
        assert [len(row.clients) for row in rows] == [6, 5, 5, 4]
        assert len({row.node for row in rows}) == 4
        assert [path.name for path in (tmp_path / "run" / "releases").iterdir()] == [f"{rows[-1].node}.safetensors"]
        moved = np.linalg.norm(released_model(reader) - reader.load_model(reader.tip))
        assert moved == pytest.approx(NOISE * np.sqrt(reader.layout.size), rel=0.3)
        third = [row.distances[3] for row in rows[:3]]
    stated = [run.certificate(name).body["before_after"] for name in ("r1", "r2", "r3")]
    assert stated[2] == {"epsilon": 1e4, "delta": 1e-5}, "a demand that is met is stated as it is"
    reached = epsilon_reached(third, NOISE, 1e-5)
    with run.reader() as reader:
        terms = Terms(("client-003",), 10.0, 0.01)
        figure = guarantee_of_all(reader, Spec.from_mapping(reader.spec), [3], terms)
    assert reached <= figure.epsilon <= 1.1 * reached
    words = sifu.verify(tmp_path / "run" / "certificates" / "r1.public.json")
    assert words.holds
    assert stated[1]["epsilon"] < stated[0]["epsilon"], "a record is hidden better than a client"


def test_a_demand_that_is_not_met_is_refused_with_the_figure(tmp_path):
    run = sifu.train(_spec(), run=tmp_path / "run")
    before = state(tmp_path / "run")
    with pytest.raises(
        NotCertifiableError, match=r"only \(epsilon, delta\) = \(\d+, 1e-05\) is proven, but \(1, 1e-05\)"
    ) as refusal:
        run.forget(["client-001"], before_after="1,1e-5")
    assert refusal.value.exit_code == 4
    assert state(tmp_path / "run") == before
    plain = sifu.train(_spec(noise=0.0), run=tmp_path / "plain")
    with pytest.raises(NotCertifiableError, match="no guarantee is proven"):
        plain.forget(["client-001"], before_after="1,1e-5")
    with pytest.raises(InputError, match="must be EPSILON,DELTA"):
        plain.plan(["client-001"], before_after="1")


def _exits(run: sifu.Run, folder: Path) -> dict[str, np.ndarray]:
    """Return everything that exports weights or full-precision scores of the model, as weights."""
    from safetensors.numpy import load_file

    exported = run.export(folder / "model.safetensors")
    x = np.random.default_rng(1).uniform(0.0, 1.0, size=(200, 64)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x)
    loaded, module = sifu.load_model(exported), run.model()
    found = {"export": np.concatenate([values.ravel() for values in load_file(exported).values()])}
    for name, model in {"load_model": loaded, "Run.model": module}.items():
        found[name] = np.concatenate([value.detach().numpy().ravel() for value in model.network.parameters()])
    found["predict"] = np.array([list(row.scores.values()) for row in loaded.predict_rows(folder / "rows.npz")])
    return found


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_the_solved_head_leaves_the_folder_only_without_noise(tmp_path, noise):
    run = sifu.train(_spec(noise=noise), run=tmp_path / "run")
    run.forget(["client-001"])
    exits = _exits(run, tmp_path)
    with run.reader() as reader:
        solved, given = reader.load_model(reader.tip), released_model(reader)
    for name in ("export", "load_model", "Run.model"):
        weights = np.sort(exits[name].astype(np.float64))
        is_solved = np.allclose(weights, np.sort(solved), rtol=0.0, atol=1e-6)
        assert is_solved == (noise == 0.0), name
        assert np.allclose(weights, np.sort(given), rtol=0.0, atol=1e-6), name
    scores = sifu.load_model(tmp_path / "model.safetensors")
    weights = dict(zip(("weight", "bias"), (solved[:-10].reshape(-1, 10), solved[-10:]), strict=True))
    rows = np.load(tmp_path / "rows.npz")["x"]
    phi = scores._mapped(torch.from_numpy(rows)).numpy()
    of_solved = phi @ weights["weight"] + weights["bias"]
    assert np.allclose(exits["predict"], of_solved, atol=1e-5) == (noise == 0.0)


def test_figures_are_those_of_the_released_head(tmp_path):
    """With noise that dominates the head, no recorded accuracy may be the solved head's."""
    run = sifu.train(_spec(noise=100.0), run=tmp_path / "run")
    solved = sifu.train(_spec(noise=0.0), run=tmp_path / "plain")
    assert solved.status().accuracy > 0.8
    assert run.status().accuracy < 0.5
    with run.reader() as reader:
        assert all(row.accuracy < 0.5 for row in reader.evaluations() if np.isfinite(row.accuracy))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"kind": "softmax"}}, "release.noise must be 0 unless model.kind = 'ridge'"),
        ({"ridge": {"regularisation": "auto"}}, "ridge.regularisation must be a number with release.noise"),
        ({"keep": {"statistics": "sum"}}, "keep.statistics must be clients with release.noise"),
        ({"release": {"noise": "auto"}}, "release.noise must be a number"),
        ({"release": {"noise": -1.0}}, "release.noise must be 0, or in 1e-12 to 1e12"),
    ],
)
def test_specs_that_cannot_be_accounted_for_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        Spec.from_mapping(SPEC | change)


def _tampered_distance(folder: Path) -> None:
    with sqlite3.connect(folder / "run.db") as db:
        *_, (seq, content) = db.execute("SELECT seq, payload FROM events WHERE kind = 'released' ORDER BY seq")
        changed = json.loads(content)
        changed[RELEASE_DISTANCES]["clients"]["0"] /= 2.0
        db.execute("UPDATE events SET payload = ? WHERE seq = ?", (json.dumps(changed, separators=(",", ":")), seq))


def _tampered_noise(folder: Path) -> None:
    with sqlite3.connect(folder / "run.db") as db:
        rows = list(db.execute("SELECT seq, payload FROM events WHERE kind = 'released'"))
        payload = json.loads(rows[-1][1]) | {"noise_std": 2.0 * NOISE}
        text = json.dumps(payload, separators=(",", ":"), sort_keys=True)
        db.execute("UPDATE events SET payload = ? WHERE seq = ?", (text, rows[-1][0]))


def _tampered_file(folder: Path) -> None:
    (path,) = (folder / "releases").iterdir()
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def _solved_head_in_its_place(folder: Path) -> None:
    (path,) = (folder / "releases").iterdir()
    path.write_bytes((folder / "models" / path.name).read_bytes())


@pytest.mark.parametrize("tamper", [_tampered_distance, _tampered_noise, _tampered_file, _solved_head_in_its_place])
def test_tampering_is_caught_by_both_verifiers(tmp_path, tamper):
    run = sifu.train(_spec(), run=tmp_path / "run")
    run.forget(["client-001"])
    assert _problems(tmp_path / "run") == []
    tamper(tmp_path / "run")
    assert sifu.open_run(tmp_path / "run").verify().problems
    assert second_opinion(tmp_path / "run")


def test_distances_that_an_operator_records_too_small_are_caught(tmp_path, monkeypatch):
    """The forged distances are signed with the right key and in the chain, so only recomputation finds them."""
    from sifu.theory.release_noise import Release

    honest = Release.distance_without
    monkeypatch.setattr(Release, "distance_without", lambda self, client: 0.5 * honest(self, client))
    sifu.train(_spec(), run=tmp_path / "run")
    monkeypatch.undo()
    assert any("the distance of client-000" in problem for problem in sifu.open_run(tmp_path / "run").verify().problems)
    assert any("client 0 is at" in problem for problem in second_opinion(tmp_path / "run"))


def test_less_noise_than_recorded_is_caught(tmp_path, monkeypatch):
    from sifu.run import releases as publishing

    monkeypatch.setattr(publishing, "add_noise", lambda model, noise_std, normals: model.copy())
    sifu.train(_spec(), run=tmp_path / "run")
    monkeypatch.undo()
    assert any("from the solved head" in problem for problem in sifu.open_run(tmp_path / "run").verify().problems)
    assert any("noises from the head" in problem for problem in second_opinion(tmp_path / "run"))


def test_an_interrupted_release_is_made_again(tmp_path, monkeypatch):
    from sifu.run import releases as publishing

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing, "RunWriter", publishing.RunWriter)
    honest = publishing.write_release
    monkeypatch.setattr(publishing, "write_release", lambda *given: (honest(*given), stop())[0])
    with pytest.raises(KeyboardInterrupt):
        sifu.train(_spec(), run=tmp_path / "run")
    monkeypatch.undo()
    run = sifu.train(_spec(), run=tmp_path / "run")
    with run.reader() as reader:
        assert len(releases(reader)) == 1
        assert release_path(reader.folder, reader.tip).exists()
    assert _problems(tmp_path / "run") == []


def test_a_purge_leaves_what_later_certificates_are_composed_from(tmp_path):
    run = sifu.train(_spec(), run=tmp_path / "run")
    run.forget(["client-001"])
    run.purge()
    run.forget(["client-002"])
    assert _problems(tmp_path / "run") == []
    assert run.certificate("r2").body["before_after"]["epsilon"] > 0.0
