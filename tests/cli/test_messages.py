"""Messages that once misled: each names the object, the value found and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command

PLAIN = "hospital,age,pressure,disease\nnorth,50,130,False\nsouth,60,150,True\nnorth,70,120,True\nsouth,30,110,False\n"
SPEC = {
    "name": "table", "partition": "given", "label": "disease", "client": "hospital", "classes": "False,True",
    "scale": "age=50,20; pressure=130,20",
}  # fmt: skip
WRONG: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "words in the label": (PLAIN, {"classes": ""}, ["line 2 (row 0)", "'disease' holds 'False'", "in data.classes"]),
    "a word that is not listed": (PLAIN, {"classes": "no,yes"}, ["'False', which data.classes", "no, yes"]),
    "an empty client": (
        PLAIN.replace("north,70", ",70"), {}, ["line 4 (row 2)", "'hospital', the client, is empty", "name the client"]
    ),
    "a missing value": (
        PLAIN.replace("120", ""), {}, ["line 4 (row 2): column 'pressure' holds ''", 'data.missing = "pressure=NUMBER"']
    ),
    "semicolons": (PLAIN.replace(",", ";"), {"label": "ill"}, ["separated by commas", "no column 'ill'"]),
    "a typo in the name": (PLAIN, {"name": "tabel"}, ["data.name must be one of", "'tabel', did you mean table?"]),
    "a typo in a column": (PLAIN, {"scale": "aeg=50,20"}, ["no column 'aeg', which data.scale", "it has hospital"]),
    "too many outputs": (PLAIN, {"outputs": 3}, ["model.outputs = 3, but data.classes lists 2: leave"]),
}  # fmt: skip


def write_spec(folder: Path, keys: dict[str, Any]) -> Path:
    keys = dict(keys)
    model = {"kind": "ridge"} | ({"outputs": keys.pop("outputs")} if "outputs" in keys else {})
    lines = ["[data]", *(f"{key} = {value!r}" for key, value in keys.items())]
    lines += ["[model]", *(f"{key} = {value!r}" for key, value in model.items())]
    (folder / "spec.toml").write_text("\n".join(lines) + "\n")
    return folder / "spec.toml"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_table_or_its_spec(tmp_path: Path, cli: Command, name: str) -> None:
    text, keys, words = WRONG[name]
    (tmp_path / "heart.csv").write_text(text)
    spec = write_spec(tmp_path, SPEC | {"file": str(tmp_path / "heart.csv")} | keys)
    answer = cli("train", spec, "--run", tmp_path / "run")
    assert answer.code == 2
    said = " ".join(answer.err.split())
    assert [word for word in words if word not in said] == []
    assert not (tmp_path / "run").exists()


def test_a_semicolon_file_is_read(tmp_path: Path, cli: Command) -> None:
    (tmp_path / "heart.csv").write_text(PLAIN.replace(",", ";"))
    spec = write_spec(tmp_path, SPEC | {"file": str(tmp_path / "heart.csv"), "separator": ";"})
    assert cli("train", spec, "--run", tmp_path / "run").code == 0


@pytest.mark.parametrize(("trained", "newcomer"), [("npz", "csv"), ("csv", "npz")])
def test_a_newcomer_in_another_format_is_told_which_one(
    tmp_path: Path, cli: Command, trained: str, newcomer: str
) -> None:
    (tmp_path / "data.csv").write_text(PLAIN)
    np.savez(tmp_path / "data.npz", x=np.eye(4), y=np.arange(4) % 2, client=np.array(list("aabb")))
    npz: dict[str, Any] = {"name": "npz", "partition": "given"}
    spec = write_spec(tmp_path, (SPEC if trained == "csv" else npz) | {"file": str(tmp_path / f"data.{trained}")})
    assert cli("train", spec, "--run", tmp_path / "run").code == 0
    answer = cli("join", tmp_path / "run", "--file", tmp_path / f"data.{newcomer}", "--client", "new")
    said = " ".join(answer.err.split())
    assert answer.code == 2
    assert "zip" not in said
    expected = "is a table, but this run was not trained from one: give an .npz" if trained == "npz" else "give a .csv"
    assert expected in said


@pytest.mark.parametrize(("command", "extra"), [("serve", "extra console"), ("export", "extra onnx")])
def test_help_shows_what_is_in_brackets(cli: Command, command: str, extra: str) -> None:
    assert extra in cli(command, "--help").out


def test_a_client_that_loses_records_is_not_counted_as_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If one of two clients loses a record, both are left."""
    (tmp_path / "heart.csv").write_text(PLAIN)
    data = SPEC | {"file": str(tmp_path / "heart.csv"), "preprocessing": "fixed"}
    run = sifu.train({"data": data, "model": {"kind": "ridge"}}, run=tmp_path / "run")
    run.forget(["north"], records=[0])
    assert "only client left" not in caplog.text
    run.forget(["north"])
    assert "south is the only client left" in caplog.text
