"""Warnings before training about data that look like a mistake; training runs nevertheless."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command, small_spec
from sifu.errors import SifuWarning

X, Y = np.random.default_rng(0).random((4, 3)), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("clients", "participation", "words"),
    [
        ({"a": (X, Y), "b": (X, Y)}, "fixed(999)", "there are 2 clients"),
        ({"a": (0 * X, Y), "b": (0 * X, Y)}, "all", "every feature of every client is 0"),
        ({"a": (0 * X, Y), "b": (X, Y)}, "all", "all features of 1 of 2 clients are 0, the first is 'a'"),
        ({"a": (X, 0 * Y), "b": (X, 0 * Y)}, "all", "the same class, 0"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, clients: dict[str, Any], participation: str, words: str) -> None:
    spec = small_spec(stop={"max_rounds": 1}, server={"participation": participation}, model={"outputs": 2})
    with pytest.warns(SifuWarning) as told:
        sifu.train(spec, run=tmp_path / "run", clients=clients)
    assert words in str(told[0].message)


def test_nothing_is_told_of_what_is_well(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SifuWarning)
        sifu.train(small_spec(stop={"max_rounds": 1}), run=tmp_path / "run", clients={"a": (X, Y), "b": (X, Y)})


def test_the_command_line_says_it_in_a_sentence(tmp_path: Path, cli: Command) -> None:
    (tmp_path / "spec.toml").write_text("[data]\nclients = 4\n[stop]\nmax_rounds = 1\n")
    answer = cli("train", tmp_path / "spec.toml", "--run", tmp_path / "run", "--set", "server.participation=fixed(999)")
    assert answer.code == 0
    assert answer.err.startswith("sifu: warning: server.participation = 'fixed(999)', but there are 4 clients")
