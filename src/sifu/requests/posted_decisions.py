"""Decisions that come while another process writes to the run: posted like requests, taken in between rounds."""

from __future__ import annotations

import hashlib
from typing import Any

from sifu.core.ledger import canonical_json
from sifu.core.request_terms import check_request_id
from sifu.errors import InputError
from sifu.requests.request_record import check_decision, check_words, decide
from sifu.store.inbox import letters, post
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter

KIND = "decision"
FIELDS = ("request", "decision", "reason", "actor")


def post_decision(reader: RunReader, request: str, decision: str, reason: str, actor: str) -> bool:
    """Leave a decision in the inbox; False if it is in the ledger already. What cannot be recorded is refused now."""
    posted = any(letter.kind in ("request", "signed") and letter.id == request for letter in letters(reader.folder))
    if posted and all(row.request != request for row in reader.requests()):
        check_words(decision, reason)  # the rest is looked at when both are opened, the request first
    elif not check_decision(reader, request, decision, reason, actor):
        return False
    content = dict(zip(FIELDS, (request, decision, reason, actor), strict=True))
    # The same decision of the same person is the same letter, so it counts once.
    post(reader.folder, KIND, f"d-{hashlib.sha256(canonical_json(content)).hexdigest()[:32]}", content)
    return True


def open_decision(writer: RunWriter, content: dict[str, Any]) -> None:
    """Record a decision that was posted."""
    if set(content) != set(FIELDS) or not all(isinstance(content[name], str) for name in FIELDS):
        raise InputError(f"a decision must give {', '.join(FIELDS)} as texts; found {', '.join(sorted(content))[:200]}")
    check_request_id(content["request"])
    decide(writer, content["request"], content["decision"], content["reason"], content["actor"])
