"""One round of federated averaging in five named steps, written once for every engine, and what is drawn in it.

Generators of everything that is replayed are independent streams, one for each purpose and place.

A round must draw the same participants and batches whether the run was interrupted or not, and a
client's batches must not depend on who else takes part (the counterfactual of docs/theory.md, section 2.2 is "the
same schedule, W absent"). So nothing is drawn from a running generator: each stream is keyed by what it
is for.

Certified noise never comes from these generators but from the operating system's entropy, drawn and added in float64.
Every certified normal is made from bytes handed out for this one draw; they are used once and never logged. A seeded
generator is for experiments only and caps a certificate at `none`.

The steps of a round (docs/theory.md, section 2.1):

    draw      who takes part: keyed by the place, the same on every engine
    collect   what the participants make of the model they are handed
    gate      what of it may be used; a reply is not trusted, and a refusal is recorded
    average   mean = sum_i w_i theta_i with w_i = |D_i| / sum_j |D_j|, and every drift ||theta_i - mean||
    step      theta + g (mean - theta), in float64, then rounded to the model's own type (eq. 5)

Drawing and stepping are the same everywhere and are done here. An engine brings the three steps between them
(`RoundSteps`). It may train and average in one pass where no single model has to be looked at; a batched program on
a GPU runs all five at once and is held to the same results by its tests.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Position, Rejection, RoundResult
from sifu.core.layout import ModelLayout, ModelPieces, Vector
from sifu.core.replies import Reply, ReplyGate, ReplyRules
from sifu.errors import RoundRejectedError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ROUNDING_HOLDS_UP_TO, ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices, Participation, Places, place_key
from sifu.theory.rounding import UNIT_ROUNDOFF, norm_up, up


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator for `purpose` at place `key`, independent of every other purpose and place.

    >>> a = keyed_generator(7, "participation", 0, 3).random()
    >>> b = keyed_generator(7, "participation", 0, 3).random()
    >>> c = keyed_generator(7, "participation", 0, 4).random()
    >>> a == b, a == c
    (True, False)
    """
    text = ":".join([str(int(seed)), purpose, *(str(int(part)) for part in key)])
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").copy()))


NoiseSource = Literal["system", "seeded"]


class NormalSource(Protocol):
    """Anything that draws standard normals; numpy's Generator is one."""

    def standard_normal(self, size: int) -> Floats: ...


class SystemNormals:
    """Standard normals straight from the operating system's entropy (Box and Muller 1958, 53-bit uniforms)."""

    def standard_normal(self, size: int) -> Floats:
        """`size` independent standard normals."""
        pairs = (size + 1) // 2
        raw = np.frombuffer(secrets.token_bytes(16 * pairs), dtype="<u8") >> np.uint64(11)
        radius_uniform = (raw[:pairs].astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1]: its log is finite
        angle = raw[pairs:].astype(np.float64) * (2.0**-53 * 2.0 * np.pi)
        radius = np.sqrt(-2.0 * np.log(radius_uniform))
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


def noise_source(source: NoiseSource, seed: int, branch: int) -> NormalSource:
    """What a noise edge draws from; `seed` is used by `seeded` only."""
    if source == "seeded":
        return keyed_generator(seed, "seeded noise", branch)
    return SystemNormals()


def add_noise(model: Vector, noise_std: float, normals: NormalSource) -> Vector:
    """theta + N(0, sigma^2 I), in float64, then rounded to the model's own type.

    Rounding the sum is post-processing for those whom this noise hides: it costs nothing of their guarantee. It is not
    for those who ask later, see `noise_rounding`.
    """
    noisy = model.astype(np.float64) + noise_std * normals.standard_normal(model.size)
    return noisy.astype(model.dtype)


def noise_rounding(noisy: Vector) -> float:
    """How far rounding of `theta + xi` in float64 may move two worlds further apart than theta and phi were.

    To a client that asks later this noise is part of the plan (docs/theory.md, section 6.5). `noisy` is the rounded
    sum, whose norm is off by a factor 1 + u, which `norm_up` covers.
    """
    return up(UNIT_ROUNDOFF * up(2.0 * norm_up(noisy) + ROUNDING_HOLDS_UP_TO))


