"""Heart-disease data of four hospitals: a closed-form head, and the head after a hospital or a patient has left.

    python benchmarks/hospitals.py --data FOLDER --out benchmarks/results/hospitals.json

`--data` names the folder with the published files (docs/closed-form.md), or with a sub-folder `hospitals` of them.
Every run goes through the public API: it is trained once, forgets one hospital, is verified, and is compared bit for
bit with a federation that never had it. Another run forgets the first patient of each hospital, which itself stays
(`--records` on the command line), and its head is compared with that of hospitals that never had the patient. The
held-out patients of all four hospitals are used once; the figure is the area under the ROC curve. For comparison it
prints a logistic regression on the pooled patients, which the hospitals would have to share.
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
from public_data import npz_sections
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import sifu
from sifu.core.spec import Spec
from sifu.data.client_data import ClientData
from sifu.data.dataset import Dataset
from sifu.run.features import map_of
from sifu_paper.data import load
from sifu_paper.data.hospitals import HOSPITALS
from sifu_paper.provenance import provenance


def ridge_spec(source: Path | None, folder: Path) -> Spec:
    """Return the spec of a run on an npz file, which is written to `folder`."""
    return Spec.from_mapping(npz_sections("hospitals", source, folder))


def current_model(run: sifu.Run) -> Any:
    """Return the current head of the run."""
    with run.reader() as reader:
        return reader.load_model(reader.tip)


def area(model: Any, spec: Spec, dataset: Dataset) -> float:
    """Return the area under the ROC curve on the held-out patients."""
    features = map_of(spec, [ClientData("held out", dataset.x_test, dataset.y_test)])
    phi = np.concatenate([block for _, block in features.chunks(dataset.x_test)])
    weights = np.asarray(model).reshape(phi.shape[1] + 1, -1)
    scores = phi @ weights[:-1] + weights[-1]
    return float(roc_auc_score(dataset.y_test, scores[:, 1] - scores[:, 0]))


def patients_of(dataset: Dataset, hospital: str, without: int | None = None) -> tuple[Any, Any]:
    """Return the rows of a hospital's patients and their diagnoses, optionally without one patient."""
    rows = np.flatnonzero(dataset.client_train == hospital)
    if without is not None:
        rows = np.delete(rows, without)
    return dataset.x_train[rows], dataset.y_train[rows]


def a_patient_leaves(hospital: str, spec: Spec, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Train with all four hospitals, forget the first patient of one, and compare with hospitals that never had the
    patient.
    """
    run = sifu.train(spec, run=folder / f"{hospital}-patient-run")
    started = time.perf_counter()
    (outcome,) = run.forget([hospital], records=[0])
    seconds = time.perf_counter() - started
    others = {name: patients_of(dataset, name, 0 if name == hospital else None) for name in HOSPITALS}
    never = sifu.train(spec, run=folder / f"{hospital}-patient-never", clients=others)
    same = np.array_equal(current_model(run), current_model(never))
    return {
        "leaves": f"a patient of {hospital}",
        "patients": 1,
        "records_in_certificate": outcome.records,
        "area_after": round(area(current_model(run), spec, dataset), 4),
        "level": outcome.level,
        "rounds": outcome.rounds,
        "seconds": round(seconds, 3),
        "same_as_never": bool(same),
        "verified": run.verify().problems == [],
    }


def a_hospital_leaves(hospital: str, spec: Spec, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Train with all four hospitals, forget one, and compare with a federation of the other three."""
    run = sifu.train(spec, run=folder / f"{hospital}-run")
    before = area(current_model(run), spec, dataset)
    started = time.perf_counter()
    (outcome,) = run.forget([hospital], method="closed_form")
    seconds = time.perf_counter() - started
    rest = {name: patients_of(dataset, name) for name in HOSPITALS if name != hospital}
    never = sifu.train(spec, run=folder / f"{hospital}-never", clients=rest)
    return {
        "leaves": hospital,
        "patients": int((dataset.client_train == hospital).sum()),
        "area_before": round(before, 4),
        "area_after": round(area(current_model(run), spec, dataset), 4),
        "level": outcome.level,
        "rounds": outcome.rounds,
        "seconds": round(seconds, 3),
        "same_as_never": bool(np.array_equal(current_model(run), current_model(never))),
        "verified": run.verify().problems == [],
    }


def main() -> None:
    """Measure, print one JSON object, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the published files; by default SIFU_DATA")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args()
    dataset = load("hospitals", given.data)
    pooled = LogisticRegression(max_iter=5000).fit(dataset.x_train, dataset.y_train)
    with tempfile.TemporaryDirectory() as folder:
        spec = ridge_spec(given.data, Path(folder))
        rows = [
            leave(hospital, spec, dataset, Path(folder))
            for leave in (a_hospital_leaves, a_patient_leaves)
            for hospital in HOSPITALS
        ]
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
