"""Plans of requests, and the comparison of all methods that could execute one.

`--method auto` chooses in two steps (docs/theory.md, section 9.7). First, one exact method is selected by the structure
of the run, never by a prediction: a closed-form head is solved again, remaining groups are merged, and a fresh model is
the last resort. If the request demands `exact`, this method is used, so no client's data influence the choice.
Otherwise it is compared with the methods that are not exact: the fewest predicted rounds win, and on a tie the stronger
guarantee. The certificate's promise holds for the plan that was executed, including its method.

The joint Psi of a set of clients is exact for rounds whose Gram matrix was kept, and bounded by the triangle inequality
from the same scalars otherwise (docs/theory.md, section 3.2). A plan shows the request for both units, each client
separately and all clients jointly, so that the cost of joint protection is known in advance.

`--sigma auto` chooses node and noise together, from recorded scalars (docs/noise.md; docs/theory.md, section 9.1). Each
kept node needs a minimum of noise, which follows from the Psi curves of the subjects to hide and their remaining
budgets. A forecast predicts the rounds for each pair of node and noise. The pair with the fewest is chosen, or the
initial model if no pair is clearly better than Scratch.

A later request starts after this noise edge, where all subjects forgotten so far are covered, with noise chosen at that
time. More noise now would not cover clients that ask later, because noise edges added before a client's request never
cover that client. So a request adds only the noise it needs. The forecast includes the effect of earlier noise.
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
from sifu.core.premises import Premise, level_of
from sifu.core.request_terms import AUTO, RequestTerms
from sifu.planning.forecast import WORTH_IT, BudgetLine, Forecast, Outlook
from sifu.run.run_view import RunView
from sifu.theory.calibration import TrainingNoise
from sifu.theory.rollback import Exposure, Subject, choose_node, least_noise, least_noises

NOT_INSTALLED = 25
"""Rank of a recorded method whose package is not installed; it lies between scratch and sifu."""


@dataclass(frozen=True)
class MethodOption:
    """A method as an option for a request: its guarantee and cost, or the reason why this run does not allow it.

    Attributes:
        method: Name of the method.
        level: Level that a certificate would have.
        rounds: Figure that `auto` compares: predicted rounds to the target or, if the first training reached none, to
            the accuracy at its end.
        summary: Description of the method in one line.
        refused: Reason why this run does not allow the method; empty if it does.
        predicted_rounds: Predicted rounds to the target; None if unknown.
        predicted_interval: Interval around the predicted rounds.
        noise_std: Standard deviation of the noise.
        client_rounds: Participants summed over all rounds.
        rebuild_client_rounds: Participants summed over the rounds that rebuild groups of leaving clients.
        bytes_sent: Traffic of all these rounds.
        seconds: Duration of the command, with rounds at the speed of the run so far or a solve from kept statistics
            at the speed of this machine; None if it is unknown.
        attacker_rate: Upper bound on the true positive rate of an attacker with 1 % false alarms (0.01 is a blind
            guess); None means no bound.
        kept: Description of the data that the operator keeps.
        bytes_kept: Size of the files kept for later requests.
        earlier_charged: Number of subjects forgotten earlier that lose budget.
        largest_charge: Largest share of a budget that one of them loses.
        may_be_chosen: False for methods that ignore the request's sigma and for controls of experiments.
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
        ways = [{"method": way.method, "level": way.level, "rounds": way.rounds} for way in self.compared]
        return {"least_level": self.least_level, "ways": ways}


def least_level(terms: RequestTerms, floor: Level | None = None) -> Level:
    """Return the lowest accepted level: the higher of the request's level and `floor`.

    Without either, it is the usual level of the method.

    >>> least_level(RequestTerms(("a",), 10.0, 0.01)), least_level(RequestTerms(("a",), 10.0, 0.01, level="exact"))
    ('conditional', 'exact')
    """
    proves = terms.method == AUTO or method_info(terms.method).certifies
    usual: Level = floor or terms.level or ("conditional" if proves else "none")
    return max(usual, terms.level or "none", key=LEVELS.index)


def choose_method(compared: Sequence[MethodOption], least: Level) -> str | None:
    """Return the method that `auto` chooses among the options; None if none reaches the lowest accepted level.

    >>> ways = [MethodOption("sifu", "proven", 9.0), MethodOption("scratch", "exact", 90.0)]
    >>> choose_method(ways, "conditional"), choose_method(ways, "exact")
    ('sifu', 'scratch')
    >>> choose_method([MethodOption("sifu", "proven", 90.0), MethodOption("scratch", "exact", 90.0)], "conditional")
    'scratch'
    """
    enough = [way for way in compared if LEVELS.index(way.level) >= LEVELS.index(least)]
    exact = sorted((way for way in enough if way.level == "exact"), key=lambda way: _place(way.method))[:1]
    candidates = exact if least == "exact" else [*exact, *(way for way in enough if way.level != "exact")]
    if not candidates:
        return None

    return min(candidates, key=lambda way: (_cost(way), -LEVELS.index(way.level), _place(way.method))).method


