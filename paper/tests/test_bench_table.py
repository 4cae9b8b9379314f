"""Table of results: every row is durable, unique, and read back unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.errors import RunDamagedError
from sifu_paper.table import REQUEST_COLUMNS, Table, read_table


def row(request: int, **more: object) -> dict[str, object]:
    place = {"experiment": "e", "dataset": "mnist", "seed": 1, "preset": "paper", "method": "sifu", "variant": ""}
    return place | {"request": request, "rounds": 7, "reached": True, "psi": 0.1, "level": "none"} | more


def test_rows_are_read_back_with_their_types(tmp_path: Path) -> None:
    table = Table(tmp_path / "results.csv", REQUEST_COLUMNS)
    table.add(row(1, variant="limit=0.25", psi=1e-17, reached=False))
    (read,) = read_table(tmp_path / "results.csv")
    assert read == table.rows[0]
    assert (read["rounds"], read["psi"], read["reached"], read["sigma"]) == (7, 1e-17, False, None)


def test_a_row_is_added_once(tmp_path: Path) -> None:
    table = Table(tmp_path / "results.csv", REQUEST_COLUMNS)
    table.add(row(1))
    table.add(row(1, rounds=8))
    again = Table(tmp_path / "results.csv", REQUEST_COLUMNS)
    again.add(row(1, rounds=9))
    assert [row["rounds"] for row in read_table(tmp_path / "results.csv")] == [7]
    assert again.has(row(1))
    assert not again.has(row(2))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(cut=st.integers(0, 400))
def test_a_torn_last_line_is_dropped_and_nothing_before_it(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("table") / "results.csv"
    table = Table(path, REQUEST_COLUMNS)
    for number in range(1, 4):
        table.add(row(number))
    content = path.read_bytes()
    kept = content[: max(0, len(content) - cut)]
    path.write_bytes(kept)
    whole = max(kept.count(b"\n") - 1, 0)
    opened = Table(path, REQUEST_COLUMNS)
    assert [row["request"] for row in opened.rows] == list(range(1, whole + 1))
    opened.add(row(9))
    assert [row["request"] for row in read_table(path)] == [*range(1, whole + 1), 9]


def test_a_table_of_another_version_is_refused(tmp_path: Path) -> None:
    Table(tmp_path / "results.csv", ("experiment", "request")).add({"experiment": "e", "request": 1})
    with pytest.raises(RunDamagedError, match="other columns"):
        Table(tmp_path / "results.csv", REQUEST_COLUMNS)