LISTED = 5
"""How many clients an error names."""
STEPPED = 2**15
"""Entries of a model that are moved together."""


@dataclass(frozen=True)
class RoundSetup:
    """What a round is asked to do: from which model, where, among whom, and what it brings along.

    `start` is a copy in the model's own type. `absent` clients are drawn like everyone and then left out, their slots
    not refilled: the counterfactual that Psi bounds the distance to.
    """

    start: Vector
    position: Position
    active: ClientIndices | Places
    want_gram: bool = False
    want_updates: bool = False
    absent: ClientIndices | None = None


@dataclass(frozen=True)
class Average:
    """The mean of a round minus the model it started from, and every participant's distance to it, rounded up.

    `rounding` bounds floating point (see `RoundResult`), `updates` are those that were averaged, where known, and
    `gram_errors` how far off the differences are that `gram` is made of, one bound a participant.
    `not_finite` lists the places of participants whose model has a NaN or an Inf; if it is not empty, or if the
    mean overflowed, nothing else means anything.
    """

    step: Floats
    drifts: Floats
    mean_shift: float
    gram: Floats | None
    not_finite: tuple[int, ...]
    rounding: float = 0.0
    updates: NDArray[np.floating] | None = None
    gram_errors: Floats | None = None


@dataclass(frozen=True)
class AcceptedModels:
    """The models of a round that may be averaged, one by one, in the order of their clients' indices.

    `average` is theirs, where the gate has made it already.
    """

    participants: ClientIndices
    models: Sequence[Vector | ModelPieces]
    average: Average | None = None


class HasParticipants(Protocol):
    """What a gate lets through: whose it is."""

    @property
    def participants(self) -> ClientIndices: ...


Collected = TypeVar("Collected")
Accepted = TypeVar("Accepted", bound=HasParticipants)


class RoundSteps(Protocol[Collected, Accepted]):
    """What an engine brings to a round."""

    @property
    def layout(self) -> ModelLayout: ...

    @property
    def clients(self) -> tuple[ClientProfile, ...]: ...

    @property
    def facts(self) -> TrainingFacts: ...

    @property
    def samples(self) -> Integers:
        """|D_i| of every known client."""
        ...

    @property
    def participation_key(self) -> int:
        """What draws of participants are keyed by: `base_key(seed, "participation")`."""
        ...

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Collected:
        """What comes back from the clients that were drawn (at least one), by whatever road."""
        ...

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Collected
    ) -> tuple[Accepted | None, tuple[Rejection, ...]]:
        """What of it may be used, None for a round that does not count, and every reply that was refused."""
        ...

    def average(self, setup: RoundSetup, accepted: Accepted) -> Average | None:
        """The mean and the drifts of what was let through; None if the round turns out not to count."""
        ...


def run_round(
    steps: RoundSteps[Collected, Accepted], setup: RoundSetup, drawn: ClientIndices | None = None
) -> RoundResult:
    """Draw (unless `drawn` is what `draw` returns), collect, gate, average, step.

    A round that no one takes part in leaves the model as it was.
    """
    if drawn is None:
        drawn = draw(steps.facts.participation, steps.participation_key, setup)
    if drawn.size == 0:
        return _empty(setup)
    # Nothing here holds on to what was collected: a gate keeps copies, and replies of large models fill the memory.
    accepted, rejections = steps.gate(setup, drawn, steps.collect(setup, drawn))
    average = None if accepted is None else steps.average(setup, accepted)
    if accepted is None or average is None:
        return _empty(setup, rejections)
    participants, updates = accepted.participants, average.updates if setup.want_updates else None
    return RoundResult(
        step(steps, setup, participants, average),
        participants,
        steps.samples[participants],
        average.drifts,
        average.mean_shift,
        average.rounding,
        average.gram,
        None if updates is None else updates.astype(steps.layout.dtype, copy=False),
        rejections,
        average.gram_errors,
    )


