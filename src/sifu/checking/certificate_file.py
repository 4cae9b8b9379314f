"""Verification of a certificate without its run: its signature, and every figure derived from its other figures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sifu.checking.certificate_checks import wrong_types
from sifu.checking.stored_models import TOLERANCE, agree
from sifu.checking.verification import Verification
from sifu.core.certificate_words import Start
from sifu.core.ledger import finite_or_text, read_json
from sifu.core.method_info import (
    CLOSED_FORM,
    StartsFrom,
    attacker_rate,
    delta_of_budget,
    delta_of_charges,
    method_info,
)
from sifu.core.premises import (
    Premise,
    counterfactual_premise,
    level_of,
    noise_premise,
)
from sifu.core.request_terms import AUTO, Terms
from sifu.errors import InputError
from sifu.requests.certification import CERTIFICATE, COMMON_FIELDS, FIELDS, OPTIONAL_FIELDS
from sifu.store.checkpoints import Checkpoint
from sifu.store.keys import signature_holds
from sifu.theory import calibration
from sifu.theory.participation import Participation
from sifu.theory.rollback import Subject, charge
from sifu.version import OTHER_FORMAT

STARTS: dict[StartsFrom, tuple[Start, ...]] = {
    "rule": ("trained", "fresh"), "fresh": ("fresh",), "merge": ("merge", "fresh")
}  # fmt: skip
"""Permitted starting models of retraining, by the method's `starts_from`."""


def verify_content(path: Path, text: bytes, public_key: str | None = None) -> Verification:
    """Verify the content of a certificate without its run.

    Returns:
        The problems and notes.

    Raises:
        InputError: If the file is not a sifu certificate.
    """
    try:
        content = read_json(text, each_once)
        body = content["body"]
        kind = body["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is not a sifu certificate: it has no readable body ({type(error).__name__})"
        ) from error
    if kind != CERTIFICATE:
        raise InputError(f"{path} has the format {str(kind)[:40]!r}: {OTHER_FORMAT}")
    result = Verification(str(path), str(content.get("public_key", "")), content=content)
    if not signature_holds(content, None if public_key is None else public_key.lower()):
        result.problems.append("signature: it does not hold over the certificate's content (or is of another key)")
    try:
        result.problems.extend(_check_body(body, result.public_key))
    except Exception as error:  # an untrusted file may be malformed in any way
        result.problems.append(f"content: cannot be recomputed: {type(error).__name__}: {error}")
    return result


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, and refuse duplicate keys: another program might use the other value."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _check_body(body: dict[str, Any], public_key: str) -> Iterator[str]:
    form = body["form"]
    fields = set(body) - OPTIONAL_FIELDS
    strange = sorted(fields ^ FIELDS.get(form, COMMON_FIELDS))
    if form not in FIELDS or strange:
        yield f"its fields are not those of a certificate of form {str(form)[:20]!r}: {', '.join(strange)[:200]}"
        return
    wrong = list(wrong_types(body))
    if wrong:
        yield from wrong
        return
    yield from _check_head(body, public_key)
    yield from _check_terms(body)
    multiplier = calibration.exact_multiplier(body["epsilon"], body["delta"])
    exact, info = body["untouched"], method_info(body["method"])
    if body["noise_source"] not in ("system", "given"):
        yield f"noise_source says {body['noise_source'][:80]!r}, which no noise of method {body['method']} comes from"
    yield from _unlike(body, noise_multiplier=multiplier)
    yield from _unlike(body, delta_at_most=delta_of_budget(body["epsilon"], multiplier, exact))
    refused = any(premise["name"] == "replies" and premise["status"] == "assumed" for premise in body["premises"])
    if not exact and not body["sigma"] > 0.0 and not refused:
        yield "no noise was added, although a client that had to be hidden touched the model"
    yield from _check_premises(body)
    solved = body["method"] == CLOSED_FORM
    yield from _unlike(body, attacker_true_positive_rate_at_1_percent=attacker_rate(body["level"], multiplier))
    if body["start"] not in STARTS[info.starts_from]:
        yield f"start says {body['start']!r}, which method {body['method']} never starts from"
    if info.starts_from == "rule" and body["start"] == "fresh" and (body["sigma"] > 0.0 or not exact):
        yield f"start says 'fresh', but method {body['method']} continued from a model that needed hiding"
    if (body["keeps_statistics"] is not None) != solved:
        yield f"keeps_statistics says {body['keeps_statistics']!r}, which is not what method {body['method']} leaves"
    if form == "auditor":
        yield from _check_subjects(body, multiplier)
        if (body["solve"] is not None) != solved:
            yield f"solve says {str(body['solve'])[:80]!r}, which is not what method {body['method']} leaves"
        for name, model in body["models"].items():
            if model["commitment"] != body["commitments"][name]:
                yield f"models.{name} has another commitment than commitments.{name}"
            if hashlib.sha256(bytes.fromhex(model["nonce"] + model["digest"])).hexdigest() != model["commitment"]:
                yield f"models.{name}: the commitment is not that of its digest and nonce"


