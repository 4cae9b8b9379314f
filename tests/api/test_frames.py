"""Frames of pandas and polars, tables of pyarrow and data sets of Hugging Face: they train like the same rows in a
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import sifu

HOSPITALS = ("north", "south", "east")
KEYS: dict[str, Any] = {
    "label": "ill", "client": "hospital", "id": "patient", "classes": "no,yes", "categories": "ward=A,B",
    "scale": "age=50,20", "missing": "age=50", "preprocessing": "fixed",
}  # fmt: skip
RIDGE = {"model": {"kind": "ridge"}}
Numbers = dict[str, Any]


def columns(rows: int = 60, seed: int = 0) -> dict[str, list[Any]]:
    dice = np.random.default_rng(seed)
    age = [None if dice.random() < 0.1 else float(dice.integers(30, 80)) for _ in range(rows)]
    return {
        "patient": [f"P{row:03}" for row in range(rows)],
        "hospital": [HOSPITALS[row % 3] for row in range(rows)],
        "age": age,
        "ward": [str(word) for word in dice.choice(["A", "B"], rows)],
        "ill": ["yes" if (value or 50.0) + dice.normal(0, 5) > 55 else "no" for value in age],
    }


class Column:
    """Column that can only be iterated, like a column of a data set on disk."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


class Series(Column):
    def tolist(self) -> list[Any]:
        return self.values


class FakeFrame:
    """Table with the interface that pandas and polars share."""

    def __init__(self, values: dict[str, list[Any]]) -> None:
        self.columns = np.array(list(values), dtype=object)
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return Series(self._values[name])

    def __len__(self) -> int:
        return len(next(iter(self._values.values())))


class FakeDataset:
    """Table with the interface of a Hugging Face data set: column names, and columns that are iterated."""

    def __init__(self, values: dict[str, list[Any]]) -> None:
        self.column_names = list(values)
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return Column(self._values[name])

    def __len__(self) -> int:
        return len(next(iter(self._values.values())))


def make(kind: str, values: dict[str, list[Any]]) -> Any:
    if kind == "pandas":
        return pytest.importorskip("pandas").DataFrame(values)
    if kind == "polars":
        return pytest.importorskip("polars").DataFrame(values)
    if kind == "pyarrow":
        return pytest.importorskip("pyarrow").table(values)
    if kind == "datasets":
        return pytest.importorskip("datasets").Dataset.from_dict(values)
    return FakeFrame(values) if kind == "a frame" else FakeDataset(values)


def numbers_of(run: sifu.Run) -> Numbers:
    """Return the numbers of the exported model without the salts."""
    arrays = load_file(run.export(run.folder.parent / "m.safetensors"))
    return {name: values.tolist() for name, values in arrays.items() if name != "salts"}


