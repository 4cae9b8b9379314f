"""Advice before training: whether certified unlearning is worthwhile (docs/theory.md, section 13).

The ratio of noise to signal at a model is s sqrt(d) Psi / ||theta - theta_0||, and Psi falls like 1/M. Therefore noise
is worthwhile if the number M of clients is several times s sqrt(d), a rule called the law here. A pilot trains for a
few rounds in a temporary folder to measure Psi, the distance from the initial model and the learning curve. The rounds
of a longer training are extrapolated from the curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.advice.release_options import ReleaseAdvice, advise_releases
from sifu.advice.training_options import (
    TrainingName,
    TrainingOption,
    accuracy_after,
    clients_and_rows,
    closed_form_option,
    groups_option,
    keys_that_lift,
    recommend,
    rounds_to_target,
    seconds_to_forget,
    trained,
)
from sifu.choices import Level
from sifu.core.held_out_figures import TRAINING_DATA
from sifu.core.method_info import CLOSED_FORM
from sifu.core.premises import level_of
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import LINEAR_KINDS, Spec
from sifu.core.spec.regime import ClosedForm, Regime, by_regime
from sifu.errors import InputError
from sifu.methods.base import Claim
from sifu.methods.registry import method_named
from sifu.planning.noise_options import LARGEST_NOISE_TO_SIGNAL
from sifu.planning.outlook import influence, most_expensive
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.given import as_model
from sifu.run.held_out import held_out_figures
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback
from sifu.store.client_accuracy import read_held_out
from sifu.store.release_files import released_model
from sifu.theory.calibration import exact_multiplier
from sifu.theory.participation import Participation

PILOT_ROUNDS = 30


@dataclass(frozen=True)
class Advice:
    """Advice on a spec: comparison with the law, results of the pilot, a verdict, and suggested changes.

    Attributes:
        clients: Number of clients.
        parameters: Number of model parameters, d.
        epsilon: Privacy budget epsilon of a request.
        delta: Privacy budget delta of a request.
        multiplier: Noise multiplier s of the budget.
        clients_over_law: Number of clients divided by s sqrt(d).
        pilot_rounds: Number of rounds of the pilot.
        reached_target: True if the pilot reached the target.
        accuracy: Accuracy of the pilot on its training data, to which the target refers.
        noise_to_signal: Ratio of noise to signal for the most expensive client, at the pilot's last model.
        typical_noise_to_signal: Ratio of noise to signal for the median client.
        level: Level of certificates that rely on noise or, for a spec with a closed-form head, on that head.
        verdict: Sentence that says whether certified unlearning is worthwhile.
        worthwhile: True if a request with noise is predicted to be clearly cheaper than Scratch.
        epsilon_needed: Epsilon (at most 1000) at which the noise would be small enough, or None if there is none or the
            noise is small already.
        clients_needed: Number of clients at which the noise would be small enough, or None if no number suffices or the
            noise is small already.
        predicted_rounds: Predicted number of rounds of a request.
        scratch_rounds: Predicted number of rounds of Scratch.
        suggestions: Suggested changes of the spec, most useful first.
        ways: The training options that were compared.
        recommended: Name of the recommended option.
        predicted_interval: Interval around the predicted rounds.
        target: Target accuracy of the spec.
        measured_on: Description of the rows on which the accuracy of every option is measured.
    """

    clients: int
    parameters: int
    epsilon: float
    delta: float
    multiplier: float
    clients_over_law: float
    pilot_rounds: int
    reached_target: bool
    accuracy: float | None
    noise_to_signal: float
    typical_noise_to_signal: float
    level: Level
    verdict: str
    worthwhile: bool
    epsilon_needed: float | None
    clients_needed: int | None
    predicted_rounds: int | None
    scratch_rounds: int | None
    suggestions: tuple[str, ...]
    ways: tuple[TrainingOption, ...] = ()
    recommended: TrainingName = "plain"
    predicted_interval: tuple[int, int] | None = None
    target: float = 0.0
    measured_on: str = TRAINING_DATA
    release: ReleaseAdvice | None = None
    """Cost of noise on releases, if the spec has `release.noise`."""


def advise(
    spec: Spec,
    *,
    data_folder: str | Path | None = None,
    pilot_rounds: int = PILOT_ROUNDS,
    clients: Any = None,
    model: Any = None,
    progress: ProgressCallback | None = None,
) -> Advice:
    """Train a pilot in a temporary folder and return advice on whether certified unlearning is worthwhile.

    Args:
        spec: Spec of the training.
        data_folder: As in `sifu.train`.
        pilot_rounds: Rounds of the pilot.
        clients: As in `sifu.train`.
        model: As in `sifu.train`.
        progress: Callback invoked after each round.
    """
    known = by_regime(WITHOUT_PILOT, spec.regime)
    if known is not None:
        return known(spec, data_folder, clients, progress)
    if spec.model.kind not in (*LINEAR_KINDS, "python") and spec.regularity.kind == "measured":
        # A network has no measured smoothness: use the paper's assumption, which the level reflects.
        spec = replace(spec, regularity=replace(spec.regularity, kind="assumed"))
    data, rows = clients_and_rows(spec, data_folder, clients)
    engine, _ = engine_from_spec(spec, data, as_model(model))
    shorter = replace(
        spec.stop,
        max_rounds=min(pilot_rounds, spec.stop.max_rounds),
        min_rounds=min(spec.stop.min_rounds, pilot_rounds, spec.stop.max_rounds),
    )
    pilot = trained(replace(spec, stop=shorter), engine=engine, model=model, clients=clients, progress=progress)
    with pilot as (run, seconds), run.reader() as reader:
        view = RunView(reader)
        advice = _judge(spec, view)
        figures = None if rows is None else held_out_figures(spec, engine, released_model(reader), rows)
        pace = seconds / max(1, advice.pilot_rounds), _bytes_a_round(view)
        target, most = spec.stop.target, spec.stop.max_rounds
        training = rounds_to_target(view, target, most)
        groups = groups_option(spec, view, training)
        ends_with = accuracy_after(view, target, most)
        scratch = _scratch_level(spec, view)
    closed = closed_form_option(spec, data_folder, clients)
    measured = None if figures is None else figures.accuracy
    plain = replace(_plain_option(advice, training, scratch).at_pace(*pace), accuracy=measured)
    groups = groups.at_pace(*pace)
    missed_with = None
    if target > 0.0 and training is None:
        # Gain on training data expected from further rounds, added to the pilot's accuracy on held-out rows.
        gain = 0.0 if ends_with is None or advice.accuracy is None else max(0.0, ends_with - advice.accuracy)
        missed_with = None if measured is None else measured + gain
        plain = replace(plain, reason=f"{plain.reason}; it does not reach the target in stop.max_rounds = {most}")
    recommended = recommend(closed, plain, groups, noise_is_worthwhile=advice.worthwhile, missed_with=missed_with)
    where = advice.measured_on if figures is None else figures.where
    return replace(advice, ways=(closed, plain, groups), recommended=recommended, measured_on=where)


def _bytes_a_round(view: RunView) -> float:
    """Return the traffic of a round: the model to every participant, and an update back."""
    counts = [count for _, _, count in view.round_sums.values()]
    return 2.0 * view.parameters * np.dtype(view.reader.layout.dtype).itemsize * float(np.mean(counts or [0]))


def _scratch_level(spec: Spec, view: RunView) -> Level:
    """Return the level of a certificate of Scratch for the most expensive client."""
    terms = RequestTerms((most_expensive(view),), spec.privacy.epsilon, spec.privacy.delta, method="scratch")
    premises = method_named("scratch").premises(Claim(view, view.leaving(terms.clients), [], 0, terms))
    return level_of(premises, exact=True, fresh=True)


def _closed_form_advice(
    spec: Spec, data_folder: str | Path | None, clients: Any, progress: ProgressCallback | None
) -> Advice:
    """Solve a closed-form head once, and read the cost of its requests from the result."""
    with trained(spec, data_folder=data_folder, clients=clients, progress=progress) as (run, seconds):
        with run.reader() as reader:
            view = RunView(reader)
            privacy, method = spec.privacy, method_named(CLOSED_FORM)
            terms = RequestTerms((view.clients[0].name,), privacy.epsilon, privacy.delta, method=CLOSED_FORM)
            level = level_of(method.premises(Claim(view, [0], [], view.path.tip, terms)), exact=True)
            lifting = keys_that_lift(view.facts.preprocessing, counted=view.facts.shape_from_labels)
            plan = method.plan(view, terms)
            accuracy = next((row.accuracy for row in reader.evaluations() if row.node == reader.tip), None)
            count, parameters, kept = len(view.clients), view.parameters, method.bytes_kept(view)
            held = read_held_out(run.folder, reader.tip)
        rounds, request_seconds = plan.predicted_rounds or 0, seconds_to_forget(run, terms.clients[0])
    takes = "takes no round and contacts no client" if rounds == 0 else "takes one round without any training"
    reason = (
        f"the spec solves a head: forgetting is {level}, needs no noise and {takes}; the statistics take "
        f"{kept / 1e6:.3g} MB on disk for {count} clients and {parameters} parameters"
    )
    measured, where = (accuracy, TRAINING_DATA) if held is None else (held.accuracy, held.where)
    way = TrainingOption("closed form", True, level, float(rounds), 1.0, measured, (), reason, training_seconds=seconds)
    way = replace(way, request_seconds=request_seconds, request_bytes=None if rounds else 0.0)
    reached = accuracy is not None and spec.stop.target > 0 and accuracy >= spec.stop.target
    suggestions = []
    release = None
    if spec.release.noise != 0.0:
        with suppress(InputError):
            release = advise_releases(spec, data_folder, clients)
    elif spec.regime.releases_with_noise:
        suggestions.append(
            "An observer who kept earlier releases is not protected. What noise on releases would cost: sifu advise "
            "SPEC --set release.noise=0.01 --set ridge.regularisation=0.1 (docs/release-noise.md)."
        )
    if lifting:
        suggestions.append(f"Forgetting is exact with {' and '.join(lifting)}; with this spec it is {level}.")
    if rounds:
        suggestions.append('Set keep.statistics = "clients": with stored statistics, no client is contacted.')
    if not reached and spec.stop.target > 0:
        suggestions.append(
            "The head misses its target: try deep features of a public network (features.kind, docs/closed-form.md), "
            "or a network by groups (docs/guide.md)."
        )
    return Advice(
        clients=count,
        parameters=parameters,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        multiplier=terms.multiplier,
        clients_over_law=count / (terms.multiplier * math.sqrt(parameters)),
        pilot_rounds=1,
        reached_target=reached,
        accuracy=accuracy,
        noise_to_signal=0.0,
        typical_noise_to_signal=0.0,
        level=level,
        verdict=f"Worthwhile: a head in closed form forgets without noise, and a request {takes}.",
        worthwhile=True,
        epsilon_needed=None,
        clients_needed=None,
        predicted_rounds=rounds,
        scratch_rounds=plan.scratch_rounds,
        suggestions=tuple(suggestions),
        ways=(way,),
        recommended="closed form",
        target=spec.stop.target,
        measured_on=where,
        release=release,
    )


def _plain_option(advice: Advice, training_rounds: float | None, scratch: Level) -> TrainingOption:
    """Return the option of plain rounds. Its requests use noise if that is worthwhile, and Scratch otherwise."""
    if advice.worthwhile:
        rounds = None if advice.predicted_rounds is None else float(advice.predicted_rounds)
        takes = "takes few rounds" if rounds is None else f"takes {rounds:g} rounds, Scratch {advice.scratch_rounds}"
        reason = f"noise is {advice.noise_to_signal:.2g} of what was learned: a request {takes}"
        interval = advice.predicted_interval
        return TrainingOption(
            "plain", True, advice.level, rounds, training_rounds, advice.accuracy, (), reason, interval
        )
    reason = f"noise would be {advice.noise_to_signal:.2g} of what was learned: a request is as slow as Scratch"
    return TrainingOption("plain", True, scratch, training_rounds, training_rounds, advice.accuracy, (), reason)


def _judge(spec: Spec, view: RunView) -> Advice:
    """Return the advice that follows from a pilot."""
    privacy = spec.privacy
    terms = RequestTerms(
        (most_expensive(view),),
        privacy.epsilon,
        privacy.delta,
        calibration=privacy.calibration,
        reserve=privacy.reserve,
    )
    tip = view.path.tip
    count, parameters, multiplier = len(view.clients), view.parameters, terms.multiplier
    law = count / (multiplier * math.sqrt(parameters))
    signal = view.nodes[tip].distance
    psi = influence(view, tip)[view.active]

    def ratio(bound: float) -> float:
        return multiplier * math.sqrt(parameters) * bound / signal if signal > 0.0 else math.inf

    worst, typical = ratio(float(psi.max())), ratio(float(np.median(psi)))
    method = method_named("sifu")
    plan = method.plan(view, terms)
    premises = method.premises(Claim(view, view.leaving(terms.clients), view.exposures(plan.subjects), tip, terms))
    level = level_of(premises, exact=False)
    small = worst <= LARGEST_NOISE_TO_SIGNAL
    worthwhile = small and level != "none"
    excess = worst / LARGEST_NOISE_TO_SIGNAL
    accuracy = next((row.accuracy for row in view.reader.evaluations() if row.node == view.nodes[tip].node), None)
    reached = accuracy is not None and spec.stop.target > 0 and accuracy >= spec.stop.target
    predicted, scratch = (plan.predicted_rounds, plan.scratch_rounds) if reached else (None, None)
    if predicted is not None and predicted > spec.stop.max_rounds:
        predicted = None
    if reached and predicted is not None and scratch is not None:
        worthwhile = level != "none" and predicted < 0.8 * scratch  # saving few rounds is never worthwhile
    if level == "none":
        verdict = "Nothing could be certified with this spec; the suggestions say what to change."
    elif worthwhile:
        verdict = (
            "Worthwhile: the noise that hides any client is small compared with what was learned."
            if small
            else f"Perhaps worthwhile: the noise is not small against what was learned, but a request is predicted to "
            f"take {predicted} rounds where Scratch takes {scratch}."
        )
    elif small:
        verdict = (
            "Borderline: the noise that hides any client is small against what was learned, but a request is predicted "
            f"to take {predicted} rounds where Scratch takes {scratch}."
        )
    elif excess <= 3.0:
        verdict = "Borderline: requests will discard much of the training and save at most some of Scratch's rounds."
    else:
        verdict = "Not worthwhile: the noise would exceed what was learned, and requests will be as slow as Scratch."
    return Advice(
        clients=count,
        parameters=parameters,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        multiplier=multiplier,
        clients_over_law=law,
        pilot_rounds=view.path.rounds_until(tip),
        reached_target=reached,
        accuracy=accuracy,
        noise_to_signal=worst,
        typical_noise_to_signal=typical,
        level=level,
        verdict=verdict,
        worthwhile=worthwhile,
        epsilon_needed=None if worthwhile or small else _epsilon_for(multiplier / excess, privacy.delta),
        clients_needed=None if worthwhile or small or not math.isfinite(excess) else math.ceil(count * excess),
        predicted_rounds=predicted,
        scratch_rounds=scratch,
        suggestions=tuple(_suggestions(spec, view, worst, typical, worthwhile)),
        predicted_interval=None if predicted is None else plan.predicted_interval,
        target=spec.stop.target,
    )


def _epsilon_for(multiplier: float, delta: float) -> float | None:
    """Return the smallest epsilon (two digits) whose noise multiplier is at most `multiplier`, or None beyond 1000."""
    for epsilon in np.geomspace(0.1, 1000.0, 161):
        if exact_multiplier(float(epsilon), delta) <= multiplier:
            return float(f"{epsilon:.2g}")
    return None


def _suggestions(spec: Spec, view: RunView, worst: float, typical: float, worthwhile: bool) -> Sequence[str]:
    """Return suggested changes, most useful first."""
    facts, measured = view.facts, view.regularities.measured
    suggestions = []
    lifting = keys_that_lift(facts.preprocessing, counted=facts.shape_from_labels)
    if lifting:
        suggestions.append(f"Certificates can be more than conditional only with {' and '.join(lifting)}.")
    if spec.model.kind not in LINEAR_KINDS and not facts.smooth_model:
        suggestions.append(
            "Solve a linear head on deep features of a public network (model.kind = ridge, features.kind = pretrained "
            "or transformers, docs/closed-form.md): a request takes no round and no noise, and can be exact."
        )
    if measured.kind == "smooth" and measured.largest_certified_rate is not None:
        suggestions.append(
            f"Set local.rate to at most {measured.largest_certified_rate:.6g} (now {measured.local_rate:g}): the "
            "largest that is certified as convex. Above it the bound grows with every step."
        )
    if facts.dtype != "float64" and facts.smooth_model:
        suggestions.append(
            'Set model.dtype = "float64": the rounding of float32 is an assumption, that of float64 is bounded.'
        )
    participation = Participation.parse(spec.server.participation)
    if participation.kind == "fixed":
        rate = min(1.0, participation.count / len(view.clients))
        suggestions.append(
            f'Set server.participation = "poisson({rate:.3g})": with a fixed number another client would have filled '
            "the slot, and certificates are conditional."
        )
    if spec.privacy.accounting != "round":
        suggestions.append('Set privacy.accounting = "round": population accounting certifies nothing.')
    if worthwhile:
        return suggestions
    if spec.local.weight_decay == 0.0 and facts.smooth_model and measured.kind != "smooth":
        steps = max(client.local_steps for client in view.clients)
        # L = (1 - eta lambda)^K per round; with L = 0.98, Psi stops growing after some 50 rounds.
        decay = 0.02 / (measured.local_rate * steps)
        suggestions.append(
            f"Try local.weight_decay = {decay:.2g}: then L is about 0.98 a round, and Psi stops growing after some 50 "
            "rounds. It must not keep the model from its target."
        )
    if worst > 3.0 * typical:
        suggestions.append(
            "A few clients weigh far more than the others: cap the samples of a client, or the requests of those few "
            "will be as slow as Scratch (the others pay less)."
        )
    if participation.kind == "all" and spec.local.steps > 5:
        suggestions.append(
            f"Try fewer local steps (now {spec.local.steps}): clients drift apart less within a round, at the price of "
            "more rounds."
        )
    suggestions.append(
        "More clients, fewer parameters (frozen features of a smaller width), or a larger epsilon all help."
    )
    return suggestions


WITHOUT_PILOT: dict[type[Regime], Callable[[Spec, Any, Any, ProgressCallback | None], Advice] | None] = {
    Regime: None,
    ClosedForm: _closed_form_advice,
}
"""Functions that give advice without training a pilot, by regime class; None means that a pilot is trained."""
