"""Certificates that baselines issued in earlier formats: they verify if this package is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sifu.api import verify_certificate
from sifu.core.certificate_words import words_of
from sifu_paper.baselines import METHODS

KEPT = Path(__file__).resolve().parents[2] / "tests" / "verify" / "kept_certificates"
NAMES = {method.info.name for method in METHODS}
PATHS = sorted(path for path in KEPT.glob("*/*.json") if path.name.split(".")[0] in NAMES)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_kept_certificate_verifies(path: Path, tmp_path: Path) -> None:
    assert verify_certificate(path).problems == []
    body = json.loads(path.read_bytes())["body"]
    assert words_of(body).guarantee
    changed = tmp_path / "changed.json"
    changed.write_text(path.read_text().replace('"delta": 0.01', '"delta": 0.011'))
    assert verify_certificate(changed).problems != []
