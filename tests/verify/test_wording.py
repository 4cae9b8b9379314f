"""Sentences are not part of certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from sifu.core import certificate_words as wording
from sifu.core import premise_sentences as sentences
from sifu.core.premises import Premise


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
