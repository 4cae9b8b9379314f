"""Tamper suite: someone without the key changes any row, byte or file of a finished run, and both verifiers look at it.

A change is caught by both, or only with a head that somebody kept, or it is listed as undetectable with the reason.
Whoever has the key signs a changed record again (`signed_changes`): both verifiers judge it alike.
All changes, one of every kind on every run first: python tests/test_tamper.py --log FILE [--slice I/N] [--most N]
Which signed lies both verifiers catch, into caught_lies.json: python tests/test_tamper.py --record
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import long_form
import runs
import sifu
import sifu_verifier
import suite_setup  # noqa: F401  for the program
from signed_changes import FROM_ANOTHER_KEY, READ_BY_ONE, places_of, signed_changes
from tampering import UNDETECTABLE, UNDETECTABLE_IN, Change, changes_of, in_order, tables_of

SAMPLE = 10
"""Number of changes of each finished run in the short form."""
PARTS = 6
"""Number of tests that share the signed changes of the short form."""
CAUGHT = Path(__file__).with_name("caught_lies.json")
"""Signed lies that both verifiers caught when they were recorded: by place, how a value changes in which runs."""
LIES = 3
"""Number of runs in which a place is recorded."""
IMPLAUSIBLE = ("negative", "zero", "short", "space")
"""Changes that are recorded only where no other is caught, because a rule about form may catch them."""


def findings(folder: Path, *, witnessed: bool = True) -> list[str]:
    """Return the problems that verification finds, or the sentence of the error that refuses the run."""
    witness = runs.witness_of(folder)
    try:
        return list(sifu.verify(folder, heads=[witness] if witnessed and witness.exists() else []).problems)
    except sifu.SifuError as error:
        return [str(error)]


def outcome(run: str, folder: Path, change: Change) -> str:
    """Return whether both verifiers catch a change of a copy of a run, which the caller restores."""
    if not change.apply(folder):
        return "nothing changed"
    signed = change.name.startswith("signed")
    try:
        first = findings(folder, witnessed=not signed)
    except Exception as error:
        return f"wrong: verification crashed, {type(error).__name__}: {error}"
    second = sifu_verifier.verify(folder)  # it turns every error into a problem
    if change.listed or fnmatch.fnmatch(change.name, UNDETECTABLE_IN.get(run, "")):
        return "listed" if not first else "caught, though listed"
    if signed:
        return _alike(change, first, second)
    missed = [name for name, found in (("sifu", first), ("sifu_verifier", second)) if not found]
    kind, name = change.name.split(" ")[:2]
    if kind == "certificate" and not missed and _holds_alone(folder / name):
        missed = ["verify_certificate"]
    return f"wrong: not caught by {', '.join(missed)}" if missed else "caught"


def _alike(change: Change, first: list[str], second: list[str]) -> str:
    if bool(first) == bool(second):
        return "caught" if first else "contradicts nothing"
    if any(fnmatch.fnmatch(change.name, pattern) for pattern in READ_BY_ONE):
        return "listed"
    return f"{long_form.WRONG}: only one verifier objects: {(first or second)[0]}"


def _holds_alone(certificate: Path) -> bool:
    try:
        return sifu.verify(certificate).holds
    except sifu.SifuError:
        return False


class Changed:
    """A copy of a finished run that is restored after every change."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, runs.own(name, folder)
        self.kept = runs.run(name)

    def outcome(self, change: Change) -> str:
        """Return the outcome of a change, and restore the folder."""
        try:
            return outcome(self.name, self.folder, change)
        finally:
            shutil.rmtree(self.folder)
            shutil.copytree(self.kept, self.folder, ignore=shutil.ignore_patterns("run.db-*"))


@pytest.mark.parametrize("name", runs.BUILT_BY)
def test_both_verifiers_accept_a_run_and_catch_its_changes(name: str, tmp_path: Path) -> None:
    changed = Changed(name, tmp_path)
    assert findings(changed.folder) == sifu_verifier.verify(changed.folder) == []
    outcomes = {change.name: changed.outcome(change) for change in in_order(changes_of(changed.kept), name)[:SAMPLE]}
    assert {name: found for name, found in outcomes.items() if found.startswith(long_form.WRONG)} == {}
    assert sum(found == "caught" for found in outcomes.values()) >= SAMPLE // 2


@pytest.mark.parametrize("part", range(PARTS))
def test_both_verifiers_still_catch_a_signed_lie(part: int, tmp_path: Path) -> None:
    recorded = json.loads(CAUGHT.read_text(encoding="utf-8"))
    places = places_of({name: runs.run(name) for name in runs.BUILT_BY})
    assert len(recorded) > 100
    lies = [(place, run, how) for place, lies in sorted(recorded.items())[part::PARTS] for run, how in lies.items()]
    changed = {name: Changed(name, tmp_path / name) for name in {name for _, name, _ in lies}}
    assert {lie: changed[lie[1]].outcome(places[lie[0]][lie[1]][lie[2]]) for lie in lies} == dict.fromkeys(
        lies, "caught"
    )


