"""CSV and Parquet: columns for label and client, or one file a client; words by a coding that the spec fixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sifu
from run_tools import small_spec
from sifu.data.table import read_table
from sifu.data.table_coding import TableCoding, parse_categories
from sifu.errors import InputError

ROWS = [("north", 0.5, "red", "yes"), ("south", -1.0, "blue", "no"), ("north", 2.0, "blue", "no")]
CODING = TableCoding("bought", "shop", (("no",), ("yes",)), ("no", "yes"), {"colour": ("red", "blue")})
X = np.array([[0.5, 1.0, 0.0], [-1.0, 0.0, 1.0], [2.0, 0.0, 1.0]])


def write_csv(path: Path, rows: list[tuple[object, ...]], header: str = "shop,price,colour,bought") -> Path:
    path.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows), encoding="utf-8-sig")
    return path


def test_a_csv_file_with_words_is_coded_as_the_spec_says(tmp_path: Path) -> None:
    data = read_table(write_csv(tmp_path / "sales.csv", ROWS), CODING)
    np.testing.assert_array_equal(data.x_train, X)
    assert data.y_train.tolist() == [1, 0, 0]
    assert data.classes == ("no", "yes")
    assert data.client_train is not None
    assert data.client_train.tolist() == ["north", "south", "north"]


def test_parquet_gives_the_same_as_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = ("shop", "price", "colour", "bought")
    columns = {name: [row[place] for row in ROWS] for place, name in enumerate(names)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "sales.parquet")
    data, other = (
        read_table(tmp_path / "sales.parquet", CODING),
        read_table(write_csv(tmp_path / "a.csv", ROWS), CODING),
    )
    np.testing.assert_array_equal(data.x_train, other.x_train)
    np.testing.assert_array_equal(data.y_train, other.y_train)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_table(tmp_path / "bad.parquet", CODING)


def test_one_file_a_client(tmp_path: Path) -> None:
    for shop in ("north", "south"):
        write_csv(tmp_path / f"{shop}.csv", [row[1:] for row in ROWS if row[0] == shop], "price,colour,bought")
    data = read_table(tmp_path, TableCoding("bought", "", CODING.classes, CODING.class_names, CODING.categories))
    assert data.client_train is not None
    assert data.client_train.tolist() == ["north", "north", "south"]
    np.testing.assert_array_equal(data.x_train, X[[0, 2, 1]])
    write_csv(tmp_path / "west.csv", [("red", 1, "no")], "colour,price,bought")
    with pytest.raises(InputError, match="other columns"):
        read_table(tmp_path, TableCoding("bought", "", CODING.classes, CODING.class_names, CODING.categories))


def test_the_coding_of_one_client_does_not_depend_on_another(tmp_path: Path) -> None:
    """The same rows have the same features whoever else is there: nobody leaves a trace in the coding."""
    whole = read_table(write_csv(tmp_path / "a.csv", ROWS), CODING)
    without = read_table(write_csv(tmp_path / "b.csv", [row for row in ROWS if row[0] != "south"]), CODING)
    np.testing.assert_array_equal(without.x_train, whole.x_train[[0, 2]])
    np.testing.assert_array_equal(without.y_train, whole.y_train[[0, 2]])
    assert without.classes == whole.classes


def test_numbers_as_labels_are_classes_or_targets(tmp_path: Path) -> None:
    coding = TableCoding("y", "c")
    assert (
        read_table(write_csv(tmp_path / "a.csv", [("p", 1, 2), ("q", 1, 0)], "c,x,y"), coding).y_train.dtype == np.int64
    )
    floats = read_table(write_csv(tmp_path / "b.csv", [("p", 1, 2.5), ("q", 1, 0)], "c,x,y"), coding)
    assert floats.y_train.tolist() == [2.5, 0.0]
    assert floats.classes == ()


NO = TableCoding("bought", "shop", (("no",),), ("no",))
RED = TableCoding("bought", "shop", (("no",),), ("no",), {"colour": ("red",)})
HEADER = "shop,price,bought"
BAD: dict[str, tuple[str, str, TableCoding, str]] = {
    "a word in a column of numbers": (HEADER, "n,cheap,no", NO, "row 0.: column 'price'"),
    "a missing value": (HEADER, "n,,no", NO, "data.missing"),
    "an infinite value": (HEADER, "n,inf,no", NO, "not a finite number"),
    "a word that is not listed": ("shop,colour,bought", "n,green,no", RED, "does not list"),
    "a class that is not listed": (HEADER, "n,1,maybe", NO, "does not list"),
    "no such column": (HEADER, "n,1,no", TableCoding("label", "shop"), "no column 'label'"),
    "no column for the client": (HEADER, "n,1,no", TableCoding("bought"), "data.client"),
    "a short row": (HEADER, "n,1", TableCoding("bought", "shop"), "2 fields"),
    "two columns of one name": ("shop,price,price", "n,1,2", TableCoding("price", "shop"), "price. is there twice"),
    "no rows": (HEADER, "", TableCoding("bought", "shop"), "no rows"),
    "no features": ("shop,bought", "n,0", TableCoding("bought", "shop"), "no column for features"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_a_sentence(tmp_path: Path, name: str) -> None:
    header, row, coding, words = BAD[name]
    (tmp_path / "a.csv").write_text(f"{header}\n{row}\n" if row else f"{header}\n")
    with pytest.raises(InputError, match=words):
        read_table(tmp_path / "a.csv", coding)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    (tmp_path / "b.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
    for file in ("a.xlsx", "b.csv", "nothing.csv"):
        with pytest.raises(InputError):
            read_table(tmp_path / file, TableCoding("a", "b"))
    for text in ("colour", "=a,b", "c=a,a", "c=a,", "c=a;c=b"):
        with pytest.raises(InputError):
            parse_categories(text)


def test_a_run_on_a_table_forgets_and_verifies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        (f"shop-{shop}", value, rng.choice(["red", "blue"]), "yes" if value > 0.5 else "no")
        for shop in range(8)
        for value in rng.random(6)
    ]
    file = write_csv(tmp_path / "sales.csv", rows)
    data = {
        "name": "table", "file": str(file), "label": "bought", "client": "shop", "classes": "no,yes",
        "categories": "colour=red,blue", "partition": "given", "preprocessing": "fixed",
    }  # fmt: skip
    run = sifu.train(small_spec(local={"rate": 0.1}) | {"data": data}, run=tmp_path / "run")
    assert [client.name for client in run.status().clients][:2] == ["shop-0", "shop-1"]
    (outcome,) = run.forget(["shop-3"], sigma=0.5, method="sifu")
    assert outcome.level == "proven"  # two declared classes, fixed coding: no label was counted
    assert run.verify().problems == []
    with pytest.raises(InputError, match="given"):
        sifu.train(small_spec() | {"data": data | {"partition": "iid"}}, run=tmp_path / "other")
