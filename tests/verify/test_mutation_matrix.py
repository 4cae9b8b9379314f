"""Changes by an adversary without the key to runs of every kind: each is noticed, and none causes a crash.

The whole matrix: `python tests/verify/whole_mutation_matrix.py --jobs 4 --log FILE.jsonl`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mutated_runs import HARMLESS_FILES, RUNS, every_mutation, held_against, uncaught
from mutations import CRASH, Pristine, caught
from run_tools import dump
from sifu.store.events_check import KINDS
from sifu_verifier import verify

pytestmark = pytest.mark.long

SAMPLE = 16
"""Number of mutations of each run in the fast suite."""
EVERY_TABLE = "certificates charges clients evaluations events group_models merges models nodes"
EVERY_TABLE += " participation rejections requests run statistics subjects"
RARE_KINDS = {"evaluation", "client refused", "clients changed", "clients admitted"}
"""Events that none of the runs has (the last one only without Flower)."""


@pytest.fixture(scope="session", params=list(RUNS))
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    folder = RUNS[request.param](tmp_path_factory.mktemp("mutated") / "run")
    assert caught(folder, **held_against(folder)) == []
    assert verify(folder) == []
    return Pristine(folder)


def test_a_sample_of_all_changes_is_caught(pristine: Pristine) -> None:
    mutations = every_mutation(pristine.folder)
    step = len(mutations) / SAMPLE
    tried, wrong = uncaught(pristine, [mutations[int(number * step)] for number in range(SAMPLE)], second_every=4)
    assert tried.total() >= SAMPLE // 2
    assert wrong == []
    for name in HARMLESS_FILES:  # no claim depends on the content of these files
        (pristine.folder / name).write_bytes(b"\xff not what it was \0")
        assert not any(CRASH in finding for finding in caught(pristine.folder, **held_against(pristine.folder))), name
        pristine.restore()


@pytest.mark.slow
def test_the_runs_fill_every_table_and_have_every_kind_of_event(tmp_path: Path) -> None:
    filled, kinds = set(), set()
    for name, build in RUNS.items():
        content = dump(build(tmp_path / name.replace(" ", "-") / "run"))
        filled |= {table for table, rows in content.items() if rows}
        kinds |= {row[2] for row in content["events"]}
    assert filled == set(EVERY_TABLE.split())
    assert set(KINDS) - kinds <= RARE_KINDS
