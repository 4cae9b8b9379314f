"""A stray quote in one client's row must not turn rows of other clients into text."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import sifu
from sifu.data.dataset import Dataset
from sifu.data.table import read_table
from sifu.data.table_coding import TableCoding
from sifu.data.table_proposal import propose_spec
from sifu.errors import InputError

CODING = TableCoding("y", "c", ignored=("note",), missing={"x": 0.0})
LOST = "line .* is a row of its own, but lies inside a quoted field that begins after line"


def table(folder: Path, *lines: str, header: str = "c,x,y,note") -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "lines",
    [
        ('gone,1,0,"no end', "a,2,1,fine", "b,3,0,fine"),
        ('gone,1,0,"no end', "a,2,1,fine", 'b,3,0,stray"'),
        ('gone,1,0,"no end', 'a,2,1,"fine"'),
        ('gone,1,0,"no end', "a,?,1,"),
        ('b,3,0,"two', 'lines"', 'gone,1,0, "no end', "a, 2, 1, fine"),
    ],
)
def test_rows_inside_a_quoted_field_are_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=LOST):
        read_table(table(tmp_path, *lines), CODING)


def test_a_proposed_spec_names_the_line(tmp_path: Path) -> None:
    path = table(tmp_path, 'gone,1,0,"no end', "a,2,1,fine", "b,3,0,fine")
    assert propose_spec(path, client="c", label="y").checks[0].startswith("quotes: line 3 of")
    assert "quotes" not in str(propose_spec(table(tmp_path, "a,2,1,fine", "b,3,0,fine"), client="c", label="y").checks)


def test_decimal_commas_count_as_in_the_rest_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=LOST):
        read_table(table(tmp_path, 'gone;1;0;"no end', "a;2,5;1;fine", header="c;x;y;note"), CODING)


def test_rows_inside_a_text_for_a_model_are_refused(tmp_path: Path) -> None:
    """The check does not need the model, so an unknown one does not matter."""
    coding = TableCoding("y", "c", text="note", model="unknown")
    with pytest.raises(InputError, match=LOST):
        read_table(table(tmp_path, 'gone,0,"no end', "a,1,fine", header="c,y,note"), coding)


@pytest.mark.parametrize("note", ['"first, second\nthird, fourth"', '"a\n\nb"', '"a ""b""\n1,2,3"', '"say\na,b,c,d"'])
def test_texts_of_several_lines_are_allowed(tmp_path: Path, note: str) -> None:
    """Control: text of several lines is no row, even if a line has as many commas as a row."""
    read = read_table(table(tmp_path, f"a,1,0,{note}", "b,2,1,fine"), CODING)
    assert read.x_train[:, 0].tolist() == [1.0, 2.0]


def samples_of(read: Dataset, client: str) -> tuple[bytes, bytes]:
    assert read.client_train is not None
    own = read.client_train == client
    return read.x_train[own].tobytes(), read.y_train[own].astype(float).tobytes()


def test_no_client_decides_how_the_rows_of_others_are_read(tmp_path: Path) -> None:
    """Random tables with stray quotes are refused, or read alike for all others without the lines of one client."""
    notes = ["", "x", '"', '"a', 'a"', '"a"', '"a ""b"""', '"a,b"', "a;b", " ", "\x0b", "é", "sep=;"]
    accepted = refused = 0
    for seed in range(150):
        dice = random.Random(seed)
        owners = [f"c{dice.randint(0, 2)}" for _ in range(dice.randint(3, 9))]
        rows = [f"{owner},{dice.choice('123')},{dice.choice('01')},{dice.choice(notes)}" for owner in owners]
        try:
            whole = read_table(table(tmp_path, *rows), CODING)
        except InputError:
            refused += 1
            continue
        accepted += 1
        for gone in set(owners):
            left = [row for row, owner in zip(rows, owners, strict=True) if owner != gone]
            if not left:
                continue
            fewer = read_table(table(tmp_path, *left), CODING)
            for client in set(owners) - {gone}:
                assert samples_of(fewer, client) == samples_of(whole, client), (seed, gone, rows)
    assert min(accepted, refused) > 20


def test_an_exact_certificate_is_about_the_rows_of_the_others(tmp_path: Path) -> None:
    """The head after `gone` was forgotten is the head of a table without its lines."""
    generator = np.random.default_rng(0)
    others = [
        f"{'abcde'[row % 5]},{generator.normal():.3f},{row % 2},{'fine' if row else 'a note'}" for row in range(40)
    ]
    spec = {
        "data": {"name": "table", "file": str(tmp_path / "table.csv"), "label": "y", "client": "c", "ignore": "note",
                 "partition": "given", "preprocessing": "fixed", "classes": "0,1"},
        "model": {"kind": "ridge"},
    }  # fmt: skip
    table(tmp_path, *others[:20], 'gone,1.5,1,"no end', *others[20:])
    with pytest.raises(InputError, match=LOST):
        sifu.train(spec, run=tmp_path / "run")
    table(tmp_path, *others[:20], "gone,1.5,1,mended", *others[20:])
    run = sifu.train(spec, run=tmp_path / "run")
    assert run.forget(["gone"])[0].level == "exact"
    table(tmp_path, *others)
    fresh = sifu.train(spec, run=tmp_path / "fresh")
    with run.reader() as ours, fresh.reader() as theirs:
        assert np.array_equal(ours.load_model(ours.tip), theirs.load_model(theirs.tip))
