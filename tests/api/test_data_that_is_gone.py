"""Requests after data were deleted: a request needs the remaining clients' data only if no statistics are kept."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command, SameNoise, spec_for
from sifu.errors import InputError, SifuWarning

NAMES = ("budapest", "cleveland", "long-beach", "va", "zurich")


def rows_of(names: tuple[str, ...] = NAMES) -> tuple[Any, Any, Any]:
    """Return twelve rows of each client; clients alternate, so that each one's rows lie between others' rows."""
    rng = np.random.default_rng(3)
    client = np.array([name for _ in range(12) for name in NAMES])
    y = rng.integers(0, 2, client.size)
    x = rng.normal(size=(client.size, 4)) + y[:, None]
    stays = np.isin(client, names)
    return x[stays], y[stays], client[stays]


def write_npz(path: Path, names: tuple[str, ...] = NAMES) -> None:
    x, y, client = rows_of(names)
    np.savez(path, x=x, y=y, client=client)


def write_csv(path: Path, names: tuple[str, ...] = NAMES) -> None:
    x, y, client = rows_of(names)
    lines = [
        ",".join([*map(repr, map(float, row)), "yes" if label else "no", name])
        for row, label, name in zip(x, y, client, strict=True)
    ]
    path.write_text("\n".join(["a,b,c,d,label,client", *lines]) + "\n")


FORMATS: dict[str, Callable[..., None]] = {"npz": write_npz, "table": write_csv}


def trained(
    folder: Path, method: str, kind: str = "npz", *, held_out: float = 0.0, noise: Any = None, **sections: Any
) -> tuple[sifu.Run, Path]:
    """Train a run on a separate file, which the tests then change."""
    source = folder / ("rows.npz" if kind == "npz" else "rows.csv")
    FORMATS[kind](source)
    data: dict[str, Any] = {"name": kind, "file": str(source), "partition": "given", "preprocessing": "fixed"}
    if kind == "table":
        data |= {"label": "label", "client": "client", "classes": "no,yes", "held_out": held_out}
    spec = spec_for(method, **sections)
    spec |= {"data": data, "model": spec.get("model", {}) | {"outputs": 2}, "stop": {"target": 0.0, "max_rounds": 4}}
    return sifu.train(spec, run=folder / "run", noise=noise), source


def without(name: str) -> tuple[str, ...]:
    return tuple(other for other in NAMES if other != name)


def again(run: sifu.Run, noise: Any = None) -> sifu.Run:
    """Open the run as another process does."""
    return sifu.open_run(run.folder, noise=noise)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("method", ["closed_form", "scratch", "sifu", "groups"])
def test_a_leaver_whose_rows_are_gone_is_forgotten_as_if_they_were_there(
    tmp_path: Path, method: str, kind: str, same_groups: None
) -> None:
    """Rows are removed from the middle of the file; the models equal those of the complete file bit for bit."""
    models = []
    for name in ("as it was", "rows gone"):
        (tmp_path / name).mkdir()
        run, source = trained(tmp_path / name, method, kind, noise=SameNoise())
        if name == "rows gone":
            FORMATS[kind](source, without("long-beach"))
        (outcome,) = again(run, SameNoise()).forget(["long-beach"], method=method, sigma=0.5, level="none")
        models.append(run.reader().load_model(run.reader().tip))
        assert again(run).verify().problems == []
        assert (outcome.accuracy is None) == (method == "closed_form")  # only `sifu evaluate` measures a head
    np.testing.assert_array_equal(*models)


@pytest.mark.parametrize("gone", ["another client's rows", "the file", "the folder"])
def test_a_head_with_kept_statistics_needs_no_data_at_all(tmp_path: Path, gone: str) -> None:
    (tmp_path / "data").mkdir()
    run, source = trained(tmp_path / "data", "closed_form", "table")
    if gone == "another client's rows":
        write_csv(source, without("va"))
    else:
        source.unlink()
    (tmp_path / "data" / "run").rename(tmp_path / "run")
    if gone == "the folder":
        (tmp_path / "data").rmdir()
    run = sifu.open_run(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the file is not read, so no warning is issued
        (outcome,) = run.forget(["long-beach"], level="exact")
    assert (outcome.level, outcome.rounds, outcome.accuracy) == ("exact", 0, None)
    assert run.verify().problems == []
    # The head equals the head of a federation that never had the client.
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "rows.csv"
    write_csv(other, without("long-beach"))
    spec = run.spec.to_mapping()
    never = sifu.train(spec | {"data": spec["data"] | {"file": str(other)}}, run=tmp_path / "never")
    np.testing.assert_array_equal(model_of(run), model_of(never))
    assert not np.array_equal(model_of(run), model_of(sifu.open_run(tmp_path / "never"))[::-1])


def test_a_request_on_kept_statistics_loads_no_training_library(tmp_path: Path) -> None:
    """A request on kept statistics does not import torch, which takes longer to load than the request itself."""
    run, source = trained(tmp_path, "closed_form", "table")
    source.unlink()
    program = (
        "import sys, sifu; (outcome,) = sifu.open_run(sys.argv[1]).forget(['long-beach'], level='exact'); "
        "print(outcome.level, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(run.folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["exact", "False"]


def model_of(run: sifu.Run) -> Any:
    with run.reader() as reader:
        return reader.load_model(reader.tip)


@pytest.mark.parametrize("method", ["closed_form", "scratch"])
def test_the_data_of_those_who_stay_are_needed_where_nothing_is_kept(tmp_path: Path, method: str) -> None:
    """Negative control: without kept statistics a remaining client is asked, and its rows must match the record."""
    keep = {"keep": {"statistics": "sum"}} if method == "closed_form" else {}
    run, source = trained(tmp_path, method, **keep)
    before = model_of(run)
    write_npz(source, without("va"))
    with pytest.raises(InputError, match="'va' are missing"):
        again(run).forget(["long-beach"], method=method, level="none")
    np.testing.assert_array_equal(model_of(run), before)
    again(run).forget(["va"], method=method, level="none")
    x, y, client = rows_of(without("va"))
    np.savez(source, x=x + (client == "zurich")[:, None], y=y, client=client)
    with pytest.raises(InputError, match=r"are not those the run was made with.*zurich|'zurich' are not those"):
        again(run).forget(["long-beach"], method=method, level="none")


def test_records_need_what_their_client_has_left(tmp_path: Path) -> None:
    run, source = trained(tmp_path, "closed_form")
    write_npz(source, without("va"))
    with pytest.raises(InputError, match="'va' are missing"):
        again(run).forget(["va"], records=[1], level="none")
    (outcome,) = again(run).forget(["cleveland"], records=[1])
    assert outcome.level == "exact"
    assert again(run).verify().problems == []


def test_clients_handed_over_from_python_may_leave_out_who_left(tmp_path: Path) -> None:
    x, y, client = rows_of()
    data = {name: (x[client == name], y[client == name]) for name in NAMES}
    run = sifu.train({"stop": {"target": 0.0, "max_rounds": 3}}, clients=data, run=tmp_path / "run")
    del data["budapest"]
    run = sifu.open_run(run.folder, clients=data)
    run.forget(["budapest"], method="scratch", level="none")
    run.forget(["zurich"], method="scratch", level="none")
    assert run.verify().problems == []
    with pytest.raises(InputError, match="'budapest' are missing"):
        sifu.open_run(run.folder, clients=data).complete_engine()


def test_a_client_that_joined_from_a_file_leaves_without_it(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, "closed_form")
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "new.npz", x=rng.normal(size=(9, 4)), y=rng.integers(0, 2, 9))
    run.join(file=tmp_path / "new.npz", name="geneva")
    (tmp_path / "new.npz").unlink()
    again(run).forget(["va"])
    (outcome,) = again(run).forget(["geneva"])
    assert outcome.level == "exact"
    assert again(run).verify().problems == []


def test_the_command_line_forgets_with_the_data_gone(tmp_path: Path, cli: Command) -> None:
    run, source = trained(tmp_path, "closed_form")
    source.unlink()
    answer = cli("forget", run.folder, "--clients", "va")
    assert answer.code == 0, answer.err
    assert f"not measured; sifu evaluate {run.folder} measures it" in " ".join(answer.out.split())


@pytest.mark.parametrize("damage", ["gone", "folder", "other columns", "not a table", "no permission"])
@pytest.mark.parametrize("method", ["closed_form", "scratch"])
def test_an_unreadable_file_of_held_out_rows_is_one_warning(
    tmp_path: Path, method: str, damage: str, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is executed without figures on held-out rows, and one line says why."""
    tests = tmp_path / "tests.csv"
    write_csv(tests)
    train, source = spec_for(method), tmp_path / "rows.csv"
    write_csv(source)
    data = {"name": "table", "file": str(source), "test_file": str(tests), "partition": "given", "label": "label"}
    data |= {"client": "client", "classes": "no,yes", "preprocessing": "fixed"}
    train |= {"data": data, "model": train.get("model", {}) | {"outputs": 2}, "stop": {"target": 0.0, "max_rounds": 2}}
    run = sifu.train(train, run=tmp_path / "run")
    assert run.status().held_out is not None
    if damage in ("gone", "folder"):
        tests.unlink()
    if damage == "folder":
        tests.mkdir()
    if damage in ("other columns", "not a table"):
        tests.write_bytes(b"x,y\n1,2\n" if damage == "other columns" else b"\xff\x00" * 40)
    if damage == "no permission":
        read = Path.open

        def refused(path: Path, *given: Any, **named: Any) -> Any:
            if path == tests:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, *given, **named)

        monkeypatch.setattr(Path, "open", refused)
    answer = cli("forget", run.folder, "--clients", "va", "--method", method)
    assert answer.code == 0, answer.err
    told = " ".join(answer.err.split())
    assert told.count("no accuracy is measured on held-out rows") == 1, answer.err
    assert "tests.csv" in told.replace(" ", "")
    assert "Traceback" not in told
    assert again(run).verify().problems == []
    assert again(run).status().held_out is None
    audited = cli("audit", run.folder)
    assert audited.code == 0, audited.err
    assert "attacks that need held-out rows were left out" in " ".join(audited.out.split())
    assert "Traceback" not in audited.err


@pytest.mark.parametrize("change", ["nothing", "values", "order", "gone"])
def test_held_out_rows_of_a_changed_file_are_not_measured(tmp_path: Path, change: str) -> None:
    """The request needs no row of the file and is executed; only a file with the recorded rows is measured."""
    run, source = trained(tmp_path, "closed_form", "table", held_out=0.25)
    assert run.status().held_out is not None
    header, *lines = source.read_text().splitlines()
    if change == "values":
        lines = [line if line.endswith("long-beach") else f"0.5,{line.split(',', 1)[1]}" for line in lines]
    if change == "order":
        lines = lines[::-1]
    source.write_text("\n".join([header, *lines]) + "\n")
    if change == "gone":
        source.unlink()
    said = "there is no file" if change == "gone" else "the .* not those the run"
    noticed = pytest.warns(SifuWarning, match=f"no accuracy is measured on held-out rows: {said}")
    with warnings.catch_warnings() if change == "nothing" else noticed:
        (outcome,) = again(run).forget(["long-beach"], level="exact")
    assert (outcome.level, outcome.accuracy) == ("exact", None)
    assert (outcome.held_out is not None) == (outcome.held_out_before is not None) == (change == "nothing")
    assert again(run).verify().problems == []
