"""What a request would do, before anything is done, and every way to forget, side by side.

The rule by which `--method auto` takes one (docs/theory.md, section 9.7) has two steps. Of the ways that are exact one
is named by what the run is made of, never by a prediction: a head in closed form is solved again, groups that are left
are merged, and a fresh model comes last. If `exact` was asked for, that one is taken, so nothing of the client's data
has a say in the choice. Otherwise it is held against the ways that are not exact, by predicted rounds: the fewest win,
and on a tie the stronger guarantee. What a certificate of those promises holds for
the plan that was carried out, the method included.

Psi of a set taken jointly is exact where the Gram matrix of a round was kept, and bounded by the triangle inequality
from the same scalars elsewhere (docs/theory.md, section 3.2). A plan shows both units, so that the price of the
stronger one is seen before it is asked for.

`--sigma auto`: node and noise chosen together, from recorded scalars (docs/noise.md; docs/theory.md, section 9.1).

Each kept node needs a least noise, from the Psi curves of those who must be hidden there and the budgets they have
left. A forecast says how many rounds each of these pairs would take; the pair with the fewest is chosen, or the initial
model where none is clearly better than Scratch.

Looking ahead over a sequence: a later request stays past this noise edge, where everyone forgotten so far is covered,
with its own noise, chosen then. More noise now would cover no one who asks later (edges added before a request
never do), so a request takes only what it needs; what earlier noise has left behind is part of the forecast.
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
"""What a recorded method of a package that is not installed counts as preserving: less than sifu, more than scratch."""


@dataclass(frozen=True)
class Way:
    """One way to forget: what it would promise and cost, or why this run does not allow it (`refused`).

    `rounds` is what `auto` compares: the predicted rounds to the target, or, where the first training reached none,
    those to come back to where it ended. `client_rounds` counts the participants of all rounds, `rebuild_client_rounds`
    those of building hit groups again; `bytes_sent` is the traffic of both, `seconds` the time of the rounds as fast as
    those of the run were. `attacker_rate` is what an attacker allowed 1 % false alarms can spot at most (0.01 is a
    blind guess, None: no bound). `kept` says what stays with the operator, `bytes_kept` how much is kept now for
    requests to come. `earlier_charged` of those forgotten earlier lose budget, at most `largest_charge` of it.
    `may_be_chosen` is False for ways that do not honour the request's sigma and for controls of experiments.
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
    """Which way `auto` took, at which least level, and what it was held against: all that the choice rests on."""

    method: str
    least_level: Level
    compared: tuple[Way, ...]
    reason: str

    def to_mapping(self) -> dict[str, object]:
        """As the ledger records it."""
        ways = [{"method": way.method, "level": way.level, "rounds": way.rounds} for way in self.compared]
        return {"least_level": self.least_level, "ways": ways}


def least_level(terms: RequestTerms, floor: Level | None = None) -> Level:
    """The least level that is accepted: `floor`, or what is usual for the method, and what the request asks for.

    >>> least_level(RequestTerms(("a",), 10.0, 0.01)), least_level(RequestTerms(("a",), 10.0, 0.01, level="exact"))
    ('conditional', 'exact')
    """
    proves = terms.method == AUTO or method_info(terms.method).certifies
    usual: Level = floor or terms.level or ("conditional" if proves else "none")
    return max(usual, terms.level or "none", key=LEVELS.index)


def choose_way(compared: Sequence[Way], least: Level) -> str | None:
    """The method `auto` takes among these, None where none reaches the least level.

    >>> ways = [Way("sifu", "proven", 9.0), Way("scratch", "exact", 90.0)]
    >>> choose_way(ways, "conditional"), choose_way(ways, "exact")
    ('sifu', 'scratch')
    >>> choose_way([Way("sifu", "proven", 90.0), Way("scratch", "exact", 90.0)], "conditional")
    'scratch'
    """
    enough = [way for way in compared if LEVELS.index(way.level) >= LEVELS.index(least)]
    exact = sorted((way for way in enough if way.level == "exact"), key=lambda way: _place(way.method))[:1]
    candidates = exact if least == "exact" else [*exact, *(way for way in enough if way.level != "exact")]
    if not candidates:
        return None

    return min(candidates, key=lambda way: (_cost(way), -LEVELS.index(way.level), _place(way.method))).method


def strongest_way(compared: Sequence[Way]) -> str:
    """The way with the strongest guarantee: what is planned, and refused, where none reaches the level asked for."""
    return min(compared, key=lambda way: (-LEVELS.index(way.level), _cost(way), _place(way.method))).method


def _cost(way: Way) -> float:
    return math.inf if way.rounds is None else way.rounds


def _place(method: str) -> int:
    """Return the place of a method among exact ones: first those that preserve most of the training."""
    info = find_method_info(method)
    return -NOT_INSTALLED if info is None else -info.preserves


def reason_of(method: str, compared: Sequence[Way], least: Level) -> str:
    """Why a way was taken, in a sentence."""
    taken = next(way for way in compared if way.method == method)
    if LEVELS.index(taken.level) < LEVELS.index(least):
        return f"{method}, the strongest there is: no way reaches level {least}, so a request would be refused"
    if least == "exact":
        return f"{method}: exact was asked for, and of the ways that are exact this one keeps most of what was learned"
    others = [way for way in compared if way.method != method and LEVELS.index(way.level) >= LEVELS.index(least)]
    if not others:
        return f"{method}: the only way that reaches level {least}"
    rounds = "an unknown number of" if taken.rounds is None else f"{taken.rounds:.3g}"
    return (
        f"{method}: the fewest predicted rounds ({rounds}) among the ways of level {least} or better, and on a tie the "
        "stronger guarantee"
    )


