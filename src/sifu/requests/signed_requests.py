"""A client's own request, signed with the key of its node, for nobody else and for this run only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sifu.core.request_terms import RequestTerms, check_request_id
from sifu.errors import InputError
from sifu.record.run_view import RunView
from sifu.requests.client_list import recorded_clients
from sifu.requests.given_terms import make_terms
from sifu.store.node_keys import sign_statement, signer_of
from sifu.store.reader import RunReader

FORGET_ME = "forget me"


def sign_request(key_file: Path, name: str, run_id: str, request: str) -> dict[str, Any]:
    """What a client sends to the operator; the terms are those of the run's spec."""
    body = {"do": FORGET_ME, "run": run_id, "client": name, "request": check_request_id(request)}
    return sign_statement(key_file, body)


def id_of_signed(statement: dict[str, Any]) -> str:
    """The request's id, before anything is believed."""
    try:
        return check_request_id(statement["body"]["request"])
    except (KeyError, TypeError) as error:
        raise InputError(f"that is not a signed request: it has no {error}") from error


def terms_of_signed(reader: RunReader, statement: dict[str, Any]) -> RequestTerms:
    """The terms of a signed request, or a sentence about why it does not count."""
    id_of_signed(statement)
    body = statement["body"]
    signer = signer_of(statement)
    if body.get("do") != FORGET_ME or signer is None:
        raise InputError("the signature does not hold over the request")
    if body.get("run") != reader.value("run"):
        raise InputError(f"the request was signed for another run ({body.get('run')!r})")
    owner = next((entry.name for entry in recorded_clients(reader) if entry.key == signer), None)
    if owner is None:
        raise InputError("the request is signed with a key that is not on the list of clients")
    if owner != body.get("client"):
        raise InputError(f"{owner} signed a request for {body.get('client')}: a client can ask for itself only")
    return make_terms(RunView(reader), [owner], {})