@pytest.mark.parametrize("name", ["requests", "groups", "closed_form"])
def test_an_earlier_state_is_caught_only_with_a_later_head(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, earlier = runs.own(name, tmp_path), runs.run(name)
    monkeypatch.setenv("SIFU_WITNESS", str(runs.witness_of(folder)))
    run = sifu.open_run(folder)
    run.request([next(client.name for client in run.status().clients if client.state == "active")])
    monkeypatch.delenv("SIFU_WITNESS")
    assert findings(folder) == []
    shutil.rmtree(folder)
    shutil.copytree(earlier, folder)
    assert sifu.verify(folder).problems == sifu_verifier.verify(folder) == []
    assert findings(folder) != []


def test_a_run_made_by_someone_else_is_caught_only_with_a_head(tmp_path: Path) -> None:
    """Another operator trains the same clients: their run holds, and no kept certificate of the first is in it."""
    ours, folder = runs.run("requests"), tmp_path / "run"
    runs.requests(folder)
    assert sifu.verify(folder).problems == sifu_verifier.verify(folder) == []
    certificate = min((ours / "certificates").iterdir())
    assert sifu.verify(ours, heads=[certificate]).problems == []
    assert sifu.verify(folder, heads=[certificate]).problems != []
    (key,) = sifu.open_run(ours).keys().public_keys
    assert sifu.verify(folder, key.key).problems != []


def test_folders_that_are_empty_may_be_missing(tmp_path: Path) -> None:
    """Some programs unpack a copy of a run without them."""
    folder = runs.own("requests", tmp_path)
    empty = [path for path in folder.iterdir() if path.is_dir() and not any(path.iterdir())]
    assert [path.rmdir() for path in empty]
    assert findings(folder) == sifu_verifier.verify(folder) == []


def test_the_finished_runs_fill_every_table() -> None:
    found = [tables_of(runs.run(name)) for name in runs.BUILT_BY]
    assert [
        table.name for same in zip(*found, strict=True) for table in same[:1] if not any(t.rows for t in same)
    ] == []


def test_what_is_listed_is_tried() -> None:
    names = {change.name for name in ("requests", "approvals") for change in changes_of(runs.run(name))}
    assert [pattern for pattern in UNDETECTABLE if not fnmatch.filter(names, pattern)] == []


def record() -> None:
    """Write, for each place of the records, which of its changes both verifiers catch."""
    draw, caught = random.Random("signed"), dict[str, dict[str, str]]()
    with tempfile.TemporaryDirectory(prefix="sifu-tamper-", dir=runs.run("trained").parents[1]) as folder:
        changed = {name: Changed(name, Path(folder)) for name in runs.BUILT_BY}
        for place, in_runs in sorted(places_of({name: changed[name].kept for name in changed}).items()):
            for run in draw.sample(sorted(in_runs), len(in_runs))[: LIES + 1]:
                hows = draw.sample(sorted(in_runs[run]), len(in_runs[run]))
                for how in sorted(hows, key=IMPLAUSIBLE.__contains__):
                    if len(caught.get(place, ())) < LIES and changed[run].outcome(in_runs[run][how]) == "caught":
                        caught.setdefault(place, {})[run] = how
                        break
            print(place, caught.get(place), flush=True)
    lines = [f"{json.dumps(place)}: {json.dumps(lies)}" for place, lies in caught.items()]
    CAUGHT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    """Try every change on every finished run."""
    if sys.argv[1:] == ["--record"]:
        record()
        return 0
    with tempfile.TemporaryDirectory(prefix="sifu-tamper-", dir=runs.run("trained").parents[1]) as folder:
        changed = {name: Changed(name, Path(folder)) for name in runs.BUILT_BY}
        signed = {name: list(signed_changes(runs.run(name))) for name in changed.keys() - set(FROM_ANOTHER_KEY)}
        ordered = {name: in_order(changes_of(runs.run(name)) + signed.get(name, []), name) for name in runs.BUILT_BY}
        trials = {
            f"{name}: {change.name}": (name, change)
            for changes in itertools.zip_longest(*ordered.values())
            for name, change in zip(ordered, changes, strict=True)
            if change is not None
        }

        def attempt(trial: str) -> str:
            name, change = trials[trial]
            return changed[name].outcome(change)

        return long_form.work_off("tamper", list(trials), attempt, __doc__)


if __name__ == "__main__":
    sys.exit(main())
