"""Training options and their costs of forgetting a client: plain rounds, groups, or a head in closed form.

The recommendation is the first of these options that applies. A closed-form head, if accurate enough, forgets exactly
in at most one round. Plain rounds, if noise is worthwhile and groups are not faster, forget in a few rounds
(docs/theory.md, section 13). Groups forget exactly, by retraining from the groups that never held the client. If there
are too few clients for groups, only Scratch is left.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sifu.api.run import Run
from sifu.api.start_run import train as start_training
from sifu.choices import Level
from sifu.core.operator_words import PYTHON
from sifu.core.premises import level_of
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import Spec
from sifu.core.spec.run_spec import COSTS, LEAST_MEMBERS, REACHED, TRIED, USUAL_COST, number_of_groups, separate_rounds
from sifu.core.spec.sections import FeaturesSpec, GroupsSpec, KeepSpec, LocalSpec, ModelSpec, RegularitySpec, ServerSpec
from sifu.errors import InputError, SifuError
from sifu.methods.base import Claim
from sifu.methods.registry import method_named
from sifu.planning.measure import FirstTraining
from sifu.run.clients_and_engine import (
    HeldOutRows,
    clients_from_spec,
    known_outputs,
    preprocessing_of,
)
from sifu.run.features import with_samples
from sifu.run.given import as_clients
from sifu.run.held_out import held_out_figures, held_out_rows
from sifu.run.run_view import RunView
from sifu.store.release_files import released_model
from sifu.theory.closed_form.rows import kept_bytes
from sifu.theory.facts import DECLARED_FIXED, FIXED_CONSTANTS
from sifu.theory.participation import Participation

TrainingName = Literal["closed form", "plain", "groups", "blocks", "merge", "frozen network"]
FEATURES = (FeaturesSpec(), FeaturesSpec(kind="random_fourier", count=512))
"""Features that a closed-form head is tried on: the inputs themselves, and random features of them."""
AS_ACCURATE = 0.005
"""Largest loss of accuracy at which an option with cheaper requests or cheaper training is recommended."""
LEAST_TAKING_PART = 0.05
"""Lowest participation rate in the experiments with groups."""


@dataclass(frozen=True)
class TrainingOption:
    """A training option with the guarantee and the cost of a request, and the reason for or against it.

    Attributes:
        name: Name of the option.
        possible: True if the option can be used with this spec.
        level: Level of a request's certificate.
        request_rounds: Predicted rounds of a request of one client, or None if unknown.
        training_rounds: Predicted rounds of the first training, or None if unknown or impossible.
        accuracy: Accuracy on the same held-out rows for every option.
        settings: Keys of the spec that choose this option.
        reason: Sentence with the reason for or against the option.
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


def clients_and_rows(
    spec: Spec, data_folder: str | Path | None, given: Any
) -> tuple[tuple[Any, ...], HeldOutRows | None]:
    """Return the clients to train on, `given` or read as the spec says, and the rows to measure accuracy on.

    Every fifth row of each client is held out if the data have no held-out rows, or they cannot be read. The rows are
    None if no client has five rows.
    """
    clients = as_clients(clients_from_spec(spec, data_folder) if given is None else given, spec)
    with suppress(SifuError):
        if (rows := held_out_rows(spec, data_folder, given)) is not None:
            return clients, rows
    return _without_held_out(clients)


def _without_held_out(clients: Sequence[Any]) -> tuple[tuple[Any, ...], HeldOutRows | None]:
    kept, x, y = [], [], []
    for client in clients:
        held = np.arange(len(client.y)) % HELD_OUT_SHARE == HELD_OUT_SHARE - 1
        x.append(np.asarray(client.x)[held])
        y.append(np.asarray(client.y)[held])
        kept.append(with_samples(client, ~held, client.name))
    rows = HeldOutRows(np.concatenate(x), np.concatenate(y))
    return tuple(kept), rows if len(rows.y) else None


@contextmanager
def trained(spec: Spec, **given: Any) -> Iterator[tuple[Run, float]]:
    """Train a run in a temporary folder; yield the run and the duration in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        run = start_training(spec, run=Path(folder) / "run", **given)
        yield run, time.monotonic() - started


def seconds_to_forget(run: Run, client: str) -> float | None:
    """Forget a client and return the duration in seconds, or None if the request is refused."""
    started = time.monotonic()
    try:
        run.forget([client])
    except SifuError:
        return None
    return time.monotonic() - started


def closed_form_option(spec: Spec, data_folder: str | Path | None, clients: Any) -> TrainingOption:
    """Solve a closed-form head on each kind of features and return the option of the most accurate head."""
    options: list[TrainingOption] = []
    refusal = ""
    for features in FEATURES:
        try:
            options.append(_option_of_head(_closed_form(spec, features), data_folder, clients))
        except (SifuError, ValueError) as error:
            refusal = str(error)
    if not options:
        reason = f"a head in closed form cannot be tried here: {refusal}"
        return TrainingOption("closed form", False, "none", None, None, None, (), reason)
    return max(options, key=lambda option: option.accuracy or 0.0)


def keys_that_lift(preprocessing: str, *, counted: bool) -> list[str]:
    """Return the settings that the spec needs for a certificate level above `conditional`.

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


