"""Decisions that come while another process writes to the run: posted like requests, taken in between rounds."""

from __future__ import annotations

import hashlib
from typing import Any

from sifu.core.ledger import canonical_json
from sifu.core.request_terms import TERMS, RequestTerms, check_request_id
from sifu.errors import InputError
from sifu.requests.request_record import check_decision, check_digest, check_words, decide
from sifu.requests.signed_requests import terms_of_signed
from sifu.store.inbox import Letter, letters, post
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter

KIND = "decision"
FIELDS = ("request", "decision", "reason", "actor", "terms")
"""`terms` is the digest of the terms that an approval is about, and empty for other decisions."""


def post_decision(
    reader: RunReader, request: str, decision: str, reason: str, actor: str, terms: str | None = None
) -> bool:
    """Leave a decision in the inbox; False if it is in the ledger already. What cannot be recorded is refused now."""
    row = next((row for row in reader.requests() if row.request == request), None)
    posted = [letter for letter in letters(reader.folder) if _is_request(letter) and letter.id == request]
    if row is not None or not posted:
        if not check_decision(reader, request, decision, reason, actor, terms):
            return False
        digest = row.terms.digest(request) if row is not None else ""
    else:
        check_words(decision, reason)  # the rest is looked at when both are opened, the request first
        digest = _terms_posted(reader, posted[0]).digest(request) if decision == "approved" else ""
        check_digest(request, digest, terms)
    about = digest if decision == "approved" else ""
    content = dict(zip(FIELDS, (request, decision, reason, actor, about), strict=True))
    # The same decision of the same person is the same letter, so it counts once.
    post(reader.folder, KIND, f"d-{hashlib.sha256(canonical_json(content)).hexdigest()[:32]}", content)
    return True


def open_decision(writer: RunWriter, content: dict[str, Any]) -> None:
    """Record a decision that was posted."""
    if set(content) != set(FIELDS) or not all(isinstance(content[name], str) for name in FIELDS):
        raise InputError(f"a decision must give {', '.join(FIELDS)} as texts; found {', '.join(sorted(content))[:200]}")
    check_request_id(content["request"])
    terms = content["terms"] if content["decision"] == "approved" else None
    decide(writer, content["request"], content["decision"], content["reason"], content["actor"], terms)


def _is_request(letter: Letter) -> bool:
    return letter.kind in ("request", "signed")


def _terms_posted(reader: RunReader, letter: Letter) -> RequestTerms:
    content = letter.content or {}
    if letter.kind == "signed":
        return terms_of_signed(reader, content)
    return RequestTerms.from_mapping({name: value for name, value in content.items() if name in TERMS})
