"""Improved sentences break no certificate, because sentences are not part of certificates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sifu
from run_tools import Command
from sifu.api import verify_certificate
from sifu.core import certificate_words as wording
from sifu.core import premise_sentences as sentences
from sifu.core.certificate_words import words_of
from sifu.core.premises import Premise

AFTERTHOUGHT = " as before."


@pytest.fixture
def other_wording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add two words to every sentence, as a later wording might."""
    for name, value in vars(wording).copy().items():
        if name.isupper() and isinstance(value, str):
            monkeypatch.setattr(wording, name, value + AFTERTHOUGHT)
        elif name.isupper() and isinstance(value, tuple):
            monkeypatch.setattr(wording, name, tuple(sentence + AFTERTHOUGHT for sentence in value))
    other = {
        name: {case: words + AFTERTHOUGHT for case, words in cases.items()}
        for name, cases in sentences.SENTENCES.items()
    }
    monkeypatch.setattr(sentences, "SENTENCES", other)
    monkeypatch.setattr(wording, "WORDING", wording.WORDING + 1)
    monkeypatch.setattr("sifu.verify.request_checks.WORDING", wording.WORDING)
    monkeypatch.setattr("sifu.requests.certification.WORDING", wording.WORDING)


@pytest.mark.usefixtures("other_wording")
def test_certificates_issued_before_a_change_of_wording_verify(run_with_requests: Path, cli: Command) -> None:
    assert sifu.verify_run(run_with_requests).problems == []
    paths = sorted((run_with_requests / "certificates").glob("*.json"))
    assert len(paths) > 4
    for path in paths:
        assert verify_certificate(path).problems == []
        words = words_of(json.loads(path.read_bytes())["body"])
        assert words.guarantee.endswith(AFTERTHOUGHT)  # people read the current wording
        assert all(premise.statement.endswith(AFTERTHOUGHT) for premise in words.premises)


def test_no_certificate_holds_a_sentence(run_with_requests: Path) -> None:
    said = [words for cases in sentences.SENTENCES.values() for words in cases.values() if "{" not in words]
    said += [*wording.NOT_COVERED, wording.EXACT_GUARANTEE, wording.NO_GUARANTEE]
    for path in (run_with_requests / "certificates").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert [sentence for sentence in said if sentence in text] == []


def test_a_premise_without_a_sentence_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="add it to SENTENCES"):
        _ = Premise("weather", "assumed").statement
    assert Premise("weather", "assumed", "as stated", {"statement": "It rains."}).statement == "It rains."
