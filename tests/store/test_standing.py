"""Cached held-out figures of the current model: nothing of an earlier model stays, and a backup has them."""

from __future__ import annotations

from pathlib import Path

import sifu
from run_tools import copy_run
from sifu.store.client_accuracy import STANDING_FILE
from sifu.store.writer import RunWriter


def test_an_erasure_that_was_cut_short_takes_the_figures_along(trained_run: Path, tmp_path: Path) -> None:
    """After a kill between a strict request's event and its last steps, the next opening finishes them."""
    folder = copy_run(trained_run, tmp_path / "run")
    kept = (folder / STANDING_FILE).read_bytes()
    sifu.open_run(folder).forget(["client-003"], sigma=0.3, retention="strict")
    (folder / STANDING_FILE).write_bytes(kept)
    (folder / "scrub").touch()
    RunWriter.open(folder).close()
    assert not (folder / STANDING_FILE).exists()


def test_a_backup_brings_it_along(trained_run: Path, tmp_path: Path) -> None:
    from sifu.api.safekeeping import restore

    sifu.open_run(copy_run(trained_run, tmp_path / "run")).backup(tmp_path / "file.sifu")
    restore(tmp_path / "file.sifu", tmp_path / "again")
    assert (tmp_path / "again" / STANDING_FILE).read_bytes() == (trained_run / STANDING_FILE).read_bytes()
