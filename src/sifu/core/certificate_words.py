"""Sentences about a certificate for clients, auditors, plans and reports.

A public certificate reveals neither whether training was rolled back nor whether a model was erased, and neither do the
sentences about it.

The sentences are generated from the fields of a certificate whenever it is read. No certificate contains a sentence, so
a new wording changes no certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sifu.choices import Retention
from sifu.core.method_info import CLOSED_FORM, method_info
from sifu.core.observers import observers_in
from sifu.core.operator_words import forgotten_words
from sifu.core.premises import Premise
from sifu.core.request_terms import BUDGET_TERMS, ROUND_TERMS, terms_words


def whom_words(clients: int, records: int | None) -> str:
    """Return a phrase for forgotten clients or, if `records` is given, for forgotten records of a client that stays.

    >>> whom_words(1, None), whom_words(2, None), whom_words(1, 3)
    ('this participant', 'these participants', 'these records')
    """
    if records is not None:
        return "this record" if records == 1 else "these records"
    return "these participants" if clients > 1 else "this participant"


def what_was_done(body: Mapping[str, Any]) -> str:
    """Return a sentence that describes how the request was executed, using only facts of a public certificate."""
    whom, noised = whom_words(len(body["clients"]), body["records"]), float(body["sigma"]) > 0.0
    if body["method"] == CLOSED_FORM:
        return f"The model was solved again without {whom}."
    if method_info(body["method"]).starts_from == "fresh":
        return (
            f"A fresh model was made{', random noise was added to it,' if noised else ''} and trained without {whom}."
        )
    if noised:
        return f"Random noise was added to a model, and training continued from it without {whom}."
    return f"Training continued without {whom}, from a model that their data never influenced."


def exact_words(whom: str, method: str, records: int | None) -> str:
    """Return the meaning of level `exact` for the clients `whom`, or for records of one client.

    If records are forgotten, only a closed-form head equals the head of a federation in which the client never had
    these records. Other methods forget all earlier contributions of the client.
    """
    released = "The models released from this request on are those of training"
    if records is None or method == CLOSED_FORM:
        return f"{released} without {whom if records is None else whom_words(1, records)} under the same plan"
    return (
        f"{released} under the same plan, to which the client contributed nothing before this request, and which it "
        "then joined with its remaining records"
    )


GUARANTEE = (
    "For the executed plan (initial model, hyperparameters, preprocessing, participation, batches, earlier noise, "
    "source models and noise sizes), and over the noise drawn since this request was executed: the joint distributions "
    "of all models released since then, with and "
    "without the client's data under the same plan, are (epsilon, delta)-close."
)

PLAN_NOT_COVERED = (
    "What the plan itself reveals is not covered: the method if it was chosen automatically, the model that training "
    "resumed from, how long training took, the level and the premises. The accuracy on all active clients, including "
    "those that take part in no round, decides when training stops."
)
EARLIER_NOT_COVERED = (
    "Models released before this request was executed are not covered, nor is what a comparison of one of them with a "
    "later one reveals."
)
REPORTS_TRUSTED = "Sample counts, drifts and expansions reported by clients are trusted."
NOISE_NOT_COVERED = "Noise is drawn in floating point; attacks on its last bits are not covered."
NOT_COVERED = (
    "The other participants and the operator, who have more than the released models, are not covered.",
    "The same data from another client, or under another name, are not recognised, because nothing of the forgotten "
    "data is kept for a comparison.",
    "This is evidence for the operator's file, not a statement of legal compliance.",
)
"""Limits that every certificate has."""

EACH_BY_ITSELF = ("Each client is covered separately; what they reveal together is not.",)

HEADS_COMPARED = (
    "Models released before this request was executed are not covered. Anyone who kept one can compare it with a later "
    "one: the difference of two linear heads can reconstruct a deleted record and identify a deleted client."
)
ALL_RELEASES_NOT_COVERED = (
    "Over all releases, each client or record is covered separately, for the data of this run: this is not worst-case "
    "differential privacy. Requests, joins and releases that depend on an earlier release are not covered, nor are "
    "other runs on the same data."
)
CLOSED_FORM_NOT_COVERED = (
    "It is trusted that each client computed its statistics from its own data.",
    "Kept copies of the client's features (such as features.cache), of its statistics, or of a sum that includes them "
    "are not covered.",
)
"""Limits of certificates for closed-form heads; they replace the limits of training in rounds."""

RECORDS_NOT_COVERED = (
    "Other records of the same person, with this client or another, are not covered.",
    "The operator's confidential ledger lists the rows, so that they are left out whenever the data are read again.",
)
RECORDS_COMPARED = (
    "The comparison is with a federation to which the client contributed nothing before this request, not with one in "
    "which it took part without these records.",
)


def not_covered_by(body: Mapping[str, Any]) -> list[str]:
    """Return the sentences on the limits of a certificate's guarantee, in its public or its auditor's form."""
    level = body["level"]
    of_records = () if body["records"] is None else RECORDS_NOT_COVERED
    of_noise = (NOISE_NOT_COVERED,) if has_noise(body) else ()
    if body["method"] == CLOSED_FORM:
        earlier = ALL_RELEASES_NOT_COVERED if "before_after" in body else HEADS_COMPARED
        return [earlier, *CLOSED_FORM_NOT_COVERED, *of_noise, *of_records, *NOT_COVERED]
    # A guarantee that is exact for each client is also exact for all clients together.
    several = EACH_BY_ITSELF if len(body["clients"]) > 1 and level != "exact" else ()
    compared = () if body["records"] is None or level == "none" else RECORDS_COMPARED
    of_rounds = (PLAN_NOT_COVERED, EARLIER_NOT_COVERED, REPORTS_TRUSTED)
    return [*of_rounds, *of_noise, *several, *compared, *of_records, *NOT_COVERED]


Start = Literal["fresh", "merge", "trained"]
"""Model that training continued from: fresh, merged from groups, or trained before."""
ERASED_AND_LEFT: Mapping[Start, tuple[str, str]] = {
    "merge": (
        "Every model after the initial one was erased, and the model of every group that included the client.",
        "The initial model and the models of groups that never included the client remain.",
    ),
    "fresh": (
        "Every model on the way to the current one was erased.",
        "No model in the run folder contains the client's influence. Exported copies may.",
    ),
}
GROUPS_REMAIN = (
    " If clients trained in groups, the models of groups that never included the client remain, and the groups' "
    "initial model may remain."
)


def what_was_erased(
    retention: Retention,
    start: Start,
    *,
    statistics: Literal["clients", "sum"] | None = None,
    records: int | None = None,
    grouped: bool = True,
    untouched: bool = False,
) -> tuple[str, str]:
    """Return a public statement on the erased data, and one on the data that remain.

    Args:
        retention: Retention rule of the request.
        start: Model that training continued from.
        statistics: Kept statistics that a head was solved from, or None without a head in closed form.
        records: Number of forgotten records, or None if whole clients were forgotten.
        grouped: True if clients may have trained in groups.
        untouched: True if the client did not influence the model that training continued from.
    """
    if start != "trained":
        erased, remains = ERASED_AND_LEFT[start]
        remains += GROUPS_REMAIN if start == "fresh" and grouped else ""
    elif untouched:
        erased = "Any kept model after the one that training resumed from was erased."
        remains = "The operator keeps the models up to that one for later requests; the client did not influence them."
    elif retention == "strict":
        erased = "Any kept model with the client's influence was erased."
        remains = "No model in the run folder contains the client's influence without noise. Exported copies may."
    else:
        erased = "Any kept model after the one that training resumed from was erased."
        remains = (
            "The operator keeps the models up to that one for later requests, without the noise of this request; they "
            "may contain the client's influence."
        )
    if statistics is not None:
        erased += " The client's statistics, and every sum that includes them, were erased."
        who = "of each other client and their sum" if statistics == "clients" else "of the other clients, as one sum,"
        remains += f" The operator keeps the statistics {who} and does not release them."
    if records is not None:
        remains += " The client takes part again with its remaining records."
    return erased, remains


CertificateForm = Literal["public", "auditor"]


@dataclass(frozen=True)
class Certificate:
    """A signed certificate: its statements in `body`, the operator's key, and the signature over the body."""

    form: CertificateForm
    body: dict[str, Any]
    public_key: str
    signature: str

    def to_mapping(self) -> dict[str, Any]:
        """Return the content of the certificate's file."""
        return {"body": self.body, "public_key": self.public_key, "signature": self.signature}

    @property
    def words(self) -> CertificateWords:
        """Sentences for the fields of the certificate."""
        return words_of(self.body)

    def lines(self, everything: bool = False) -> list[str]:
        """Return the answer to the client in plain language.

        Args:
            everything: True for all sentences, and for the figures and premises of an auditor's certificate.
        """
        body, words = self.body, self.words
        lines = [
            f"The request {body['request']} to forget {forgotten_words(body['clients'], body['records'])}, received on "
            f"{body['received'][:10]}, was executed on {body['carried_out'][:10]}.",
            *words.promise,
        ]
        assumed = words.premises_that_are("assumed") if body["level"] == "conditional" else []
        if not everything:
            told = f"{len(assumed)} assumption{'' if len(assumed) == 1 else 's'} without a proof, " if assumed else ""
            more = f"{told}what was erased, what is kept, and {len(words.not_covered)} things that are not covered"
            return [f"Level {body['level']}, method {body['method']}.", *lines, f"With --all: {more}."]
        if assumed:
            lines += ["The assumptions, which are not proven:", *(f"- {sentence}" for sentence in assumed)]
        lines += [f"Erased: {words.erased}", f"Kept: {words.remains}", "Not covered:"]
        lines += [*(f"- {sentence}" for sentence in words.not_covered), f"Terms asked for: {terms_asked_for(body)}."]
        return lines if self.form == "public" else [*lines, "", *self._auditor_lines()]

    def _auditor_lines(self) -> list[str]:
        """Return the statements that the public certificate lacks."""
        body = self.body
        budget = f", epsilon {body['epsilon']:g}, delta {body['delta']:g}" if needs_budget(body) else ""
        lines = [f"For auditors, confidential: level {body['level']}, method {body['method']}{budget}."]
        psi, limit = body["psi"], body["psi_star"]
        if isinstance(psi, int | float) and isinstance(limit, int | float) and limit > 0:
            lines.append(
                "Psi bounds the clients' influence on the model that training resumed from, if the assumptions below "
                f"hold: {psi:.4g}. Noise of standard deviation {float(body['sigma']):.4g} hides up to Psi* = "
                f"{limit:.4g}."
            )
        if body["method"] != CLOSED_FORM:  # a solve has no rounds of retraining
            lines.append(f"Rounds of retraining: {body['rounds']}.")
        lines += [f"- {premise.status}: {premise.statement}" for premise in self.words.premises]
        return [*lines, f"Signed over event {body['ledger']['seq']} of the ledger; issued {body['issued']}."]


