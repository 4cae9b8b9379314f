"""Experiments in several processes: the same table as in one process, even after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.errors import InputError
from sifu_paper.jobs import run_in_processes, shared_out
from sifu_paper.options import Options
from sifu_paper.runner import Bench, Update
from sifu_paper.table import read_table


def options(out: Path, **more: Any) -> Options:
    chosen: dict[str, Any] = {"seeds": (1, 2), "scale": "smoke", "datasets": ("digits",), "methods": ("sifu",)}
    return Options("sequential", out, **(chosen | {"presets": ("paper",), "device": "cpu"} | more))


def comparable(out: Path) -> list[list[str]]:
    rows = read_table(out / "results.csv")
    return sorted([f"{key}={value}" for key, value in row.items() if key != "seconds"] for row in rows)


def test_processes_and_interrupts_leave_the_table_of_a_single_process(tmp_path: Path) -> None:
    Bench(options(tmp_path / "one")).run()
    seen: list[Update] = []

    def interrupt(update: Update) -> None:
        seen.append(update)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_processes(options(tmp_path / "many"), 2, interrupt)
    result = run_in_processes(options(tmp_path / "many"), 2, seen.append)
    assert not result.failures
    assert comparable(tmp_path / "many") == comparable(tmp_path / "one")
    assert seen[-1].done == seen[-1].total == 6
    assert not (tmp_path / "many" / "parts").exists()
    before = (tmp_path / "many" / "results.csv").read_bytes()
    run_in_processes(options(tmp_path / "many"), 2)
    assert (tmp_path / "many" / "results.csv").read_bytes() == before


def test_what_a_part_cannot_do_is_named(tmp_path: Path) -> None:
    result = run_in_processes(options(tmp_path / "out", datasets=("mnist",), seeds=(1,), data=tmp_path), 2)
    assert [failure.task.name for failure in result.failures] == ["mnist-seed1"] or "mnist" in result.failures[0].error
    assert (tmp_path / "out" / "failures.txt").exists()


def test_no_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--jobs must be at least 1, found 0"):
        run_in_processes(options(tmp_path / "out"), 0)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 60), st.sampled_from(["cpu", "cuda"]))
def test_every_seed_is_in_one_part_and_a_gpu_has_no_more_parts_than_it_keeps_busy(
    seeds: int, datasets: int, jobs: int, device: str
) -> None:
    numbers = tuple(range(1, seeds + 1))
    parts = shared_out(numbers, datasets, jobs, device)
    assert sum(parts, ()) == numbers
    if device == "cpu":
        assert len(parts) == seeds
    else:  # as many parts as processes, or as data sets if there are more of them
        assert len(parts) * datasets <= jobs + datasets
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
