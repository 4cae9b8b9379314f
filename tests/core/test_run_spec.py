"""Spec of a run: every mistake is named, and a written spec reads back unchanged (core.spec)."""

from __future__ import annotations

import json
import tomllib
import typing
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sifu.core.spec import DataSpec, Spec, commented_toml
from sifu.errors import InputError
from sifu.theory.calibration import LARGEST_NOISE
from sifu.theory.participation import Participation
from suite_setup import examples

SECTIONS = {field.name: typing.get_type_hints(Spec)[field.name] for field in fields(Spec) if field.name != "seed"}


def refused(mapping: Any) -> str:
    """Return the message with which a mapping is refused."""
    with pytest.raises(InputError) as caught:
        Spec.from_mapping(mapping)
    return str(caught.value)


def test_defaults_round_trip() -> None:
    spec = Spec()
    assert Spec.from_mapping({}) == spec
    assert Spec.from_mapping(spec.to_mapping()) == spec
    assert Spec.from_mapping(json.loads(json.dumps(spec.to_mapping()))) == spec
    assert Spec.from_mapping(tomllib.loads(commented_toml(spec))) == spec


def test_every_key_has_a_comment_in_the_file() -> None:
    lines = commented_toml(Spec()).splitlines()
    for section, kind in SECTIONS.items():
        assert any(line.startswith(f"[{section}]") for line in lines)
        for field in fields(kind):
            assert any(line.startswith(f"{field.name} = ") and "  # " in line for line in lines), field.name


NEAR = [
    ({"privacy": {"epsilom": 1.0}}, "privacy.epsilom", "privacy.epsilon"),
    ({"privcy": {}}, "privcy", "privacy"),
    ({"local": {"learning_rate": 0.1}}, "local.learning_rate", "local."),
    ({"epsilon": 1.0}, "epsilon", "privacy.epsilon"),
    ({"data": {"momentum": 0.9}}, "data.momentum", "local.momentum"),
    ({"stop": {"max_round": 3}}, "stop.max_round", "stop.max_rounds"),
]


@pytest.mark.parametrize(("mapping", "named", "nearest"), NEAR)
def test_an_unknown_key_names_its_nearest(mapping: dict[str, Any], named: str, nearest: str) -> None:
    message = refused(mapping)
    assert f"unknown key {named} " in message
    assert nearest in message


WRONG_TYPES = [
    ({"seed": "1"}, "seed must be a whole number, found '1'"),
    ({"seed": 1.0}, "seed must be a whole number"),
    ({"seed": True}, "seed must be a whole number, found True"),
    ({"local": {"momentum": "0.9"}}, "local.momentum must be a number"),
    ({"local": {"momentum": True}}, "local.momentum must be a number"),
    ({"local": {"rate": "fast"}}, "local.rate must be a number or 'auto', found 'fast'"),
    ({"local": {"rate": None}}, "local.rate must be a number"),
    ({"data": {"file": 3}}, "data.file must be a text, found 3"),
    ({"data": [1, 2]}, "data must be a table of keys"),
    ({"data": None}, "data must be a table of keys"),
    ({"privacy": {"retention": "papers"}}, "did you mean paper?"),
    ({"privacy": {"retention": ["paper"]}}, "privacy.retention must be one of paper, strict"),
    ({"privacy": {"epsilon": float("nan")}}, "privacy.epsilon must be a finite number"),
    ({"privacy": {"sigma": float("inf")}}, "privacy.sigma must be a finite number"),
]


@pytest.mark.parametrize(("mapping", "words"), WRONG_TYPES)
def test_a_wrong_type_is_named(mapping: dict[str, Any], words: str) -> None:
    assert words in refused(mapping)


RIDGE_MODEL = {"kind": "ridge", "dtype": "float64"}
OUT_OF_RANGE = [
    ({"seed": -1}, "seed"),
    ({"data": {"clients": 1}}, "data.clients"),
    ({"data": {"samples_per_client": -1}}, "data.samples_per_client"),
    ({"data": {"alpha": 0}}, "data.alpha"),
    ({"local": {"rate": 0}}, "local.rate"),
    ({"local": {"steps": 0}}, "local.steps"),
    ({"local": {"batch": -1}}, "local.batch"),
    ({"local": {"momentum": 1.0}}, "local.momentum"),
    ({"local": {"weight_decay": -1e-9}}, "local.weight_decay"),
    ({"server": {"participation": "half"}}, "participation"),
    ({"server": {"participation": "poisson(0)"}}, "participation"),
    ({"server": {"participation": "fixed(2.5)"}}, "participation"),
    ({"stop": {"target": 1.1}}, "stop.target"),
    ({"stop": {"min_rounds": 10, "max_rounds": 9}}, "stop.max_rounds"),
    ({"stop": {"evaluate_every": 0}}, "stop.evaluate_every"),
    ({"privacy": {"epsilon": 0}}, "epsilon"),
    ({"privacy": {"delta": 1}}, "delta"),
    ({"privacy": {"sigma": 0}}, "sigma"),
    ({"regularity": {"factor": 0}}, "regularity.factor"),
    ({"keep": {"models": 1}}, "keep.models"),
    ({"data": {"held_out": 0.91}}, "data.held_out"),
    ({"data": {"held_out": 0.1, "test_file": "test.csv"}}, "data.held_out"),
    ({"model": {"outputs": -1}}, "model.outputs"),
    ({"local": {"steps": 1001, "momentum": 0.5}}, "local.steps"),
    ({"groups": {"count": 1}}, "groups.count"),
    ({"groups": {"rounds": 10**6, "count": 2}}, "groups.rounds must be at least 1 and below stop.max_rounds"),
    ({"groups": {"rounds": 0, "count": 2}}, "groups.rounds"),
    ({"server": {"participation": "fixed(3)"}, "groups": {"count": 2, "rounds": 2}}, "server.participation"),
    ({"features": {"seed": -1}}, "features.seed"),
    ({"features": {"count": -1}}, "features.count"),
    ({"features": {"count": 3, "kind": "random_fourier"}}, "features.count"),
    ({"features": {"norm": 0}}, "features.norm"),
    ({"features": {"bandwidth": 0}}, "features.bandwidth"),
    ({"features": {"module": "a:b"}}, "features.module"),
    ({"features": {"kind": "pretrained", "model": "resnet"}}, "features.model must be one of efficientnet-lite0"),
    ({"ridge": {"scale": 0}, "model": RIDGE_MODEL}, "ridge.scale"),
    ({"ridge": {"shift": 1e13}, "model": RIDGE_MODEL}, "ridge.shift"),
    ({"ridge": {"regularisation": 0}, "model": RIDGE_MODEL}, "ridge.regularisation"),
    ({"server": {"participation": "poisson(0.5)"}, "model": RIDGE_MODEL}, "server.participation"),
    ({"model": {"kind": "ridge", "dtype": "float32"}}, "model.dtype"),
]


