"""CSV and Parquet tables: columns for label and client, or one file per client; words are coded as the spec fixes."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sifu
from run_tools import small_spec
from sifu.core.spec import DataSpec
from sifu.data.table import read_columns, read_table
from sifu.data.table_coding import TableCoding, TableFile
from sifu.data.table_keys import join_names, parse_categories, parse_classes, quoted, split_names
from sifu.errors import InputError, SifuWarning

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
    with pytest.raises(InputError, match="differ in their columns"):
        read_table(tmp_path, TableCoding("bought", "", CODING.classes, CODING.class_names, CODING.categories))


def test_the_coding_of_one_client_does_not_depend_on_another(tmp_path: Path) -> None:
    """The features of a client's rows do not depend on the other clients."""
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
    "two columns of one name": ("shop,price,price", "n,1,2", TableCoding("price", "shop"), "price. occurs twice"),
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
    assert outcome.level == "proven"  # two declared classes and a fixed coding: no label was counted
    assert run.verify().problems == []
    with pytest.raises(InputError, match=r"data\.partition"):
        sifu.train(small_spec() | {"data": data | {"partition": "iid"}}, run=tmp_path / "other")


def table_file(folder: Path, text: str, name: str = "a.csv", encoding: str = "utf-8") -> Path:
    (folder / name).write_text(text, encoding=encoding)
    return folder / name