def strongest_option(compared: Sequence[MethodOption]) -> str:
    """Return the method with the strongest guarantee; it is planned, then refused, if every method is too weak."""
    return min(compared, key=lambda way: (-LEVELS.index(way.level), _cost(way), _place(way.method))).method


def _cost(way: MethodOption) -> float:
    return math.inf if way.rounds is None else way.rounds


def _place(method: str) -> int:
    """Return the rank of a method among exact ones; methods that preserve more of the training come first."""
    info = find_method_info(method)
    return -NOT_INSTALLED if info is None else -info.preserves


def reason_of(method: str, compared: Sequence[MethodOption], least: Level) -> str:
    """Return the reason for choosing a method, as a sentence."""
    taken = next(way for way in compared if way.method == method)
    if LEVELS.index(taken.level) < LEVELS.index(least):
        return f"{method}, the strongest one here: no method reaches level {least}, so a request would be refused"
    if least == "exact":
        return f"{method}: exact was asked for, and among the exact methods this one preserves most of the training"
    others = [way for way in compared if way.method != method and LEVELS.index(way.level) >= LEVELS.index(least)]
    if not others:
        return f"{method}: the only method that reaches at least the required level ({least}); it is {taken.level}"
    rounds = "an unknown number of" if taken.rounds is None else f"{taken.rounds:.3g}"
    return (
        f"{method}: the fewest predicted rounds ({rounds}) among the methods of level {least} or better; on a tie, "
        "the stronger guarantee"
    )


@dataclass(frozen=True)
class UnitView:
    """Result of a request for one choice of unit (each client separately, or all jointly), with the plan's noise.

    Attributes:
        unit: Clients to hide: `client` for each separately, `joint` for all together.
        psi_now: Largest Psi to hide at the current model.
        noise_now: Noise needed at the current model.
        rollback_to: Rounds of the latest kept model that the plan's noise allows.
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
    """Return the Psi and noise for each unit, `client` and `joint`; empty for a single client, for which they agree."""
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
class NoiseOption:
    """A noise that could be used, and its predicted effect.

    Options are compared by `expected`, which is in rounds if the first training reached its target.
    """

    noise_std: float
    depth: int
    rounds: int
    noise_to_signal: float
    expected: float
    predicted_rounds: int | None
    predicted_interval: tuple[int, int] | None = None
    level: Level = "none"


@dataclass(frozen=True)
class Plan:
    """Node, noise, cost and level of a request.

    Attributes:
        terms: Terms of the request, with `auto` replaced by the chosen method.
        order: Order of the request among all executed requests.
        subjects: Subjects that the request forgets.
        source_node: Node that training restarts from; None for a fresh initial model.
        source_depth: Depth of the source on the path.
        source_rounds: Number of rounds that led to the source.
        wanted_node: Latest node that the budget allows, whether or not its model was kept.
        tip_rounds: Number of rounds that led to the current model.
        noise_std: Standard deviation of the noise.
        multiplier: Noise multiplier s of the budget.
        psi: Largest Psi to hide at the source.
        psi_star: Largest Psi that the noise hides.
        charges: Subjects that the noise is charged to, new ones first.
        premises: Premises of the certificate.
        level: Level of the certificate.
        predicted_rounds: Predicted rounds to the target; None if unknown.
        scratch_rounds: Predicted rounds of Scratch; None if unknown.
        options: Noises that were compared.
        notes: Remarks for the operator.
        protection: Means by which the method hides subjects.
        untouched: True if no subject to hide influenced the source, and no reply of the clients was refused on the path
            to it.
        training_noise: Guarantee of noise in training, if the method relies on it.
        predicted_interval: Interval that holds the rounds to the target in most cases.
        units: Figures of a request of several clients in each unit, `client` and `joint`.
        budgets: Budgets of the subjects forgotten earlier.
        outlook: Outlook for later requests.
        expected_rounds: Prediction before rounding; if no target was reached, the rounds to regain the accuracy at the
            end of training.
        rebuild_client_rounds: Participants summed over the rounds that rebuild groups of leaving clients.
        ways: Options of all methods, if `auto` chose the method.
        auto: Choice of `auto` and its reason.
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
    """The guarantee against an observer of all releases; None means not protected."""
    predicted_accuracy: float | None = None
    """Accuracy of the final model on the clients that stay; None if the record does not determine it."""
    squared_error_now: float | None = None
    """Mean squared error of the current model on training data, for regression."""

    @property
    def method(self) -> str:
        """Method that would execute the request; with `auto`, the chosen one."""
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
        """Guarantee against an observer of later releases, and against one who kept earlier releases."""
        rate = attacker_rate(self.level, self.multiplier)
        return observers_of(self.level, rate, self.terms.scope, self.before_after, untouched=self.untouched)


