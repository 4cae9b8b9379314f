"""Issue of a certificate as the last event of a request."""

from __future__ import annotations

from typing import Any

import numpy as np

from sifu.core.engine import Engine, evaluate_present
from sifu.errors import InputError
from sifu.requests.certification import RecordedRequest, committed_model, payload_of_request, public_form
from sifu.requests.roll_back import may_measure, measured_rows
from sifu.run.run_view import RunView
from sifu.store import keys
from sifu.store.actors import actor_name
from sifu.store.files import uninterrupted
from sifu.store.last_failure import remove_failure
from sifu.store.projection import EvaluationRow, NewEvent, RequestRow
from sifu.store.reader import remainder_to_join
from sifu.store.release_files import released_model
from sifu.store.writer import SCRUB_FILE, RunWriter


def issue_certificates(writer: RunWriter, engine: Engine | None, row: RequestRow, reason: str = "") -> None:
    """Certify the current model for a request whose rounds are done.

    Args:
        writer: Writer of the run.
        engine: Engine that evaluates the model on the request's clients, or None to evaluate nothing.
        row: Row of the request in the table `requests`.
        reason: Reason why the request ended before its stop rule held, or an empty string if it held.
    """
    request, final = row.request, writer.tip
    recorded = RecordedRequest(writer, row)
    rolled_back = payload_of_request(writer, request, "rolled back")
    models = _certified_models(writer, row, rolled_back)
    last, public_key = writer.events()[-1], writer.value("public_key")
    # Sign the last event again: if it is a key rotation, its recorded signature was made with the old key.
    signature = (writer.signer().sign(writer.value("run"), last) or b"").hex()
    body = recorded.auditor_form(models, last, signature, writer.now())
    certificates = {
        (request, form["form"]): keys.sign(writer.folder, form, public_key) for form in (body, public_form(body))
    }
    payload = {
        "request": request,
        "actor": actor_name(),
        "final_node": final,
        "level": body["level"],
        "run": {"phase": "ready"},
        "certified_models": models,
    } | ({"reason": reason} if reason else {})
    evaluations = [] if engine is None else _evaluations(writer, engine, recorded)
    with uninterrupted():
        writer.record(NewEvent("request done", payload, evaluations=evaluations, certificates=certificates))
        if (writer.folder / SCRUB_FILE).exists():  # another process was reading the run during the erasure
            writer.scrub()


def _evaluations(writer: RunWriter, engine: Engine, recorded: RecordedRequest) -> list[EvaluationRow]:
    """Return the evaluation of the certified model on the request's clients, or [] if it exists or is not allowed."""
    row, final, subset = recorded.request, writer.tip, f"forgotten:{recorded.request.request}"
    # The certified model may be the noised one, which the rollback has evaluated already.
    if any((known.node, known.subset) == (final, subset) for known in writer.evaluations()):
        return []
    if not may_measure(writer, recorded.view, row.terms):
        return []
    asking = np.array([recorded.view.index_of[name] for name in row.clients], dtype=np.int64)
    return measured_rows([(final, subset, evaluate_present(engine, released_model(writer), asking))])


def settle(writer: RunWriter, request: str, reason: str) -> str:
    """End a running request with the model that it has reached (see `Run.settle`), and return its level.

    Raises:
        InputError: If the request is not running, or its model cannot be certified yet.
    """
    rows = {row.request: row for row in writer.requests()}
    status = rows[request].status if request in rows else "not in this run"
    if status != "running":
        raise InputError(f"only a running request can be settled, and request {request} is {status}")
    if not reason.strip() or not reason.isprintable():
        raise InputError("settling a request needs a reason: give one line with --reason")
    if RunView(writer).regime.solves:
        raise InputError(
            f"request {request} has no head yet, so there is nothing to certify: run sifu forget again when the "
            "remaining clients answer"
        )
    if remainder_to_join(writer) is not None:
        raise InputError(
            f"request {request} is about records, and its client has not rejoined with its remaining records: run sifu "
            "forget again with the client's data"
        )
    issue_certificates(writer, None, rows[request], reason)
    remove_failure(writer.folder)
    level: str = next(row.level for row in writer.requests() if row.request == request) or "none"
    return level


def _certified_models(writer: RunWriter, row: RequestRow, rolled_back: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the source, noised and final model of a certificate; a fresh starting model is also the source."""
    noised = next(model for model in rolled_back["models"] if model["node"] == row.noise_node)
    final = writer.tip
    return {
        "source": rolled_back["source_model"] or committed_model(noised["node"], noised["digest"]),
        "noised": committed_model(noised["node"], noised["digest"]),
        "final": committed_model(final, writer.models()[final].digest),
    }
