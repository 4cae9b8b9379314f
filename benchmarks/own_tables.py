"""User tables from training to the exported model, compared with scikit-learn on the pooled rows.

    python benchmarks/own_tables.py --rows 200000 --columns 1000

Five tables: hospitals with missing values and categories, a regression, a column of texts, a wide table and a long one.
For each, a ridge head in closed form is trained, forgets a client and a record, and is exported. The output gives the
held-out figure after both requests, scikit-learn's figure on the remaining rows of all clients together, the largest
difference between the scores of the exported graph and of `sifu predict` on the raw file, and the processor seconds of
each step. It needs the extra `onnx`; onnxruntime runs the graph, or onnx's own evaluator if onnxruntime is not
installed.

Texts need the extra `transformers`; without it their table is left out. A tiny model with random weights reads them, or
the model in the folder `--model`. An ONNX graph cannot hold a tokenizer, so `sifu predict` is compared with the
exported head applied to the features that the library transformers computes.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from texts.small_model import save_text_model

import sifu
from sifu.core.spec import Spec
from sifu.run.clients_and_engine import clients_from_spec

CLIENTS = 8
WORDS = ("good", "fine", "bad", "poor", "film", "book", "song", "the", "was", "very", "rather", "not", "and", "long")
TOKENS = 16


@dataclass
class Table:
    """Table with its spec, and its features for scikit-learn, encoded without sifu."""

    name: str
    columns: dict[str, list[Any]]
    x: np.ndarray
    y: np.ndarray
    data: dict[str, Any]
    ridge: dict[str, Any] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        """True if the label is a number to predict."""
        return self.ridge.get("task") == "regression"

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the file and return the spec."""
        path = folder / f"{self.name}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(zip(*self.columns.values(), strict=True))
        roles = {"name": "table", "partition": "given", "label": "label", "client": "site", "id": "id"}
        data = {**roles, "file": str(path), "held_out": 0.2, "preprocessing": "fixed", **self.data}
        return {"data": data, "model": {"kind": "ridge"}, "ridge": self.ridge, "features": self.features}


def owners(rows: int) -> dict[str, list[str]]:
    """Return the columns that name the client and the identity of each row."""
    return {"site": [f"s{row % CLIENTS}" for row in range(rows)], "id": [f"P{row}" for row in range(rows)]}


def numbers(name: str, rows: int, columns: int, seed: int) -> Table:
    """Return a classification table with only numbers."""
    draw = np.random.default_rng(seed)
    x = np.round(draw.normal(size=(rows, columns)), 3)
    score = x @ draw.normal(size=columns) / np.sqrt(columns)
    y = (score + 0.5 * draw.normal(size=rows) > 0).astype(int)
    names = [f"x{number}" for number in range(columns)]
    cells = {key: x[:, place].tolist() for place, key in enumerate(names)}
    scale = "; ".join(f"{key}=0,1" for key in names)
    return Table(name, {**owners(rows), **cells, "label": y.tolist()}, x, y, {"scale": scale, "classes": "0,1"})


def hospitals(rows: int = 4000) -> Table:
    """Return a table with a category and a missing value in about a tenth of the rows."""
    draw = np.random.default_rng(1)
    age, pressure, ward = draw.integers(20, 90, rows), draw.integers(90, 190, rows), draw.integers(0, 3, rows)
    missing = draw.random(rows) < 0.1
    y = (age / 20 + pressure / 40 + 0.5 * (ward == 2) + draw.normal(0, 0.8, rows) > 6.5).astype(int)
    cells = {
        **owners(rows),
        "age": age.tolist(),
        "pressure": ["" if gone else int(value) for gone, value in zip(missing, pressure, strict=True)],
        "ward": [("A", "B", "C")[number] for number in ward],
        "label": [("healthy", "ill")[number] for number in y],
    }
    data = {"scale": "age=50,20; pressure=130,20", "categories": "ward=A,B,C", "missing": "pressure=130"}
    filled = np.where(missing, 130, pressure)
    x = np.column_stack([(age - 50) / 20, (filled - 130) / 20, missing, ward == 0, ward == 1, ward == 2])
    return Table("hospitals", cells, x, y, {**data, "classes": "healthy,ill"})


def regression(rows: int = 4000) -> Table:
    """Return a table whose label is a number."""
    draw = np.random.default_rng(2)
    x = np.round(draw.normal(size=(rows, 5)), 3)
    y = np.round(50 + x @ np.array([3.0, -2.0, 1.0, 0.5, 0.0]) + draw.normal(size=rows), 3)
    cells = {f"x{place}": x[:, place].tolist() for place in range(5)}
    data = {"scale": "; ".join(f"{name}=0,1" for name in cells)}
    ridge = {"task": "regression", "shift": 50.0, "scale": 10.0}
    return Table("regression", {**owners(rows), **cells, "label": y.tolist()}, x, y, data, ridge)


def texts(folder: Path, rows: int = 4000) -> Table:
    """Return a table with a column of texts for the model in `folder`."""
    draw = np.random.default_rng(5)
    y = draw.integers(0, 2, rows)
    praise = np.where(draw.random(rows) < 0.9, y, 1 - y)  # about one text in ten is misleading
    opinions = draw.choice(WORDS[:2], rows), draw.choice(WORDS[2:4], rows)
    subjects, strengths, others = (draw.choice(words, rows) for words in (WORDS[4:7], WORDS[9:11], WORDS))
    written = [
        f"the {subjects[row]} was {strengths[row]} {opinions[1 - good][row]} and {others[row]}"
        for row, good in enumerate(praise)
    ]
    data = {"text": "comment", "classes": "no,yes"}
    features = {"kind": "transformers", "model": str(folder), "size": TOKENS}
    cells = {**owners(rows), "comment": written, "label": [("no", "yes")[number] for number in y]}
    return Table("texts", cells, read_by_the_library(folder, written), y, data, features=features)


