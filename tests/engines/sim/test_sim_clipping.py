"""Clipped and noised updates: exact norms, the resulting round, and the source of the noise."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, SimulatedFederation, SimulationSettings
from sifu.engines.sim.client_updates import OUTSIDE, Clipping, clip_rows
from sifu.errors import RoundRejectedError

EVERYONE = np.arange(6)


class Site:
    """Client with a few random samples."""

    def __init__(self, number: int) -> None:
        generator = np.random.default_rng(number)
        self.name = f"site-{number}"
        self.x = generator.random((4 + number, 5))
        self.y = generator.integers(0, 3, 4 + number)


def federation(clipping: Clipping | None, **settings: object) -> SimulatedFederation:
    sites = [Site(k) for k in range(6)]
    sites[0].y[:3] = [0, 1, 2]
    return SimulatedFederation(
        sites, "softmax", LocalTraining(0.5, 4), SimulationSettings(clipping=clipping, **settings)
    )  # type: ignore[arg-type]


def exact_square(row: np.ndarray) -> Fraction:
    return sum((Fraction(float(value)) ** 2 for value in row), Fraction(0))


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30),
    st.floats(1e-6, 1e3),
)
def test_the_norm_is_at_most_clip_for_the_very_numbers(values: list[float], clip: float) -> None:
    (clipped,) = clip_rows(np.array([values]), clip)
    assert exact_square(clipped) <= Fraction(clip) ** 2
    length = float(np.linalg.norm(values))
    if length <= clip * (1 - 1e-9):
        assert np.array_equal(clipped, values)
    elif np.isfinite(length) and length > 0:
        assert np.linalg.norm(clipped) == pytest.approx(clip, rel=1e-9)


def test_plain_division_would_not_be_enough() -> None:
    """Negative control: u C / ||u|| computed directly exceeds C for some rows."""
    rows = np.random.default_rng(0).standard_normal((400, 7))
    plain = rows * (1.0 / np.linalg.norm(rows, axis=1))[:, None]
    assert any(exact_square(row) > 1 for row in plain)
    assert all(exact_square(row) <= 1 for row in clip_rows(rows, 1.0))


def test_extreme_rows() -> None:
    clipped = clip_rows(np.array([[1e300, 1e300], [1e-300, 0.0], [0.0, 0.0]]), 1.0)
    assert exact_square(clipped[0]) <= 1
    assert clipped[0] == pytest.approx([0.5**0.5] * 2)
    assert clipped[1:].tolist() == [[1e-300, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_round_is_the_weighted_mean_of_clipped_updates(dtype: str) -> None:
    engine = federation(Clipping(0.2, 0.0, "system", 1), server_rate=0.7, dtype=dtype)
    start, position = engine.initial_model(0), Position(0, 0)
    result = engine.run_round(start, position, EVERYONE, want_gram=True, want_updates=True)
    raw = engine.local_updates(start, position, EVERYONE, 4)
    lengths = np.linalg.norm(raw.astype(float), axis=1)
    assert (lengths > 0.2).all()
    clipped = raw * (0.2 / lengths)[:, None]
    weights = result.samples / result.samples.sum()
    tolerance = 1e-12 if dtype == "float64" else 1e-6
    assert result.model == pytest.approx(start + 0.7 * weights @ clipped, abs=tolerance)
    assert result.updates == pytest.approx(clipped, abs=tolerance)
    assert result.drifts == pytest.approx(np.linalg.norm(clipped - weights @ clipped, axis=1), rel=1e-5)
    assert (result.drifts >= np.linalg.norm(clip_rows(raw, 0.2) - weights @ clip_rows(raw, 0.2), axis=1)).all()
    assert np.sqrt(np.diag(result.gram)) == pytest.approx(result.drifts, rel=1e-6)
    assert result.mean_shift <= 0.2 * (1 + 1e-9)
    assert (engine.facts.clip, engine.facts.noise) == (0.2, 0.0)
    assert OUTSIDE in engine.facts.outside
    assert not engine.facts.rounding_bounded


def test_a_large_bound_changes_nothing() -> None:
    start = federation(None).initial_model(0)
    plain = federation(None).run_round(start, Position(0, 0), EVERYONE)
    clipped = federation(Clipping(1e6, 0.0, "system", 1)).run_round(start, Position(0, 0), EVERYONE)
    assert clipped.model == pytest.approx(plain.model, abs=1e-12)
    assert clipped.drifts == pytest.approx(plain.drifts, rel=1e-9)


def test_leaving_a_client_out_moves_a_round_by_at_most_twice_its_weight() -> None:
    engine = federation(Clipping(0.1, 0.0, "system", 1))
    start = engine.initial_model(0)
    whole = engine.run_round(start, Position(0, 0), EVERYONE)
    for client in EVERYONE:
        rest = np.setdiff1d(EVERYONE, [client])
        moved = np.linalg.norm(whole.model - engine.run_round(start, Position(0, 0), rest).model)
        assert 0.0 < moved <= 2 * whole.samples[client] / whole.samples.sum() * 0.1


def test_noise_has_the_stated_size_and_its_own_source() -> None:
    start = federation(None).initial_model(0)

    def noise(source: str, position: Position, client: int) -> np.ndarray:
        clipping = Clipping(0.2, 3.0, source, 1)  # type: ignore[arg-type]
        return clipping._draw(position, client, 20_000)

    drawn = noise("system", Position(0, 0), 1)
    assert drawn.std() == pytest.approx(0.6, rel=0.03)
    assert not np.array_equal(drawn, noise("system", Position(0, 0), 1))
    seeded = noise("seeded", Position(0, 0), 1)
    assert np.array_equal(seeded, noise("seeded", Position(0, 0), 1))
    for other in ((Position(0, 1), 1), (Position(1, 0), 1), (Position(0, 0), 2)):
        assert abs(np.corrcoef(seeded, noise("seeded", *other))[0, 1]) < 0.05
    engine = federation(Clipping(0.2, 3.0, "seeded", 1))
    result = engine.run_round(start, Position(0, 0), EVERYONE, want_updates=True)
    clipped = clip_rows(engine.local_updates(start, Position(0, 0), EVERYONE, 4), 0.2)
    expected = clipped + np.stack([noise_of(k, start.size) for k in EVERYONE])
    assert result.updates == pytest.approx(expected, abs=1e-12)
    assert result.model == pytest.approx(start + result.samples / result.samples.sum() @ expected, abs=1e-12)


def noise_of(client: int, size: int) -> np.ndarray:
    return Clipping(0.2, 3.0, "seeded", 1)._draw(Position(0, 0), client, size)


def test_a_diverged_client_is_named() -> None:
    engine = federation(Clipping(0.2, 1.0, "seeded", 1))
    bad = engine.initial_model(0)
    bad[:] = np.nan
    with pytest.raises(RoundRejectedError, match="site-0"):
        engine.run_round(bad, Position(0, 0), EVERYONE)