LARGEST_NOISE_TO_SIGNAL = 0.5
"""Largest worthwhile ratio of noise to distance travelled (docs/theory.md, section 13, for advice)."""
SIGMA_LADDER = 1.1
"""Base of the powers to which an automatic sigma is rounded up.

Sigma is stated in public certificates; rounding sigma up hides most of the information about the Psi that sigma was
chosen from.
"""


def noise_options(
    view: RunView, exposures: Sequence[Exposure], order: int, forecast: Forecast, premises: Sequence[Premise]
) -> tuple[NoiseOption, ...]:
    """Return the least noise of each kept node, rounded up, with its predicted effect; latest node first.

    Rounding up may allow a later node than the one the noise was computed for, so every option uses the latest node
    that its noise allows.

    Args:
        view: View of the run.
        exposures: Subjects to hide, of this request and earlier ones.
        order: Order of the request.
        forecast: Forecast of the rounds.
        premises: Premises of the method, which determine the level.
    """
    before = _needed_by_earlier(view, [exposure for exposure in exposures if exposure.subject.order < order], order)
    new = [exposure for exposure in exposures if exposure.subject.order >= order]
    needed = {depth: max(least_noise(new, depth, order), before[depth]) for depth in sorted(view.kept, reverse=True)}
    starts_fresh = view.path.nodes[0].kind == "initial"
    options: dict[tuple[int, float], NoiseOption] = {}
    for least in needed.values():
        if not math.isfinite(least):
            continue
        noise_std = on_ladder(least)
        reached = next(d for d, other in needed.items() if other <= noise_std)
        noise_std = noise_std if needed[reached] > 0.0 else 0.0
        prediction = forecast.predict(reached, noise_std)
        options[reached, noise_std] = NoiseOption(
            noise_std=noise_std,
            depth=reached,
            rounds=view.path.rounds_until(reached),
            noise_to_signal=noise_to_signal(view, reached, noise_std),
            expected=forecast.expected(reached, noise_std),
            predicted_rounds=prediction.rounds if prediction else None,
            predicted_interval=prediction.interval if prediction else None,
            level=level_of(premises, exact=noise_std == 0.0, fresh=reached == 0 and starts_fresh),
        )
    return tuple(options.values())


def _needed_by_earlier(view: RunView, earlier: Sequence[Exposure], order: int) -> dict[int, float]:
    """Return the least noise of each kept node for the subjects forgotten earlier, cached until the run changes."""
    remembered: dict[object, dict[int, float]] = view.reader.remembered("least noise of those forgotten earlier", dict)
    key = (view.path.nodes[-1].node, order, tuple(exposure.subject for exposure in earlier), tuple(sorted(view.kept)))
    if key not in remembered:
        remembered[key] = least_noises(earlier, view.kept, order)
    return remembered[key]


def choose_noise(
    options: Sequence[NoiseOption], forecast: Forecast, least: Level | None = None
) -> tuple[float, tuple[str, ...]]:
    """Return the noise of the option with the fewest expected rounds, and notes on the choice.

    If Scratch is as fast, the returned noise is less than any option needs, so that the initial model is chosen.
    Options below the level `least` are ignored unless there are no others.

    Args:
        options: Options of noise to choose from.
        forecast: Forecast of the rounds.
        least: Lowest accepted level; by default any.
    """
    enough = [option for option in options if LEVELS.index(option.level) >= LEVELS.index(least or "none")]
    best = min(enough or options, key=lambda option: option.expected)
    if best.noise_std > 0.0 and best.expected <= WORTH_IT * forecast.expected(0, 0.0):
        return best.noise_std, ()
    # Less noise than any node needs leads to the latest node that needs none: theta_0, or one the subjects never
    # touched.
    too_little = 0.5 * min((option.noise_std for option in options if option.noise_std > 0.0), default=1.0)
    if best.noise_std == 0.0 and best.depth > 0:
        return too_little, ()
    return too_little, (
        "no kept model with its noise promises clearly fewer rounds than Scratch, so training starts again from "
        "the initial model: exact, and as slow as Scratch. More clients, or a larger epsilon, would help",
    )


def on_ladder(noise_std: float) -> float:
    """Return the smallest power of `SIGMA_LADDER` that is at least `noise_std`; 0 for no noise."""
    if noise_std <= 0.0:
        return 0.0
    rung = SIGMA_LADDER ** math.ceil(math.log(noise_std) / math.log(SIGMA_LADDER))
    return rung if rung >= noise_std else rung * SIGMA_LADDER


def noise_to_signal(view: RunView, depth: int, noise_std: float) -> float:
    """Return sigma sqrt(d) / ||theta - theta_0||, with earlier noise subtracted from the squared distance."""
    size = view.parameters
    signal = math.sqrt(max(view.rows[depth].distance ** 2 - view.path.noise_energy(depth) * size, 0.0))
    if noise_std == 0.0:
        return 0.0
    return noise_std * math.sqrt(size) / signal if signal > 0.0 else math.inf