def _option_of_head(spec: Spec, data_folder: str | Path | None, clients: Any) -> TrainingOption:
    """Solve a head from the rows that are not held out, forget a client, and return the option with the figures."""
    data, held = clients_and_rows(spec, data_folder, clients)
    if held is None:
        raise InputError("no client has five rows, so none can be held out")
    known, kind, target = known_outputs(spec), spec.features.kind, spec.stop.target
    outputs = known or 1 + max(int(np.max(client.y)) for client in data)
    own = replace(spec, data=replace(spec.data, name=PYTHON), model=replace(spec.model, outputs=outputs))
    rows = {client.name: (client.x.reshape(len(client.x), -1), client.y) for client in data}
    with trained(own, clients=rows) as (run, seconds):
        engine: Any = run.engine()
        with run.reader() as reader:
            model = released_model(reader)
        request_seconds = seconds_to_forget(run, data[0].name)
    flat = HeldOutRows(np.asarray(held.x).reshape(len(held.y), -1), held.y)
    figures = held_out_figures(spec, engine, model, flat)
    if figures is None or figures.accuracy is None:
        raise InputError("accuracy cannot be measured on held-out rows")
    lifting = keys_that_lift(preprocessing_of(spec), counted=not known)
    level: Level = "conditional" if lifting else "exact"
    lifted = f" (exact with {' and '.join(lifting)})" if lifting else ""
    enough = figures.accuracy >= target > 0.0
    verdict = "reaches" if enough else "misses" if target > 0.0 else "must be compared with"
    goal = f"the target of {target:.1%}" if target > 0.0 else "what rounds reach"
    return TrainingOption(
        "closed form",
        enough or target == 0.0,
        level,
        0.0,
        1.0,
        figures.accuracy,
        ('model.kind = "ridge"', f'features.kind = "{kind}"'),
        f"a head on {'the inputs' if kind == 'none' else 'random features'} has {figures.accuracy:.1%} {figures.where} "
        f"and {verdict} {goal}; forgetting is {level}{lifted} and takes no round",
        training_seconds=seconds,
        training_bytes=float(sum(kept_bytes(engine.fixed, len(client.x)) for client in data)),
        request_seconds=request_seconds,
        request_bytes=0.0,
    )


def groups_option(spec: Spec, view: RunView, training_rounds: float | None) -> TrainingOption:
    """Return the option of training in groups with default settings; its costs were measured on earlier tasks."""
    clients = len(view.clients)
    participation = Participation.parse(spec.server.participation)
    count = number_of_groups(clients, participation.rate)
    separate = separate_rounds(spec.stop.max_rounds, participation.rate)
    terms = RequestTerms((view.clients[0].name,), spec.privacy.epsilon, spec.privacy.delta, method="groups")
    level = level_of(method_named("groups").premises(Claim(view, [0], [], 0, terms)), exact=True)
    least, most = COSTS
    refusal = ""
    if clients < 2 * LEAST_MEMBERS:
        refusal = f"{clients} clients are too few: at least two groups of {LEAST_MEMBERS} clients are needed"
    elif participation.rate < LEAST_TAKING_PART or not participation.independent:
        refusal = f"with server.participation = {spec.server.participation} groups were not tried"
    elif spec.round_extras.update_noise > 0.0:
        refusal = "noise in training and groups exclude each other"
    why = refusal or (
        f"a request took {USUAL_COST:.0%} of Scratch's rounds where tried ({least:.0%} to {most:.0%}, "
        f"on {TRIED - REACHED} of {TRIED} tasks it missed the target), exact for any model; the first training takes "
        "about as long"
    )
    settings: tuple[str, ...] = (f"groups.count = {count}", f"groups.rounds = {separate}")
    if spec.groups.count > 0:
        settings, why = (), f"the spec has {spec.groups.count} groups, {spec.groups.rounds} separate rounds; {why}"
    rounds, interval = None, None
    if not refusal and training_rounds is not None:
        rounds = USUAL_COST * training_rounds
        interval = math.floor(least * training_rounds), math.ceil(most * training_rounds)
    return TrainingOption("groups", not refusal, level, rounds, training_rounds, None, settings, why, interval)


def rounds_to_target(view: RunView, target: float, max_rounds: int) -> float | None:
    """Return the rounds of the first training to the target, from the pilot's error curve, extrapolated if needed.

    Returns:
        The rounds, or None if the curve does not reach the target in `max_rounds`.
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
    """Return the accuracy that the pilot's error curve predicts after `rounds` rounds, or None if there is no curve."""
    errors = FirstTraining(view, target).errors
    return None if errors is None else 1.0 - float(errors.errors(float(max(rounds, errors.end))))


def recommend(
    closed: TrainingOption,
    plain: TrainingOption,
    groups: TrainingOption,
    noise_is_worthwhile: bool,
    missed_with: float | None = None,
) -> TrainingName:
    """Return the name of the recommended option.

    The first option that applies is recommended: closed form if it is accurate enough, plain rounds if noise is
    worthwhile and groups are not faster, groups if they are possible, and otherwise plain rounds.

    Args:
        closed: The option of a closed-form head.
        plain: The option of plain rounds.
        groups: The option of groups.
        noise_is_worthwhile: True if noise is worthwhile.
        missed_with: Predicted accuracy of plain rounds if they miss the target, else None. A closed-form head with at
            least this accuracy is recommended.
    """
    if missed_with is not None and closed.accuracy is not None and closed.accuracy >= missed_with:
        return "closed form"
    if closed.possible and (plain.accuracy is None or (closed.accuracy or 0.0) >= plain.accuracy - AS_ACCURATE):
        return "closed form"
    by_noise, by_groups = plain.request_rounds, groups.request_rounds
    groups_are_faster = by_noise is not None and by_groups is not None and by_groups < by_noise
    if noise_is_worthwhile and not (groups.possible and groups_are_faster):
        return "plain"
    return "groups" if groups.possible else "plain"
