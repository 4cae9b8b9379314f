"""Slightly wrong files get one clear line each: descriptions of models, arrays, tables, authorities, disks."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command
from sifu.errors import DiskError, RunDamagedError
from sifu.store.reader import RunReader


def check_one_line(answer: Any, code: int, *words: str) -> None:
    """Check that the refusal is one sentence without a traceback or the word `unexpected`."""
    assert answer.code == code, (answer.code, answer.out, answer.err)
    flat = " ".join(answer.err.split())
    assert "Traceback" not in flat
    assert "unexpected" not in flat
    for word in words:
        assert word in flat, flat


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model with its description, and write rows to predict from."""
    folder = tmp_path_factory.mktemp("exported")
    spec = {"data": {"name": "digits", "clients": 4}, "model": {"kind": "softmax"}, "stop": {"max_rounds": 1}}
    run = sifu.train(spec, run=folder / "run")
    run.export(folder / "m.safetensors")
    np.savez(folder / "rows.npz", x=np.zeros((2, 64)))
    return folder


def set_key(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        inner = description
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to

    return change


ODD_DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a type that is none": set_key("dtype", to="float99"),
    "a type that is no float": set_key("dtype", to="U5"),
    "an unknown kind": set_key("model", to="oracle"),
    "a ridge without a task": set_key("model", to="ridge"),
    "outputs that are a word": set_key("outputs", to="many"),
    "classes that are a number": set_key("classes", to=3),
    "classes that are too few": set_key("classes", to=["zero"]),
    "an input shape of words": set_key("input_shape", to=["a", None]),
    "an input shape that is a number": set_key("input_shape", to=7),
    "a feature map of another world": set_key("features", to={"kind": "magic"}),
    "features without a kind": set_key("features", to={}),
    "a norm that is a word": set_key("features", "norm", to="large"),
    "an unknown normalisation": set_key("normalise", to="twice"),
    "an unknown data set": set_key("data", to="moon"),
    "columns that are a number": set_key("columns", to=5),
    "a table of another world": set_key("table", to={"a": 5}),
    "a table that is a number": set_key("table", to=5),
    "no parameters": set_key("parameters", to={}),
    "no outputs at all": lambda description: description.pop("outputs"),
    "no task at all": lambda description: description.pop("task"),
}


@pytest.mark.parametrize("odd", ODD_DESCRIPTIONS)
def test_a_description_that_is_odd_is_refused(exported: Path, tmp_path: Path, cli: Command, odd: str) -> None:
    description = json.loads((exported / "m.safetensors.json").read_text())
    ODD_DESCRIPTIONS[odd](description)
    (tmp_path / "m.safetensors").write_bytes((exported / "m.safetensors").read_bytes())
    (tmp_path / "m.safetensors.json").write_text(json.dumps(description))
    for rows in (np.zeros((2, 64)), np.zeros((2, 64), dtype=np.uint8)):
        np.savez(tmp_path / "rows.npz", x=rows)
        answer = cli("predict", tmp_path / "m.safetensors", tmp_path / "rows.npz")
        if answer.code != 0:  # such rows do not need every key
            check_one_line(answer, 2)


ODD_ROWS: dict[str, Any] = {
    "no dimension": np.array(3.0),
    "complex": np.zeros((2, 64), dtype=complex),
    "texts": np.array([["a"] * 64]),
    "dates": np.zeros((2, 64), dtype="datetime64[s]"),
    "records": np.zeros(2, dtype=[("a", float)]),
    "booleans of no dimension": np.array(True),
    "nothing": np.zeros((0, 64)),
    "no columns": np.zeros((2, 0)),
}


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_rows_that_are_no_samples_are_refused(exported: Path, tmp_path: Path, cli: Command, odd: str) -> None:
    np.savez(tmp_path / "rows.npz", x=ODD_ROWS[odd])
    answer = cli("predict", exported / "m.safetensors", tmp_path / "rows.npz")
    if odd == "nothing":
        assert answer.code == 0
    else:
        check_one_line(answer, 2)


ODD_ARRAYS: dict[str, dict[str, Any]] = {
    "x of no dimension": {"x": np.array(1.0), "y": np.zeros(1, int)},
    "y of no dimension": {"x": np.zeros((4, 2)), "y": np.array(1)},
    "both of no dimension": {"x": np.array(1.0), "y": np.array(1)},
    "complex x": {"x": np.zeros((8, 2), complex), "y": np.arange(8) % 2},
    "complex y": {"x": np.zeros((8, 2)), "y": np.zeros(8, complex)},
    "texts": {"x": np.array([["a", "b"]] * 8), "y": np.arange(8) % 2},
    "dates": {"x": np.zeros((8, 2), "datetime64[s]"), "y": np.arange(8) % 2},
    "records": {"x": np.zeros(8, dtype=[("a", float)]), "y": np.arange(8) % 2},
    "a client of no dimension": {"x": np.zeros((8, 2)), "y": np.arange(8) % 2, "client": np.array(1)},
    "complex clients": {"x": np.zeros((8, 2)), "y": np.arange(8) % 2, "client": np.zeros(8, complex)},
    "clients of two columns": {"x": np.zeros((8, 2)), "y": np.arange(8) % 2, "client": np.zeros((8, 2), int)},
    "too few clients": {"x": np.zeros((8, 2)), "y": np.arange(8) % 2, "client": np.zeros(3, int)},
    "a huge label": {"x": np.zeros((8, 2)), "y": np.array([0, 1, 10**12, 0, 1, 0, 1, 0])},
    "a negative label": {"x": np.zeros((8, 2)), "y": np.array([0, 1, -1, 0, 1, 0, 1, 0])},
    "a label beyond int64": {"x": np.zeros((8, 2)), "y": np.full(8, 2**64 - 1, dtype=np.uint64)},
    "labels of three dimensions": {"x": np.zeros((8, 2)), "y": np.zeros((8, 2, 2), int)},
    "an x_test of no dimension": {"x": np.zeros((8, 2)), "y": np.arange(8) % 2, "x_test": np.array(1.0), "y_test": 0},
}


