"""Gram matrices, which sharpen joint requests: a changed or removed one is noticed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import sifu
from run_tools import copy_run, small_spec


@pytest.fixture(scope="module")
def gram_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = sifu.train(small_spec(keep={"gram_clients": 12}), run=tmp_path_factory.mktemp("gram") / "run")
    run.forget(["client-002", "client-003"], unit="joint", sigma=1.0)
    assert run.verify().problems == []
    return run.folder


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE grams SET matrix = zeroblob(length(matrix)) WHERE node = 2",
        "UPDATE grams SET node = 99 WHERE node = 2",
        "DELETE FROM grams WHERE node = 2",
        "DELETE FROM grams",
    ],
)
def test_a_changed_gram_matrix_is_named(gram_run: Path, tmp_path: Path, change: str) -> None:
    folder = copy_run(gram_run, tmp_path / "run")
    connection = sqlite3.connect(folder / "run.db")
    with connection:
        assert connection.execute(change).rowcount > 0
    connection.close()
    assert any("grams" in problem for problem in sifu.open_run(folder).verify().problems)
