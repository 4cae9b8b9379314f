"""Untouched runs verify with both verifiers: random trainings, random requests, and other operator commands."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from random_runs import random_run
from sifu.api import restore, verify_certificate, verify_run
from sifu_verifier import verify

QUICK, ALL = range(6), range(200)


def looked_after(seed: int, folder: Path) -> Path:
    """Make a random run with requests and some of: a withdrawn request, a purge, a new key, a restored backup."""
    run, dice = random_run(seed, folder / "run"), random.Random(-seed)
    left = [client.name for client in run.status().clients if client.state == "active"]
    if dice.random() < 0.4 and len(left) > 2:
        run.request([left[0]], "not-any-more", deadline_days=dice.choice([0, 30]), actor="desk")
        run.decide("not-any-more", dice.choice(["verified", "withdrawn"]), actor="desk")
    if dice.random() < 0.4:
        run.purge()
    if dice.random() < 0.4:
        run.rotate_key()
    assert verify_run(run.folder).problems == []
    if dice.random() < 0.3:
        run.backup(folder / "backup.zip")
        restore(folder / "backup.zip", folder / "back")
        return folder / "back"
    return run.folder


def false_alarms(seeds: range, folder: Path) -> list[str]:
    """Return the problems that either verifier finds in untouched runs."""
    alarms = []
    for seed in seeds:
        run = looked_after(seed, folder / str(seed))
        problems = verify_run(run).problems + verify(run)
        for path in sorted((run / "certificates").glob("*.json")):
            problems += verify_certificate(path).problems
        alarms += [f"run {seed}: {problem}" for problem in problems]
    print(f"false alarms: {len(alarms)} on {len(seeds)} untouched runs")
    return alarms


@pytest.mark.long
def test_no_false_alarm_on_a_few_runs(tmp_path: Path) -> None:
    assert false_alarms(QUICK, tmp_path) == []


@pytest.mark.slow
def test_no_false_alarm_on_200_runs(tmp_path: Path) -> None:
    assert false_alarms(ALL, tmp_path) == []


def test_the_search_for_false_alarms_would_notice_one(tmp_path: Path) -> None:
    """Control: both verifiers find one changed byte of a model."""
    run = looked_after(1, tmp_path)
    path = min((run / "models").glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert verify_run(run).problems
    assert verify(run)