@dataclass(frozen=True)
class UnitView:
    """What a unit would mean for the request, with the plan's noise.

    `psi_now` and `noise_now` are those of the current model, `rollback_to` the rounds of the latest kept model allowed
    with the plan's noise. `gram_rounds` of the `shared_rounds` that two or more of the clients took part in
    have a kept Gram matrix; the others are bounded.
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
    """The request in both units; nothing for a single client, for whom they are the same."""
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
    """What the noise of a plan costs one subject."""

    subject: Subject
    psi: float
    charge: float


@dataclass(frozen=True)
class NoiseOption:
    """One noise that could be used, and what would come of it.

    `expected` is the figure options are compared by; it is rounds where the first training reached its target.
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

    `source_node` is None for a fresh initial model. `wanted_node` is the latest node the budget allows,
    whether its model was kept or not. `charges` holds every subject the noise is charged to, new ones first.
    `untouched` says that no one who must be hidden ever touched the source, `training_noise` what noise in training
    promises where the method rests on it. `predicted_interval` holds the rounds to the target in most cases, `units` a
    request of several clients in both units, `budgets` those of everyone forgotten earlier, `outlook` what is to come.
    `expected_rounds` is the prediction unrounded, and where no target was reached the rounds to come back to where
    training ended. Where the method was left to `auto`, `ways` has every way side by side and `auto` says which was
    taken and why.
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
    ways: tuple[Way, ...] = ()
    auto: AutoChoice | None = None
    before_after: BeforeAfter | None = None
    """The guarantee against an observer of all releases; None means not protected."""
    predicted_accuracy: float | None = None
    """Of the model when the request is done, on the clients that stay; None where the record does not tell."""
    squared_error_now: float | None = None
    """Mean squared error of the current model on training data, where real numbers are predicted."""

    @property
    def method(self) -> str:
        """The method that would carry the request out, also where it was left to `auto`."""
        return self.terms.method

    @property
    def delta_at_most(self) -> float:
        """The delta at the request's epsilon once the budget is used up whole."""
        return delta_of_budget(
            self.terms.epsilon, self.multiplier, self.untouched, self.protection, self.training_noise
        )

    @property
    def delta_reached(self) -> float:
        """The delta at the request's epsilon that this release would reach on its own."""
        own = [charge.charge for charge in self.charges if charge.subject.order == self.order]
        return delta_of_charges(self.terms.epsilon, own, self.protection, self.training_noise)

    @property
    def observers(self) -> Observers:
        """What the plan means for an observer of later releases, and for one who kept earlier ones."""
        rate = attacker_rate(self.level, self.multiplier)
        return observers_of(self.level, rate, self.terms.scope, self.before_after)


LARGEST_NOISE_TO_SIGNAL = 0.5
"""Noise up to this share of the distance travelled is worthwhile (docs/theory.md, section 13, for advice)."""
SIGMA_LADDER = 1.1
"""An automatic sigma stands in public certificates, so it is rounded up to a power of this: it then says little
about the Psi it was chosen from."""


def noise_options(
    view: RunView, exposures: Sequence[Exposure], order: int, forecast: Forecast, premises: Sequence[Premise]
) -> tuple[NoiseOption, ...]:
    """The least noise of each kept node, rounded up, the node it leads to, and what would come of it; latest first.

    More noise than a node needs may reach a later one: every option is at the latest node that its noise allows.
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
    """The least noise of each kept node for those forgotten earlier: the same until something is written."""
    remembered: dict[object, dict[int, float]] = view.reader.remembered("least noise of those forgotten earlier", dict)
    key = (view.path.nodes[-1].node, order, tuple(exposure.subject for exposure in earlier), tuple(sorted(view.kept)))
    if key not in remembered:
        remembered[key] = least_noises(earlier, view.kept, order)
    return remembered[key]


def choose_noise(
    options: Sequence[NoiseOption], forecast: Forecast, least: Level | None = None
) -> tuple[float, tuple[str, ...]]:
    """The noise of the option that promises the fewest rounds, and what should be said about it.

    Where Scratch is as fast it is less noise than any option has, which leads to theta_0. Options below the `least`
    level asked for are left aside, unless there are no others.
    """
    enough = [option for option in options if LEVELS.index(option.level) >= LEVELS.index(least or "none")]
    best = min(enough or options, key=lambda option: option.expected)
    if best.noise_std > 0.0 and best.expected <= WORTH_IT * forecast.expected(0, 0.0):
        return best.noise_std, ()
    # Less noise than any node needs leads to the latest one that needs none: theta_0, or one they never touched.
    too_little = 0.5 * min((option.noise_std for option in options if option.noise_std > 0.0), default=1.0)
    if best.noise_std == 0.0 and best.depth > 0:
        return too_little, ()
    return too_little, (
        "no kept model with its noise promises clearly fewer rounds than Scratch, so training starts again from "
        "the initial model: exact, and as slow as Scratch. More clients, or a larger epsilon, would help",
    )


def on_ladder(noise_std: float) -> float:
    """The next power of `SIGMA_LADDER` at or above a noise."""
    if noise_std <= 0.0:
        return 0.0
    rung = SIGMA_LADDER ** math.ceil(math.log(noise_std) / math.log(SIGMA_LADDER))
    return rung if rung >= noise_std else rung * SIGMA_LADDER


def noise_to_signal(view: RunView, depth: int, noise_std: float) -> float:
    """sigma sqrt(d) / ||theta - theta_0|| with the energy of earlier noise taken out of the distance."""
    size = view.parameters
    signal = math.sqrt(max(view.rows[depth].distance ** 2 - view.path.noise_energy(depth) * size, 0.0))
    if noise_std == 0.0:
        return 0.0
    return noise_std * math.sqrt(size) / signal if signal > 0.0 else math.inf
