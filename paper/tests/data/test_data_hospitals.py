"""The four hospitals: published files, fixed coding, and their federation."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sifu.errors import InputError
from sifu_paper.data import load
from sifu_paper.data.hospitals import ATTRIBUTES, FILES, HOSPITALS, Number, coded, read_hospitals, read_patients

HEADER = "age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, oldpeak, slope, ca, thal, num"
SHARED = Path(os.environ.get("SIFU_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))


def made_up_line(generator: np.random.Generator) -> str:
    """Return an invented patient in the published format with unknown fields; age and chest pain
    decide the diagnosis.
    """
    age, pain = int(generator.integers(30, 78)), int(generator.integers(1, 5))
    ill = int(age + 8 * pain + generator.normal(0, 5) > 75)
    fields = [age, generator.integers(0, 2), pain, generator.integers(100, 170), generator.integers(150, 330), 0,
              generator.integers(0, 3), generator.integers(90, 190), 0, 1.5, "?", "?", 3]  # fmt: skip
    return ",".join(str(field) for field in [*fields, ill * int(generator.integers(1, 5))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write invented files in the published format, and return their folder."""
    generator = np.random.default_rng(5)
    for name, patients in zip(FILES, (60, 50, 25, 40), strict=True):
        lines = [made_up_line(generator) for _ in range(patients)]
        (tmp_path / name).write_text("\n".join([HEADER] * (name == FILES[0]) + lines) + "\n")
    return tmp_path


def test_attributes_are_coded_by_constants() -> None:
    values = [60.0, 1.0, 4.0, 150.0, 0.0, None, 2.0, 140.0, 0.0, 2.0, None, 3.0, 7.0]
    names: list[str] = []
    for name, attribute in ATTRIBUTES.items():
        kinds = ("", " unknown") if isinstance(attribute, Number) else [f" {value}" for value in attribute]
        names += [f"{name}{kind}" for kind in kinds]
    features = dict(zip(names, coded(values), strict=True))
    assert features["age"] == 1.0
    assert features["trestbps"] == 1.0
    assert (features["chol"], features["chol unknown"]) == (0.0, 1.0)  # a cholesterol of zero was not measured
    assert (features["oldpeak"], features["oldpeak unknown"]) == (1.0, 0.0)
    assert (features["fbs 0"], features["fbs 1"]) == (0.0, 0.0)
    assert [features[f"cp {kind}"] for kind in (1, 2, 3, 4)] == [0.0, 0.0, 0.0, 1.0]
    assert sum(coded([None] * 13)) == 5.0  # the five numeric attributes are marked as unknown


def test_files_with_and_without_a_line_of_names_are_read(folder: Path) -> None:
    assert [len(read_patients(folder / file)) for file in FILES] == [60, 50, 25, 40]
    dataset = read_hospitals(folder)
    assert dataset.x_train.shape == (175 - len(dataset.x_test), 33)
    assert 20 <= len(dataset.x_test) <= 50
    assert len(read_hospitals(folder, "number").x_test) == 35
    assert sorted(set(dataset.client_train.tolist())) == sorted(HOSPITALS)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("63,1,4", "has 3 fields, 14 were expected"),
        ("63,1,4,x,260,0,1,112,1,3,2,?,?,2", "holds 'x'; a number or"),
        ("63,1,4,140,260,0,1,112,1,3,2,?,?,9", "diagnosis '9'"),
        ("", "holds no patients"),
    ],
)
def test_what_is_not_a_file_of_patients_is_refused(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / FILES[0]).write_text(line + "\n")
    with pytest.raises(InputError, match=sentence):
        read_patients(tmp_path / FILES[0])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"processed\.cleveland\.data.*archive\.ics\.uci\.edu"):
        load("hospitals", tmp_path)


@pytest.mark.skipif(not (SHARED / "hospitals").is_dir(), reason="the published files are not here")
def test_the_published_files_have_the_published_patients() -> None:
    folder = SHARED / "hospitals"
    assert [len(read_patients(folder / file)) for file in FILES] == [303, 294, 123, 200]


def test_a_patient_less_moves_no_other_patient(tmp_path: Path) -> None:
    generator, whole, fewer = np.random.default_rng(4), tmp_path / "whole", tmp_path / "fewer"
    whole.mkdir(), fewer.mkdir()
    for file in FILES:
        lines = [
            f"{generator.integers(30, 78)},1,4,140,260,0,1,112,1,3,2,?,?,{generator.integers(5)}" for _ in range(40)
        ]
        (whole / file).write_text("\n".join(lines))
        (fewer / file).write_text("\n".join(lines[1:]))
    for rule, same in (("content", True), ("number", False)):  # `number` is the control
        tested = [read_hospitals(folder, rule).x_test for folder in (whole, fewer)]
        kept = {tuple(row) for row in tested[1]} <= {tuple(row) for row in tested[0]}
        assert (kept and len(tested[0]) - len(tested[1]) <= len(FILES)) is same
