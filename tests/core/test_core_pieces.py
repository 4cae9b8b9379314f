"""Small pieces of the core: participation draws, keyed generators, layouts, noise, request terms."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.core.layout import ModelLayout
from sifu.core.request_terms import Terms, check_request_id
from sifu.core.round import SystemNormals, add_noise, keyed_generator
from sifu.errors import InputError, SifuError
from sifu.theory.participation import Participation, base_key, place_key


def test_every_error_has_an_exit_code() -> None:
    errors = importlib.import_module("sifu.errors")
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SifuError)]
    assert {kind.__name__: kind.exit_code for kind in kinds} == {
        "SifuError": 1,
        "InputError": 2,
        "NoSpaceError": 2,
        "UnusableSamplesError": 2,
        "RoundRejectedError": 2,
        "IdInUseError": 2,
        "VerificationError": 3,
        "NotCertifiableError": 4,
        "RunDamagedError": 5,
        "RunBusyError": 5,
        "NoClientResponseError": 1,
        "DiskError": 5,
    }


# Participation.


def round_key(seed: int, number: int = 1) -> Any:
    return place_key(base_key(seed, "participation"), 0, number)


@given(st.integers(0, 1000), st.sets(st.integers(0, 19), min_size=1))
def test_a_coin_does_not_move_when_another_client_leaves(seed: int, gone: set[int]) -> None:
    """Poisson sampling without the clients in `gone` draws the same others: the certified counterfactual."""
    everyone, rest = np.arange(20), np.array([i for i in range(20) if i not in gone], dtype=np.int64)
    poisson = Participation("poisson", rate=0.4)
    full = poisson.draw(everyone, round_key(seed))
    left = poisson.draw(rest, round_key(seed))
    assert left.tolist() == [i for i in full.tolist() if i not in gone]


def test_control_a_fixed_sample_does_move() -> None:
    fixed = Participation("fixed", count=5)
    moved = 0
    for seed in range(20):
        full = fixed.draw(np.arange(20), round_key(seed)).tolist()
        left = fixed.draw(np.arange(1, 20), round_key(seed)).tolist()
        moved += left != [i for i in full if i != 0]
    assert moved > 0


def test_poisson_has_its_rate() -> None:
    """4,000 draws of 50 coins: the standard error of the rate is sqrt(0.25 * 0.75 / 200,000) = 1e-3, and four are
    allowed.
    """
    poisson = Participation("poisson", rate=0.25)
    total = sum(poisson.draw(np.arange(50), round_key(7, number)).size for number in range(4000))
    assert total / 200_000 == pytest.approx(0.25, abs=4e-3)


def test_draws_are_sorted_and_bounded() -> None:
    active = np.array([9, 2, 5])
    assert Participation("all").draw(active, round_key(0)).tolist() == [2, 5, 9]
    assert Participation("fixed", count=7).draw(active, round_key(0)).tolist() == [2, 5, 9]
    picked = Participation("fixed", count=2).draw(active, round_key(0))
    assert picked.size == 2
    assert np.all(np.diff(picked) > 0)


@pytest.mark.parametrize(
    "text", ["", "ALL", "poisson", "poisson()", "poisson(1.5)", "poisson(nan)", "fixed(0)", "x(1)"]
)
def test_participation_is_refused_in_words(text: str) -> None:
    with pytest.raises(InputError, match="write all, poisson"):
        Participation.parse(text)


# Keyed generators.


def test_streams_are_repeatable_and_apart() -> None:
    keys: list[tuple[Any, ...]] = [
        (1, "a"),
        (1, "a", 0),
        (1, "a", 0, 1),
        (1, "b", 0, 1),
        (2, "a", 0, 1),
        (1, "a", 1, 0),
    ]
    draws = [keyed_generator(*key).random(4).tolist() for key in keys]
    assert draws == [keyed_generator(*key).random(4).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)


# Layouts.


@given(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4), st.integers(0, 99))
def test_flatten_and_unflatten_are_inverse(shapes: list[tuple[int, ...]], seed: int) -> None:
    layout = ModelLayout(tuple(f"p{i}" for i in range(len(shapes))), tuple(shapes))
    vector = np.random.default_rng(seed).normal(size=layout.size)
    assert layout.flatten(layout.unflatten(vector)).tobytes() == vector.tobytes()


def test_layout_mistakes_are_named() -> None:
    layout = ModelLayout(("w",), ((2, 3),))
    with pytest.raises(InputError, match="no parameter 'w'; it has \\['v'\\]"):
        layout.flatten({"v": np.zeros((2, 3))})
    with pytest.raises(InputError, match=r"shape \(3, 2\), not \(2, 3\)"):
        layout.flatten({"w": np.zeros((3, 2))})
    with pytest.raises(InputError, match="6 parameters"):
        layout.unflatten(np.zeros(5))


# Noise.


def test_system_normals_are_normal() -> None:
    """400,000 draws from the system, which cannot be seeded: every bound is six standard errors, so false alarms are
    rare (1e-8).
    """
    draws = SystemNormals().standard_normal(400_001)
    count = draws.size
    assert abs(draws.mean()) < 6 / math.sqrt(count)
    assert abs(draws.var() - 1.0) < 6 * math.sqrt(2 / count)
    assert abs(np.mean(draws**4) - 3.0) < 6 * math.sqrt(96 / count)
    assert abs(np.mean(draws[:-1] * draws[1:])) < 6 / math.sqrt(count)
    half = count // 2 + 1
    assert abs(np.mean(draws[: count - half] * draws[half:])) < 6 / math.sqrt(count - half)
    for level in (-2.0, -0.5, 1.0, 3.0):
        chance = 0.5 * math.erfc(-level / math.sqrt(2.0))
        assert abs(np.mean(draws <= level) - chance) < 6 * math.sqrt(chance * (1 - chance) / count)
    assert np.all(np.isfinite(draws))


def test_control_the_same_test_refuses_wrong_noise() -> None:
    draws = np.random.default_rng(0).uniform(-math.sqrt(3.0), math.sqrt(3.0), 400_001)  # mean 0, variance 1
    assert abs(np.mean(draws**4) - 3.0) > 6 * math.sqrt(96 / draws.size)


def test_draws_of_the_system_differ() -> None:
    system = SystemNormals()
    assert system.standard_normal(8).tolist() != system.standard_normal(8).tolist()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_noise_is_added_in_float64_and_the_model_is_not_modified(dtype: type) -> None:
    model = np.linspace(-1.0, 1.0, 7).astype(dtype)
    copy = model.copy()
    noisy = add_noise(model, 0.5, np.random.default_rng(3))
    expected = copy.astype(np.float64) + 0.5 * np.random.default_rng(3).standard_normal(7)
    assert noisy.dtype == dtype
    assert noisy.tolist() == expected.astype(dtype).tolist()
    assert model.tolist() == copy.tolist()


# Terms of a request.


def test_terms_are_checked() -> None:
    good = Terms(("a", "b"), 10.0, 0.01)
    assert good.multiplier == pytest.approx(0.3501, abs=1e-4)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"clients": ()}, "names no client"),
        ({"clients": ("a", "a")}, "names a more than once"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"sigma": -1.0}, "sigma"),
        ({"retention": "x"}, "retention must be paper or strict"),
    ]
    for change, words in bad:
        with pytest.raises(InputError, match=words):
            Terms(**({"clients": ("a",), "epsilon": 10.0, "delta": 0.01} | change))


@given(
    st.builds(
        Terms,
        st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True).map(tuple),
        st.floats(0.01, 100.0),
        st.floats(1e-6, 0.5),
        sigma=st.floats(1e-6, 1e6) | st.just("auto"),
    )
)
def test_terms_survive_their_mapping_and_json(terms: Terms) -> None:
    assert Terms.from_mapping(json.loads(json.dumps(terms.to_mapping()))) == terms


def test_a_mapping_of_terms_is_checked() -> None:
    good = Terms(("a",), 10.0, 0.01).to_mapping()
    bad: list[tuple[dict[str, Any], str]] = [
        (good | {"epsilom": 1.0}, "unknown term epsilom"),
        ({key: good[key] for key in good if key != "delta"}, "a request needs delta"),
        (good | {"clients": "a"}, "clients must be a list of names, found 'a'"),
        (good | {"sigma": "much"}, "sigma must be auto or a number, found 'much'"),
        (good | {"sigma": None}, "sigma must be a number or auto"),
    ]
    for mapping, words in bad:
        with pytest.raises(InputError, match=words):
            Terms.from_mapping(mapping)


@pytest.mark.parametrize("name", ["a", "R-1.2_x", "0" * 64])
def test_good_request_ids(name: str) -> None:
    assert check_request_id(name) == name


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "..", "a b", "0" * 65, "a\n", "é"])
def test_bad_request_ids(name: str) -> None:
    with pytest.raises(InputError, match=r"cannot be used: .* beginning with a letter or a digit"):
        check_request_id(name)
