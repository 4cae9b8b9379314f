"""Every benchmark can be started: its imports from the library still exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "public_data")
PEERS = {"peers.fedlab", "peers.flower", "peers.fluke", "peers.pfl"}
"""Scripts that run in separate environments with their frameworks."""
PARTS = sorted({f"{path.parent.name}.{path.stem}" for path in BENCHMARKS.glob("*/*.py")} - PEERS)


@pytest.mark.parametrize("name", [*COMMANDS, "public_data", *PARTS])
def test_a_benchmark_can_be_imported(name: str) -> None:
    if name == "flower_rounds":
        pytest.importorskip("flwr")
    assert importlib.import_module(name).__doc__


def test_only_commands_are_started() -> None:
    started = {
        path.relative_to(BENCHMARKS).as_posix()
        for path in BENCHMARKS.rglob("*.py")
        if "__main__" in path.read_text(encoding="utf-8")
    }
    contestants = {"ours", "plain", "fedlab", "flower", "fluke", "pfl", "roofline"}  # started by compare.py
    assert started == {f"{name}.py" for name in COMMANDS} | {f"peers/{name}.py" for name in contestants}


def test_control_an_import_that_is_gone_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outdated_benchmark.py").write_text('"""Outdated."""\nfrom sifu.errors import NeverThereError\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="NeverThereError"):
        importlib.import_module("outdated_benchmark")