@pytest.mark.parametrize("model", ["softmax", "ridge"])
@pytest.mark.parametrize("odd", ODD_ARRAYS)
def test_arrays_that_are_no_data_are_refused(tmp_path: Path, cli: Command, odd: str, model: str) -> None:
    np.savez(tmp_path / "data.npz", **ODD_ARRAYS[odd])
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'[data]\nname = "npz"\nfile = "{tmp_path / "data.npz"}"\nclients = 2\npreprocessing = "fixed"\n'
        f'[model]\nkind = "{model}"\n[stop]\nmax_rounds = 1\n'
    )
    check_one_line(cli("train", spec, "--run", tmp_path / "run"), 2)
    assert not (tmp_path / "run" / "run.db").exists()


ODD_TABLES = {
    "a huge label": "c,a,y\n" + "one,1,0\ntwo,2,1000000000000\n",
    "a label beyond int64": "c,a,y\none,1,0\ntwo,2,1e30\n",
    "a number beyond float": "c,a,y\none,1,0\ntwo,1e999,1\n",
    "a field of a megabyte": "c,a,y\none,1,0\ntwo,2," + "1" * 1_000_000 + "\n",
    "a byte of zero": "c,a,y\none,1,0\ntwo,\0,1\n",
    "no rows": "c,a,y\n",
    "nothing": "",
}


@pytest.mark.parametrize("odd", ODD_TABLES)
def test_tables_that_are_no_data_are_refused(tmp_path: Path, cli: Command, odd: str) -> None:
    (tmp_path / "data.csv").write_text(ODD_TABLES[odd])
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'[data]\nname = "table"\nfile = "{tmp_path / "data.csv"}"\nlabel = "y"\nclient = "c"\nclients = 2\n'
        'partition = "given"\npreprocessing = "fixed"\n[model]\nkind = "softmax"\n[stop]\nmax_rounds = 1\n'
    )
    check_one_line(cli("train", spec, "--run", tmp_path / "run"), 2, "data.csv")
    assert not (tmp_path / "run" / "run.db").exists()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_is_no_file_and_nothing_waits_for_it(fifo: Path, exported: Path, tmp_path: Path, cli: Command) -> None:
    run, model = exported / "run", exported / "m.safetensors"
    check_one_line(cli("verify", run, "--head", fifo), 2, str(fifo))
    check_one_line(cli("verify", fifo), 2)
    check_one_line(cli("predict", fifo, exported / "rows.npz"), 2)
    check_one_line(cli("train", fifo, "--run", tmp_path / "run"), 2, str(fifo))
    check_one_line(cli("restore", fifo, tmp_path / "back"), 2, str(fifo))
    check_one_line(cli("forget", run, "--clients", "client-001", "--records", fifo), 2, str(fifo))
    os.mkfifo(tmp_path / "rows.npz")
    check_one_line(cli("predict", model, tmp_path / "rows.npz"), 2)
    os.mkfifo(tmp_path / "rows.csv")
    check_one_line(cli("predict", model, tmp_path / "rows.csv"), 2)


class _FailingConnection:
    """Database connection whose disk fails."""

    def __init__(self, message: str, code: int) -> None:
        self.error = sqlite3.DatabaseError(message)
        self.error.sqlite_errorcode = code  # type: ignore[misc]

    def execute(self, *_: Any) -> Any:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("disk I/O error", sqlite3.SQLITE_IOERR),
        ("database disk image is malformed", sqlite3.SQLITE_IOERR_SHORT_READ),
        ("database disk image is malformed", sqlite3.SQLITE_CORRUPT),
    ],
)
def test_a_disk_that_fails_is_not_called_a_damaged_run(
    exported: Path, message: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code == sqlite3.SQLITE_CORRUPT:  # only reading the file shows whether the disk fails
        monkeypatch.setattr("sifu.store.database._is_readable", lambda path: False)
    with RunReader(exported / "run") as reader:
        reader.connection.close()
        reader.connection = _FailingConnection(message, code)  # type: ignore[assignment]
        with pytest.raises(DiskError, match="the disk failed"):
            reader.query("SELECT 1")


def test_a_database_that_is_malformed_is_damaged(exported: Path) -> None:
    """Negative control: if the disk returns every byte, the run is reported as damaged."""
    with RunReader(exported / "run") as reader:
        reader.connection.close()
        reader.connection = _FailingConnection("database disk image is malformed", sqlite3.SQLITE_CORRUPT)  # type: ignore[assignment]
        with pytest.raises(RunDamagedError, match="Restore it from a backup"):
            reader.query("SELECT 1")
