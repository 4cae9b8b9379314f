"""Caps on the level by values derived from clients' data before training: preprocessing, local rate, model shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runs
import sifu
from sifu.errors import InputError

RNG = np.random.default_rng(0)


def arrays(rare: bool = False) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    sites = {f"site {k}": (RNG.random((6, 4)), RNG.integers(0, 2, 6)) for k in range(6)}
    if rare:
        sites["site 5"] = (RNG.random((6, 4)), np.array([0, 1, 2, 0, 1, 2]))
    return sites


def level(tmp_path: Path, name: str, spec: dict[str, Any], clients: Any, whom: str, **terms: Any) -> str:
    run = sifu.train(
        {"local": {"steps": 2, "rate": 0.05}, "stop": {"target": 0.0, "max_rounds": 3}} | spec,
        run=tmp_path / name,
        clients=clients,
    )
    (outcome,) = run.forget([whom], **terms)
    assert run.verify().problems == []
    return outcome.level


def test_preprocessing_of_own_data_is_not_known(tmp_path: Path) -> None:
    given, fixed = {"model": {"outputs": 3}}, {"model": {"outputs": 3}, "data": {"preprocessing": "fixed"}}
    clients = arrays()
    assert level(tmp_path, "a", given, clients, "site 1", sigma=5.0) == "conditional"
    assert level(tmp_path, "b", given, clients, "site 1", method="scratch") == "conditional"
    assert level(tmp_path, "c", fixed, clients, "site 1", sigma=5.0) == "proven"
    assert level(tmp_path, "d", fixed, clients, "site 1", method="scratch") == "exact"


def test_a_shape_counted_from_labels_is_not_exact(tmp_path: Path) -> None:
    """Only one site has class 2, so without it even a model from scratch would have another shape."""
    fixed = {"data": {"preprocessing": "fixed"}}
    assert level(tmp_path, "a", fixed, arrays(rare=True), "site 5", method="scratch") == "conditional"
    shaped = fixed | {"model": {"outputs": 3}}
    assert level(tmp_path, "b", shaped, arrays(rare=True), "site 5", method="scratch") == "exact"
    with pytest.raises(InputError, match="outputs = 2"):
        sifu.train(fixed | {"model": {"outputs": 2}}, run=tmp_path / "c", clients=arrays(rare=True))


def test_a_delta_that_noise_cannot_deliver_is_refused(own_trained: Path) -> None:
    with pytest.raises(InputError, match="at least 1e-10"):
        sifu.open_run(own_trained).plan(["client-003"], delta=1e-25)


def test_a_refused_request_does_not_hold_up_the_others(tmp_path: Path) -> None:
    from sifu.errors import NotCertifiableError

    run = sifu.open_run(runs.own("trained", tmp_path))
    run.request(["client-003"], "weak", sigma=2.0, method="sifu", level="exact")
    run.request(["client-004"], "fine", sigma=2.0)
    with pytest.raises(NotCertifiableError, match="request weak"):
        run.forget()
    assert run.request_record("fine").status == "done"
    assert run.request_record("weak").status == "received"
