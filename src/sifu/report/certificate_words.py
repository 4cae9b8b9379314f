"""A certificate in plain words, as the page shows it; its figures are folded away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sifu.core.guarantee import COUNTERFACTUAL, CertificateWords, words_of
from sifu.core.request_terms import terms_words
from sifu.core.wording import forgotten_words
from sifu.plots.run_data import Request
from sifu.plots.style import counted
from sifu.report.words import (
    LEVEL_WORDS,
    attacker_words,
    forgotten_verdict,
    percent,
    promise,
    rounds_words,
    status_words,
)

MOST_NAMES = 12
MOST_SUBJECTS = 20
STATES = {"running": "in progress", "refused": "refused", "withdrawn": "withdrawn"}
"""What a request without a certificate is called; any other waits."""


def certificate_article(request: Request) -> dict[str, Any]:
    """One request for `macros.html`: what was promised to whom, on which premises, what is not covered or erased."""
    level = request.level if request.done else None
    body = request.certificate
    article: dict[str, Any] = {
        "name": request.request,
        "state": level or STATES.get(request.status, "waiting"),
        "received": request.received,
        "who": f"{counted(len(request.clients), 'client')}: {names(request.clients)}"
        if not (body or {}).get("records")
        else forgotten_words(request.clients, (body or {})["records"]),
        "certified": body is not None,
        "status": status_words(request),
    }
    if body is None:
        return article
    ranks = {"failed": 0, "assumed": 1}  # what does not simply hold comes first and is never folded away
    words = words_of(body)
    still_open = [premise for premise in words.premises if premise.status != "met"]
    return article | {
        "level": LEVEL_WORDS.get(request.level or "none", ""),
        "promise": promise(request),
        "attacker": attacker_words(request),
        "premises_open": sorted(still_open, key=lambda premise: ranks.get(premise.status, 0)),
        "premises_met": [premise for premise in words.premises if premise.status == "met"],
        "not_covered": words.not_covered,
        "erased": _erased(words, body),
        "figures": _figures(request, body),
        "digests": _digests(request, body),
        "subjects": [
            (caption, [_subject_row(subject) for subject in subjects[:MOST_SUBJECTS]], len(subjects) - MOST_SUBJECTS)
            for caption, subjects in (
                ("Clients of this request", body.get("subjects", [])),
                ("Clients forgotten earlier that this noise was charged to", body.get("earlier_subjects", [])),
            )
            if subjects
        ],
    }


def names(clients: Sequence[str], most: int = MOST_NAMES) -> str:
    """Some names, and how many more there are."""
    more = len(clients) - most
    return ", ".join(clients[:most]) + (f" and {more:,} more (all are in the certificate)" if more > 0 else "")


def _erased(words: CertificateWords, body: Mapping[str, Any]) -> list[str]:
    erased, remaining = len(body.get("erased_nodes", [])), len(body.get("remaining_nodes", []))
    return [
        f"{words.erased} Erased: {counted(erased, 'model')}."
        if erased
        else "No model had to be erased: none lay after the point training went on from.",
        f"{words.remains} Kept from before: {counted(remaining, 'model')}."
        if remaining
        else "No earlier model remains.",
        "Copies outside the run folder, such as backups and models handed out before, are not reached from here.",
    ]


def _figures(request: Request, body: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [
        ("The guarantee", words_of(body).guarantee),
        ("Noise σ", _number(body.get("sigma"))),
        *_training_noise(body.get("training_noise")),
        ("Noise multiplier s", _number(body.get("noise_multiplier"))),
        ("Ψ* = σ/s", _number(body.get("psi_star"))),
        ("Ψ at the model gone back to", _number(body.get("psi"))),
        ("δ reached by this release", _number(body.get("delta_reached"))),
        ("δ once the budget is used up", _number(body.get("delta_at_most"))),
        ("Calibration", body.get("calibration", "")),
        ("Accounting", body.get("accounting", "")),
        ("Participation", body.get("participation", "")),
        ("Compared with", COUNTERFACTUAL),
        ("Terms asked for", terms_words(body.get("terms", {}))),
        ("Noise drawn from", body.get("noise_source", "")),
        ("Nodes: gone back to, noised, final", _joined(body, ", ", "node", "noise_node", "final_node")),
        ("Rounds", rounds_words(request)),
        (
            "Accuracy of the forgotten, before and after",
            f"{percent(request.forgotten_before)}, {percent(request.forgotten_after)}",
        ),
        ("Is that what Scratch would have?", forgotten_verdict(request)),
        (
            "Accuracy of who remains, before and after",
            f"{percent(request.remaining_before)}, {percent(request.remaining_after)}",
        ),
        ("Received, carried out, issued", _joined(body, " · ", "received", "carried_out", "issued")),
        ("Ledger event", f"{body.get('ledger', {}).get('seq', '')}"),
        ("Versions", ", ".join(f"{name} {value}" for name, value in body.get("versions", {}).items())),
    ]


def _digests(request: Request, body: Mapping[str, Any]) -> list[tuple[str, object]]:
    models = body.get("models", {})
    return [
        *((f"Commitment, {name.replace('_', ' ')}", model.get("commitment", "")) for name, model in models.items()),
        ("Head of the ledger then", body.get("ledger", {}).get("head", "")),
        ("Signature", request.signature),
    ]


def _training_noise(noise: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """Both accountings of noise in training."""
    if not noise:
        return []
    return [
        ("Updates clipped to, noise a multiple of it", f"{_number(noise.get('clip'))}, {_number(noise.get('noise'))}"),
        ("ε of all rounds together, which counts", _number(noise.get("epsilon_composed"))),
        ("ε of one round, as the paper counts", _number(noise.get("epsilon_one_round"))),
    ]


def _subject_row(subject: Mapping[str, Any]) -> tuple[str, ...]:
    return names(subject.get("clients", []), 4), *(_number(subject.get(key)) for key in ("psi", "charge", "budget"))


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str("–" if value is None else value)


def _joined(body: Mapping[str, Any], separator: str, *keys: str) -> str:
    return separator.join(str(body.get(key, "–")) for key in keys)
