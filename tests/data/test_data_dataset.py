"""Data sets: arrays that do not match are refused, and features use fixed constants only."""

from __future__ import annotations

import numpy as np
import pytest

from sifu.data import Dataset, load, scale_features
from sifu.data.digits import fixed_order
from sifu.errors import InputError


def make(name="npz:own", **changes):
    fields = {
        "name": name,
        "x_train": np.zeros((4, 3)),
        "y_train": np.array([0, 1, 0, 1]),
        "x_test": np.zeros((2, 3)),
        "y_test": np.array([0, 1]),
        "classes": ("a", "b"),
    }
    return Dataset(**(fields | changes))


def test_unit_and_standard_use_constants_alone():
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3) * 2
    unit = scale_features(images, 200.0, flat=False)
    assert unit.shape == (2, 3, 4, 4)
    np.testing.assert_array_equal(unit, images.transpose(0, 3, 1, 2) / 200.0)
    standard = scale_features(images, 200.0, flat=False, normalise="standard")
    np.testing.assert_allclose(standard, 2.0 * unit - 1.0, rtol=1e-15, atol=1e-15)


def test_flat_is_the_torch_order_of_channels_first_images():
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)
    kept = scale_features(images, 255.0, flat=False, dtype="float32")
    flat = scale_features(images, 255.0, flat=True, dtype="float32")
    assert flat.dtype == np.float32
    assert flat.flags.c_contiguous
    np.testing.assert_array_equal(flat, kept.reshape(3, -1))


def test_greyscale_images_get_one_channel():
    images = np.full((2, 28, 28), 255, dtype=np.uint8)
    assert scale_features(images, None, flat=False).shape == (2, 1, 28, 28)
    assert (scale_features(images.reshape(2, 784), 255.0, normalise="standard") == 1.0).all()


@pytest.mark.parametrize("normalise", ["unit", "standard"])
def test_a_sample_does_not_depend_on_the_others(normalise):
    """A row's features are the same with and without the other clients' rows, which is a premise of certificates."""
    digits = load("digits")
    alone = digits.features("train", normalise=normalise, rows=np.array([5]))
    np.testing.assert_array_equal(alone[0], digits.features("train", normalise=normalise)[5])


def test_own_floats_are_left_alone_and_own_bytes_are_divided_by_255():
    floats = np.array([[1.5, -2.0]])
    np.testing.assert_array_equal(scale_features(floats, None), floats)
    np.testing.assert_array_equal(scale_features(np.array([[51]], dtype=np.uint8), None), [[0.2]])


def test_images_that_are_channels_first_already_stay_so():
    assert scale_features(np.zeros((2, 3, 8, 9)), None, flat=False).shape == (2, 3, 8, 9)
    with pytest.raises(InputError, match="no axis of 1 to 4 channels"):
        scale_features(np.zeros((2, 7, 8, 9)), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"largest": None, "normalise": "standard"}, "no published mean"),
        ({"largest": None, "normalise": "fitted"}, "'fitted' is unknown"),
        ({"largest": None, "dtype": "float16"}, "'float16' is not supported"),
        ({"largest": 16.0}, "must be stored as bytes"),
    ],
)
def test_features_refuse(arguments, message):
    with pytest.raises(InputError, match=message):
        scale_features(x=np.zeros((1, 2)), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.array([[np.nan, 1, np.inf]] * 4)}, "x_train of data set .* holds 8 values that are NaN or Inf"),
        ({"x_test": np.full((2, 3), np.inf)}, "x_test .* holds 6 values"),
        ({"y_train": np.array([0, 1, 0])}, "4 samples in x_train but 3 labels"),
        ({"y_train": np.array([0, 1, 0, 2])}, "run from 0 to 2; class numbers 0 to 1"),
        ({"y_test": np.array([-1, 0])}, "run from -1 to 0"),
        ({"y_train": np.array([0.0, 1, 0, 1])}, "float64 although 2 classes"),
        ({"classes": ()}, "no classes are named"),
        ({"x_test": np.zeros((2, 4))}, r"shape \(3,\) and test samples of shape \(4,\)"),
        ({"x_train": np.zeros(4)}, r"write one feature as shape \(N, 1\)"),
        ({"x_train": np.array([["a"]] * 4)}, "array of real numbers"),
        ({"client_train": np.zeros(3)}, r"client_train .* has shape \(3,\); \(4,\)"),
        ({"x_train": np.zeros((0, 3)), "y_train": np.zeros(0, dtype=int)}, "no training samples"),
    ],
)
def test_a_bad_data_set_is_refused_with_what_was_found(changes, message):
    with pytest.raises(InputError, match=message):
        make(**changes)


def test_a_set_without_test_samples_has_features_of_the_right_width():
    own = make(x_test=np.zeros((0, 3)), y_test=np.zeros(0, dtype=int))
    assert own.features("test").shape == (0, 3)
    images = scale_features(np.zeros((0, 32, 32, 3), np.uint8), 255.0, normalise="standard")
    assert images.shape == (0, 3072)


def test_the_digits_are_those_that_scikit_learn_loads():
    from sklearn.datasets import load_digits

    digits, stored = load("digits"), load_digits()
    order = fixed_order()
    x, y = np.concatenate([digits.x_train, digits.x_test]), np.concatenate([digits.y_train, digits.y_test])
    np.testing.assert_array_equal(x, stored.images[order])
    np.testing.assert_array_equal(y, stored.target[order])


def test_digits_have_a_fixed_split_that_covers_them():
    first, second = load("digits"), load("digits")
    assert (first.x_train.shape, first.x_test.shape) == ((1600, 8, 8), (197, 8, 8))
    assert first.x_train.dtype == np.uint8
    assert first.x_train.max() == 16
    np.testing.assert_array_equal(first.x_train, second.x_train)
    # Golden: every published result depends on this split, so it must not change.
    assert first.y_train[:8].tolist() == GOLDEN_LABELS
    assert np.unique(first.y_train).size == np.unique(first.y_test).size == 10
    np.testing.assert_array_equal(np.bincount(np.append(first.y_train, first.y_test)), DIGITS_PER_CLASS)
    assert first.features().max() == 1.0
    assert first.features(normalise="standard").min() == -1.0


GOLDEN_LABELS = [6, 4, 4, 6, 0, 1, 2, 3]
DIGITS_PER_CLASS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