def draw(participation: Participation, key: int, setup: RoundSetup) -> ClientIndices:
    """The participants of a round, sorted."""
    drawn = participation.draw(setup.active, place_key(key, setup.position.branch, setup.position.round))
    return drawn if setup.absent is None else np.setdiff1d(drawn, setup.absent)


def gate_replies(
    steps: RoundSteps[Collected, Accepted],
    setup: RoundSetup,
    drawn: ClientIndices,
    replies: Iterable[Reply],
    rules: ReplyRules,
    forgotten: Iterable[int],
    averaging: Callable[[AcceptedModels], Average] | None = None,
) -> tuple[AcceptedModels | None, tuple[Rejection, ...]]:
    """Check replies one by one; where the rules say so, one that cannot be used stops the training with a sentence.

    With `averaging` the numbers of every reply are first looked at together: the distance of a model to the mean and
    that of the mean to where the round started bound its update, ||theta_i - theta|| <= ||theta_i - mean|| +
    ||mean - theta||. If that is far within the limit for all of them, nothing more has to be read, and the average
    comes along.
    """
    position, replies = setup.position, list(replies)
    new_gate = partial(
        ReplyGate, setup.start, position, drawn.tolist(), steps.layout, steps.clients, rules, forgotten=set(forgotten)
    )
    if averaging is not None and replies:
        gate = new_gate(numbers=False)
        if all(gate.take(reply) is None for reply in replies):
            accepted = _accepted(gate)
            average = averaging(accepted)
            updates = average.drifts + average.mean_shift
            if not average.not_finite and bool((updates <= rules.limit / 2.0).all()):
                return replace(accepted, average=average), ()
    gate = new_gate()
    for reply in replies:
        gate.take(reply)
    rejections = gate.finish()
    left_out = [f"{rejection.client}: {rejection.reason}" for rejection in rejections if rejection.left_out]
    if left_out and rules.on_rejection == "stop":
        raise RoundRejectedError(
            f"{_rejected(position)}{len(left_out)} of {drawn.size} replies cannot be used ({listed(left_out)}). "
            "See server.rejected"
        )
    if not gate.accepted:
        return None, rejections
    return _accepted(gate), rejections


def _accepted(gate: ReplyGate) -> AcceptedModels:
    participants = np.array(sorted(gate.accepted), dtype=np.int64)
    return AcceptedModels(participants, [gate.accepted[client] for client in participants.tolist()])


def step(
    steps: RoundSteps[Collected, Accepted], setup: RoundSetup, participants: ClientIndices, average: Average
) -> Vector:
    """theta + g (mean - theta); a model with a NaN or an Inf is refused, and its clients are named."""
    rate, dtype = steps.facts.server_rate, steps.layout.dtype
    new: Vector = np.empty(setup.start.size, dtype=dtype)
    finite = not average.not_finite
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, new.size, STEPPED):  # in parts that stay in the processor's cache
            here = slice(first, first + STEPPED)
            moved = average.step[here] if rate == 1.0 else rate * average.step[here]
            model = setup.start[here].astype(np.float64)
            model += moved
            new[here] = model
            finite = finite and bool(np.isfinite(new[here]).all())
    if finite:
        return new
    where = _rejected(setup.position)
    advice = f"; lower the local rate ({steps.facts.local_rate:g}) or look at the data"
    if not average.not_finite:
        raise RoundRejectedError(
            f"{where}every client's model is finite but the averaged model overflows {dtype}{advice}"
        )
    names = [repr(steps.clients[participants[place]].name) for place in average.not_finite]
    raise RoundRejectedError(
        f"{where}{len(names)} of {participants.size} clients returned a model with NaN or Inf ({listed(names)}){advice}"
    )


def _empty(setup: RoundSetup, rejections: tuple[Rejection, ...] = ()) -> RoundResult:
    none, gram = np.zeros(0, dtype=np.int64), np.zeros((0, 0)) if setup.want_gram else None
    return RoundResult(setup.start, none, none, np.zeros(0), 0.0, 0.0, gram, rejections=rejections)


def _rejected(position: Position) -> str:
    return f"round {position.round} of branch {position.branch} was rejected and changed nothing: "


def listed(names: Sequence[str]) -> str:
    """The first few of them, for an error."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
