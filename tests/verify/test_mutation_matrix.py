"""An adversary without the key changes runs of every kind: nothing goes unnoticed, and nothing crashes.

The whole matrix: `pytest -s -m slow tests/verify/test_mutation_matrix.py`. The fast suite tries a sample of it.
"""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from independent_verifier import verify
from mutated_runs import HARMLESS_FILES, RUNS, Mutation, every_mutation
from mutations import CRASH, Pristine, caught
from run_tools import dump
from sifu.api import verify_certificate
from sifu.errors import SifuError

WORDS = {"event": "sign", "field": "certificates: "}
"""What a finding must speak of: without the key, an event is given away by its signature, whatever else is wrong."""
SAMPLE = 16
"""Mutations of each run that the fast suite tries."""
EVERY_TABLE = "certificates charges clients comparisons evaluations events grams group_models merges models nodes"
EVERY_TABLE += " participation rejections requests run statistics subjects updates"


@pytest.fixture(scope="session", params=list(RUNS))
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    folder = RUNS[request.param](tmp_path_factory.mktemp("mutated") / "run")
    assert caught(folder) == []
    assert verify(folder) == []
    return Pristine(folder)


def uncaught(pristine: Pristine, mutations: list[Mutation]) -> tuple[collections.Counter[str], list[str]]:
    """How many of each kind were tried, and those that nobody noticed or that ended in a traceback."""
    tried: collections.Counter[str] = collections.Counter()
    wrong = []
    for number, mutation in enumerate(mutations):
        if mutation.apply(pristine.folder):
            tried[mutation.kind] += 1
            if mutation.kind == "field":
                path = pristine.folder / "certificates" / mutation.name.partition(": ")[0]
                if not alone(path):
                    wrong.append(f"not caught alone: {mutation.name}")
            # A file of a certificate is compared with the ledger's copy, so a sample of its fields will do there.
            if mutation.kind != "field" or number % 5 == 0:
                findings = [finding for finding in caught(pristine.folder) if WORDS.get(mutation.kind, "") in finding]
                if not findings or any(CRASH in finding for finding in findings):
                    wrong.append(f"{mutation.kind} not caught: {mutation.name}: {findings[:1]}")
        pristine.restore()
    return tried, wrong


def alone(path: Path) -> list[str]:
    """What is said of a certificate by itself."""
    try:
        return verify_certificate(path).problems
    except SifuError as error:
        return [str(error)]


def test_a_sample_of_all_changes_is_caught(pristine: Pristine) -> None:
    mutations = every_mutation(pristine.folder)
    step = len(mutations) / SAMPLE
    tried, wrong = uncaught(pristine, [mutations[int(number * step)] for number in range(SAMPLE)])
    assert tried.total() >= SAMPLE // 2
    assert wrong == []
    for name in HARMLESS_FILES:  # whatever is in them, nothing that the record says is another thing
        (pristine.folder / name).write_bytes(b"\xff not what it was \0")
        assert not any(CRASH in finding for finding in caught(pristine.folder)), name
        pristine.restore()


@pytest.mark.slow
def test_every_change_is_caught(pristine: Pristine, capsys: pytest.CaptureFixture[str]) -> None:
    tried, wrong = uncaught(pristine, every_mutation(pristine.folder))
    with capsys.disabled():
        print(f"\n{pristine.folder}: {tried.total()} changes, {dict(tried)}, {len(wrong)} uncaught")
    assert wrong == []


@pytest.mark.slow
def test_the_runs_fill_every_table(tmp_path: Path) -> None:
    filled = set()
    for name, build in RUNS.items():
        filled |= {table for table, rows in dump(build(tmp_path / name.replace(" ", "-"))).items() if rows}
    assert filled == set(EVERY_TABLE.split())
