"""Sentences of a certificate, written once for clients, auditors, plans and reports.

Every sentence is true for anyone who may read it. A public certificate reveals neither whether anything was undone nor
whether a model was erased, and neither do the sentences.

Certificates contain none of these sentences. They are generated from the fields of a certificate whenever it is read,
so a better wording changes no certificate. `WORDING` counts the versions; a certificate names the version that was
current when it was issued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sifu.choices import Level, Retention, Scope, Unit
from sifu.core.method_info import CLOSED_FORM, Protection, method_info
from sifu.core.observers import Observers, observers_in
from sifu.core.premises import Premise


def whom_words(clients: int, records: int | None) -> str:
    """Return the words for the forgotten clients, or for the forgotten records of a client that stays.

    >>> whom_words(1, None), whom_words(2, None), whom_words(1, 3)
    ('this participant', 'these participants', 'these records')
    """
    if records is not None:
        return record_words(records)
    return "these participants" if clients > 1 else "this participant"


def record_words(records: int) -> str:
    """Return the words for one or several forgotten records.

    >>> record_words(1), record_words(3)
    ('this record', 'these records')
    """
    return "this record" if records == 1 else "these records"


def what_was_done(body: Mapping[str, Any]) -> str:
    """Return a sentence that describes the execution of the request, limited to the facts of a public certificate."""
    whom, noised = whom_words(len(body["clients"]), body["records"]), float(body["sigma"]) > 0.0
    if body["protection"] == "nothing":
        return f"Training went on without {whom}."
    if body["protection"] == "training noise":
        return f"Random noise was added to every contribution during training, and training went on without {whom}."
    if body["method"] == CLOSED_FORM:
        return f"The model was solved again without {whom}."
    if method_info(body["method"]).starts_from == "fresh":
        return f"A new model was made{', random noise was added to it,' if noised else ''} and trained without {whom}."
    if noised:
        return f"Random noise was added to a model, and training went on from it without {whom}."
    return f"Training went on without {whom}, from a model that their data has no part in."


def exact_words(whom: str, method: str, records: int | None) -> str:
    """Return the meaning of level `exact` for `whom`, or for records of one client.

    Only a closed-form head equals the head of a federation whose client never had the records. With other methods, all
    earlier contributions of the client are forgotten as well.

    Args:
        whom: Words for the forgotten clients.
        method: Name of the method.
        records: Number of forgotten records, or None for whole clients.
    """
    released = "The models released from this request on are those of training"
    if records is None or method == CLOSED_FORM:
        return f"{released} without {whom if records is None else record_words(records)} under the same plan"
    return (
        f"{released} to which the client had contributed nothing before this request, and which it joined then with "
        "the records it has left, under the same plan"
    )


WORDING = 6
"""Version of the wording and the rules of claims.

