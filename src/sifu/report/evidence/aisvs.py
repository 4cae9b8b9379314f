"""Requirements of OWASP AISVS on deletion, unlearning, consent and federated learning that a bundle supports.

The requirements come from chapter C12, *Privacy Protection & Personal Data Management*, of the AISVS 1.0 draft. The
chapter was removed before the release (docs/aisvs.md), so the source names a revision of the draft. A requirement is
"supported" if the bundle alone shows that it is met, "partly" supported if the bundle shows a part of it, and "not
supported" if an auditor needs other evidence.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Literal

Support = Literal["supported", "partly", "not supported"]
SOURCE = {
    "standard": "OWASP AISVS, draft of 1.0",
    "chapter": "C12 Privacy Protection & Personal Data Management",
    "revision": "7f2079d70fa4d1891806e5f9a234c4207ba5f14a",
    "note": "removed before the release of AISVS 1.0, whose chapter C12 is about monitoring and logging",
}
WINDOW_DAYS = 30
"""Limit of requirement 12.2.1: a deletion request must be propagated in fewer days."""
BEFORE_TRAINING = "about training data before a federation uses it; sifu does not check it"
PURPOSE = "sifu records no purpose and does not watch queries"
AT_INFERENCE = "sifu does not serve predictions, so it checks no consent at inference"
NO_AUDIT = "the bundle has no attack results; sifu audit measures them for the operator"
NOT_DIFFERENTIALLY_PRIVATE = "a certificate is about one request; it does not make training differentially private"
ALWAYS: dict[str, str] = {
    **dict.fromkeys(("12.1.1", "12.1.2", "12.1.3", "12.1.4"), BEFORE_TRAINING),
    "12.2.2": NO_AUDIT,
    "12.3.1": NOT_DIFFERENTIALLY_PRIVATE,
    "12.3.2": NO_AUDIT,
    "12.3.3": NOT_DIFFERENTIALLY_PRIVATE,
    **dict.fromkeys(("12.4.1", "12.4.2", "12.4.3"), PURPOSE),
    **dict.fromkeys(("12.5.1", "12.5.2"), AT_INFERENCE),
    "12.6.1": NOT_DIFFERENTIALLY_PRIVATE,
    "12.6.2": NOT_DIFFERENTIALLY_PRIVATE,
    "12.6.3": NO_AUDIT,
}
"""Requirements that no bundle supports, with the reason."""


def aisvs_support(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for each requirement of the chapter, whether the bundle of this certificate supports it and why.

    Args:
        body: Body of the public certificate.

    Returns:
        The source of the requirements, and a status and a reason by requirement.
    """
    answers: dict[str, tuple[Support, str]] = {name: ("not supported", reason) for name, reason in ALWAYS.items()}
    answers |= {
        "12.2.1": _propagation(body),
        "12.2.3": _unlearning(body),
        "12.5.3": _withdrawal(body),
        "12.6.4": _proofs(body),
    }
    return {
        "source": SOURCE,
        "requirements": {
            name: {"status": status, "reason": reason} for name, (status, reason) in sorted(answers.items())
        },
    }


def _days(body: Mapping[str, Any]) -> float:
    """Return the days from the receipt of the request to its execution."""
    received, done = (datetime.datetime.fromisoformat(body[name]) for name in ("received", "carried_out"))
    return (done - received).total_seconds() / 86400


def _propagation(body: Mapping[str, Any]) -> tuple[Support, str]:
    """Return status and reason for 12.2.1: deletion reaches data artefacts in fewer than 30 days."""
    if body["level"] == "none":
        return "not supported", "level none: nothing bounds what remains in the model"
    if _days(body) >= WINDOW_DAYS:
        return "not supported", f"executed {_days(body):.0f} days after receipt; fewer than {WINDOW_DAYS} are required"
    return "partly", (
        f"executed within {WINDOW_DAYS} days of receipt, with what was erased in the run folder; raw data, feature "
        "caches, backups and exported models are not covered"
    )


def _unlearning(body: Mapping[str, Any]) -> tuple[Support, str]:
    """Return status and reason for 12.2.3: retraining on the retained data, or (epsilon, delta)-unlearning."""
    if body["level"] == "exact":
        return "supported", f"level exact by {body['method']}: the model was made from the retained data only"
    if body["level"] == "none":
        return "not supported", "level none: no guarantee"
    budget = f"(epsilon, delta) = ({body['epsilon']:g}, {body['delta']:g})"
    if body["level"] == "proven":
        return "supported", f"level proven by {body['method']}, {budget}"
    return "partly", f"level conditional by {body['method']}, {budget}, if the premises hold that are named as assumed"


def _withdrawal(body: Mapping[str, Any]) -> tuple[Support, str]:
    """Return status and reason for 12.5.3: a withdrawal of consent is a deletion request, and inference stops."""
    status, reason = _propagation(body)
    if status == "not supported":
        return status, reason
    return "partly", (
        "a withdrawal filed as a request is executed in the same way; that earlier models are no longer in use is not "
        "shown"
    )


def _proofs(body: Mapping[str, Any]) -> tuple[Support, str]:
    """Return status and reason for 12.6.4: proofs of the overall epsilon, and the loss of utility."""
    if body["level"] == "proven" and body["sigma"] > 0.0:
        return "partly", "the request's epsilon is proven; that of training is not, nor is the loss of utility"
    return "not supported", NOT_DIFFERENTIALLY_PRIVATE
