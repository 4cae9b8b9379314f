"""Options of training and their cost of forgetting: plain rounds, groups that merge, or closed form.

The recommendation answers three questions, in this order. Is a closed-form head accurate enough? It forgets exactly, in
no round or one. Is noise worthwhile? Then plain rounds forget in a few rounds (docs/theory.md, section 13). Otherwise
groups forget exactly, by retraining from the groups that never held the client. If there are too few clients for
groups, only Scratch is left.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sifu.api.start_run import train as start_training
from sifu.choices import Level
from sifu.core.held_out_figures import HeldOutFigures
from sifu.core.operator_words import PYTHON
from sifu.core.premises import level_of
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import Spec
from sifu.core.spec.run_spec import COSTS, LEAST_MEMBERS, REACHED, TRIED, USUAL_COST, number_of_groups, separate_rounds
from sifu.core.spec.sections import FeaturesSpec, GroupsSpec, KeepSpec, LocalSpec, ModelSpec, RegularitySpec, ServerSpec
from sifu.data import ClientData
from sifu.errors import InputError, SifuError
from sifu.methods.base import Claim
from sifu.methods.registry import method_named
from sifu.planning.measure import FirstTraining
from sifu.run.clients_and_engine import (
    HeldOutRows,
    clients_from_spec,
    closed_form_engine,
    known_outputs,
    preprocessing_of,
)
from sifu.run.given import as_clients
from sifu.run.recorded_data import available_rows, held_out_figures
from sifu.run.run_view import RunView
from sifu.store.release_files import released_model
from sifu.theory.closed_form.rows import kept_bytes
from sifu.theory.facts import DECLARED_FIXED, FIXED_CONSTANTS
from sifu.theory.participation import Participation

TrainingName = Literal["closed form", "plain", "groups", "blocks", "merge", "frozen network"]
FEATURES = (FeaturesSpec(), FeaturesSpec(kind="random_fourier", count=512))
"""Features that a closed-form head is tried on: the inputs themselves, and random features of them."""
LEAST_TAKING_PART = 0.05
"""Lowest participation rate at which groups were tried."""


@dataclass(frozen=True)
class TrainingOption:
    """An option of training: its guarantee and cost of a request, and why it is or is not recommended.

    Attributes:
        name: Name of the option.
        possible: True if the option applies.
        level: Level of a certificate.
        request_rounds: Predicted rounds of a request of one client; None if unknown.
        training_rounds: Predicted rounds of the first training; None if unknown or impossible.
        accuracy: Accuracy on the same held-out rows for every option.
        settings: Keys of the spec that choose this option.
        reason: Reason for or against it, as a sentence.
        request_interval: Interval around the predicted rounds of a request.
        training_seconds: Expected duration of the first training.
        training_bytes: Expected traffic of the first training.
        request_seconds: Expected duration of a request.
        request_bytes: Expected traffic of a request.
    """

    name: TrainingName
    possible: bool
    level: Level
    request_rounds: float | None
    training_rounds: float | None
    accuracy: float | None
    settings: tuple[str, ...]
    reason: str
    request_interval: tuple[int, int] | None = None
    training_seconds: float | None = None
    training_bytes: float | None = None
    request_seconds: float | None = None
    request_bytes: float | None = None

    def at_pace(self, seconds: float, sent: float) -> TrainingOption:
        """Return the option with duration and traffic, assuming that each round costs as much as a round of the pilot.

        Args:
            seconds: Seconds per round.
            sent: Bytes per round.
        """
        training, request = self.training_rounds, self.request_rounds
        return replace(
            self,
            training_seconds=None if training is None else training * seconds,
            training_bytes=None if training is None else training * sent,
            request_seconds=None if request is None else request * seconds,
            request_bytes=None if request is None else request * sent,
        )


HELD_OUT_SHARE = 5
"""Inverse of the share of rows that the comparison holds out if the data have no held-out rows."""


def without_held_out(clients: Sequence[Any]) -> tuple[tuple[Any, ...], HeldOutRows | None]:
    """Hold out every fifth row of each client; return the clients without these rows, and the rows or None."""
    kept, x, y = [], [], []
    for client in clients:
        held = np.arange(len(client.y)) % HELD_OUT_SHARE == HELD_OUT_SHARE - 1
        samples, labels = np.asarray(client.x), np.asarray(client.y)
        x.append(samples[held])
        y.append(labels[held])
        rest = {"x": samples[~held], "y": labels[~held]} | ({"ids": None} if hasattr(client, "ids") else {})
        whole: Any = client if is_dataclass(client) else ClientData(client.name, samples, labels)
        kept.append(replace(whole, **rest))
    rows = HeldOutRows(np.concatenate(x), np.concatenate(y))
    return tuple(kept), rows if len(rows.y) else None


def closed_form_option(spec: Spec, data_folder: str | Path | None, clients: Any) -> TrainingOption:
    """Return the more accurate of the closed-form heads solved on each kind of features."""
    solved: list[_Solved] = []
    refusal = ""
    for features in FEATURES:
        try:
            solved.append(_solve(_closed_form(spec, features), data_folder, clients))
        except (SifuError, ValueError) as error:
            refusal = str(error)
    if not solved:
        reason = f"a head in closed form cannot be tried here: {refusal}"
        return TrainingOption("closed form", False, "none", None, None, None, (), reason)
    best = max(solved, key=lambda head: head.figures.accuracy or 0.0)
    accuracy, kind = best.figures.accuracy or 0.0, best.kind
    lifting = keys_that_lift(preprocessing_of(spec), counted=not known_outputs(_closed_form(spec, FEATURES[0])))
    level: Level = "conditional" if lifting else "exact"
    lifted = f" (exact with {' and '.join(lifting)})" if lifting else ""
    enough = accuracy >= spec.stop.target > 0.0
    verdict = "reaches" if enough else "misses" if spec.stop.target > 0.0 else "must be compared with"
    target = f"the target of {spec.stop.target:.1%}" if spec.stop.target > 0.0 else "what rounds reach"
    return TrainingOption(
        "closed form",
        enough or spec.stop.target == 0.0,
        level,
        0.0,
        1.0,
        accuracy,
        ('model.kind = "ridge"', f'features.kind = "{kind}"'),
        f"a head on {'the inputs' if kind == 'none' else 'random features'} has {accuracy:.1%} {best.figures.where} "
        f"and {verdict} {target}; forgetting is {level}{lifted} and takes no round",
        training_seconds=best.seconds,
        training_bytes=best.bytes_sent,
        request_seconds=best.request_seconds,
        request_bytes=0.0,
    )


def keys_that_lift(preprocessing: str, *, counted: bool) -> list[str]:
    """Return the settings without which a certificate is only conditional.

    >>> keys_that_lift(FIXED_CONSTANTS, counted=True)
    ['model.outputs given']

    Args:
        preprocessing: Known facts about the preprocessing.
        counted: True if the number of classes was counted from the labels.
    """
    keys = []
    if preprocessing not in (FIXED_CONSTANTS, DECLARED_FIXED):
        keys.append('data.preprocessing = "fixed" (if no client\'s data shaped it)')
    return keys + (["model.outputs given"] if counted else [])


def _closed_form(spec: Spec, features: FeaturesSpec) -> Spec:
    """Return the spec for the same data with a head that is solved instead of trained."""
    return replace(
        spec,
        model=ModelSpec(kind="ridge", outputs=spec.model.outputs),
        features=features,
        local=LocalSpec(),
        server=ServerSpec(),
        groups=GroupsSpec(),
        keep=KeepSpec(),
        regularity=RegularitySpec(),
    )


@dataclass(frozen=True)
class _Solved:
    """A solved head: its figures on held-out rows, the cost of the solve, and the cost of forgetting a client."""

    kind: str
    figures: HeldOutFigures
    seconds: float
    bytes_sent: float
    request_seconds: float | None


def _solve(spec: Spec, data_folder: str | Path | None, clients: Any) -> _Solved:
    """Solve a head from the rows that are not held out."""
    data = as_clients(clients if clients is not None else clients_from_spec(spec, data_folder), spec)
    held = available_rows(spec, data_folder, clients)
    if held is None:
        data, held = without_held_out(data)
    if held is None:
        raise InputError("no client has five rows, so none can be held out")
    outputs = known_outputs(spec) or 1 + max(int(np.max(client.y)) for client in data)
    own = replace(spec, data=replace(spec.data, name=PYTHON), model=replace(spec.model, outputs=outputs))
    rows = {client.name: (client.x.reshape(len(client.x), -1), client.y) for client in data}
    engine: Any = closed_form_engine(own, as_clients(rows, own))[0]
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        run = start_training(own, run=Path(folder) / "solved", clients=rows)
        seconds = time.monotonic() - started
        with run.reader() as reader:
            model = released_model(reader)
        request_seconds = None
        with suppress(SifuError):
            started = time.monotonic()
            run.forget([data[0].name])
            request_seconds = time.monotonic() - started
    flat = HeldOutRows(np.asarray(held.x).reshape(len(held.y), -1), held.y)
    figures = held_out_figures(spec, engine, model, flat)
    if figures is None or figures.accuracy is None:
        raise InputError("accuracy cannot be measured on held-out rows")
    size = float(sum(kept_bytes(engine.fixed, len(client.x)) for client in data))
    return _Solved(spec.features.kind, figures, seconds, size, request_seconds)


def groups_option(spec: Spec, view: RunView, training_rounds: float | None) -> TrainingOption:
    """Return the option of groups: groups and separate rounds as the rule sets them, cost from earlier measurements."""
    clients = len(view.clients)
    rate = Participation.parse(spec.server.participation).rate
    count, separate = number_of_groups(clients, rate), separate_rounds(spec.stop.max_rounds, rate)
    terms = RequestTerms((view.clients[0].name,), spec.privacy.epsilon, spec.privacy.delta, method="groups")
    level = level_of(method_named("groups").premises(Claim(view, [0], [], 0, terms)), exact=True)
    least, most = COSTS
    possible, why = (
        True,
        (
            f"a request took {USUAL_COST:.0%} of Scratch's rounds where tried ({least:.0%} to {most:.0%}, "
            f"on {TRIED - REACHED} of {TRIED} tasks it never got there), exact for any model; the first training takes "
            "about as long"
        ),
    )
    if clients < 2 * LEAST_MEMBERS:
        possible, why = False, f"{clients} clients are too few for groups of {LEAST_MEMBERS} that learn by themselves"
    elif rate < LEAST_TAKING_PART or not Participation.parse(spec.server.participation).independent:
        possible, why = False, f"with server.participation = {spec.server.participation} groups were not tried"
    elif spec.round_extras.update_noise > 0.0:
        possible, why = False, "noise in training and groups exclude each other"
    settings: tuple[str, ...] = (f"groups.count = {count}", f"groups.rounds = {separate}")
    if spec.groups.count > 0:
        settings, why = (), f"the spec has {spec.groups.count} groups, {spec.groups.rounds} separate rounds; {why}"
    rounds, interval = None, None
    if possible and training_rounds is not None:
        rounds = USUAL_COST * training_rounds
        interval = math.floor(least * training_rounds), math.ceil(most * training_rounds)
    return TrainingOption("groups", possible, level, rounds, training_rounds, None, settings, why, interval)


def rounds_to_target(view: RunView, target: float, max_rounds: int) -> float | None:
    """Return the rounds of the first training to the target, from the pilot's error curve, extrapolated if needed.

    Returns:
        The rounds; None if the curve does not reach the target in `max_rounds`.
    """
    first = FirstTraining(view, target)
    if first.rounds_to_target is not None:
        return float(first.rounds_to_target)
    errors = first.errors
    if errors is None or not 0.0 < target < 1.0 or errors.at_end <= 0.0:
        return None
    # Logarithms, since the power of a flat curve may overflow.
    more = (math.log(errors.at_end) - math.log1p(-target)) / errors.exponent
    if math.log(errors.end) + more > math.log(max_rounds):
        return None
    return float(errors.end * math.exp(more))


def accuracy_after(view: RunView, target: float, rounds: int) -> float | None:
    """Return the accuracy that the pilot's error curve predicts after `rounds` rounds; None if there is no curve."""
    errors = FirstTraining(view, target).errors
    return None if errors is None else 1.0 - float(errors.errors(float(max(rounds, errors.end))))


def recommend(
    closed: TrainingOption,
    plain: TrainingOption,
    groups: TrainingOption,
    noise_is_worthwhile: bool,
    missed_with: float | None = None,
) -> TrainingName:
    """Return the option to choose: closed form if accurate enough, plain rounds if noise is worthwhile, else groups.

    Args:
        closed: A closed-form head.
        plain: Plain rounds.
        groups: Groups.
        noise_is_worthwhile: True if noise is worthwhile.
        missed_with: Accuracy at which rounds end if they miss the target; a head that is as accurate is cheaper.
    """
    if missed_with is not None and closed.accuracy is not None and closed.accuracy >= missed_with:
        return "closed form"
    good_enough = closed.possible and (plain.accuracy is None or (closed.accuracy or 0.0) >= plain.accuracy - 0.005)
    if closed.possible and (good_enough or closed.training_rounds is None):
        return "closed form"
    fewer = plain.request_rounds, groups.request_rounds
    groups_are_faster = groups.possible and fewer[0] is not None and fewer[1] is not None and fewer[1] < fewer[0]
    if noise_is_worthwhile and not groups_are_faster:
        return "plain"
    return "groups" if groups.possible else "plain"
