"""Heart disease of four hospitals: a closed-form head, and the same head after each hospital has left.

    SIFU_DATA=FOLDER python benchmarks/hospitals.py --out benchmarks/results/hospitals.json

`FOLDER` holds the published files (docs/closed-form.md), or a sub-folder `hospitals` with them. Every run goes through
the public API: trained once, one hospital forgotten, verified, and compared bit for bit with a federation that never
had it. The held-out patients of all four hospitals are looked at once; the figure is the area under the ROC curve. A
logistic regression on the pooled patients, which the hospitals would have to hand over, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import sifu
from sifu.core.spec import Spec
from sifu.data.dataset import Dataset
from sifu.data.federation import ClientData
from sifu.data.hospitals import HOSPITALS
from sifu.data.sources import load
from sifu.experiments.provenance import provenance
from sifu.launch.features import map_of


def ridge_spec(folder: Path | None) -> Spec:
    """Everything a run needs to know."""
    return Spec.from_mapping({"data": {"name": "hospitals", "folder": str(folder or "")}, "model": {"kind": "ridge"}})


def current_model(run: sifu.Run) -> Any:
    """The head the run stands at."""
    with run.reader() as reader:
        return reader.load_model(reader.tip)


def area(model: Any, spec: Spec, dataset: Dataset) -> float:
    """The area under the ROC curve on the held-out patients."""
    features = map_of(spec, [ClientData("held out", dataset.x_test, dataset.y_test)])
    phi = np.concatenate([block for _, block in features.chunks(dataset.x_test)])
    weights = np.asarray(model).reshape(phi.shape[1] + 1, -1)
    scores = phi @ weights[:-1] + weights[-1]
    return float(roc_auc_score(dataset.y_test, scores[:, 1] - scores[:, 0]))


def one_leaves(hospital: str, spec: Spec, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Train with all four, forget one, and hold it against a federation of the other three."""
    run = sifu.train(spec, run=folder / f"{hospital}-run")
    before = area(current_model(run), spec, dataset)
    started = time.perf_counter()
    (outcome,) = run.forget([hospital], method="closed_form")
    seconds = time.perf_counter() - started
    rest = {
        name: (dataset.x_train[dataset.client_train == name], dataset.y_train[dataset.client_train == name])
        for name in HOSPITALS
        if name != hospital
    }
    never = sifu.train(spec, run=folder / f"{hospital}-never", clients=rest)
    return {
        "leaves": hospital,
        "patients": int((dataset.client_train == hospital).sum()),
        "area_before": round(before, 4),
        "area_after": round(area(current_model(run), spec, dataset), 4),
        "level": outcome.level,
        "rounds": 0,
        "seconds": round(seconds, 3),
        "same_as_never": bool(np.array_equal(current_model(run), current_model(never))),
        "verified": run.verify().problems == [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the published files; SIFU_DATA where it is not given")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args()
    dataset, spec = load("hospitals", given.data), ridge_spec(given.data)
    pooled = LogisticRegression(max_iter=5000).fit(dataset.x_train, dataset.y_train)
    with tempfile.TemporaryDirectory() as folder:
        rows = [one_leaves(hospital, spec, dataset, Path(folder)) for hospital in HOSPITALS]
    result = {
        "rows": rows,
        "pooled_logistic_regression": round(
            float(roc_auc_score(dataset.y_test, pooled.decision_function(dataset.x_test))), 4
        ),
        "provenance": provenance("cpu", ["python", "benchmarks/hospitals.py", *sys.argv[1:]]),
    }
    text = json.dumps(result, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
