"""The commit beside a result is that of the package, and says when the package was changed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sifu.experiments import provenance
from sifu.version import __version__

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_only_a_repository_that_holds_the_package_is_named(tmp_path, monkeypatch):
    package = tmp_path / "package"
    own, other, outside = package / "experiments" / "provenance.py", package / "core.py", tmp_path / "notes.md"
    own.parent.mkdir(parents=True)
    for path in (own, other, outside):
        path.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(own))
    assert provenance.commit() == f"version {__version__}"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "notes.md")
    git(tmp_path, "commit", "--quiet", "-m", "somebody else's repository around an installed copy")
    assert provenance.commit() == f"version {__version__}"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "ours")
    head = git(tmp_path, "rev-parse", "--short=10", "HEAD")
    assert provenance.commit() == head
    outside.write_text("a result that was written meanwhile")
    assert provenance.commit() == head
    other.write_text("another package than the one committed")
    assert provenance.commit() == head + "+"
