"""Certificates of earlier formats: they verify permanently, and today's wording explains them.

A change that makes one of these fail breaks every issued certificate of its format. Introduce a new format instead,
read the old one as before, and keep its files here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sifu.api import verify_certificate
from sifu.core import extensions
from sifu.core.certificate_words import words_of
from sifu.core.method_info import METHOD_INFOS
from sifu.errors import MissingExtensionError
from sifu.requests.certification import FORMAT
from sifu.requests.request_record import auditor_lines, plain_answer

KEPT = Path(__file__).with_name("kept_certificates")
PATHS = sorted(KEPT.glob("*/*.json"))
BASELINES = ("dp", "noisy_scratch", "fine_tuning", "fed_eraser", "fed_accum")
"""Methods of these certificates that the paper's package now provides."""


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_bytes())["body"]
    return body


@pytest.mark.parametrize(
    "path",
    [path for path in PATHS if path.name.split(".")[0] not in BASELINES],
    ids=lambda path: f"{path.parent.name} {path.stem}",
)
def test_a_kept_certificate_verifies_and_can_be_read(path: Path) -> None:
    assert verify_certificate(path).problems == []
    body = body_of(path)
    assert words_of(body).guarantee
    assert plain_answer(body) if body["form"] == "public" else auditor_lines(body)


def test_the_format_in_force_is_kept_at_every_level_and_by_every_kind_of_method() -> None:
    bodies = [body_of(path) for path in PATHS if path.parent.name == FORMAT]
    assert {body["level"] for body in bodies} == {"exact", "proven", "conditional", "none"}
    assert {body["protection"] for body in bodies} == {"noise", "training noise", "nothing"}
    assert {body["start"] for body in bodies} == {"fresh", "merge", "initial", "trained"}
    assert {body["form"] for body in bodies} == {"public", "auditor"}


@pytest.mark.parametrize("method", BASELINES)
def test_without_the_package_of_its_method_a_certificate_says_what_to_install(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_entries", lambda group: {})
    monkeypatch.delitem(METHOD_INFOS, method, raising=False)
    for form in ("public", "auditor"):
        with pytest.raises(MissingExtensionError, match="sifu-paper") as refused:
            verify_certificate(KEPT / FORMAT / f"{method}.{form}.json")
        assert refused.value.exit_code == 5


def test_control_one_digit_more_is_noticed(tmp_path: Path) -> None:
    text = (KEPT / FORMAT / "sifu-proven.public.json").read_text(encoding="utf-8")
    changed = tmp_path / "changed.json"
    changed.write_text(text.replace('"delta": 0.01', '"delta": 0.011'), encoding="utf-8")
    assert changed.read_text(encoding="utf-8") != text
    assert verify_certificate(changed).problems != []
