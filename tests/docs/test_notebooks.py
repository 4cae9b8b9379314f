"""The notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def test_there_are_two() -> None:
    assert [path.name for path in NOTEBOOKS] == ["forget_a_hospital.ipynb", "one_figure.ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_committed(notebook: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells_of(notebook))


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells_of(notebook):
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
