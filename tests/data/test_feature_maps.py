"""Feature maps: features of one sample alone, the same on every machine, of bounded norm, and accurate enough."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps import (
    FeatureMap,
    PlainInputs,
    RandomFourier,
    fixed_point,
    specified_map,
)
from sifu.data.feature_maps.feature_map import drawn_normals
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.data.feature_maps.row_maps import WAVE_BITS
from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Statistics, Targets, total
from sifu.theory.closed_form.sums import statistics_of_chunks

torch = pytest.importorskip("torch")

GOLDEN_NORMALS = [0.4914093017578125, 0.051971435546875]


def maps() -> list[FeatureMap]:
    """Return one map of each kind for samples of the same shape."""
    torch.manual_seed(0)
    convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    return [
        PlainInputs((3, 9, 11)),
        RandomFourier((3, 9, 11), features=20, bandwidth=4.0, seed=3),
        NetworkFeatures(convolution, (3, 9, 11)),
    ]


def client_statistics(
    features: FeatureMap, targets: Targets, fixed: FixedPoint, x: np.ndarray, y: np.ndarray
) -> Statistics:
    """Return (G, H, n, q) of a client's samples, computed in chunks."""
    encoded = targets.encode(y)
    return statistics_of_chunks(fixed, ((phi, encoded[rows]) for rows, phi in features.chunks(x)))


def images(count: int, shape: tuple[int, ...] = (3, 9, 11), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, *shape), dtype=np.uint8)


@pytest.mark.parametrize("number", range(3))
def test_features_of_a_sample_are_its_own_to_the_bit(number: int) -> None:
    features, x = maps()[number], images(41)
    whole = features(x)
    order = np.random.default_rng(1).permutation(41)
    assert whole.shape == (41, features.features)
    assert np.array_equal(features(x[order]), whole[order])
    for row in (0, 7, 40):
        assert np.array_equal(features(x[row : row + 1])[0], whole[row])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert np.array_equal(features(x), whole)
    finally:
        torch.set_num_threads(before)
    assert features(x[:0]).shape == (0, features.features)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("extreme", ["black", "white", "half", "stripes", "noise"])
def test_no_sample_is_longer_than_the_norm(number: int, extreme: str) -> None:
    features, x = maps()[number], images(2)
    if extreme != "noise":
        x[:] = 0 if extreme == "black" else 255
    if extreme == "half":
        x[:, :, :, :5] = 0
    if extreme == "stripes":
        x[:, :, ::2] = 0
    fixed = fixed_point(features, Targets("classification", 2))
    assert np.all(np.linalg.norm(features(x), axis=1) <= features.norm * (1.0 + 1e-12))
    fixed.quantised_features(features(x))  # raises nothing


def test_maps_are_known_by_their_digest() -> None:
    digests = [features.digest() for features in maps()]
    assert digests == [features.digest() for features in maps()]
    others = [
        RandomFourier((3, 9, 11), features=20, bandwidth=4.0, seed=4),
        RandomFourier((3, 9, 11), features=20, bandwidth=4.0, seed=3, norm=9.0),
    ]
    assert len({*digests, *(features.digest() for features in others)}) == len(digests) + len(others)


def test_drawn_numbers_are_the_same_on_every_machine() -> None:
    """Golden: x86-64 and ARM gave these normals."""
    assert drawn_normals(0, "filters", 2).tolist() == GOLDEN_NORMALS
    normals = drawn_normals(1, "many", 40_000)
    assert abs(normals.mean()) < 4.0 / 200.0
    assert abs(normals.std() - 1.0) < 4.0 / math.sqrt(2 * 40_000)


def test_cosines_of_the_table_are_not_near_a_tie() -> None:
    wave = np.cos(2.0 * math.pi * np.arange(2**16) / 2**16)
    steps = np.ldexp(wave, WAVE_BITS)
    # far more than the last bits of a cosine
    assert np.abs(np.abs(steps - np.floor(steps)) - 0.5).min() > 2.0 ** (WAVE_BITS - 53) * 100


def test_fourier_features_have_a_gaussian_kernel() -> None:
    features = RandomFourier((3,), features=20_000, bandwidth=2.0, norm=1.0)
    x = np.random.default_rng(0).normal(size=(6, 3))
    distances = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(features(x) @ features(x).T, np.exp(-distances / 8.0), atol=0.04)


def test_a_module_that_is_changed_later_changes_no_features() -> None:
    module = torch.nn.Linear(4, 3)
    features = NetworkFeatures(module, (4,))
    digest, rows = features.digest(), features(np.ones((2, 4)))
    with torch.no_grad():
        module.weight[0, 0] += 1.0
    assert features.digest() == digest
    assert np.array_equal(features(np.ones((2, 4))), rows)
    changed = NetworkFeatures(module, (4,))
    assert changed.digest() != digest
    assert not np.array_equal(changed(np.ones((2, 4))), rows)


class Tokens(torch.nn.Module):
    """Embedding whose parameter type cannot represent the largest token ids exactly."""

    def __init__(self, kind: torch.dtype, converts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.converts = torch.nn.Embedding(3000, 4, dtype=kind), converts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean embedding of each row of tokens."""
        rows: torch.Tensor = self.table(x.long() if self.converts else x)
        return rows.mean(1)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("converts", [False, True])
def test_token_ids_reach_a_module_as_they_are(kind: torch.dtype, converts: bool) -> None:
    """Token ids reach the module as integers: float16, with eleven significant bits, would change an id of 2,999."""
    tokens = np.random.default_rng(0).integers(2000, 3000, (5, 6))
    module = Tokens(kind, converts)
    expected = module(torch.as_tensor(tokens)).double().detach().numpy()
    expected *= 10.0 / np.linalg.norm(expected, axis=1, keepdims=True)
    features = NetworkFeatures(module, (6,))
    ((_, found),) = list(features.chunks(tokens))
    np.testing.assert_allclose(found, expected, rtol=0.02)
    if not converts:
        with pytest.raises(InputError, match="takes integers, found samples of type float64"):
            features(tokens + 0.5)


def test_options_and_samples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="channels, height, width"):
        specified_map(FeaturesSpec(kind="pretrained"), (3,))
    with pytest.raises(InputError, match="NaN"):
        PlainInputs((3,))(np.full((1, 3), np.nan))
    with pytest.raises(InputError, match="2\\^53"):
        RandomFourier((3,), features=2)(np.full((1, 3), 1e12))


def test_statistics_of_chunks_of_clients_are_those_of_all_samples() -> None:
    features, targets = maps()[1], Targets("classification", 4)
    x, y = images(600), np.random.default_rng(0).integers(4, size=600)
    fixed = fixed_point(features, targets)
    assert [rows.stop for rows, _ in features.chunks(x)] == [256, 512, 600]
    whole = client_statistics(features, targets, fixed, x, y)
    parts = (client_statistics(features, targets, fixed, x[a::7], y[a::7]) for a in range(7))
    assert total(fixed, parts).digest() == whole.digest()
