"""Plans of requests, and the comparison of all methods that could execute a request.

`--method auto` chooses in two steps (docs/theory.md, section 9.7). First, one exact method is selected by the structure
of the run, never by an estimate: solving a closed-form head again, else merging the remaining groups, else training a
fresh model. If the request demands `exact`, this method is used, so no client's data influence the choice. Otherwise it
is used unless another method needs less than half of its rounds; then the fewest rounds win, and on a tie the stronger
guarantee. The certificate's promise holds for the plan that was executed, including its method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sifu.choices import LEVELS, Level
from sifu.core.ledger import finite_or_text
from sifu.core.method_info import CLOSED_FORM, METHOD_INFOS, attacker_rate, delta_of_budget, delta_of_charges
from sifu.core.observers import BeforeAfter, Observers, observers_of
from sifu.core.operator_words import aligned, forgotten_words, names_words
from sifu.core.premises import Premise, premises_that_count
from sifu.core.request_terms import Terms
from sifu.theory.rollback import Subject

SHORTER = 2.0
"""Factor by which another method must need fewer rounds to be chosen instead of an exact one."""


def rounds_words(rounds: int | None) -> str:
    """Return a number of rounds as text.

    >>> rounds_words(None), rounds_words(0), rounds_words(12)
    ('unknown', 'none', '12')
    """
    return "unknown" if rounds is None else str(rounds or "none")


@dataclass(frozen=True)
class MethodOption:
    """A method as an option for a request: its guarantee and cost, or the reason why this run does not allow it.

    Attributes:
        method: Name of the method.
        level: Level that a certificate would have.
        rounds: Expected rounds to the target, or None if unknown.
        summary: Description of the method in one line.
        refused: Reason why this run does not allow the method, or an empty string if it does.
        source_rounds: Number of rounds that led to the model that training restarts from, or None for a fresh model.
        noise_std: Standard deviation of the noise.
        may_be_chosen: False for methods that ignore the request's sigma.
    """

    method: str
    level: Level = "none"
    rounds: int | None = None
    summary: str = ""
    refused: str = ""
    source_rounds: int | None = None
    noise_std: float = 0.0
    may_be_chosen: bool = True

    @property
    def cost(self) -> float:
        """Expected rounds, infinite if unknown."""
        return math.inf if self.rounds is None else self.rounds

    def row(self, mark: str) -> tuple[str, str, str, str]:
        """Return the method with a mark, its level, the model it starts from, and its rounds, as text."""
        start = "a fresh model" if self.source_rounds is None else f"round {self.source_rounds}"
        if self.method == CLOSED_FORM:
            start = "kept statistics"
        noise = f", noise {self.noise_std:.4g}" if self.noise_std else ""
        return self.method + mark, self.level, start + noise, rounds_words(self.rounds)


@dataclass(frozen=True)
class AutoChoice:
    """Choice of a method by `auto`: the lowest accepted level, the options compared, and the reason."""

    least_level: Level
    compared: tuple[MethodOption, ...]
    reason: str

    def to_mapping(self) -> dict[str, object]:
        """Return the choice as the ledger records it."""
        options = [
            {"method": option.method, "level": option.level, "rounds": option.rounds} for option in self.compared
        ]
        return {"least_level": self.least_level, "ways": options}


def least_level(terms: Terms, floor: Level | None = None) -> Level:
    """Return the lowest accepted level: the higher of the request's level and `floor`, or `conditional`.

    >>> least_level(Terms(("a",), 10.0, 0.01)), least_level(Terms(("a",), 10.0, 0.01, level="exact"))
    ('conditional', 'exact')
    """
    usual: Level = floor or terms.level or "conditional"
    return max(usual, terms.level or "none", key=LEVELS.index)


def choose_method(compared: Sequence[MethodOption], least: Level) -> str | None:
    """Return the method that `auto` chooses, or None if no option reaches the lowest accepted level.

    >>> options = [MethodOption("sifu", "proven", 9), MethodOption("scratch", "exact", 90)]
    >>> choose_method(options, "conditional"), choose_method(options, "exact")
    ('sifu', 'scratch')
    >>> choose_method([MethodOption("sifu", "proven", 60), MethodOption("scratch", "exact", 90)], "conditional")
    'scratch'
    """
    enough = [option for option in compared if LEVELS.index(option.level) >= LEVELS.index(least)]
    exact = min((option for option in enough if option.level == "exact"), key=_preserving, default=None)
    shortest = min((option for option in enough if option.level != "exact"), key=_order, default=None)
    if exact is not None and (shortest is None or exact.cost <= SHORTER * shortest.cost):
        return exact.method
    return None if shortest is None else shortest.method


def strongest_option(compared: Sequence[MethodOption]) -> str:
    """Return the method with the strongest guarantee; it is planned if no method reaches the required level."""
    return min(compared, key=lambda option: (-LEVELS.index(option.level), *_order(option))).method


def _order(option: MethodOption) -> tuple[float, int, int]:
    return option.cost, -LEVELS.index(option.level), _preserving(option)


def _preserving(option: MethodOption) -> int:
    """Return the sort key of an exact method; methods that preserve more of the training come first."""
    return -METHOD_INFOS[option.method].preserves


def reason_of(method: str, compared: Sequence[MethodOption], least: Level) -> str:
    """Return the reason for choosing a method."""
    taken = next(option for option in compared if option.method == method)
    if LEVELS.index(taken.level) < LEVELS.index(least):
        return f"{method}, the strongest one here: no method reaches level {least}, so a request would be refused"
    if least == "exact":
        return f"{method}: exact was asked for, and among the exact methods this one preserves most of the training"
    others = [
        option for option in compared if option.method != method and LEVELS.index(option.level) >= LEVELS.index(least)
    ]
    if not others:
        return f"{method}: the only method that reaches at least the required level ({least}); it is {taken.level}"
    if taken.level == "exact":
        return f"{method}: exact, and no other method of level {least} needs less than half of its rounds"
    more = "; an exact method would need over twice as many" if any(way.level == "exact" for way in others) else ""
    return f"{method}: the fewest rounds of level {least} or better{more}"


@dataclass(frozen=True)
class PlannedCharge:
    """Budget that the noise of a plan costs one subject."""

    subject: Subject
    psi: float
    charge: float


@dataclass(frozen=True)
class Plan:
    """Node, noise, cost and level of a request.

    Attributes:
        terms: Terms of the request, with `auto` replaced by the chosen method.
        order: Order of the request among all executed requests.
        subjects: Subjects that the request forgets.
        source_node: Node that training restarts from, or None for a fresh initial model.
        source_depth: Depth of the source on the path.
        source_rounds: Number of rounds that led to the source.
        wanted_node: Latest node that the budget allows, whether or not its model was kept.
        tip_rounds: Number of rounds that led to the current model.
        noise_std: Standard deviation of the noise.
        multiplier: Noise multiplier s of the budget.
        psi: Largest Psi to hide at the source.
        psi_star: Largest Psi that the noise hides.
        charges: Subjects that the noise is charged to, new subjects first.
        premises: Premises of the certificate.
        level: Level of the certificate.
        rounds: Expected rounds to the target, or None if unknown. Without a target, the rounds that always run.
        target: Accuracy at which retraining stops, or 0 without a target.
        notes: Remarks for the operator.
        untouched: True if no subject to hide influenced the source, and no reply of the clients was refused on the path
            to the source.
        ways: Options of all methods, if `auto` chose the method.
        auto: Choice of `auto` and its reason.
        before_after: Guarantee against an observer of all releases, or None if there is no protection.
    """

    terms: Terms
    order: int
    subjects: tuple[Subject, ...]
    source_node: int | None
    source_depth: int
    source_rounds: int
    wanted_node: int | None
    tip_rounds: int
    noise_std: float
    multiplier: float
    psi: float
    psi_star: float
    charges: tuple[PlannedCharge, ...]
    premises: tuple[Premise, ...]
    level: Level
    rounds: int | None
    target: float = 0.0
    notes: tuple[str, ...] = ()
    untouched: bool = False
    ways: tuple[MethodOption, ...] = ()
    auto: AutoChoice | None = None
    before_after: BeforeAfter | None = None

    @property
    def method(self) -> str:
        """Method that would execute the request. With `auto`, this is the chosen method."""
        return self.terms.method

    @property
    def delta_at_most(self) -> float:
        """Delta at the request's epsilon once the whole budget is used."""
        return delta_of_budget(self.terms.epsilon, self.multiplier, self.untouched)

    @property
    def delta_reached(self) -> float:
        """Delta at the request's epsilon that this release alone would reach."""
        own = [charge.charge for charge in self.charges if charge.subject.order == self.order]
        return delta_of_charges(self.terms.epsilon, own)

    @property
    def observers(self) -> Observers:
        """Guarantees against an observer of later releases, and against an observer who kept earlier releases."""
        rate = attacker_rate(self.level, self.multiplier)
        return observers_of(self.level, rate, self.before_after, untouched=self.untouched)

    def to_mapping(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON; an unbounded Psi becomes the string "inf"."""
        terms, auto = self.terms, self.auto
        same = ("level", "delta_at_most", "delta_reached", "psi_star", "wanted_node", "rounds", "target", "notes")
        return {
            "clients": list(terms.clients),
            "records": len(terms.records) or None,
            **{name: getattr(terms, name) for name in ("method", "epsilon", "delta")},
            **{name: getattr(self, name) for name in same},
            "sigma": self.noise_std,
            "psi": finite_or_text(self.psi),
            "rollback_to": self.source_rounds,
            "node": self.source_node,
            "rounds_so_far": self.tip_rounds,
            "attacker_true_positive_rate_at_1_percent": attacker_rate(self.level, self.multiplier),
            "observers": asdict(self.observers),
            "charges": [
                {"psi": finite_or_text(charge.psi), "charge": charge.charge}
                | {name: getattr(charge.subject, name) for name in ("subject", "clients", "budget", "used")}
                for charge in self.charges
            ],
            "premises": [premise.in_words() for premise in self.premises],
            "ways": [asdict(way) | {"allowed": not way.refused} for way in self.ways],
            "chosen": terms.method,
            "least_level": auto.least_level if auto else None,
            "why": auto.reason if auto else None,
        }

    def lines(self, everything: bool = False) -> Iterator[str]:
        """Yield the plan as text, without what does not apply; `everything` adds refused methods and all premises."""
        terms = self.terms
        whom = forgotten_words([names_words(terms.clients)], len(terms.records) or None)
        together = ", each separately" if len(terms.clients) > 1 else ""
        yield f"To forget {whom}{together}: method {terms.method}, level {self.level}."
        yield from (f"  {line}" for line in aligned(list(self._facts())))
        yield from self.observers.sentences
        for status in ("assumed", "failed"):
            premises = premises_that_count(self.premises, exact=self.untouched, fresh=self.source_node is None)
            chosen = [premise for premise in premises if premise.status == status]
            if everything:
                yield from (f"{status} {premise.name}: {premise.statement}" for premise in chosen)
            elif chosen:
                yield f"{status}: {', '.join(premise.name for premise in chosen)}"
        if others := [charge for charge in self.charges if charge.subject.order != self.order]:
            yield f"It also uses budget of {len(others)} subject(s) forgotten earlier."
        yield from (f"Note: {note}" for note in self.notes)
        if self.auto is not None:
            yield ""
            rows = [way.row(" *" if way.method == terms.method else "") for way in self.ways if not way.refused]
            yield from aligned([("method", "level", "starts from", "rounds"), *rows], right=[3])
            yield f"auto chooses {self.auto.reason}."
            refused = [way for way in self.ways if way.refused]
            if everything:
                yield from (f"Not possible: {way.method}. {way.refused}" for way in refused)
            elif refused:
                yield f"Not possible here: {', '.join(way.method for way in refused)}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield what would be done, each fact with its name."""
        terms, back = self.terms, self.tip_rounds - self.source_rounds
        if terms.method == CLOSED_FORM:
            yield "solve again", "from the sum over the clients that stay, exact to the bit"
            own = "none: the client alone sends its statistics again, without these records"
            kept = own if terms.records else "none: no client is contacted"
            yield "rounds", kept if self.rounds == 0 else "1: remaining clients send their statistics"
        else:
            if self.source_node is None:
                yield "start from", "a fresh initial model"
            elif terms.method == "groups":
                yield "start from", "the merge of the groups without a forgotten client"
            else:
                name = "roll back to" if back else "start from"
                yield name, f"round {self.source_rounds} of {self.tip_rounds}, {back or 'nothing'} undone"
            if self.noise_std:
                hides = f"hides Psi up to {self.psi_star:.4g}; theirs is {self.psi:.4g}"
                yield "add noise", f"sigma {self.noise_std:.4g} {hides}"
            about = "unknown" if self.rounds is None else f"about {self.rounds}"
            reach = f"{about}, to {100 * self.target:g} % on training data"
            yield "rounds", reach if self.target > 0 else f"{self.rounds}, as there is no target"
        if terms.records:
            yield "afterwards", f"{terms.clients[0]} stays with its remaining records"
        if not self.untouched and self.level != "none":
            later = f"at most {self.delta_at_most:.5g} with later ones, at epsilon {terms.epsilon:g}"
            yield "delta", f"{self.delta_reached:.5g} by this release, {later}"
        if terms.retention == "strict":
            yield "erased", "every earlier model that they influenced, including those before that round"
