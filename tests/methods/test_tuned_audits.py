"""Audits, purges and backups of runs with tuned networks: nothing is left of the network of a hit group."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

import sifu
from folder_values import places_that_differ
from guessing import RANDOM
from run_tools import copy_run
from sifu.methods import closed_form
from sifu.requests import files_to_erase
from sifu.run import group_training
from sifu.run.group_state import available_backbones
from sifu.store.reader import RunReader
from tuned_runs import check, clients_of, groups_of, open_own, spec_of, whole_sum


def test_a_restored_backup_gives_up_what_went_through_the_network_of_a_forgotten_client(
    own: Path, tmp_path: Path
) -> None:
    backup = tmp_path / "backup.zip"
    open_own(own).backup(backup)
    open_own(own).forget(["client-003"], "gone")
    certificate = own / "certificates" / "gone.public.json"
    restored = tmp_path / "restored"
    sifu.restore(backup, restored, certificates=[certificate])
    check(restored)
    with RunReader(restored) as reader:
        (hit,) = groups_of(restored, ["client-003"])
        kept = reader.statistics().values()
        assert kept
        assert not any(row.is_sum or hit in (row.part or ()) or 3 in row.clients for row in kept)
        assert not groups_of(restored, ["client-003"]) & {row.grp for row in available_backbones(reader)}
    (outcome,) = open_own(restored).forget()
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    assert whole_sum(restored) == whole_sum(own)
    check(restored)


@pytest.mark.parametrize(("tune", "batch"), [("blocks", 0), ("blocks", 3), ("merge", 3)])
def test_an_audit_makes_the_release_again_without_the_client_and_finds_a_hit_network(
    tmp_path: Path, tune: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit keeps the numbers of the remaining clients, so it draws the same mini-batches."""
    spec = spec_of(features={"tune": tune}, local={"batch": batch})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    copy_run(tmp_path / "run", tmp_path / "control")
    run.forget(["client-003"], "gone")
    report = sifu.audit_run(run)
    (release,) = report.exact
    assert release.same_model
    assert (release.sum_without is not None, release.same_sum) == (True, True)
    assert report.contradictions == ()
    # Negative control: the network of the hit group stays in the head.
    for module in (files_to_erase, closed_form):
        monkeypatch.setattr(module, "contains_any", lambda row, leaving: False)
    control = open_own(tmp_path / "control")
    control.forget(["client-003"], "gone")
    report = sifu.audit_run(control)
    assert not report.exact[0].same_model
    assert any("gives another model" in sentence for sentence in report.contradictions)


def test_a_purged_run_is_audited_as_before(tmp_path: Path) -> None:
    """The groups' learning rate must not count as recomputed, although the record of the head contains none."""
    spec = spec_of(privacy={"noise": "system"})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    run.forget(["client-003"], "gone")
    run.purge()
    assert sifu.audit_run(open_own(tmp_path / "run")).exact[0].same_model


@pytest.mark.parametrize("tune", ["blocks", "merge"])
def test_a_purged_run_holds_nothing_that_differs_with_a_record_of_the_forgotten(
    tmp_path: Path, tune: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network of its group is erased, with all numbers of the separate rounds."""
    monkeypatch.setattr(group_training, "COMMIT_SECONDS", 1e9)  # both runs keep the same number of group models
    folders = [tmp_path / name for name in ("one-label", "another")]
    for label, folder in enumerate(folders):
        clients = clients_of()
        clients[2] = replace(clients[2], y=np.array([label, *clients[2].y[1:]]))
        run = sifu.train(spec_of(features={"tune": tune}), run=folder, clients=clients)
        run.forget([clients[2].name], retention="strict")
        run.purge()
    differ = places_that_differ(*folders)
    assert {place for place in differ if not any(fnmatchcase(place, pattern) for pattern in RANDOM)} == set()
