"""The list of AISVS requirements: it claims no more than the certificate shows, and agrees with its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_evidence import unpack

import sifu
from sifu.report.evidence import evidence_bytes
from sifu.report.evidence.aisvs import SOURCE, aisvs_support

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "aisvs.md").read_text(encoding="utf-8")
SECTIONS = {"12.1": 4, "12.2": 3, "12.3": 3, "12.4": 3, "12.5": 3, "12.6": 4}
"""Number of requirements in each section of the chapter."""


def statuses(**changes: Any) -> dict[str, str]:
    """Return the status of each requirement for a certificate with `changes`."""
    body = {
        "level": "exact",
        "method": "closed_form",
        "epsilon": 10.0,
        "delta": 0.01,
        "sigma": 0.0,
        "received": "2026-01-01T00:00:00Z",
        "carried_out": "2026-01-05T00:00:00Z",
    }
    return {name: answer["status"] for name, answer in aisvs_support(body | changes)["requirements"].items()}


def test_every_requirement_of_the_chapter_has_an_answer() -> None:
    expected = {f"{section}.{number + 1}" for section, count in SECTIONS.items() for number in range(count)}
    assert statuses().keys() == expected
    shown: set[str] = set()
    for first, between, last in re.findall(r"^\| (12\.\d\.\d)(?:(,| to) (12\.\d\.\d))?:", PAGE, flags=re.M):
        shown |= {first, last or first}
        if between == " to":
            shown |= {f"{first[:-1]}{number}" for number in range(int(first[-1]), int(last[-1]))}
    assert shown == expected
    assert SOURCE["revision"] in PAGE


@pytest.mark.parametrize(
    ("level", "unlearning", "propagation"),
    [
        ("exact", "supported", "partly"),
        ("proven", "supported", "partly"),
        ("conditional", "partly", "partly"),
        ("none", "not supported", "not supported"),
    ],
)
def test_a_weaker_level_supports_less(level: str, unlearning: str, propagation: str) -> None:
    found = statuses(level=level)
    assert (found["12.2.3"], found["12.2.1"], found["12.5.3"]) == (unlearning, propagation, propagation)


def test_a_request_that_took_too_long_is_not_in_the_window() -> None:
    assert statuses(carried_out="2026-01-30T23:59:59Z")["12.2.1"] == "partly"
    late = statuses(carried_out="2026-01-31T00:00:00Z")
    assert (late["12.2.1"], late["12.5.3"], late["12.2.3"]) == ("not supported", "not supported", "supported")


def test_only_noise_has_a_proven_epsilon() -> None:
    assert statuses(level="proven", sigma=0.5)["12.6.4"] == "partly"
    for level in ("exact", "conditional", "none"):
        assert statuses(level=level, sigma=0.5)["12.6.4"] == "not supported"


def test_nothing_is_supported_that_the_bundle_does_not_show() -> None:
    """Negative control: all other requirements stay unsupported at every level."""
    for level in ("exact", "proven", "conditional", "none"):
        claimed = {name for name, status in statuses(level=level, sigma=0.5).items() if status != "not supported"}
        assert claimed <= {"12.2.1", "12.2.3", "12.5.3", "12.6.4"}


def test_the_bundle_has_the_answers_of_its_certificate(own_run: Path) -> None:
    files = unpack(evidence_bytes(own_run, "strictly"))
    body = sifu.open_run(own_run).certificate("strictly").body
    assert json.loads(files["aisvs.json"]) == aisvs_support(body)
    assert "aisvs.json" in files["README.txt"].decode()