Raise it with every change to a sentence of this file, `observers.py` or `premise_sentences.py`, or to the premises of a
claim. A certificate is recomputed by the rules of the version it names (docs/theory.md, section 12.1). Version 3 counts
all clients that have left so far, certifies the initial model as a fresh one, and records how held-out rows were drawn.
Version 4 distinguishes two observers, version 5 leaves out sentences that do not apply, and version 6 states the limits
of a guarantee over all releases. Versions 4 to 6 keep the rules of version 3.
"""
RULES_COUNT_ALL = 3
"""First version whose rules count all clients that have left so far."""

COUNTERFACTUAL = "the same schedule with the client absent and its slots not refilled"

GUARANTEE = (
    "For the plan that was carried out (initial model, hyper-parameters, preprocessing, participation, batches, "
    "earlier noise, source models and noise sizes), and over the noise drawn from the moment this request was "
    "carried out, what is released {scope} from the data with the client and without it, under that same plan, is "
    "(epsilon, delta)-close."
)

TRAINING_NOISE_GUARANTEE = (
    "For the plan that was carried out (initial model, hyper-parameters, preprocessing, participation, batches and "
    "noise sizes), and over the noise added to every update in training, all models released from this request on, "
    "from the data with the client and without it, under that same plan, are together (epsilon, delta)-close."
)

SCOPE_WORDS = {
    "all": "in all models from that moment on",
    "latest": "in the latest model alone",
}

PLAN_NOT_COVERED = (
    "What the plan itself reveals is not covered: the method where it was left to be chosen, which model training went "
    "on from, how long it took, and by its level and premises whether an automatic rate that was not found anew was "
    "set by the client. "
    "When to stop is decided by the accuracy on every active client, whether it takes part in rounds or not."
)
EARLIER_NOT_COVERED = (
    "Models released before this request was carried out are not covered, nor is what comparing one of them with a "
    "later one reveals."
)
REPORTS_TRUSTED = "Sample counts, drifts and smoothness bounds reported by clients are trusted."
NOISE_NOT_COVERED = "Noise is drawn in floating point; attacks on the last bits of such noise are not covered."
NOT_COVERED = (
    "The other participants and the operator, who hold more than the released models, are not covered.",
    "The same data brought in again, by another client or under another name, is not recognised: nothing of the "
    "forgotten is kept to compare with.",
    "This is evidence for the operator's file, not a statement of legal compliance.",
)
"""Limits of every certificate."""

SEVERAL_RELEASES = (
    "Only the latest model is covered (scope latest): an attacker who keeps several of the models released since this "
    "request learns more, and nothing bounds how much.",
)

EACH_BY_ITSELF = ("Each client is covered separately; what they reveal together is not (unit joint would cover it).",)

EXACT_GUARANTEE = (
    "The client's data has no part in the model training went on from, so the models released from it are those of "
    "training without the client under the same plan."
)

CLOSED_FORM_GUARANTEE = (
    "The model was solved from a sum of integers over the remaining clients, which is bit for bit the sum of a "
    "federation that never had the client."
)

HEADS_COMPARED = (
    "Models released before this request was carried out are not covered. Whoever kept one can compare it with a later "
    "one: the difference of two linear heads can reconstruct a deleted record and identify a deleted client."
)
ALL_RELEASES_NOT_COVERED = (
    "Over all releases, each client or record is covered separately, for the data at hand: this is not worst-case "
    "differential privacy. Requests, joins and releases that were decided by what an earlier release showed are not "
    "covered, nor are other runs on the same data."
)
CLOSED_FORM_NOT_COVERED = (
    "That each client computed its statistics from its own data is trusted.",
    "Any copy that was kept of the client's features (features.cache keeps them), of its statistics, or of a sum with "
    "them, still holds them.",
)
"""Limits of a head in closed form; they replace the limits of training in rounds."""

RECORDS_GUARANTEE = (
    "This is about records of a client that stays: all that it had contributed was forgotten, and it joined again with "
    "the records it has left."
)
EXACT_RECORDS_GUARANTEE = (
    "What it had contributed has no part in the model training went on from, so the models released from it are those "
    "of training to which the client had contributed nothing before this request, under the same plan."
)
CLOSED_FORM_RECORDS_GUARANTEE = (
    "This is about records of a client that stays. The model was solved from a sum of integers over the clients, "
    "which is bit for bit the sum of a federation whose client never had these records."
)
RECORDS_NOT_COVERED = (
    "Other records of the same person, with this client or another, are not covered.",
    "The operator's confidential record names the rows, so that they can be left out whenever the data are read again.",
)
RECORDS_COMPARED = (
    "The comparison is with a world in which the client contributed nothing before this request, and not with one in "
    "which it took part without these records.",
)
NO_GUARANTEE = "Nothing is guaranteed: at least one premise does not hold, so no claim is made."


def guarantee_of(
    level: Level,
    protection: Protection,
    scope: Scope,
    *,
    solved: bool = False,
    records: int | None = None,
    exact: bool = False,
) -> str:
    """Return the sentence that states the guarantee.

    Args:
        level: Level of the certificate.
        protection: Basis of the method's guarantee.
        scope: Releases that the guarantee covers.
        solved: True if the model is a head in closed form.
        records: Number of forgotten records, or None for whole clients.
        exact: True if the guarantee is exact under the premises, so that no budget is part of it.
    """
    if level == "none":
        return NO_GUARANTEE
    exact = exact or level == "exact"
    wording = TRAINING_NOISE_GUARANTEE if protection == "training noise" else GUARANTEE
    guarantee = EXACT_GUARANTEE if exact else wording.format(scope=SCOPE_WORDS[scope])
    if solved:
        guarantee = CLOSED_FORM_GUARANTEE if records is None else CLOSED_FORM_RECORDS_GUARANTEE
    elif records is not None:
        guarantee = f"{RECORDS_GUARANTEE} {EXACT_RECORDS_GUARANTEE if exact else guarantee}"
    if level == "conditional":
        return f"Provided that every premise marked 'assumed' below holds: {guarantee[0].lower()}{guarantee[1:]}"
    return guarantee


def not_covered_by(
    unit: Unit,
    clients: int,
    scope: Scope,
    level: Level,
    *,
    solved: bool = False,
    records: int | None = None,
    noised: bool = True,
    all_releases: bool = False,
) -> list[str]:
    """Return the applicable sentences about the limits of the guarantee.

    Args:
        unit: `client` if the guarantee covers each client separately, `joint` if it covers them together. Ignored for a
            closed-form head, which always covers them together.
        clients: Number of forgotten clients.
        scope: Releases that the guarantee covers.
        level: Level of the certificate.
        solved: True if the model is a head in closed form.
        records: Number of forgotten records, or None for whole clients.
        noised: True if noise is part of the guarantee.
        all_releases: True if a guarantee over all releases is stated (`release.noise`).
    """
    of_records = () if records is None else RECORDS_NOT_COVERED
    of_noise = (NOISE_NOT_COVERED,) if noised else ()
    if solved:
        earlier = ALL_RELEASES_NOT_COVERED if all_releases else HEADS_COMPARED
        return [earlier, *CLOSED_FORM_NOT_COVERED, *of_noise, *of_records, *NOT_COVERED]
    latest = scope == "latest" and level in ("proven", "conditional")
    together = unit == "client" and clients > 1 and level != "exact"  # exact for each is exact for all
    several = (*(SEVERAL_RELEASES if latest else ()), *(EACH_BY_ITSELF if together else ()))
    compared = () if records is None or level == "none" else RECORDS_COMPARED
    of_rounds = (PLAN_NOT_COVERED, EARLIER_NOT_COVERED, REPORTS_TRUSTED)
    return [*of_rounds, *of_noise, *several, *compared, *of_records, *NOT_COVERED]


Start = Literal["fresh", "merge", "initial", "trained"]
"""Model that training continued from: fresh, merged from groups, initial with replayed updates, or trained before.
"""
ERASED_AND_LEFT: Mapping[Start, tuple[str, str]] = {
    "initial": (
        "Any model after the initial one was erased.",
        "The initial model remains. What was made from stored updates may still hold the client's part.",
    ),
    "merge": (
        "Every model after the initial one was erased, and the model of every group that held the client.",
        "The initial model and the models of groups that never held the client remain.",
    ),
    "fresh": (
        "Every model on the way to the current one was erased.",
        "No model that the client had a part in remains.",
    ),
}
GROUPS_REMAIN = (
    " If clients trained in groups, the models of groups the client never belonged to remain, and so may the groups' "
    "starting model."
)


def what_was_erased(
    retention: Retention,
    start: Start,
    *,
    protection: Protection,
    keeps_updates: bool,
    statistics: Literal["clients", "sum"] | None = None,
    records: int | None = None,
    grouped: bool = True,
    untouched: bool = False,
) -> tuple[str, str]:
    """Return public statements on what was erased and on what remains.

    Args:
        retention: Retention rule of the request.
        start: Model that training continued from.
        protection: Basis of the method's guarantee.
        keeps_updates: True if the run stores clients' updates.
        statistics: Kept statistics that a head was solved from; None without a head in closed form.
        records: Number of forgotten records, or None for whole clients.
        grouped: True if clients may have trained in groups.
        untouched: True if the client did not influence the model that training continued from.
    """
    if start != "trained":
        erased, remains = ERASED_AND_LEFT[start]
        remains += GROUPS_REMAIN if start == "fresh" and grouped else ""
    elif untouched:
        erased = "Any kept model after the one training went on from was erased."
        remains = "Models up to that one stay with the operator for later requests; the client has no part in them."
    elif retention == "strict":
        erased = "Any kept model that held the client's part was erased."
        remains = (
            "The model that training went on from, and every later one, may hold the client's part; nothing hides it."
            if protection == "nothing"
            else "No model that holds the client's part without noise remains."
        )
    else:
        erased = "Any kept model after the one training went on from was erased."
        remains = (
            "Models up to that one stay with the operator for later requests, without the noise of this one; they may "
            "hold the client's part."
        )
    if keeps_updates:
        erased += " Any stored update of the client was erased."
        remains += " Updates of other clients are stored with the operator, unreleased."
    if statistics is not None:
        erased += " The client's statistics, and every sum with them, were erased."
        who = "of each other client and their sum" if statistics == "clients" else "of the other clients, as one sum,"
        remains += f" Statistics {who} are stored with the operator, unreleased."
    if records is not None:
        remains += " The client takes part again with the records it has left."
    return erased, remains


@dataclass(frozen=True)
class CertificateWords:
    """Sentences of a certificate, in the current wording."""

    guarantee: str
    observers: Observers
    not_covered: list[str]
    erased: str
    remains: str
    premises: list[Premise]

    def premises_that_are(self, status: str) -> list[str]:
        """Return the sentences of the premises with this status."""
        return [premise.statement for premise in self.premises if premise.status == status]


def has_noise(body: Mapping[str, Any]) -> bool:
    """Return whether noise, on a model, in training or on releases, is part of what a certificate guarantees."""
    return float(body["sigma"]) > 0.0 or body.get("training_noise") is not None or body.get("before_after") is not None


def needs_budget(body: Mapping[str, Any]) -> bool:
    """Return whether a certificate's budget is meaningful: there is noise, or the client influenced the model.

    Args:
        body: Certificate of either form.
    """
    return has_noise(body) or not body.get("untouched")


def words_of(body: Mapping[str, Any]) -> CertificateWords:
    """Return the sentences for the fields of a certificate of either form."""
    level, scope, solved, records = body["level"], body["scope"], body["method"] == CLOSED_FORM, body["records"]
    erased, remains = what_was_erased(
        body["retention"],
        body["start"],
        protection=body["protection"],
        keeps_updates=body["keeps_updates"],
        statistics=body["keeps_statistics"],
        records=records,
        grouped=not solved or any(said["name"] == "grouping" for said in body["premises"]),
        untouched=bool(body.get("untouched")),
    )
    exact = not needs_budget(body)
    limits: dict[str, Any] = {"solved": solved, "records": records, "noised": has_noise(body)}
    limits["all_releases"] = "before_after" in body
    return CertificateWords(
        guarantee_of(level, body["protection"], scope, solved=solved, records=records, exact=exact),
        observers_in(body),
        not_covered_by(body["unit"], len(body["clients"]), scope, level, **limits),
        erased,
        remains,
        [Premise(said["name"], said["status"], said["case"], said["values"]) for said in body["premises"]],
    )
