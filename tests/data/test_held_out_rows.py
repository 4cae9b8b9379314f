"""Held-out rows: forgetting a record gives the bits of a federation that never had the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from sifu.data.held_out import contents_of, held_out_rows, numbers_of
from sifu.run.recorded_data import clients_of_file
from sifu_verifier import verify

Row = tuple[str, float, float, int]


def drawn_rows(seed: int, count: int = 60) -> list[Row]:
    """Return rows of two clients; about a third duplicate another row of the same client."""
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        if rows and generator.random() < 0.35:
            rows.append(rows[int(generator.integers(len(rows)))])
        else:
            x, z = (round(float(value), 2) for value in generator.normal(size=2))
            rows.append(("pq"[int(generator.integers(2))], x, z, int(generator.random() < 0.5)))
    return rows


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("c,x,z,y\n" + "".join(f"{c},{x},{z},{y}\n" for c, x, z, y in rows))
    return path


def spec_of(path: Path, **more: Any) -> dict[str, Any]:
    table = {"name": "table", "file": str(path), "client": "c", "label": "y", "classes": "0,1", "partition": "given"}
    return {"data": table | {"preprocessing": "fixed", "held_out": 0.3} | more, "model": {"kind": "ridge"}, "seed": 0}


def sides(rows: list[Row], rule: str, seed: int) -> list[bool]:
    client = np.array([row[0] for row in rows])
    x, y = np.array([row[1:3] for row in rows]), np.array([row[3] for row in rows])
    key = contents_of(x, y) if rule == "content" else numbers_of(client.tolist())
    return [bool(side) for side in held_out_rows(client, key, 0.3, seed)]


def moved_rows(rule: str) -> int:
    """Count how often removing one row changes whether another is held out, over seeded tables with duplicates."""
    moved = 0
    for seed in range(40):
        rows = drawn_rows(seed)
        before = sides(rows, rule, seed)
        for row in range(len(rows)):
            fewer = rows[:row] + rows[row + 1 :]
            moved += sides(fewer, rule, seed) != before[:row] + before[row + 1 :]
    return moved


def test_no_row_changes_the_side_of_another() -> None:
    assert moved_rows("content") == 0
    assert moved_rows("number") > 1000  # control: rows drawn by their index change often


def test_a_label_elsewhere_that_is_no_whole_number_moves_no_row() -> None:
    x, y = np.array([[1.0, -0.0], [2.0, 3.0]]), np.array([0, 1])
    np.testing.assert_array_equal(contents_of(x, y), contents_of(x + 0.0, y.astype(np.float64)))


@pytest.mark.parametrize("seed", range(4))
def test_a_forgotten_record_leaves_the_bits_of_a_table_without_it(tmp_path: Path, seed: int) -> None:
    rows, generator = drawn_rows(seed), np.random.default_rng(seed)
    run = sifu.train(spec_of(write(tmp_path / "a.csv", rows)), run=tmp_path / "run")
    trained = [row for row, held in enumerate(sides(rows, "content", 0)) if not held]
    row = int(generator.choice([row for row in trained if rows.count(rows[row]) > (seed % 2)]))
    number = sum(other[0] == rows[row][0] for other in rows[:row])
    (outcome,) = run.forget([rows[row][0]], records=[str(number)])
    assert outcome.level == "exact"
    never = sifu.train(spec_of(write(tmp_path / "b.csv", rows[:row] + rows[row + 1 :])), run=tmp_path / "never")
    with run.reader() as reader, never.reader() as other:
        np.testing.assert_array_equal(reader.load_model(reader.tip), other.load_model(other.tip))
    assert run.verify().problems == []
    assert verify(tmp_path / "run") == []


def test_rows_of_a_newcomer_do_not_follow_from_the_name_of_its_file(tmp_path: Path) -> None:
    """A newcomer's training rows do not depend on the name of its file; runs that drew by file name keep their rows."""
    run = sifu.train(spec_of(write(tmp_path / "table.csv", drawn_rows(1))), run=tmp_path / "run")
    text = "x,z,y\n" + "".join(f"{x},{z},{y}\n" for _, x, z, y in drawn_rows(2))
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for file in files:
        file.write_text(text)

    def rows(file: Path, owner: str = "") -> list[list[float]]:
        (client,) = clients_of_file(run.spec, file, "newcomer", owner)
        return np.asarray(client.x).tolist()

    assert rows(files[0]) == rows(files[1])
    assert rows(files[0], "a") != rows(files[1], "b")
    run.join(file=files[0], name="newcomer")
    sifu.open_run(tmp_path / "run").forget(["newcomer"])
    assert run.verify().problems == verify(tmp_path / "run") == []
