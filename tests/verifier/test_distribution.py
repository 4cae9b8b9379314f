"""The second verifier is a separate program: it imports only the packages that its distribution names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "verifier"
SOURCES = sorted((ROOT / "src" / "sifu_verifier").glob("*.py"))


def imported(source: str) -> set[str]:
    """Return the top-level packages that a module imports, without those of the standard library."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names - set(sys.stdlib_module_names)


def test_it_imports_numpy_and_cryptography_alone() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = {re.split(r"[^\w-]", requirement)[0] for requirement in needed}
    assert named == {"numpy", "cryptography"}
    assert set().union(*(imported(path.read_text()) for path in SOURCES)) == {"sifu_verifier"} | named


@pytest.mark.parametrize("line", ["import sifu", "from sifu.core import ledger", "def f():\n    import scipy.special"])
def test_control_another_import_is_noticed(line: str) -> None:
    assert imported(line) & {"sifu", "scipy"}


def test_a_folder_that_is_no_run_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sifu_verifier", str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "1 problem\n" in answer.stdout
    assert answer.stderr == ""