UNUSUAL: dict[str, tuple[str, dict[str, str], list[list[float]]]] = {
    "semicolons and decimal commas": ("c;x;y\np;1,5;0\nq;-2,25;1\n", {"separator": ";"}, [[1.5], [-2.25]]),
    "tabs": ("c\tx\ty\np\t1\t0\nq\t2\t1\n", {"separator": "\t"}, [[1.0], [2.0]]),
    "blank lines and spaces": ("c, x, y\n\np, 1, 0\n\nq, 2, 1\n\n", {}, [[1.0], [2.0]]),
    "quotes with a comma and a new line": ('c,"x, in\nkg",y\np,1,0\nq,2,1\n', {}, [[1.0], [2.0]]),
    "a column to leave out": ("c,note,x,y\np,hello,1,0\nq,bye,2,1\n", {"ignore": "note"}, [[1.0], [2.0]]),
    "an identity": ("id,c,x,y\nP1,p,1,0\nP2,q,2,1\n", {"id": "id"}, [[1.0], [2.0]]),
    "constants": ("c,x,y\np,60,0\nq,40,1\n", {"scale": "x=50,10"}, [[1.0], [-1.0]]),
    "a missing number": ("c,x,y\np,?,0\nq,40,1\n", {"scale": "x=50,10", "missing": "x=55"}, [[0.5, 1.0], [-1.0, 0.0]]),
    "a missing category": (
        "c,x,y\np,NA,0\nq,b,1\n", {"categories": "x=a,b", "missing": "x="}, [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]],
    ),
    "a category of numbers": ("c,x,y\np,1.0,0\nq,2,1\n", {"categories": "x=1,2"}, [[1.0, 0.0], [0.0, 1.0]]),
    "no header line": ("p,1,0\nq,2,1\n", {"header": "c,x,y"}, [[1.0], [2.0]]),
    "a header line although the spec names columns": ("c,x,y\np,1,0\nq,2,1\n", {"header": "c,x,y"}, [[1.0], [2.0]]),
    "an odd name": ('c,"a=b; c",y\np,50,0\nq,70,1\n', {"scale": '"a=b; c"=60,10'}, [[-1.0], [1.0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_tables_are_read(tmp_path: Path, name: str) -> None:
    text, keys, expected = UNUSUAL[name]
    coding = TableCoding.from_spec(DataSpec(name="table", label="y", client="c", **keys))
    data = read_table(table_file(tmp_path, text), coding)
    np.testing.assert_allclose(data.x_train, expected)
    assert data.y_train.tolist() == [0, 1]
    assert data.client_train is not None
    assert data.client_train.tolist() == ["p", "q"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings_that_programs_write(tmp_path: Path, encoding: str) -> None:
    path = table_file(tmp_path, "klinik,größe,y\nMünchen,1,0\nKöln,2,1\n", encoding=encoding)
    data = read_table(path, TableCoding("y", "klinik", encoding="utf-8" if "utf-8" in encoding else encoding))
    assert data.client_train is not None
    assert data.client_train.tolist() == ["München", "Köln"]


def test_classes_may_have_several_words(tmp_path: Path) -> None:
    path = table_file(tmp_path, "c,x,num\np,1,0\nq,2,3\nq,2,1\n")
    data = read_table(
        path, TableCoding.from_spec(DataSpec(name="table", label="num", client="c", classes="healthy=0,ill=1|2|3|4"))
    )
    assert data.y_train.tolist() == [0, 1, 1]
    assert data.classes == ("healthy", "ill")


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "a date": ("c,x,y\np,2024-01-31,0\n", {}, "line 2 .row 0.: column 'x'.*date"),
    "a decimal comma between commas": ('c,x,y\np,"1,5",0\n', {}, "decimal comma"),
    "a word": ("c,x,y\np,1,0\np,red,0\n", {}, "line 3 .row 1.: column 'x' holds 'red'.*data.categories"),
    "a missing value": ("c,x,y\np,,0\n", {}, "data.missing"),
    "a label that is a word": ("c,x,y\np,1,False\n", {}, "column 'y' holds 'False'.*data.classes"),
    "a missing label": ("c,x,y\np,1,?\n", {}, "column 'y', the label"),
    "no client": ("c,x,y\n,1,0\n", {}, "line 2 .row 0.: column 'c', the client, is empty"),
    "no identity": ("c,x,id,y\np,1,,0\n", {"id": "id"}, "data.id"),
    "a semicolon file without the column": ("a;x;y\np;1;0\n", {}, "separated by commas.*no column 'y'"),
    "a key that names no column": ("c,x,y\np,1,0\n", {"scale": "z=1,2"}, "'z', which data.scale names"),
    "two roles": ("c,x,y\np,1,0\n", {"ignore": "y"}, "two roles"),
    "an underscore in a number": ("c,x,y\np,1_000,0\n", {}, "not a number"),
    "a huge number": ("c,x,y\np,1e999,0\n", {}, "not a finite number"),
    "an unequal row": ("c,x,y\np,1\n", {}, "line 2 .row 0. has 2 fields separated by commas"),
    "a huge class": ("c,x,y\np,1,1000000000000\n", {}, "regression"),
    "a spread of zero": ("c,x,y\np,1,0\n", {"scale": "x=1,0"}, "positive spread"),
    "a filler that is a word": ("c,x,y\np,1,0\n", {"missing": "x=average"}, "data.missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_place_and_the_remedy(tmp_path: Path, name: str) -> None:
    text, keys, words = REFUSED[name]
    path = table_file(tmp_path, text)
    with pytest.raises(InputError, match=words):
        read_table(path, TableCoding.from_spec(DataSpec(name="table", label="y", client="c", **keys)))


def test_rows_kept_for_testing_depend_on_their_own_identity_alone(tmp_path: Path) -> None:
    rows = [f"P{number},{'pq'[number % 2]},{number},{number % 2}" for number in range(200)]
    coding = TableCoding("y", "c", identity="id")
    whole = read_table(table_file(tmp_path, "id,c,x,y\n" + "\n".join(rows)), coding, held_out=0.25, seed=3)
    fewer = [row for row in reversed(rows) if ",p," in row]
    part = read_table(table_file(tmp_path, "id,c,x,y\n" + "\n".join(fewer), "b.csv"), coding, held_out=0.25, seed=3)
    assert 30 <= len(whole.y_test) <= 70
    assert whole.row_ids is not None
    assert part.row_ids is not None
    assert set(part.row_ids) == {name for name in whole.row_ids if int(name[1:]) % 2 == 0}
    test = read_table(table_file(tmp_path, "id,c,x,y\n" + "\n".join(rows)), coding, test_file=tmp_path / "b.csv")
    assert len(test.y_test) == 100
    assert len(test.y_train) == 200


def test_a_test_file_of_strangers_is_named(tmp_path: Path) -> None:
    """A test file whose clients are all unknown to the run causes a warning."""
    table, coding = table_file(tmp_path, "c,x,y\np,1,0\nq,2,1\n"), TableCoding("y", "c")
    with pytest.warns(SifuWarning, match="no client of data.test_file .*found test.*leave out its column c"):
        read_table(table, coding, test_file=table_file(tmp_path, "c,x,y\ntest,1,0\n", "strangers.csv"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_table(table, coding, test_file=table_file(tmp_path, "c,x,y\ntest,1,0\nq,1,1\n", "known.csv"))
        read_table(table, coding, test_file=table_file(tmp_path, "x,y\n1,0\n", "nobody.csv"))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([str(1000 + 17 * row) for row in range(40)], "like an identity"),
        ([str(500 + row % 3) for row in range(40)], "beyond 10.*data.scale"),
    ],
)
def test_what_looks_like_a_mistake_is_a_warning(tmp_path: Path, column: list[str], words: str) -> None:
    text = "c,x,y\n" + "".join(f"{'pq'[row % 2]},{value},{row % 2}\n" for row, value in enumerate(column))
    with pytest.warns(SifuWarning, match=words):
        read_table(table_file(tmp_path, text), TableCoding("y", "c"))


def test_one_class_nearly_everywhere_is_a_warning(tmp_path: Path) -> None:
    text = "c,x,y\n" + "".join(f"p,{row % 2},{int(row == 0)}\n" for row in range(40))
    with pytest.warns(SifuWarning, match=r"97\.5%"):
        read_table(table_file(tmp_path, text), TableCoding("y", "c"))


@given(st.lists(st.text('a",;=|<\n é', min_size=1, max_size=5), min_size=1, max_size=4, unique=True))
def test_names_with_any_character_are_read_as_they_are_written(names: list[str]) -> None:
    assert split_names(join_names(names), "data.ignore") == names
    entries = "; ".join(f"{quoted(name)}={join_names(names)}" for name in names)
    assert parse_categories(entries) == dict.fromkeys(names, tuple(names))
    assert parse_classes(join_names(names)) == {name: (name,) for name in names}


def coded_one_by_one(text: str, fill: float) -> list[float] | None:
    """Return the features of one text of a column with a filler, without the code under test; None if it must be
    refused.
    """
    plain = text.strip(" \t\ufeff\u200b")
    if plain.lower() in {"", "?", "na", "nan", "-", "."}:
        return [(fill - 2.0) / 3.0, 1.0]
    written = plain.replace("\u2212", "-")
    number = written.removeprefix("-").removeprefix("+") if written[:2] not in ("--", "++", "+-", "-+") else "bad"
    mantissa, _, exponent = number.lower().partition("e")
    digits = mantissa.replace(".", "", 1)
    if not digits.isdecimal() or ("e" in number.lower() and not exponent.lstrip("+-").isdecimal()):
        return None
    value = float(written)
    return [(value - 2.0) / 3.0, 0.0] if np.isfinite(value) else None


NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from([" 4 ", "+1.5e2", "7.", ".5", "\u22123", "\ufeff8", "\u0663"]),
)


@given(
    plain=st.lists(NUMBERS, min_size=1, max_size=20),
    odd=st.sampled_from(["", "?", "NA", "nan", "inf", "1e999", "1_000", "1__0", "0x10", "abc", "--1", "1,5"]),
    position=st.integers(0, 20),
)
def test_a_column_is_coded_as_its_values_one_by_one(plain: list[str], odd: str, position: int) -> None:
    coding = TableCoding("y", "c", scales={"x": (2.0, 3.0)}, missing={"x": 4.0})
    for texts in (plain, [*plain[:position], odd, *plain[position:]]):
        expected = [coded_one_by_one(text, 4.0) for text in texts]
        refused: dict[int, str] = {}
        found = coding.features(TableFile("t", {"x": texts}), ["x"], refused)
        assert sorted(refused) == [row for row, features in enumerate(expected) if features is None]
        for row, features in enumerate(expected):
            assert features is None or found[row].tolist() == features
        if refused:
            with pytest.raises(InputError, match=rf"row {min(refused)}\)?: column 'x'"):
                coding.features(TableFile("t", {"x": texts}), ["x"])


def test_one_request_parses_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"P{row}", "abc"[row % 3], round((row * 7 % 11) / 5 - 1, 2), row % 2) for row in range(90)]
    file = write_csv(tmp_path / "t.csv", rows, "id,c,x,y")
    data = {"name": "table", "partition": "given", "file": str(file), "label": "y", "client": "c", "id": "id"}
    spec = {"data": {**data, "classes": "0,1", "held_out": 0.2, "preprocessing": "fixed"}, "model": {"kind": "ridge"}}
    parsed: list[Path] = []

    def counted(path: Path, header: object = ()) -> TableFile:
        parsed.append(path)
        return read_columns(path, header)  # type: ignore[arg-type]

    monkeypatch.setattr("sifu.data.table.read_columns", counted)
    sifu.train(spec, run=tmp_path / "run")
    assert len(parsed) == 1
    trained_on = next(number for number in range(0, 90, 3) if _is_trained_on(tmp_path / "run", f"P{number}"))
    parsed.clear()
    (outcome,) = sifu.open_run(tmp_path / "run").forget(["a"], records=[f"P{trained_on}"])
    assert (outcome.level, len(parsed)) == ("exact", 1)
    parsed.clear()
    sifu.open_run(tmp_path / "run").forget(["b"])
    assert len(parsed) == 1  # parsed again, because no rows stay in memory between requests
    write_csv(file, [*rows[:-1], ("P89", "c", 0.25, 1)], "id,c,x,y")
    # the change is noticed, although the table was parsed before
    with pytest.warns(SifuWarning, match="'c' are not those"):
        (outcome,) = sifu.open_run(tmp_path / "run").forget(["a"])
    assert (outcome.level, outcome.held_out) == ("exact", None)


def _is_trained_on(run: Path, identity: str) -> bool:
    """Return whether a record of client a is used for training."""
    try:
        sifu.open_run(run).plan(["a"], records=[identity])
    except InputError:
        return False
    return True
