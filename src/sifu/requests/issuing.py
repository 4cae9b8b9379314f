"""Issuing certificates: the last event of a request, with what was measured of its model and the two signed forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from sifu.core.certificate import auditor_form, public_form
from sifu.core.engine import Engine, evaluate_present
from sifu.record.run_view import RunView, evaluation_row
from sifu.record.training import uninterrupted
from sifu.requests.certification import RecordedRequest, committed_model, payload_of_request
from sifu.store import keys
from sifu.store.actor import actor_name
from sifu.store.table_rows import RequestRow
from sifu.store.writer import SCRUB_FILE, RunWriter


def issue_certificates(writer: RunWriter, engine: Engine, row: RequestRow) -> None:
    """Certify the current model for a request whose rounds are done."""
    request, final = row.request, writer.tip
    recorded = RecordedRequest(writer, row)
    asking = np.array([recorded.view.index_of[name] for name in row.clients], dtype=np.int64)
    rolled_back = payload_of_request(writer, request, "rolled back")
    models = _certified_models(writer, row, rolled_back)
    last = writer.events()[-1]
    facts = recorded.facts(
        final_node=final,
        models=models,
        erased=tuple(rolled_back.get("dropped_models", [])),
        remaining=tuple(rolled_back["remaining_models"]),
        ledger=last,
        # That of the event itself, unless the event is a rotation, which the old key has signed.
        ledger_signature=(writer.signer().sign(writer.value("run"), last) or b"").hex(),
        issued=writer.now(),
    )
    public_key = writer.value("public_key")
    certificates = {
        (request, "auditor"): keys.sign(writer.folder, auditor_form(facts), public_key),
        (request, "public"): keys.sign(writer.folder, public_form(facts), public_key),
    }
    payload = {
        "request": request,
        "actor": actor_name(),
        "final_node": final,
        "level": facts.level,
        "run": {"phase": "ready"},
        "certified_models": models,
        "bytes_kept": recorded.method.bytes_kept(RunView(writer)),
    }
    # The final node may have been evaluated for this request already, when it is the noised one itself.
    subset = f"forgotten:{request}"
    is_new = not any((row.node, row.subset) == (final, subset) for row in writer.evaluations())
    evaluations = []
    if is_new and row.terms.retention != "strict":  # then nothing is measured on their data
        evaluation = evaluate_present(engine, writer.load_model(final), asking)
        evaluations = [evaluation_row(final, subset, evaluation)] if evaluation.samples.any() else []
    with uninterrupted():
        writer.record("request done", payload, evaluations=evaluations, certificates=certificates)
        if (writer.folder / SCRUB_FILE).exists():  # somebody was reading the run during the erasure
            writer.scrub()


def _certified_models(writer: RunWriter, row: RequestRow, rolled_back: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The three models that a certificate names; a fresh start has no source but itself."""
    noised = next(model for model in rolled_back["models"] if model["node"] == row.noise_node)
    final = writer.tip
    return {
        "source": rolled_back["source_model"] or committed_model(noised["node"], noised["digest"]),
        "noised": committed_model(noised["node"], noised["digest"]),
        "final": committed_model(final, writer.models()[final].digest),
    }
