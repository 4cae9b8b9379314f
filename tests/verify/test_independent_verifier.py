"""A verifier written from docs/store.md alone: it accepts every run and notices changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import copy_run
from sifu_verifier import verify

pytestmark = pytest.mark.long

SMALL: dict[str, Any] = {
    "data": {"clients": 16, "samples_per_client": 10},
    "local": {"steps": 4},
    "stop": {"target": 0.0, "max_rounds": 8},
}
# Name of the run: changes to SMALL, then requests (first client, number of clients, terms).
Runs = dict[str, tuple[dict[str, Any], list[tuple[int, int, dict[str, Any]]]]]
RUNS: Runs = {
    "convex, an earlier subject is charged again": (
        {},
        [(0, 2, {"sigma": 1.2}), (2, 1, {"sigma": 0.4}), (3, 3, {"sigma": 2.5})],
    ),
    "scratch, strict": (
        {},
        [
            (0, 1, {"sigma": 0.5, "retention": "strict"}),
            (1, 1, {"method": "scratch"}),
            (2, 1, {"epsilon": 1.0, "sigma": 1.0}),
            (3, 1, {"sigma": 0.2}),
        ],
    ),
    "strongly convex, poisson": (
        {
            "local": {"steps": 4, "weight_decay": 0.05},
            "server": {"participation": "poisson(0.3)"},
        },
        [(0, 3, {"sigma": 0.3}), (3, 1, {})],
    ),
    "sampled, sifu and scratch": (
        {"server": {"participation": "poisson(0.4)"}},
        [
            (0, 2, {"sigma": 0.6}),
            (2, 1, {"sigma": 0.6, "retention": "strict"}),
            (3, 1, {"method": "scratch"}),
            (4, 2, {"sigma": 0.4, "max_rounds": 5, "target": 0.0}),
            (6, 1, {"sigma": 0.4, "retention": "strict"}),
        ],
    ),
    "groups, built again, all hit": (
        {"groups": {"count": 4, "rounds": 3}, "server": {"participation": "poisson(0.6)"}},
        [
            (0, 1, {"method": "groups"}),
            (1, 2, {"method": "groups", "retention": "strict"}),
            (3, 1, {"sigma": 0.4}),
            (4, 1, {"method": "scratch"}),
            (5, 1, {"method": "groups", "max_rounds": 2}),
            (6, 8, {"method": "groups"}),
        ],
    ),
    "momentum beyond the safe steps": ({"local": {"steps": 3, "momentum": 0.5, "rate": 0.2}}, [(0, 1, {"sigma": 3.0})]),
    "momentum, one step, an automatic rate": (
        {"local": {"steps": 1, "momentum": 0.5, "rate": "auto"}},
        [(0, 1, {"method": "scratch"})],
    ),
    "momentum, two steps, an automatic rate": (
        {"local": {"steps": 2, "momentum": 0.5, "rate": "auto"}},
        [(0, 1, {"method": "scratch"})],
    ),
    "float32, fixed": (
        {"model": {"dtype": "float32"}, "server": {"participation": "fixed(5)"}},
        [(0, 2, {"sigma": 0.5})],
    ),
    "closed form, statistics of each client": (
        {"model": {"kind": "ridge"}, "features": {"kind": "random_fourier", "count": 32, "bandwidth": 2.0}},
        [(0, 2, {}), (2, 1, {"retention": "strict"}), (3, 3, {})],
    ),
    "closed form, sums only, fixed lambda": (
        {"model": {"kind": "ridge"}, "ridge": {"regularisation": 0.01}, "keep": {"statistics": "sum"}},
        [(0, 1, {}), (1, 2, {"retention": "strict"})],
    ),
    "softmax on features": (
        {"features": {"kind": "random_fourier", "count": 24, "norm": 4.0}},
        [(0, 1, {"sigma": 0.5})],
    ),
    "assumed network": (
        {"model": {"kind": "mlp"}, "local": {"steps": 2, "rate": 0.1}, "regularity": {"kind": "assumed"}},
        [(0, 1, {"sigma": 0.5})],
    ),
}


def make_run(folder: Path, name: str, runs: Runs | None = None) -> Path:
    extra, requests = (runs or RUNS)[name]
    run = sifu.train(SMALL | extra, run=folder)
    for first, count, terms in requests:
        run.forget([f"client-{index:03d}" for index in range(first, first + count)], **terms)
    return folder


@pytest.mark.parametrize("name", list(RUNS))
def test_the_second_opinion_agrees(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", name)
    assert sifu.open_run(folder).verify().problems == []
    assert verify(folder) == []


def test_an_unpacked_backup_without_empty_folders_agrees(run_with_requests: Path, tmp_path: Path) -> None:
    folder = copy_run(run_with_requests, tmp_path / "run")
    empty = [path for path in folder.iterdir() if path.is_dir() and not any(path.iterdir())]
    assert [path.rmdir() for path in empty]
    assert verify(folder) == []
