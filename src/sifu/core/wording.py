"""What people are told of a request, written once: plans, reports, the client's text and its audit all use these words.

Every sentence is true for anyone who may read it. A public certificate says neither whether anything was undone nor
whether a model was erased, so the sentences do not say so either. Held-out rows are those that no client trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sifu.core.method_info import CLOSED_FORM

TRAINING_DATA = "on the active clients' training data"
"""What an accuracy without held-out rows is measured on."""


@dataclass(frozen=True)
class HeldOutFigures:
    """Figures on `rows` held-out rows of the clients that stay, or that belong to no client.

    Classification has `accuracy`; of tables also `auc` (of several classes the mean of one against the rest), `f1` (of
    several classes their mean) and, where the model gives probabilities, `calibration_error`. Regression has
    `mean_squared_error` in squares of the target's unit.
    """

    rows: int
    accuracy: float | None = None
    auc: float | None = None
    f1: float | None = None
    calibration_error: float | None = None
    mean_squared_error: float | None = None

    @property
    def where(self) -> str:
        """
        >>> HeldOutFigures(184).where
        'on 184 held-out rows'
        """
        return f"on {self.rows} held-out row{'' if self.rows == 1 else 's'}"

    @property
    def words(self) -> str:
        """
        >>> HeldOutFigures(184, 0.8204, 0.881, 0.8).words
        '82.0 % on 184 held-out rows (AUC 0.881, F1 0.800)'
        >>> HeldOutFigures(1, mean_squared_error=0.25).words
        'mean squared error 0.25 on 1 held-out row'
        """
        if self.accuracy is None:
            return f"mean squared error {self.mean_squared_error:.4g} {self.where}"
        return f"{100 * self.accuracy:.1f} % {self.where}" + (f" ({self.details})" if self.details else "")

    @property
    def details(self) -> str:
        """What there is besides the accuracy."""
        named = (("AUC", self.auc), ("F1", self.f1), ("calibration error", self.calibration_error))
        return ", ".join(f"{name} {value:.3f}" for name, value in named if value is not None)


Start = Literal["fresh", "untouched", "noised", "training noise", "nothing"]
"""What training went on from: a new model, one the clients have no part in, one that noise was added to, one that was
trained with noise, or one of which nothing is known."""

SEEN = {"all": "the models released since", "latest": "the latest model alone"}
"""What an attacker may look at for the figure to hold."""
EXACT_LIMIT = "what the plan itself tells, such as the model gone on from and how long training took, is not covered"


def percent(rate: float) -> str:
    """An attacker's rate as certificates state it, in per cent: one figure for one risk, everywhere.

    >>> percent(0.702), percent(0.01), percent(0.0375)
    ('70.2 %', '1 %', '3.75 %')
    """
    return f"{100.0 * rate:.4g} %"


def start_of(protection: str, starts_from: str, sigma: float) -> Start:
    """What training went on from, as far as a public certificate says it.

    >>> start_of("noise", "rule", 0.1), start_of("noise", "fresh", 0.1), start_of("noise", "rule", 0.0)
    ('noised', 'fresh', 'untouched')
    """
    if protection == "nothing":
        return "nothing"
    if protection == "training noise":
        return "training noise"
    if starts_from == "fresh":
        return "fresh"
    return "noised" if sigma > 0.0 else "untouched"


def forgotten_words(clients: Sequence[str], records: int | None) -> str:
    """Whom, or what of whom, a request forgets.

    >>> forgotten_words(["hospital-3"], 2), forgotten_words(["hospital-3", "hospital-4"], None)
    ('2 records of hospital-3', 'hospital-3, hospital-4')
    """
    names = ", ".join(clients)
    return names if records is None else f"{records} record{'s' if records > 1 else ''} of {names}"


def rows_words(rows: Sequence[int]) -> str:
    """The rows that a request names.

    >>> rows_words([3, 5]), rows_words([7]), rows_words([])
    ('2 records, rows 3 and 5', '1 record, row 7', "all of the client's data")
    """
    if not rows:
        return "all of the client's data"
    if len(rows) == 1:
        return f"1 record, row {rows[0]}"
    *others, last = rows
    return f"{len(rows)} records, rows {', '.join(map(str, others))} and {last}"


def whom_words(clients: int, records: int | None) -> str:
    """Those without whom training went on; of a client that stays, its records.

    >>> whom_words(1, None), whom_words(2, None), whom_words(1, 3)
    ('this participant', 'these participants', 'these records')
    """
    if records is not None:
        return record_words(records)
    return "these participants" if clients > 1 else "this participant"


def record_words(records: int) -> str:
    """
    >>> record_words(1), record_words(3)
    ('this record', 'these records')
    """
    return "this record" if records == 1 else "these records"


def what_was_done(start: Start, sigma: float, whom: str) -> str:
    """What was done for the clients (`whom_words`), in one sentence."""
    if start == "fresh":
        noise = ", random noise was added to it," if sigma > 0.0 else ""
        return f"A new model was made{noise} and trained without {whom}."
    if start == "untouched":
        return f"Training went on without {whom}, from a model that their data has no part in."
    if start == "noised":
        return f"Random noise was added to a model, and training went on from it without {whom}."
    if start == "training noise":
        return f"Random noise was added to every contribution during training, and training went on without {whom}."
    return f"Training went on without {whom}."


def exact_words(whom: str, method: str, records: int | None) -> str:
    """What level `exact` means for `whom`, or for records of one client.

    Only a head in closed form is that of a federation whose client never had the records: elsewhere all that the client
    had contributed before is gone, too.
    """
    released = "The models released from this request on are those of training"
    if records is None or method == CLOSED_FORM:
        return f"{released} without {whom if records is None else record_words(records)} under the same plan"
    return (
        f"{released} to which the client had contributed nothing before this request, and which it joined then with "
        "the records it has left, under the same plan"
    )


def psi_words(status: str) -> str:
    """What Psi is worth, by the status of what it rests on.

    >>> psi_words("met")
    'Psi bounds how far a client can have moved the current model'
    """
    bounds = "Psi bounds how far a client can have moved the current model"
    return {
        "assumed": f"If what the certificates of this run name as assumed holds, {bounds}",
        "failed": "Psi is what the authors' code counts (accounting population); it bounds nothing",
    }.get(status, bounds)


def attacker_words(level: str, rate: float | None, scope: str) -> str:
    """What an attacker can do at most, in one sentence.

    >>> attacker_words("proven", 0.702, "latest")[:87]
    'An attacker with a 1 % false-alarm rate detects at most 70.2 % of forgotten clients fro'
    """
    if rate is None or level == "none":
        return "Nothing bounds what an attacker can tell."
    if level == "exact":
        return f"An attacker who looks at {SEEN['all']} can do no better than guess; {EXACT_LIMIT}."
    attacker = "If the assumptions hold, an attacker" if level == "conditional" else "An attacker"
    detects = f"detects at most {percent(rate)} of forgotten clients from {SEEN[scope]}"
    return f"{attacker} with a 1 % false-alarm rate {detects}."