def _unlike(stated: dict[str, Any], of: str = "", **recomputed: Any) -> Iterator[str]:
    """Yield a problem for each recomputed value that differs from the stated one; `of` is a prefix of the message."""
    for name, value in recomputed.items():
        if not agree(stated[name], value):
            yield f"{of}{name} says {stated[name]!r}, recomputed {value!r}"


def _check_head(body: dict[str, Any], public_key: str) -> Iterator[str]:
    """Yield a problem if the ledger's head is not signed with the certificate's key, or times are out of order."""
    if not Checkpoint.in_certificate(body, public_key).holds:
        yield "ledger: the head that it names is not signed with the certificate's key"
    times = [body["received"], body["carried_out"], body["ledger"]["time"], body["issued"]]
    if times != sorted(times):
        yield f"the dates received, executed, last event and issued are out of order: {', '.join(times)}"


def _check_terms(body: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each stated value that differs from the terms of the request."""
    terms = Terms.from_mapping(body["terms"] | {"clients": body["clients"]})
    asked_for = {name: getattr(terms, name) for name in ("epsilon", "delta", "retention")}
    asked_for |= {} if terms.method == AUTO else {"method": terms.method}
    asked_for |= {} if terms.sigma == "auto" or not body["sigma"] else {"sigma": terms.sigma}
    demanded, stated = terms.before_after_budget, body.get("before_after")
    if demanded is not None and stated != dict(zip(("epsilon", "delta"), demanded, strict=True)):
        yield f"before_after says {stated!r}, the terms demanded {demanded!r}"
    for name, value in asked_for.items():
        if not agree(body[name], value):
            yield f"{name} says {body[name]!r}, the terms asked for {value!r}"


def _check_premises(body: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each missing or contradictory premise, and for a level that the premises do not allow."""
    premises = [
        Premise(stated["name"], stated["status"], stated["case"], stated["values"]) for stated in body["premises"]
    ]
    by_name = {premise.name: premise for premise in premises}
    missing = sorted(_names_of_premises(body) - set(by_name))
    if missing:
        yield f"premises leave out {', '.join(missing)}"
    for premise in premises:
        try:
            _ = premise.statement
        except (ValueError, KeyError, IndexError, TypeError):
            yield f"premise {premise.name!r}: case {premise.case!r} with these values means nothing"
    for expected in (
        counterfactual_premise(Participation.parse(body["participation"]).independent, separate="identity" in by_name),
        noise_premise(body["noise_source"]),
    ):
        stated = by_name.get(expected.name, expected)
        if stated != expected:
            yield f"premise {expected.name} says {stated.status!r}, its other fields make it {expected.status!r}"
    level = level_of(premises, exact=body["untouched"], fresh=body["start"] == "fresh")
    if body["level"] != level:
        yield f"level says {body['level']!r}, the premises allow {level!r}"


def _names_of_premises(body: dict[str, Any]) -> set[str]:
    """Return the names of the premises that a certificate with this body must state."""
    always = {"preprocessing", "hyper-parameters", *(() if body["method"] == CLOSED_FORM else ("initial model",))}
    info = method_info(body["method"])
    always |= set(info.extra_premises)
    if info.starts_from in ("fresh", "merge") or body["start"] == "fresh":
        return always
    return always | {
        "regularity", "counterfactual", "arithmetic", "noise", "honest reports",
    }  # fmt: skip


def _check_subjects(body: dict[str, Any], multiplier: float) -> Iterator[str]:
    """Yield a problem unless the certificate's subjects are the requesters, within the request's budget."""
    exact, clients = body["untouched"], body["clients"]
    groups = [[client] for client in clients]
    hidden = [subject["clients"] for subject in body["subjects"]]
    if hidden != groups:
        yield f"subjects names {hidden}, but the request is to forget {groups}"[:300]
    budget = Subject(0, (), multiplier, 0).budget
    psi_star = calibration.hidden_sensitivity(body["sigma"], multiplier)
    yield from _unlike(body, psi_star=psi_star)
    largest = max((float(subject["psi"]) for subject in body["subjects"]), default=0.0)
    if not agree(float(body["psi"]), largest):
        yield f"psi says {body['psi']!r}, the largest of the subjects is {largest!r}"
    for subject in body["subjects"]:
        if exact and float(subject["psi"]) > 0.0:
            yield f"untouched is claimed for {', '.join(subject['clients'])}, whose psi is {subject['psi']!r}"
        cost = charge(float(subject["psi"]), body["sigma"])
        names = ", ".join(subject["clients"])
        yield from _unlike(subject, f"subject {names}: the ", charge=finite_or_text(cost), budget=budget)
        if cost > budget * (1.0 + TOLERANCE):
            yield f"the charge of {names} is above its budget"
    costs = [charge(float(subject["psi"]), body["sigma"]) for subject in body["subjects"]]
    yield from _unlike(body, delta_reached=delta_of_charges(body["epsilon"], costs))
    if float(body["psi"]) > psi_star * (1.0 + TOLERANCE):
        yield f"psi {body['psi']!r} is above psi_star {psi_star!r}"
