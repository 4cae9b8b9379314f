"""Forgotten records leave no trace in the features that a user's module gives for the client's other records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import sifu
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.core.spec import Spec
from sifu.data.client_data import ClientData
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Statistics

FEATURES = {"kind": "module", "module": "public_backbone:make_rescaling"}
ROUNDS: dict[str, Any] = {
    "model": {"kind": "softmax", "outputs": 3},
    "data": {"preprocessing": "fixed"},
    "features": FEATURES,
    "local": {"rate": 0.1, "steps": 2},
    "stop": {"max_rounds": 2, "target": 0.0},
    "privacy": {"noise": "seeded"},
}
HEAD = {name: ROUNDS[name] for name in ("data", "features", "privacy")} | {
    "model": {"kind": "ridge", "outputs": 3},
    "ridge": {"regularisation": 0.01},
}
LARGE = 4


def clients_of(never: bool = False) -> list[ClientData]:
    """Return four clients; the last one has one record with large values, or never had it."""
    clients = []
    for number in range(4):
        generator = np.random.default_rng(number)
        x, y = generator.random((9, 1, 8, 8)), generator.integers(0, 3, 9)
        x[LARGE] *= 5.0 if number == 3 else 1.0
        kept = np.arange(9) != LARGE if never and number == 3 else np.full(9, True)
        clients.append(ClientData(f"client-{number}", x[kept], y[kept]))
    return clients


def released(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return np.array(reader.load_model(reader.tip))


def whole_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        (row,) = [row for row in reader.statistics().values() if row.is_sum]
        return read_statistics(folder, row, recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout))


def forget_record(spec: dict[str, Any], folder: Path, **how: Any) -> None:
    sifu.allow_code("public_backbone:make_rescaling")
    (outcome,) = sifu.train(spec, run=folder / "own", clients=clients_of()).forget(
        ["client-3"], "gone", records=[LARGE], **how
    )
    assert outcome.level == "exact"
    sifu.train(spec, run=folder / "never", clients=clients_of(never=True))


def test_a_model_on_features_has_the_bits_of_a_client_without_the_record(tmp_path: Path) -> None:
    forget_record(ROUNDS, tmp_path, method="scratch")
    np.testing.assert_array_equal(released(tmp_path / "own"), released(tmp_path / "never"))


def test_a_cache_keeps_no_features_computed_next_to_the_record(tmp_path: Path) -> None:
    forget_record(ROUNDS | {"features": FEATURES | {"cache": str(tmp_path / "cache")}}, tmp_path, method="scratch")
    np.testing.assert_array_equal(released(tmp_path / "own"), released(tmp_path / "never"))


def test_a_run_opened_again_does_not_use_features_computed_next_to_the_record(tmp_path: Path) -> None:
    forget_record(ROUNDS, tmp_path, method="scratch")
    run = sifu.open_run(tmp_path / "own", clients=clients_of())
    run.forget(["client-1"], "later", method="scratch")
    never = sifu.train(ROUNDS, run=tmp_path / "less", clients=[*clients_of(True)[:1], *clients_of(True)[2:]])
    np.testing.assert_array_equal(released(run.folder), released(never.folder))


def test_a_head_has_the_sums_of_a_client_without_the_record(tmp_path: Path) -> None:
    forget_record(HEAD, tmp_path)
    assert whole_sum(tmp_path / "own") == whole_sum(tmp_path / "never")
