"""Commit in the provenance of a result: the package's own, with a mark if the package was changed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import sifu
from sifu import __version__
from sifu_paper import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_only_a_repository_that_holds_the_code_is_named(tmp_path, monkeypatch):
    own, library = tmp_path / "paper" / "provenance.py", tmp_path / "sifu" / "__init__.py"
    outside = tmp_path / "notes.md"
    for path in (own, library, outside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(own))
    monkeypatch.setattr(sifu, "__file__", str(library))
    assert provenance.commit() == f"version {__version__}"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "notes.md")
    git(tmp_path, "commit", "--quiet", "-m", "another repository around an installed copy")
    assert provenance.commit() == f"version {__version__}"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "ours")
    head = git(tmp_path, "rev-parse", "--short=10", "HEAD")
    assert provenance.commit() == head
    outside.write_text("a result that was written meanwhile")
    assert provenance.commit() == head
    for changed in (own, library):
        before = changed.read_text()
        changed.write_text("another package than the one committed")
        assert provenance.commit() == head + "+"
        changed.write_text(before)