def read_by_the_library(folder: Path, written: list[str]) -> np.ndarray:
    """Return the deep features of texts, each read separately by the library's own tokenizer and model."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(folder), []
    for text in written:
        inputs = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        parts = [state[0].mean(dim=0).double().numpy() for state in states]
        rows.append(np.concatenate([part / np.linalg.norm(part) for part in parts]))
    found = np.stack(rows)
    return np.asarray(10.0 * found / np.linalg.norm(found, axis=1, keepdims=True))


def pooled_figure(table: Table, train: np.ndarray, test: np.ndarray) -> float:
    """Return the AUC, or R2, of scikit-learn on the pooled rows."""
    from sklearn.linear_model import RidgeClassifierCV, RidgeCV
    from sklearn.metrics import r2_score, roc_auc_score

    penalties = np.geomspace(1e-3, 1e4, 15)
    if table.is_regression:
        model = RidgeCV(penalties).fit(table.x[train], table.y[train])
        return float(r2_score(table.y[test], model.predict(table.x[test])))
    model = RidgeClassifierCV(penalties).fit(table.x[train], table.y[train])
    return float(roc_auc_score(table.y[test], model.decision_function(table.x[test])))


def graph_scores(path: Path, table: Table, file: Path) -> np.ndarray:
    """Return the scores of an exported graph on the coded rows of a file."""
    import onnx

    graph = onnx.load(path)
    fed = {"x": sifu.load_model(path.with_suffix(".safetensors")).inputs_of(file)[0]}
    try:
        import onnxruntime
    except ModuleNotFoundError:
        from onnx.reference import ReferenceEvaluator

        (scores,) = ReferenceEvaluator(graph).run(["scores"], fed)
    else:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        (scores,) = session.run(["scores"], fed)
    return np.asarray(scores, dtype=np.float64)


def head_scores(path: Path, table: Table, file: Path) -> np.ndarray:
    """Return the scores of an exported head on the features of a table."""
    from safetensors.numpy import load_file

    head = load_file(path)
    return np.asarray(table.x @ head["weight"] + head["bias"])


def predictions_agree(run: Path, table: Table, file: Path, folder: Path) -> float:
    """Return the largest difference between the exported model and `sifu predict`, over all scores of the raw file."""
    sifu.open_run(run).export(folder / "model.safetensors")
    if not table.features:
        sifu.open_run(run).export(folder / "model.onnx")
    command = ["predict", str(folder / "model.safetensors"), str(file), "--output", str(folder / "predicted.csv")]
    subprocess.run([sys.executable, "-m", "sifu.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
    with (folder / "predicted.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    exported = (graph_scores, "model.onnx") if not table.features else (head_scores, "model.safetensors")
    scores = exported[0](folder / exported[1], table, file).reshape(len(rows), -1)
    names = [name for name in rows[0] if name.startswith(("score", "prediction"))][-scores.shape[1] :]
    printed = np.array([[float(row[name]) for name in names] for row in rows])
    return float(np.abs(scores - printed).max())


@contextmanager
def timed(times: dict[str, float], step: str) -> Iterator[None]:
    """Record the processor seconds of a step."""
    started = time.process_time()
    yield
    times[step] = time.process_time() - started


def measure(table: Table, folder: Path) -> dict[str, Any]:
    """Return the figures of one table."""
    spec = table.write(folder)
    ids = {client.name: client.ids for client in clients_from_spec(Spec.from_mapping(spec))}
    times: dict[str, float] = {}
    run = folder / f"{table.name}-run"
    with timed(times, "train"):
        sifu.train(spec, run=run)
    with timed(times, "forget client"):
        (first,) = sifu.open_run(run).forget(["s1"])
    record = str(ids["s2"][0])
    with timed(times, "forget record"):
        (second,) = sifu.open_run(run).forget(["s2"], records=[record])
    held_out = sifu.open_run(run).status().held_out
    assert held_out is not None
    trained = {str(name) for client in ids for name in ids[client]}
    row_ids, sites = np.array(table.columns["id"]), np.array(table.columns["site"])
    stays = (sites != "s1") & (row_ids != record)
    in_training = np.isin(row_ids, sorted(trained))
    return {
        "table": table.name,
        "levels": (first.level, second.level),
        "ours": held_out.r2 if table.is_regression else held_out.auc,
        "pooled": pooled_figure(table, np.flatnonzero(stays & in_training), np.flatnonzero(stays & ~in_training)),
        "export": predictions_agree(run, table, Path(spec["data"]["file"]), folder),
        "verified": sifu.verify(run).problems == [],
        "seconds": {step: round(taken, 1) for step, taken in times.items()},
    }


def has_transformers() -> bool:
    """Return whether the library that reads texts is installed."""
    return importlib.util.find_spec("transformers") is not None


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure every table and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="number of rows of the long table")
    parser.add_argument("--columns", type=int, default=1000, help="number of columns of the wide table")
    parser.add_argument("--model", type=Path, help="folder of the model for texts; a tiny one by default")
    chosen = parser.parse_args(arguments)
    tables: tuple[Callable[[Path], Table], ...] = (
        lambda folder: hospitals(),
        lambda folder: regression(),
        *(
            [lambda folder: texts(chosen.model or save_text_model(folder / "model", WORDS))]
            if has_transformers()
            else []
        ),
        lambda folder: numbers("wide", 4 * chosen.columns, chosen.columns, 3),
        lambda folder: numbers("long", chosen.rows, 12, 4),
    )
    found = []
    for make in tables:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(make(Path(folder)), Path(folder)))
        print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    main()
