"""Heart-disease data of four hospitals (UCI; Janosi, Steinbrunn, Pfisterer and Detrano 1988): a real federation.

The published files `processed.NAME.data` have a line for each patient: 13 attributes and the diagnosis, separated by
commas, with `?` for unknown values. A header line is skipped. Attributes are coded by constants that do not depend on
the data: numbers are shifted and scaled by round medical figures, categories become indicators, and an unknown value is
zero with its own indicator. So preprocessing reveals nothing about any patient.

One in five patients of a hospital is held out for testing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sifu import InputError
from sifu.data import Dataset, contents_of, held_out_rows
from sifu.theory.arrays import Floats

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FILES = tuple(f"processed.{name}.data" for name in HOSPITALS)
CLASSES = ("no heart disease", "heart disease")
HELD_OUT = 5
"""One in this many patients is held out."""


class Number(NamedTuple):
    """Measured value, coded as (value - middle) / spread; with `zero_is_unknown`, 0 stands for a missing value."""

    middle: float
    spread: float
    zero_is_unknown: bool = False


ATTRIBUTES: dict[str, Number | tuple[int, ...]] = {
    "age": Number(50.0, 10.0),
    "sex": (0, 1),
    "cp": (1, 2, 3, 4),
    "trestbps": Number(130.0, 20.0, zero_is_unknown=True),
    "chol": Number(240.0, 50.0, zero_is_unknown=True),
    "fbs": (0, 1),
    "restecg": (0, 1, 2),
    "thalach": Number(140.0, 25.0),
    "exang": (0, 1),
    "oldpeak": Number(1.0, 1.0),
    "slope": (1, 2, 3),
    "ca": (0, 1, 2, 3),
    "thal": (3, 6, 7),
}
"""Attributes in the order of the files, as the data set's description lists them: numbers, or categories by the numbers
that the files use.
"""


def read_hospitals(folder: Path, held_out_by: str = "content") -> Dataset:
    """Read the four files of a folder as one data set; `client_train` names the client of each patient.

    Patients are held out by the content of their lines (`sifu.data.held_out`), or every fifth of a file (`number`).
    """
    numbers: list[int] = []
    features, labels, owners = [], [], []
    for name, file in zip(HOSPITALS, FILES, strict=True):
        rows = read_patients(folder / file)
        features += [coded for coded, _ in rows]
        labels += [int(diagnosis > 0) for _, diagnosis in rows]
        owners += [name] * len(rows)
        numbers += range(len(rows))
    x, y, client = np.stack(features), np.array(labels, dtype=np.int64), np.array(owners)
    if held_out_by == "content":
        test = held_out_rows(client, contents_of(x, y), 1 / HELD_OUT, seed=0)
    else:
        test = np.array(numbers) % HELD_OUT == HELD_OUT - 1
    return Dataset(
        "hospitals", x[~test], y[~test], x[test], y[test], CLASSES, client_train=client[~test], client_test=client[test]
    )


def read_patients(path: Path) -> list[tuple[Floats, int]]:
    """Return the coded attributes and the diagnosis (0 to 4) of every patient in a file."""
    patients = []
    for number, line in enumerate(path.read_text(encoding="ascii", errors="replace").splitlines(), 1):
        fields = [field.strip() for field in line.split(",")]
        if not line.strip() or (number == 1 and fields[0] == "age"):
            continue
        if len(fields) != len(ATTRIBUTES) + 1:
            raise InputError(
                f"line {number} of {path} has {len(fields)} fields, {len(ATTRIBUTES) + 1} were expected: the published "
                "files are named processed.cleveland.data and so on"
            )
        *values, diagnosis = (_number(field, path, number) for field in fields)
        if diagnosis is None or diagnosis not in range(5):
            raise InputError(f"line {number} of {path} has the diagnosis {fields[-1]!r}; 0 to 4 was expected")
        patients.append((coded(values), int(diagnosis)))
    if not patients:
        raise InputError(f"{path} holds no patients")
    return patients


def coded(values: list[float | None]) -> Floats:
    """Code a patient's attributes as features; None means unknown."""
    features: list[float] = []
    for attribute, value in zip(ATTRIBUTES.values(), values, strict=True):
        if isinstance(attribute, Number):
            unknown = value is None or (attribute.zero_is_unknown and value == 0)
            scaled = 0.0 if unknown or value is None else (value - attribute.middle) / attribute.spread
            features += [min(max(scaled, -5.0), 5.0), float(unknown)]
        else:
            features += [float(value == kind) for kind in attribute]
    return np.array(features)


def _number(field: str, path: Path, line: int) -> float | None:
    if field in ("?", "-9", "-9.0"):
        return None
    try:
        value = float(field)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"line {line} of {path} holds {field!r}; a number or ? was expected")
    return value
