"""The figures of the four hospitals on the page about closed-form heads equal the committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Budapest", "switzerland": "Zurich", "va": "Long Beach"}


def test_hospitals_and_patients_leave_as_the_page_says() -> None:
    page = " ".join((ROOT / "docs/closed-form.md").read_text().split())
    measured = json.loads((ROOT / "benchmarks/results/hospitals.json").read_text())["rows"]
    assert len(measured) == 2 * len(HOSPITALS)
    assert all(row["same_as_never"] and row["verified"] for row in measured)
    assert {(row["level"], row["rounds"]) for row in measured} == {("exact", 0)}
    sentence = page.split("After Cleveland leaves it is ")[1].split(". Every certificate is `exact`, in no round")[0]
    hospitals, patients = sentence.split("; after one patient of any of them ")
    shown = dict(zip(HOSPITALS, re.findall(r"0\.\d{3}", hospitals), strict=True))
    for row in measured:
        *patient, name = row["leaves"].split(" of ")
        areas = patients.split(" or ") if patient else [shown[name]]
        # tolerance for rounding twice
        assert any(abs(float(area) - row["area_after"]) <= 0.00051 for area in areas), row["leaves"]
    for title in list(HOSPITALS.values())[1:]:
        assert f"after {title} " in hospitals
