"""Plans of requests, and the comparison of all methods that could execute a request.

`--method auto` chooses in two steps (docs/theory.md, section 9.7). First, one exact method is selected by the structure
of the run, never by a prediction: solving a closed-form head again, else merging the remaining groups, else training a
fresh model. If the request demands `exact`, this method is used, so no client's data influence the choice. Otherwise it
is compared with the methods that are not exact: the fewest predicted rounds win, and on a tie the stronger guarantee.
The certificate's promise holds for the plan that was executed, including its method.

The joint Psi of a set of clients is exact for rounds whose Gram matrix was kept. For other rounds, the triangle
inequality bounds it from recorded scalars (docs/theory.md, section 3.2). A plan shows the Psi and the noise of a
request for both units of protection, each client separately and all clients jointly, so that the cost of joint
protection is known in advance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sifu.choices import LEVELS, Level, Unit
from sifu.core.method_info import (
    Protection,
    attacker_rate,
    delta_of_budget,
    delta_of_charges,
    find_method_info,
    method_info,
)
from sifu.core.observers import BeforeAfter, Observers, observers_of
from sifu.core.premises import Premise
from sifu.core.request_terms import AUTO, RequestTerms
from sifu.planning.noise_options import NoiseOption
from sifu.planning.outlook import BudgetLine, Outlook
from sifu.run.run_view import RunView
from sifu.theory.calibration import TrainingNoise
from sifu.theory.rollback import Exposure, Subject, choose_node, least_noise

NOT_INSTALLED = 25
"""Rank of a recorded method whose package is not installed, between the ranks of scratch and sifu."""


@dataclass(frozen=True)
class MethodOption:
    """A method as an option for a request: its guarantee and cost, or the reason why this run does not allow it.

    Attributes:
        method: Name of the method.
        level: Level that a certificate would have.
        rounds: Predicted rounds to the target, which `auto` compares. If the first training did not reach the target,
            the prediction is for the accuracy at the end of that training.
        summary: Description of the method in one line.
        refused: Reason why this run does not allow the method, or an empty string if it does.
        predicted_rounds: Predicted rounds to the target, or None if unknown.
        predicted_interval: Interval around the predicted rounds.
        noise_std: Standard deviation of the noise.
        client_rounds: Number of participants, summed over all rounds.
        rebuild_client_rounds: Number of participants, summed over the rounds that rebuild groups of leaving clients.
        bytes_sent: Traffic of all these rounds, in bytes.
        seconds: Duration of the command in seconds, from the speed of earlier rounds of this run or, for a solve from
            kept statistics, from the speed of this machine, or None if unknown.
        attacker_rate: Upper bound on the true positive rate of an attacker with 1 % false alarms (0.01 is a blind
            guess), or None if there is no bound.
        kept: Description of the data that the operator keeps.
        bytes_kept: Size of the files kept for later requests.
        earlier_charged: Number of subjects forgotten earlier that lose budget.
        largest_charge: Largest share of its budget that one of these subjects loses.
        may_be_chosen: False for methods that ignore the request's sigma, and for experimental controls.
        notes: Remarks for the operator.
    """

    method: str
    level: Level = "none"
    rounds: float | None = None
    summary: str = ""
    refused: str = ""
    predicted_rounds: int | None = None
    predicted_interval: tuple[int, int] | None = None
    noise_std: float = 0.0
    client_rounds: float | None = None
    rebuild_client_rounds: int = 0
    bytes_sent: float | None = None
    seconds: float | None = None
    attacker_rate: float | None = None
    kept: str = ""
    bytes_kept: int = 0
    earlier_charged: int = 0
    largest_charge: float = 0.0
    may_be_chosen: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AutoChoice:
    """Method that `auto` chose, the lowest accepted level, the options compared, and the reason."""

    method: str
    least_level: Level
    compared: tuple[MethodOption, ...]
    reason: str

    def to_mapping(self) -> dict[str, object]:
        """Return the choice as the ledger records it."""
        options = [
            {"method": option.method, "level": option.level, "rounds": option.rounds} for option in self.compared
        ]
        return {"least_level": self.least_level, "ways": options}


def least_level(terms: RequestTerms, floor: Level | None = None) -> Level:
    """Return the lowest accepted level: the higher of the request's level and `floor`, or the method's usual level.

    >>> least_level(RequestTerms(("a",), 10.0, 0.01)), least_level(RequestTerms(("a",), 10.0, 0.01, level="exact"))
    ('conditional', 'exact')
    """
    proves = terms.method == AUTO or method_info(terms.method).certifies
    usual: Level = floor or terms.level or ("conditional" if proves else "none")
    return max(usual, terms.level or "none", key=LEVELS.index)


def choose_method(compared: Sequence[MethodOption], least: Level) -> str | None:
    """Return the method that `auto` chooses, or None if no option reaches the lowest accepted level.

    >>> options = [MethodOption("sifu", "proven", 9.0), MethodOption("scratch", "exact", 90.0)]
    >>> choose_method(options, "conditional"), choose_method(options, "exact")
    ('sifu', 'scratch')
    >>> choose_method([MethodOption("sifu", "proven", 90.0), MethodOption("scratch", "exact", 90.0)], "conditional")
    'scratch'
    """
    enough = [option for option in compared if LEVELS.index(option.level) >= LEVELS.index(least)]
    exact = sorted((option for option in enough if option.level == "exact"), key=lambda option: _place(option.method))[
        :1
    ]
    candidates = exact if least == "exact" else [*exact, *(option for option in enough if option.level != "exact")]
    if not candidates:
        return None
    return min(
        candidates, key=lambda option: (_cost(option), -LEVELS.index(option.level), _place(option.method))
    ).method


def strongest_option(compared: Sequence[MethodOption]) -> str:
    """Return the method with the strongest guarantee; it is planned if no method reaches the required level."""
    return min(compared, key=lambda option: (-LEVELS.index(option.level), _cost(option), _place(option.method))).method


def _cost(option: MethodOption) -> float:
    return math.inf if option.rounds is None else option.rounds


def _place(method: str) -> int:
    """Return the sort key of an exact method; methods that preserve more of the training come first."""
    info = find_method_info(method)
    return -NOT_INSTALLED if info is None else -info.preserves


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
    rounds = "an unknown number of" if taken.rounds is None else f"{taken.rounds:.3g}"
    return (
        f"{method}: the fewest predicted rounds ({rounds}) among the methods of level {least} or better; on a tie, "
        "the stronger guarantee"
    )


@dataclass(frozen=True)
class UnitView:
    """Figures of a request for one unit of protection, with the plan's noise.

    Attributes:
        unit: `client` if each client is hidden separately, `joint` if all are hidden together.
        psi_now: Largest Psi to hide at the current model.
        noise_now: Noise needed at the current model.
        rollback_to: Number of rounds that led to the latest kept model that the plan's noise allows.
        gram_rounds: Number of shared rounds whose Gram matrix was kept; Psi of the others is bounded.
        shared_rounds: Number of rounds that two or more of the clients took part in.
    """

    unit: Unit
    psi_now: float
    noise_now: float
    rollback_to: int
    gram_rounds: int
    shared_rounds: int


def both_units(
    view: RunView, terms: RequestTerms, noise_std: float, earlier: Sequence[Exposure]
) -> tuple[UnitView, ...]:
    """Return the Psi and noise for each unit, `client` and `joint`, or () for a single client, for which they agree."""
    if len(terms.clients) < 2:
        return ()
    order, tip = view.next_order, view.path.tip
    result = []
    units: tuple[Unit, ...] = ("client", "joint")
    for unit in units:
        in_unit = replace(terms, unit=unit)
        new = view.exposures(view.new_subjects(in_unit, order))
        node = choose_node([*new, *earlier], view.kept, noise_std, order)
        shared = view.shared_depths(view.leaving(terms.clients)) if unit == "joint" else []
        result.append(
            UnitView(
                unit,
                max(exposure.psi_to_hide(tip) for exposure in new),
                least_noise([*new, *earlier], tip, order),
                view.path.rounds_until(node.depth),
                sum(1 for depth in shared if view.path.gram(depth) is not None),
                len(shared),
            )
        )
    return tuple(result)


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
        predicted_rounds: Predicted rounds to the target, or None if unknown.
        scratch_rounds: Predicted rounds of Scratch, or None if unknown.
        options: Noise options that were compared.
        notes: Remarks for the operator.
        protection: Basis of the method's guarantee.
        untouched: True if no subject to hide influenced the source, and no reply of the clients was refused on the path
            to the source.
        training_noise: Guarantee of noise in training, if the method relies on it.
        predicted_interval: Interval around the predicted rounds.
        units: Figures of a request of several clients in each unit, `client` and `joint`.
        budgets: Budgets of the subjects forgotten earlier.
        outlook: Outlook for later requests.
        expected_rounds: Unrounded prediction of the rounds to the target. If the first training did not reach the
            target, the prediction is for the accuracy at the end of that training.
        rebuild_client_rounds: Number of participants, summed over the rounds that rebuild groups of leaving clients.
        ways: Options of all methods, if `auto` chose the method.
        auto: Choice of `auto` and its reason.
        before_after: Guarantee against an observer of all releases, or None if there is no protection.
        predicted_accuracy: Accuracy of the final model on the remaining clients, or None if the record does not
            determine it.
        squared_error_now: Mean squared error of the current model on training data, for regression.
    """

    terms: RequestTerms
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
    predicted_rounds: int | None
    scratch_rounds: int | None
    options: tuple[NoiseOption, ...] = ()
    notes: tuple[str, ...] = ()
    protection: Protection = "nothing"
    untouched: bool = False
    training_noise: TrainingNoise | None = None
    predicted_interval: tuple[int, int] | None = None
    units: tuple[UnitView, ...] = ()
    budgets: tuple[BudgetLine, ...] = ()
    outlook: Outlook | None = None
    expected_rounds: float | None = None
    rebuild_client_rounds: int = 0
    ways: tuple[MethodOption, ...] = ()
    auto: AutoChoice | None = None
    before_after: BeforeAfter | None = None
    predicted_accuracy: float | None = None
    squared_error_now: float | None = None

    @property
    def method(self) -> str:
        """Method that would execute the request. With `auto`, this is the chosen method."""
        return self.terms.method

    @property
    def delta_at_most(self) -> float:
        """Delta at the request's epsilon once the whole budget is used."""
        return delta_of_budget(
            self.terms.epsilon, self.multiplier, self.untouched, self.protection, self.training_noise
        )

    @property
    def delta_reached(self) -> float:
        """Delta at the request's epsilon that this release alone would reach."""
        own = [charge.charge for charge in self.charges if charge.subject.order == self.order]
        return delta_of_charges(self.terms.epsilon, own, self.protection, self.training_noise)

    @property
    def observers(self) -> Observers:
        """Guarantees against an observer of later releases, and against an observer who kept earlier releases."""
        rate = attacker_rate(self.level, self.multiplier)
        return observers_of(self.level, rate, self.terms.scope, self.before_after, untouched=self.untouched)