def write_csv(path: Path, values: dict[str, list[Any]]) -> Path:
    rows = zip(*values.values(), strict=True)
    lines = [",".join(values), *(",".join("" if value is None else str(value) for value in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Return the model trained on the same rows from a CSV file, without P000 and P003."""
    folder = tmp_path_factory.mktemp("file")
    data = KEYS | {"name": "table", "partition": "given", "file": str(write_csv(folder / "a.csv", columns()))}
    run = sifu.train(RIDGE | {"data": data}, run=folder / "run")
    run.forget(["north"], records=["P000", "P003"])
    return numbers_of(run)


@pytest.mark.parametrize("kind", ["a frame", "a data set", "pyarrow", "pandas", "polars", "datasets"])
def test_a_frame_trains_and_forgets_as_its_file_does(kind: str, from_file: Numbers, tmp_path: Path) -> None:
    frame = make(kind, columns())
    run = sifu.train(RIDGE | {"data": KEYS}, run=tmp_path / "run", clients=frame)
    assert [client.name for client in run.status().clients] == sorted(HOSPITALS)
    (outcome,) = sifu.open_run(run.folder, clients=frame).forget(["north"], records=["P000", "P003"])
    assert outcome.level == "exact"
    assert numbers_of(run) == from_file
    assert run.verify().problems == []


@pytest.mark.parametrize("keys", [{"held_out": 0.3}, {"test_file": "test.csv"}], ids=["a share", "a file"])
def test_held_out_rows_of_a_frame_are_those_of_its_file(keys: dict[str, Any], tmp_path: Path) -> None:
    keys = {name: str(tmp_path / value) if isinstance(value, str) else value for name, value in keys.items()}
    write_csv(tmp_path / "test.csv", columns(40, seed=2))
    file = {"name": "table", "partition": "given", "file": str(write_csv(tmp_path / "a.csv", columns()))}
    frame, data = FakeFrame(columns()), KEYS | keys
    of_frame = sifu.train(RIDGE | {"data": data}, run=tmp_path / "frame", clients=frame)
    of_file = sifu.train(RIDGE | {"data": data | file}, run=tmp_path / "file")
    assert numbers_of(of_frame) == numbers_of(of_file)
    (figures, expected) = (run.status().held_out for run in (of_frame, of_file))
    assert figures is not None
    assert figures.auc is not None
    assert figures == expected
    for run in (sifu.open_run(of_frame.folder, clients=frame), of_file):
        run.forget(["south"])
    assert of_frame.status().held_out == of_file.status().held_out != figures


def test_control_another_row_gives_another_model(from_file: Numbers, tmp_path: Path) -> None:
    values = columns()
    values["age"][1] = 31.0
    run = sifu.train(RIDGE | {"data": KEYS}, run=tmp_path / "run", clients=FakeFrame(values))
    run.forget(["north"], records=["P000", "P003"])
    assert numbers_of(run) != from_file


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_folder_with_a_file_per_hospital_trains_alike(ending: str, from_file: Numbers, tmp_path: Path) -> None:
    values, files = columns(), tmp_path / "files"
    files.mkdir()
    for hospital in HOSPITALS:
        rows = [row for row, name in enumerate(values["hospital"]) if name == hospital]
        own = {name: [column[row] for row in rows] for name, column in values.items() if name != "hospital"}
        if ending == "csv":
            write_csv(files / f"{hospital}.csv", own)
        else:
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(own), files / f"{hospital}.parquet")
    data = KEYS | {"name": "table", "partition": "given", "file": str(files), "client": ""}
    run = sifu.train(RIDGE | {"data": data}, run=tmp_path / "run")
    assert {client.name for client in run.status().clients} == set(HOSPITALS)
    (outcome,) = run.forget(["north"], records=["P000", "P003"])
    assert outcome.level == "exact"
    assert numbers_of(run) == from_file
    assert run.verify().problems == []


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no column for the client": (FakeFrame(columns()), {"client": ""}, "data.client"),
    "no such column": (FakeFrame(columns()), {"label": "sick"}, "the frame has no column 'sick', which data.label"),
    "columns without names": (FakeFrame({0: [1, 2], "a": [1, 2]}), {}, "distinct names, as texts"),  # type: ignore[dict-item]
    "no rows": (FakeFrame({name: [] for name in columns()}), {}, "has no rows"),
    "a date": (FakeFrame(columns() | {"age": [np.datetime64("2024-01-31")] * 60}), {}, "row 0: column 'age'.*a date"),
    "a missing client": (  # pandas turns the numbers of all other rows into floats, so they would be drawn differently
        FakeFrame(columns() | {"hospital": [float("nan"), *[float(row % 3) for row in range(59)]]}), {},
        "row 0: column 'hospital', the client, is empty",
    ),
    "a missing identity": (
        FakeFrame(columns() | {"patient": [*map(float, range(59)), float("nan")]}), {},
        "row 59: column 'patient', the identity .* is empty",
    ),
    "splits": ({"train": FakeDataset(columns())}, {}, "'train' is a table"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_frame_is_a_sentence(name: str, tmp_path: Path) -> None:
    frame, keys, words = REFUSED[name]
    with pytest.raises(sifu.InputError, match=words):
        sifu.train(RIDGE | {"data": KEYS | keys}, run=tmp_path / "run", clients=frame)
    assert not (tmp_path / "run").exists()


def test_a_model_is_exported_whole_when_its_data_are_gone(tmp_path: Path) -> None:
    """The exported model reads rows by column name, in any order, although the original table no longer exists."""
    file = write_csv(tmp_path / "a.csv", columns())
    data = KEYS | {"name": "table", "partition": "given", "file": str(file)}
    run = sifu.train(RIDGE | {"data": data}, run=tmp_path / "run")
    values = columns(30, seed=1)
    rows = write_csv(tmp_path / "new.csv", {name: values[name] for name in ("ward", "age", "patient")})
    before = sifu.load_model(run.export(tmp_path / "m.safetensors")).predict_rows(rows)
    file.unlink()
    after = sifu.load_model(run.export(tmp_path / "m.safetensors")).predict_rows(rows)
    assert after == before
    frame = sifu.train(RIDGE | {"data": KEYS}, run=tmp_path / "frame", clients=FakeFrame(columns()))
    assert sifu.load_model(frame.export(tmp_path / "f.safetensors")).predict_rows(rows) == before