@pytest.mark.parametrize(("mapping", "name"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named_with_what_was_found(mapping: dict[str, Any], name: str) -> None:
    message = refused(mapping)
    assert name in message
    value = next(iter(next(iter(mapping.values())).values())) if isinstance(next(iter(mapping.values())), dict) else -1
    assert str(value).rstrip("0").rstrip(".") in message or "found" in message


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"model": RIDGE_MODEL}, "groups.count must be 0 with model.kind = 'ridge'"),
    ],
)
def test_what_does_not_go_together_with_groups_is_named(others: dict[str, Any], words: str) -> None:
    assert words in refused({"groups": {"count": 2, "rounds": 2}} | others)


LITERAL_WORDS = ["auto", "all", "poisson(0.5)", "fixed(3)", "client", "exact", "digits", "", "zeros", "measured"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(LITERAL_WORDS)
    | st.sampled_from([10**400, -(10**400)])
)
ANY_JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


def section_fuzz(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from([field.name for field in fields(kind)]) | st.text(max_size=5)
    return st.dictionaries(names, ANY_JSON, max_size=4)


FUZZ = st.fixed_dictionaries(
    {}, optional={name: section_fuzz(kind) | ANY_JSON for name, kind in SECTIONS.items()} | {"seed": ANY_JSON}
)


@settings(max_examples=examples(150))
@given(FUZZ | ANY_JSON)
@example({"privacy": {"epsilon": 10**400}})  # an integer that exceeds every float
@example({"local": {"rate": -(10**400)}})
@example({1: 2})
@example(None)
def test_any_mapping_is_read_or_refused_in_words(mapping: Any) -> None:
    spec, words = None, "a sentence"
    try:
        spec = Spec.from_mapping(mapping)
    except InputError as error:
        words = str(error)
    assert len(words) > 9
    assert not words.startswith(" ")
    assert spec is None or Spec.from_mapping(spec.to_mapping()) == spec


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
POSITIVE = st.floats(1e-300, 1e300)


@given(TEXTS, TEXTS, POSITIVE, st.floats(1e-4, 1e4), st.integers(0, 2**53 - 1), st.booleans())
@example("C:\\data\\new", 'a "quoted" name', 0.1, 1e3, 0, True)
@example("two\nlines", "bell\x07 and del\x7f", 1e-7, 1e-3, 1, False)
def test_the_commented_file_reads_back(
    label: str, file: str, alpha: float, epsilon: float, seed: int, automatic: bool
) -> None:
    spec = Spec(seed=seed, data=DataSpec(label=label, file=file, alpha=alpha))
    spec = replace(
        spec, privacy=replace(spec.privacy, epsilon=epsilon, sigma="auto" if automatic else min(alpha, LARGEST_NOISE))
    )
    assert Spec.from_mapping(tomllib.loads(commented_toml(spec))) == spec


def test_control_a_changed_value_does_not_read_back_as_the_same() -> None:
    text = commented_toml(Spec()).replace("epsilon = 10.0", "epsilon = 9.0")
    assert Spec.from_mapping(tomllib.loads(text)) != Spec()


def test_whole_numbers_are_read_as_numbers() -> None:
    spec = Spec.from_mapping({"privacy": {"epsilon": 5}, "local": {"rate": 1}})
    assert isinstance(spec.privacy.epsilon, float)
    assert isinstance(spec.local.rate, float)


@given(st.floats(1e-12, 1.0, exclude_min=True), st.integers(1, 10**6))
def test_participation_reads_back_what_it_says(rate: float, count: int) -> None:
    for participation in (
        Participation("all"),
        Participation("poisson", rate=rate),
        Participation("fixed", count=count),
    ):
        assert Participation.parse(str(participation)) == participation
        assert participation.independent is (participation.kind != "fixed")


def test_specs_are_plain_frozen_values() -> None:
    assert all(is_dataclass(kind) for kind in SECTIONS.values())
    with pytest.raises(AttributeError):
        Spec().seed = 3  # type: ignore[misc]
