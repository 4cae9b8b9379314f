"""Exported graphs on random specs and random rows: they give the same answers as `sifu predict`."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

import sifu
from onnx_tools import answers_of_the_graph, description_in
from sifu.errors import InputError

pytest.importorskip("onnx")

Rng = np.random.Generator
ROWS, NEW_ROWS = 24, 60
HEADS = ("ridge", "softmax", "logistic", "least_squares", "ridge regression")
MAPS = ("none", "random_fourier")
CASES = [(head, features) for head in HEADS for features in MAPS] + [("mlp", "none")]


def trained(folder: Path, rng: Rng, head: str, features: str, data: dict[str, Any]) -> sifu.Run:
    kind = head.split()[0]
    spec: dict[str, Any] = {
        "data": data | {"partition": "given", "preprocessing": "fixed"},
        "model": {"kind": kind, "dtype": "float64" if kind == "ridge" else str(rng.choice(["float32", "float64"]))},
        "local": {"rate": 0.1, "steps": 2},
        "stop": {"max_rounds": 1, "target": 0.0},
        "regularity": {"kind": "assumed" if kind in ("mlp", "cnn") else "measured"},
        # A small norm: most rows are scaled down to it.
        "features": {"kind": features, "norm": float(rng.choice([0.5, 3.0])), "count": 8 * (features != "none")},
    }
    if head == "ridge regression":
        spec["ridge"] = {"task": "regression", "shift": 0.5, "scale": 2.0}
    return sifu.train(spec, run=folder / "run")


def labels(rng: Rng, head: str) -> Any:
    if head in ("least_squares", "ridge regression"):
        return rng.random(ROWS) + 0.25
    classes = 2 if head == "logistic" else 3
    return np.concatenate([np.arange(classes), rng.integers(0, classes, ROWS - classes)])


def check(
    run: sifu.Run, file: Path, inputs: dict[str, Any] | None = None, own: Callable[[], nn.Module] | None = None
) -> None:
    """Check that scores agree up to rounding, and decisions wherever the margin exceeds rounding.

    Without `inputs`, the graph receives the rows of a table as `sifu predict` codes them.
    """
    model = sifu.load_model(run.export(file.parent / "m.safetensors"), module=own)
    rows = model.predict_rows(file)
    scores = np.array([list(row.scores.values()) for row in rows])
    single = model.description["dtype"] == "float32" or model.kind in ("cnn", "python")
    close = (1e-5 if single else 1e-10) * max(1.0, np.abs(scores).max())
    assert np.ptp(scores, axis=0).max() > 10 * close  # constant scores would agree with anything
    sizes = np.sort(scores, axis=1)
    separate = sizes[:, -1] - sizes[:, -2] if scores.shape[1] > 1 else np.abs(scores[:, 0])
    classes = model.description["classes"]
    graph = run.export(file.parent / "m.onnx")
    assert description_in(graph) == model.description
    for answer in answers_of_the_graph(graph, inputs or {"x": model.inputs_of(file)[0]}):
        np.testing.assert_allclose(answer["scores"], scores, rtol=0.0, atol=close)
        decided = answer["prediction"].reshape(len(rows)).tolist()
        if classes and answer["prediction"].dtype == np.int64:
            decided = [classes[said] if said < len(classes) else str(said) for said in decided]
        for row, said, distance in zip(rows, decided, separate, strict=True):
            if isinstance(row.prediction, float):
                assert math.isclose(said, row.prediction, rel_tol=0.0, abs_tol=3 * close)
            elif distance > 2 * close:
                assert said == row.prediction


@pytest.mark.parametrize("form", ["rows", "bytes", "grey", "colour"])
@pytest.mark.parametrize(("head", "features"), CASES)
def test_arrays(tmp_path: Path, head: str, features: str, form: str) -> None:
    rng = np.random.default_rng([CASES.index((head, features)), len(form)])
    shape = {"rows": (7,), "bytes": (7,), "grey": (3, 5), "colour": (4, 5, 3)}[form]

    def samples(count: int) -> Any:
        if form == "rows":
            return rng.normal(size=(count, *shape)) * rng.choice([0.01, 1.0, 30.0], (count, 1))
        return rng.integers(0, 256, (count, *shape), dtype=np.uint8)

    clients = np.repeat(np.arange(4), ROWS // 4)
    np.savez(tmp_path / "own.npz", x=samples(ROWS), y=labels(rng, head), client=clients)
    run = trained(tmp_path, rng, head, features, {"name": "npz", "file": str(tmp_path / "own.npz")})
    x = samples(NEW_ROWS)
    np.savez(tmp_path / "new.npz", x=x)
    check(run, tmp_path / "new.npz", {"x": x})


@pytest.mark.parametrize("normalise", ["unit", "standard"])
@pytest.mark.parametrize("kind", ["softmax", "cnn"])
def test_bytes_of_a_named_set(tmp_path: Path, kind: str, normalise: str) -> None:
    spec = {
        "data": {"name": "digits", "clients": 4, "normalise": normalise},
        "model": {"kind": kind},
        "local": {"rate": 0.05},
        "regularity": {"kind": "assumed"},
        "stop": {"max_rounds": 3, "target": 0.0},
    }
    from sifu.data import load

    x = load("digits").x_test[:NEW_ROWS]
    np.savez(tmp_path / "new.npz", x=x)
    check(sifu.train(spec, run=tmp_path / "run"), tmp_path / "new.npz", {"x": x})


COLUMNS = {
    "age, years": lambda rng, count: rng.normal(50, 30, count),
    "scores": lambda rng, count: rng.normal(0, 1, count),
    "ward": lambda rng, count: rng.choice(["A", "B", "C d"], count),
    "smokes": lambda rng, count: rng.choice(["1", "0", "true", "False", "1.0"], count),
    "été": lambda rng, count: rng.normal(0, 1e-4, count),
}
HOLES = {"age, years": ["?", "", "NA"], "ward": ["n/a", "", "None"]}
TABLE = {
    "label": "ill", "client": "hospital", "classes": "healthy=0, ill=1|2", "id": "patient",
    "categories": "ward=A,B,C d; smokes=0,1", "scale": '"age, years"=50,10; été=0,0.001',
    "missing": '"age, years"=45; ward=',
}  # fmt: skip


def written(rng: Rng, path: Path, count: int, y: Any = None) -> None:
    """Write a table with missing values."""
    columns: dict[str, list[Any]] = {name: list(draw(rng, count)) for name, draw in COLUMNS.items()}
    for name, words in HOLES.items():
        columns[name] = [rng.choice(words) if rng.random() < 0.2 else value for value in columns[name]]
    others: dict[str, Any] = {"patient": [f"P{row:03}" for row in range(count)]}
    if y is not None:
        others |= {"hospital": [f"h{row % 4}" for row in range(count)], "ill": y}
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*columns, *others])
        table.writerows(zip(*columns.values(), *others.values(), strict=True))


@pytest.mark.parametrize(("head", "features"), CASES)
def test_tables(tmp_path: Path, head: str, features: str) -> None:
    rng = np.random.default_rng([CASES.index((head, features)), 99])
    y = labels(rng, head)
    written(rng, tmp_path / "own.csv", ROWS, y)
    classes = {} if y.dtype.kind == "i" else {"classes": ""}
    data = TABLE | classes | {"name": "table", "file": str(tmp_path / "own.csv")}
    run = trained(tmp_path, rng, head, features, data)
    written(rng, tmp_path / "new.csv", NEW_ROWS)
    check(run, tmp_path / "new.csv")
    model = sifu.load_model(tmp_path / "m.safetensors")
    assert [row.id for row in model.predict_rows(tmp_path / "new.csv")] == [f"P{row:03}" for row in range(NEW_ROWS)]


def own_module(rng: Rng, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    """Return a function that makes a random small network for samples of `shape`, usually with batch normalisation."""
    width, norm, activation = int(rng.integers(3, 9)), rng.random() < 0.7, rng.choice([nn.Tanh, nn.ReLU, nn.GELU])
    affine, drops = bool(rng.random() < 0.5), bool(rng.random() < 0.5)

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        if len(shape) == 3:
            layers += [nn.Conv2d(shape[0], 4, 3, padding=1), *([nn.BatchNorm2d(4)] if norm else []), nn.ReLU()]
        size = math.prod(shape) * 4 // shape[0] if len(shape) == 3 else math.prod(shape)
        layers += [nn.Flatten(), nn.Linear(size, width), *([nn.BatchNorm1d(width, affine=affine)] if norm else [])]
        return nn.Sequential(*layers, activation(), *([nn.Dropout(0.3)] if drops else []), nn.Linear(width, 3))

    return make


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
@pytest.mark.parametrize("form", ["rows", "grid", "images", "table", "own.npz"])
def test_modules_of_ones_own(tmp_path: Path, form: str, seed: int) -> None:
    """Also with batch normalisation, the recorded accuracy, `predict` and the graph use the same statistics."""
    rng = np.random.default_rng([seed, len(form)])
    shape = {"rows": (7,), "grid": (3, 4), "images": (2, 5, 4), "table": (10,), "own.npz": (3, 5, 4)}[form]
    make, y = own_module(rng, shape), labels(rng, "softmax")
    dtype = str(rng.choice(["float32", "float64"]))
    spec: dict[str, Any] = {
        "model": {"dtype": dtype}, "local": {"rate": 0.1, "steps": 2},
        "stop": {"max_rounds": 2, "target": 0.0}, "regularity": {"kind": "assumed"},
    }  # fmt: skip
    data = {"partition": "given", "preprocessing": "fixed"}
    if form == "table":
        written(rng, tmp_path / "own.csv", ROWS, y)
        run = sifu.train(
            spec | {"data": TABLE | data | {"name": "table", "file": str(tmp_path / "own.csv")}},
            run=tmp_path / "run", model=make,
        )  # fmt: skip
        file, inputs = tmp_path / "new.csv", None
        written(rng, file, NEW_ROWS)
    else:
        stored = (5, 4, 3) if form == "own.npz" else shape  # channels last, stored as bytes
        draw = (lambda n: rng.integers(0, 256, (n, *stored), dtype=np.uint8)) if form == "own.npz" else (
            lambda n: rng.normal(size=(n, *stored)))  # fmt: skip
        x, file = draw(ROWS), tmp_path / "new.npz"
        if form == "own.npz":
            np.savez(tmp_path / "own.npz", x=x, y=y, client=np.arange(ROWS) % 4)
            spec["data"] = data | {"name": "npz", "file": str(tmp_path / "own.npz")}
            run = sifu.train(spec, run=tmp_path / "run", model=make)
        else:
            clients = {f"c{k}": (x[k::4], y[k::4]) for k in range(4)}
            run = sifu.train(spec, run=tmp_path / "run", model=make, clients=clients)
            module = sifu.load_model(run.export(tmp_path / "m.safetensors"), module=make)
            correct = sum(int((module.predict(x) == y).sum()) for x, y in clients.values())
            assert run.status().accuracy == pytest.approx(correct / ROWS)
        inputs = {"x": draw(NEW_ROWS)}
        np.savez(file, **inputs)
    check(run, file, inputs, make)


def test_what_predict_refuses_has_no_prediction_in_the_graph(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    heads = [("ridge", "none"), ("ridge", "random_fourier"), ("ridge regression", "none"), ("softmax", "none")]
    for number, (head, features) in enumerate(heads):
        folder = tmp_path / str(number)
        folder.mkdir()
        client = np.arange(ROWS) % 4
        np.savez(folder / "own.npz", x=rng.random((ROWS, 7)), y=labels(rng, head), client=client)
        run = trained(folder, rng, head, features, {"name": "npz", "file": str(folder / "own.npz")})
        x = np.array([[0.5] * 7, [1e308] * 7, [math.nan] * 7, [math.inf] * 7])
        answer = answers_of_the_graph(run.export(folder / "m.onnx"), {"x": x})[0]
        assert np.isfinite(answer["scores"][0]).all()
        assert np.isnan(answer["scores"][1:]).all()
        refused = answer["prediction"][1:].ravel()
        assert np.isnan(refused).all() if head == "ridge regression" else (refused == -1).all()


def test_control_rows_are_shortened_in_the_graph(tmp_path: Path) -> None:
    """Rows longer than the norm get the scores of their direction; a linear head without scaling gives more than ten
    times as much.
    """
    rng = np.random.default_rng(7)
    np.savez(tmp_path / "own.npz", x=rng.random((ROWS, 7)), y=labels(rng, "ridge"), client=np.arange(ROWS) % 4)
    run = trained(tmp_path, rng, "ridge", "none", {"name": "npz", "file": str(tmp_path / "own.npz")})
    x = 100.0 * rng.normal(size=(NEW_ROWS, 7))
    path = run.export(tmp_path / "m.onnx")
    near, far = (answers_of_the_graph(path, {"x": rows})[0]["scores"] for rows in (x, 10.0 * x))
    np.testing.assert_allclose(near, far, atol=1e-5)
    head = load_file(run.export(tmp_path / "m.safetensors"))
    assert np.abs(x @ head["weight"] + head["bias"] - near).max() > 10.0 * np.abs(near).max()


def test_where_the_data_file_is_gone_the_graph_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    np.savez(tmp_path / "own.npz", x=rng.random((ROWS, 7)), y=labels(rng, "softmax"), client=np.arange(ROWS) % 4)
    run = trained(tmp_path, rng, "softmax", "none", {"name": "npz", "file": str(tmp_path / "own.npz")})
    (tmp_path / "own.npz").unlink()
    with pytest.raises(InputError, match="put the data file back"):
        run.export(tmp_path / "m.onnx")
    assert sifu.load_model(run.export(tmp_path / "m.safetensors")).predict(np.zeros((2, 7))).shape == (2,)
