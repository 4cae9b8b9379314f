"""Malformed and unusual tables: each is read as intended, or refused in one line with the place and the remedy."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from sifu.core.spec import DataSpec
from sifu.data.table import read_table
from sifu.data.table_coding import TableCoding
from sifu.data.table_proposal import propose_spec
from sifu.errors import InputError, SifuWarning

PLAIN = "c,x,y\np,1,0\nq,2,1\n"
COLUMN_X = r"line 2 \(row 0\): column 'x' holds "


def cell(value: str) -> bytes:
    """Return a table with this value in its first row."""
    return f'c,x,y\np,"{value}",0\nq,2,1\n'.encode()


READ: dict[str, tuple[bytes, dict[str, str], list[float]]] = {
    "a mark of UTF-8 before semicolons": ("\ufeffc;x;y\np;1;0\nq;2;1\n".encode(), {"separator": ";"}, [1, 2]),
    "UTF-16": (PLAIN.encode("utf-16"), {"encoding": "utf-16"}, [1, 2]),
    "UTF-32": (PLAIN.encode("utf-32"), {"encoding": "utf-32"}, [1, 2]),
    "old line ends of a Mac": (PLAIN.replace("\n", "\r").encode(), {}, [1, 2]),
    "line ends of Windows": (PLAIN.replace("\n", "\r\n").encode(), {}, [1, 2]),
    "no line end at the end": (PLAIN.rstrip().encode(), {}, [1, 2]),
    "a separator at the end of every line": (PLAIN.replace("\n", ",\n").encode(), {}, [1, 2]),
    "a separator at the end of the names": (PLAIN.replace("y\n", "y,\n").encode(), {}, [1, 2]),
    "separators at the end of rows": (b"c,x,y\np,1,0,\nq,2,1,,\n", {}, [1, 2]),
    "a line for Excel": (b"sep=;\nc;x;y\np;1;0\nq;2;1\n", {"separator": ";"}, [1, 2]),
    "bars": (b"c|x|y\np|1|0\nq|2|1\n", {"separator": "|"}, [1, 2]),
    "decimal commas and points": (b"c;x;y\np;1,5;0\nq;2.5;1\n", {"separator": ";"}, [1.5, 2.5]),
    "the minus sign of typesetters": (cell("\u22121.5"), {}, [-1.5, 2]),
    "a negative zero": (cell("-0.0"), {}, [0, 2]),
    "an exponent": (cell("1.5E+01"), {"scale": "x=0,10"}, [1.5, 0.2]),
    "a number over two lines": (cell("1\n"), {}, [1, 2]),
    "an invisible character in a value": (cell("\u200b1.5"), {}, [1.5, 2]),
    "an invisible character in a name": ("c,x\u200b,y\np,1,0\nq,2,1\n".encode(), {"scale": "x=0,2"}, [0.5, 1]),
    "a tab in a name": (b'c,"x\tkg",y\np,1,0\nq,2,1\n', {"scale": "x\tkg=0,2"}, [0.5, 1]),
    "a blank that does not break in a client": ("c,x,y\np\u00a0,1,0\nq,2,1\n".encode(), {}, [1, 2]),
    "labels that are written with a point": (b"c,x,y\np,1,0.0\nq,2,1.0\n", {}, [1, 2]),
    "labels that are true or false": (b"c,x,y\np,1,False\nq,2,TRUE\n", {"classes": "0,1"}, [1, 2]),
    "one person with two rows": (b"id,c,x,y\nA,p,1,0\nA,q,2,1\n", {"id": "id"}, [1, 2]),
}


@pytest.mark.parametrize("name", READ)
def test_tables_that_are_read_as_meant(name: str, tmp_path: Path) -> None:
    content, keys, expected = READ[name]
    (tmp_path / "a.csv").write_bytes(content)
    data = read_table(tmp_path / "a.csv", TableCoding.from_spec(DataSpec(name="table", label="y", client="c", **keys)))
    np.testing.assert_array_equal(data.x_train[:, 0], expected)
    assert data.y_train.tolist() == [0, 1]
    assert data.client_train is not None
    assert data.client_train.tolist() == ["p", "q"]


REFUSED: dict[str, tuple[bytes, dict[str, str], str]] = {
    "UTF-16 that is not named": (PLAIN.encode("utf-16"), {}, "save it as UTF-8"),
    "an encoding that there is not": (PLAIN.encode(), {"encoding": "utf-9"}, "data.encoding"),
    "a gzip file": (gzip.compress(PLAIN.encode()), {}, "gzip: unpack it"),
    "a workbook": (b"PK\x03\x04\x14\0\6\0", {}, "workbook.*save the sheet as CSV"),
    "an old workbook": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", {}, "workbook.*save the sheet as CSV"),
    "a PDF": (b"%PDF-1.7\nhello\n", {}, "a PDF"),
    "a page": (b"<!DOCTYPE html>\n<html></html>\n", {}, "HTML"),
    "JSON": (b'[{"c": "p", "x": 1, "y": 0}]\n', {}, "JSON"),
    "Parquet with another ending": (b"PAR1\x15\x04", {}, r"\.parquet"),
    "a mark of UTF-8 alone": (b"\xef\xbb\xbf", {}, "no rows: give a table"),
    "blanks alone": (b"  \n \n", {}, "no rows: give a table"),
    "names alone": (b"c,x,y\n", {}, "no rows: give a table"),
    "the index of pandas": (b",c,x,y\n0,p,1,0\n", {}, "line 1.*column 1 has none.*index=False"),
    "a title above the names": (b"My table\n\n" + PLAIN.encode(), {}, "'My table', does not name them: remove"),
    "a quote that is not closed": (b'c,x,y\np,"1,0\nq,2,1\n', {}, "a quote that is not closed"),
    "a field without end": (b'c,x,y\np,"' + b"1" * 200_000, {}, "after line 1.*a quote that is not closed"),
    "names and rows separated differently": (b"c;x;y\np,1,0\n", {"separator": ";"}, "separated by semicolons"),
    "other capitals": (b"C,X,Y\np,1,0\n", {}, "did you mean 'Y'"),
    "marks between thousands": (cell("1,000"), {}, COLUMN_X + ".*thousands: write it without"),
    "marks between millions": (cell("1,000,000"), {}, COLUMN_X + ".*thousands: write it without"),
    "blanks between thousands": (cell("1 000"), {}, COLUMN_X + ".*thousands: write it without"),
    "points between thousands": (b"c;x;y\np;1.000,5;0\n", {"separator": ";"}, COLUMN_X + ".*thousands: write it"),
    "a percentage": (cell("12%"), {}, COLUMN_X + ".*write the number alone"),
    "money": (cell("\u20ac3"), {}, COLUMN_X + ".*write the number alone"),
    "a unit": (cell("12 kg"), {}, COLUMN_X + ".*write the number alone"),
    "below a limit": (cell("<5"), {}, COLUMN_X + ".*write the number alone"),
    "a number of 400 digits": (cell("9" * 400), {}, COLUMN_X + ".*not a finite number: correct it"),
    "minus infinity": (cell("-Infinity"), {}, COLUMN_X + ".*not a finite number: correct it"),
    "a day with the name of its month": (cell("31-Jan-2024"), {}, COLUMN_X + ".*a date"),
    "a time": (cell("10:30"), {}, COLUMN_X + ".*a date"),
    "a time stamp": (cell("2024-01-31T10:00:00Z"), {}, COLUMN_X + ".*a date"),
    "a hexadecimal number": (cell("0x1F"), {}, COLUMN_X + ".*data.ignore"),
    "a column of missing values": (b"c,x,z,y\np,1,,0\n", {}, "column 'z'.*data.missing"),
    "a word in other capitals": (cell("Red"), {"categories": "x=red,blue"}, COLUMN_X + ".*it lists red, blue"),
    "a scale for words": (cell("red"), {"categories": "x=red,2", "scale": "x=1,2"}, "'x' .*leave it out of data.scale"),
    "a number for missing words": (cell("red"), {"categories": "x=red,2", "missing": "x=5"}, 'data.missing = "x="'),
    "a line of sums": (PLAIN.encode() + b"Total,3,\n", {}, r"line 4 \(row 2\): column 'y', the label"),
    "a second line of names": (b"c,x,y\n-,kg,-\np,1,0\n", {}, "column 'y', the label|column 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_tables_that_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, keys, words = REFUSED[name]
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as refused:
        read_table(path, TableCoding.from_spec(DataSpec(name="table", label="y", client="c", **keys)))
    assert "\n" not in str(refused.value)
    if not name.endswith("words"):  # these messages concern the spec
        assert "a.csv" in str(refused.value)


@pytest.mark.parametrize("name", [*READ, *REFUSED])
def test_a_proposal_is_made_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, _, _ = {**READ, **REFUSED}[name]
    (tmp_path / "a.csv").write_bytes(content)
    said = "made"
    try:
        propose_spec(tmp_path / "a.csv", client="c", label="y")
    except InputError as error:
        said = str(error)
    assert "\n" not in said


def test_there_are_sixty() -> None:
    assert len(READ) + len(REFUSED) >= 60


WARNED: dict[str, tuple[str, dict[str, str], str]] = {
    "a column of large numbers": ("".join(f"p,{900 + row % 2},{row % 2}\n" for row in range(40)), {}, "outweigh"),
    "constants that do not fit": (
        "".join(f"p,{900 + row % 2},{row % 2}\n" for row in range(40)), {"scale": "x=1,1"}, "correct their constants",
    ),
    "an identity among the features": (
        "".join(f"p,{row},{row % 2}\n" for row in range(40)), {"scale": "x=0,10"}, "like an identity",
    ),
    "one class nearly everywhere": ("".join(f"p,{row % 3},{int(row == 5)}\n" for row in range(40)), {}, "the AUC"),
    "classes that begin at 1": ("".join(f"p,{row % 3},{1 + row % 2}\n" for row in range(40)), {}, "no row has class 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_what_makes_a_model_of_the_base_rate_is_said(name: str, tmp_path: Path) -> None:
    rows, keys, words = WARNED[name]
    (tmp_path / "a.csv").write_text("c,x,y\n" + rows)
    with pytest.warns(SifuWarning, match=words):
        read_table(tmp_path / "a.csv", TableCoding.from_spec(DataSpec(name="table", label="y", client="c", **keys)))
