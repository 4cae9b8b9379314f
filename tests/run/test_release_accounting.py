"""Accounting for noisy releases: last bits, restored backups, records kept as rows, and wording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from sifu.core.certificate_words import ALL_RELEASES_NOT_COVERED, HEADS_COMPARED, words_of
from sifu.core.round import SystemNormals, add_noise, keyed_generator
from sifu.errors import NotCertifiableError
from sifu.run.releases import with_noise
from sifu.store.release_files import releases
from sifu.theory.release_noise import Release
from sifu_verifier import verify as second_opinion

NOISE = 0.05


def _spec(samples: int = 60, **release: Any) -> dict[str, Any]:
    """Return a spec whose clients keep statistics (60 samples) or rows (4 samples)."""
    return {
        "model": {"kind": "ridge"},
        "data": {"clients": 6, "samples_per_client": samples},
        "features": {"kind": "random_fourier", "count": 32, "bandwidth": 4.0},
        "ridge": {"regularisation": 0.05},
        "release": {"noise": NOISE} | release,
    }


class _Uniforms:
    """Box-Muller transform of 53-bit uniforms like `SystemNormals`, but from a seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        draw = keyed_generator(seed, "last bits")
        monkeypatch.setattr("sifu.core.round.secrets.token_bytes", draw.bytes)

    def standard_normal(self, size: int) -> np.ndarray:
        return SystemNormals().standard_normal(size)


def _off_the_lattice(released: np.ndarray, head: np.ndarray, noise_std: float) -> float:
    """Return the mean distance of the uniforms behind the noise from multiples of 2^-53, if `head` was released.

    In the tails, exp(-r^2/2) times 2^53 is an integer small enough for float64. For a wrong head the mean distance from
    integers is a quarter, for the right head far less.
    """
    half = head.size // 2
    noise = (released - head) / noise_std
    squares = noise[:half] ** 2 + noise[half:] ** 2
    seen = squares > 2.0 * np.log(2.0**6)
    uniforms = np.exp(-squares[seen] / 2.0) * 2.0**53
    return float(np.mean(np.abs(uniforms - np.rint(uniforms))))


@pytest.mark.parametrize("release", [add_noise, with_noise])
def test_last_bits_do_not_tell_which_head_was_released(monkeypatch: pytest.MonkeyPatch, release: Any) -> None:
    """Rounding to a grid hides which head was released; noise added without rounding reveals it
    (the negative control).
    """
    draw, normals = np.random.default_rng(5), _Uniforms(monkeypatch, 5)
    found = []
    for _ in range(10):
        head = 0.05 * draw.normal(size=5000)
        other = head + 1e-4 * draw.normal(size=5000)
        released = release(head, NOISE, normals)
        found.append(_off_the_lattice(released, head, NOISE) < 0.8 * _off_the_lattice(released, other, NOISE))
    assert sum(found) == (10 if release is add_noise else 0)


def test_the_grid_is_far_below_the_noise() -> None:
    head = np.linspace(-1.0, 1.0, 2000)
    for noise_std in (1e-9, 0.0499, 0.5, 3.0):
        released = with_noise(head, noise_std, np.random.default_rng(1))
        unrounded = add_noise(head, noise_std, np.random.default_rng(1))
        step = np.max(np.abs(released - unrounded))
        assert 0.0 < step <= noise_std / 2.0**9
        assert np.std(released - head) == pytest.approx(noise_std, rel=0.1)


def test_after_a_restore_nothing_is_said_about_all_releases(tmp_path: Path) -> None:
    """The original run may continue after the backup, so the restored one claims nothing about all releases."""
    first = sifu.train(_spec(), run=tmp_path / "first")
    first.backup(tmp_path / "backup")
    first.forget(["client-000"])
    sifu.restore(tmp_path / "backup", tmp_path / "second", accept_older=True)
    run = sifu.open_run(tmp_path / "second")
    with pytest.raises(NotCertifiableError, match="no guarantee is proven"):
        run.forget(["client-001"], before_after="1e4,1e-5")
    run.forget(["client-001"])
    assert "before_after" not in run.certificate("r1").body
    assert first.certificate("r1").body["before_after"]["epsilon"] > 0.0
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert [*sifu.verify(folder).problems, *second_opinion(folder)] == []


def test_distances_of_records_are_recomputed_where_samples_are_kept(tmp_path: Path) -> None:
    run = sifu.train(_spec(samples=4), run=tmp_path / "rows")
    assert [*sifu.verify(run.folder).problems, *second_opinion(run.folder)] == []
    assert not [note for note in sifu.verify(run.folder).notes if "taken from the signed record" in note]
    run.forget(["client-001"])
    (note,) = [note for note in sifu.verify(run.folder).notes if "taken from the signed record" in note]
    assert note.startswith("the distances of 1 of 2 releases")
    plain = sifu.train(_spec(), run=tmp_path / "statistics")
    (note,) = [note for note in sifu.verify(plain.folder).notes if "taken from the signed record" in note]
    assert note.startswith("the distances of records of 6 clients")


def test_distances_of_records_recorded_too_small_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Release.distances_of_records
    monkeypatch.setattr(Release, "distances_of_records", lambda self, *given: 0.5 * honest(self, *given))
    run = sifu.train(_spec(samples=4), run=tmp_path / "run")
    monkeypatch.undo()
    said = "the largest distance of a record of client-000 is recorded as"
    assert any(said in problem for problem in sifu.verify(run.folder).problems)
    assert any("a record of client 0 is at" in problem for problem in second_opinion(run.folder))


def test_kept_rows_give_the_distances_that_the_data_give(tmp_path: Path) -> None:
    """Distances of records from the kept rows, which are all that a server on Flower has, equal those from the data."""
    from sifu.run.releases import Accountant, _largest_of_records

    run = sifu.train(_spec(samples=4), run=tmp_path / "run")
    with run.reader() as reader:
        accountant = Accountant.of(reader, run.spec)
        recorded = releases(reader)[-1].record_distances
        assert recorded is not None
        for client in range(6):
            from_data = _largest_of_records(run.engine(), accountant.release, client)
            assert accountant.distances_of(client)[1] == from_data == recorded[client]


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_a_certificate_does_not_contradict_what_it_states(tmp_path: Path, noise: float) -> None:
    run = sifu.train(_spec(noise=noise), run=tmp_path / "run")
    run.forget(["client-001"])
    said = words_of(run.certificate("r1").body).not_covered
    assert (HEADS_COMPARED in said) == (noise == 0.0)
    assert (ALL_RELEASES_NOT_COVERED in said) == (noise > 0.0)