@dataclass(frozen=True)
class CertificateWords:
    """Sentences of a certificate; `promise` says in plain language what was done and what observers can learn."""

    promise: list[str]
    not_covered: list[str]
    erased: str
    remains: str
    premises: list[Premise]

    def premises_that_are(self, status: str) -> list[str]:
        """Return the sentences of the premises with this status."""
        return [premise.statement for premise in self.premises if premise.status == status]


def has_noise(body: Mapping[str, Any]) -> bool:
    """Return whether a certificate's guarantee depends on noise, added to a model or to releases."""
    return float(body["sigma"]) > 0.0 or body.get("before_after") is not None


def _promise(body: Mapping[str, Any]) -> list[str]:
    """Return sentences on the execution of the request, and on what it means for observers."""
    clients, level, records = len(body["clients"]), body["level"], body["records"]
    lines = [what_was_done(body)]
    if records is not None and body["method"] != CLOSED_FORM:
        lines.append(
            "All that the participant had contributed before was forgotten, too; it takes part again with the records "
            "it has left."
        )
    if level == "exact":
        lines.append(f"{exact_words(whom_words(clients, None), body['method'], records)}.")
    if level == "none":
        whose = "these participants'" if clients > 1 else "this participant's"
        lines.append(
            f"Nothing is guaranteed ({body['method']}): it is unknown how much of {whose} data is still in the model."
        )
    return [*lines, *observers_in(body).sentences]


def needs_budget(body: Mapping[str, Any]) -> bool:
    """Return whether a certificate's budget has a meaning: noise was added, or the client influenced the model."""
    return has_noise(body) or not body.get("untouched")


def terms_asked_for(body: Mapping[str, Any]) -> str:
    """Return the terms of a certificate that apply to its method, in one line."""
    of_budget = () if needs_budget(body) else BUDGET_TERMS
    return terms_words(body["terms"], without=(*of_budget, *(ROUND_TERMS if body["method"] == CLOSED_FORM else ())))


def words_of(body: Mapping[str, Any]) -> CertificateWords:
    """Return the sentences for the fields of a certificate, in its public or its auditor's form."""
    is_solved = body["method"] == CLOSED_FORM
    erased, remains = what_was_erased(
        body["retention"],
        body["start"],
        statistics=body["keeps_statistics"],
        records=body["records"],
        grouped=not is_solved or any(said["name"] == "grouping" for said in body["premises"]),
        untouched=bool(body.get("untouched")),
    )
    return CertificateWords(
        _promise(body),
        not_covered_by(body),
        erased,
        remains,
        [Premise(said["name"], said["status"], said["case"], said["values"]) for said in body["premises"]],
    )
