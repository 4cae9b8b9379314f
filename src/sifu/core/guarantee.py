"""What a certificate says in sentences: what is promised, what is not, what was erased and what remains.

Certificates hold none of these sentences. They are made from its fields whenever someone reads it, so a better wording
changes no certificate. `WORDING` counts the versions; a certificate names the one of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sifu.choices import Level, Retention, Scope, Unit
from sifu.core.method_info import CLOSED_FORM, Protection
from sifu.core.premise_sentences import sentence

WORDING = 2
"""Raise it with every change to a sentence of this file or of `premise_sentences.py`."""

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

NOT_COVERED = (
    "What the plan itself reveals is not covered: the method where it was left to be chosen, which model training went "
    "on from, how long it took, and by its level and premises whether an automatic rate that was not found anew was "
    "set by the client. "
    "When to stop is decided by the accuracy on every active client, whether it takes part in rounds or not.",
    "Models seen before this request was carried out are not covered.",
    "The other participants and the operator, who hold more than the released models, are not covered.",
    "Sample counts, drifts and smoothness bounds reported by clients are trusted.",
    "The same data brought in again, by another client or under another name, is not recognised: nothing of the "
    "forgotten is kept to compare with.",
    "Noise is drawn in floating point; attacks on the last bits of such noise are not covered.",
    "This is evidence for the operator's file, not a statement of legal compliance.",
)

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

CLOSED_FORM_NOT_COVERED = (
    "The difference between releases before and after this request reveals something about the client; only those "
    "from now on are covered.",
    "Any copy that was kept of the client's features (features.cache keeps them), of its statistics, or of a sum with "
    "them, still holds them.",
)

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
    level: Level, protection: Protection, scope: Scope, *, solved: bool = False, records: int | None = None
) -> str:
    """The sentence that says what is promised; `solved` is a head in closed form, `records` those of one client."""
    if level == "none":
        return NO_GUARANTEE
    wording = TRAINING_NOISE_GUARANTEE if protection == "training noise" else GUARANTEE
    guarantee = EXACT_GUARANTEE if level == "exact" else wording.format(scope=SCOPE_WORDS[scope])
    if solved:
        guarantee = CLOSED_FORM_GUARANTEE if records is None else CLOSED_FORM_RECORDS_GUARANTEE
    elif records is not None:
        guarantee = f"{RECORDS_GUARANTEE} {EXACT_RECORDS_GUARANTEE if level == 'exact' else guarantee}"
    if level == "conditional":
        return f"Provided that every premise marked 'assumed' below holds: {guarantee[0].lower()}{guarantee[1:]}"
    return guarantee


def not_covered_by(
    unit: Unit, clients: int, scope: Scope, level: Level, *, solved: bool = False, records: int | None = None
) -> list[str]:
    """The sentences that say what is not promised; a head in closed form forgets clients together anyway."""
    of_records = () if records is None else RECORDS_NOT_COVERED
    if solved:
        return [*NOT_COVERED, *CLOSED_FORM_NOT_COVERED, *of_records]
    latest = scope == "latest" and level in ("proven", "conditional")
    together = unit == "client" and clients > 1
    several = (*(SEVERAL_RELEASES if latest else ()), *(EACH_BY_ITSELF if together else ()))
    compared = () if records is None or level == "none" else RECORDS_COMPARED
    return [*NOT_COVERED, *several, *compared, *of_records]


def what_was_erased(
    retention: Retention,
    *,
    protection: Protection,
    fresh: bool,
    replayed: bool,
    keeps_updates: bool,
    statistics: Literal["clients", "sum"] | None = None,
    merged: bool = False,
    records: int | None = None,
) -> tuple[str, str]:
    """What anyone may know of what was erased, and of what remains; `statistics` are those a head was solved from."""
    if replayed:
        erased = "Any model after the initial one was erased."
        remains = "The initial model remains. What was made from stored updates may still hold the client's part."
    elif merged:
        erased = "Every model after the initial one was erased, and the model of every group that held the client."
        remains = "The initial model and the models of groups that never held the client remain."
    elif fresh:
        erased = "Every model on the way to the current one was erased."
        remains = (
            "No model that the client had a part in remains. Where clients trained in groups, the models of groups "
            "that never held it do, and the model that groups start from may."
        )
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
class StatedPremise:
    """A premise of a certificate in words."""

    name: str
    status: str
    statement: str


@dataclass(frozen=True)
class CertificateWords:
    """A certificate in sentences, by today's wording."""

    guarantee: str
    not_covered: list[str]
    erased: str
    remains: str
    premises: list[StatedPremise]

    def premises_that_are(self, status: str) -> list[str]:
        """The sentences of the premises with this status."""
        return [premise.statement for premise in self.premises if premise.status == status]


def words_of(body: Mapping[str, Any]) -> CertificateWords:
    """What the fields of a certificate, of either form, mean."""
    solved, records = body["method"] == CLOSED_FORM, body["records"]
    erased, remains = what_was_erased(
        body["retention"],
        protection=body["protection"],
        fresh=body["start"] == "fresh",
        replayed=body["start"] == "initial",
        keeps_updates=body["keeps_updates"],
        statistics=body["keeps_statistics"],
        merged=body["start"] == "merge",
        records=records,
    )
    return CertificateWords(
        guarantee_of(body["level"], body["protection"], body["scope"], solved=solved, records=records),
        not_covered_by(
            body["unit"], len(body["clients"]), body["scope"], body["level"], solved=solved, records=records
        ),
        erased,
        remains,
        [
            StatedPremise(
                premise["name"], premise["status"], sentence(premise["name"], premise["case"], premise["values"])
            )
            for premise in body["premises"]
        ],
    )
