"""One round of federated averaging in five steps, shared by every engine, and the random draws of a round.

Draws must be reproducible. A round must draw the same participants and batches whether or not the run was interrupted,
and a client's batches must not depend on the other participants (the counterfactual of docs/theory.md, section 2.2 is
"the same schedule, W absent"). Nothing is therefore drawn from a running generator: each purpose and each position (a
branch, a round and often a client) has a generator of its own, keyed by both.

Certified noise never comes from these generators but from the operating system's entropy, drawn and added in float64.
Each certified draw requests its own bytes, uses them once and never logs them. Any other source, which a caller can
give, caps a certificate at `none`.

The steps of a round (docs/theory.md, section 2.1):

    draw      select the participants: keyed by the position, the same on every engine
    collect   obtain the participants' results for the model they receive
    gate      accept the usable results; a reply is not trusted, and a refusal is recorded
    average   mean = sum_i w_i theta_i with w_i = |D_i| / sum_j |D_j|, and every drift ||theta_i - mean||
    step      the mean, in float64, rounded to the model's own type (eq. 5)

`draw` and `step` are the same for all engines and implemented here. An engine implements the other three steps
(`RoundSteps`). It may train and average in one pass if no single model needs a check. A batched GPU program runs all
five steps at once; tests check that it gives the same results.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeVar

import numpy as np

from sifu.core.engine import Federation, Position, Rejection, RoundResult
from sifu.core.layout import ModelPieces, Vector
from sifu.core.replies import Reply, ReplyGate, ReplyRules
from sifu.errors import RoundRejectedError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ROUNDING_HOLDS_UP_TO
from sifu.theory.participation import ClientIndices, Participation, Places, place_key
from sifu.theory.rounding import UNIT_ROUNDOFF, norm_up, up


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return a generator for `purpose` at position `key`, independent of generators for other purposes and positions.

    >>> a = keyed_generator(7, "participation", 0, 3).random()
    >>> b = keyed_generator(7, "participation", 0, 3).random()
    >>> c = keyed_generator(7, "participation", 0, 4).random()
    >>> a == b, a == c
    (True, False)
    """
    text = ":".join([str(int(seed)), purpose, *(str(int(part)) for part in key)])
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").copy()))


NoiseSource = Literal["system", "given"]
"""Source of noise: the operating system, or a generator that the caller gave."""


class NormalSource(Protocol):
    """Source of standard normal numbers, such as numpy's `Generator`."""

    def standard_normal(self, size: int) -> Floats:
        """Return `size` independent standard normals."""
        ...


class SystemNormals:
    """Standard normals from the operating system's entropy (Box and Muller 1958, 53-bit uniforms)."""

    def standard_normal(self, size: int) -> Floats:
        """Return `size` independent standard normals."""
        pairs = (size + 1) // 2
        raw = np.frombuffer(secrets.token_bytes(16 * pairs), dtype="<u8") >> np.uint64(11)
        radius_uniform = (raw[:pairs].astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1], so its log is finite
        angle = raw[pairs:].astype(np.float64) * (2.0**-53 * 2.0 * np.pi)
        radius = np.sqrt(-2.0 * np.log(radius_uniform))
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


def add_noise(model: Vector, noise_std: float, normals: NormalSource) -> Vector:
    """Return theta + N(0, sigma^2 I), computed in float64, then rounded to the model's own type.

    For the clients that this noise hides, rounding the sum is post-processing and needs no allowance. For clients whose
    requests come later, the rounding must be accounted for (`noise_rounding`).
    """
    noisy = model.astype(np.float64) + noise_std * normals.standard_normal(model.size)
    return noisy.astype(model.dtype)


def noise_rounding(noisy: Vector) -> float:
    """Return a bound on how much the rounding of `theta + xi` can increase the distance to the counterfactual.

    For a client whose request comes later, the counterfactual adds the same noise (docs/theory.md, section 6.5).
    `noisy` is the rounded sum; rounding changes its norm by a factor of at most 1 + u, where u is the unit roundoff,
    and `norm_up` covers that.
    """
    return up(UNIT_ROUNDOFF * up(2.0 * norm_up(noisy) + ROUNDING_HOLDS_UP_TO))


LISTED = 5
"""Largest number of clients that an error names."""
ENTRIES_PER_BLOCK = 2**15
"""Number of model entries updated at once."""


@dataclass(frozen=True)
class RoundSetup:
    """Inputs of a round: its model, its position and the active clients.

    `start` is a copy in the model's own type.
    """

    start: Vector
    position: Position
    active: ClientIndices | Places


@dataclass(frozen=True)
class Average:
    """Mean of a round minus the model at its start, and every participant's distance to the mean, rounded up.

    `rounding` bounds floating-point errors (see `RoundResult`). `not_finite` lists the positions, among the
    participants, of models with a NaN or an Inf. If it is not empty, or if the mean overflowed, the other fields are
    meaningless.
    """

    step: Floats
    drifts: Floats
    mean_shift: float
    not_finite: tuple[int, ...]
    rounding: float = 0.0


@dataclass(frozen=True)
class AcceptedModels:
    """Models of a round that may be averaged, in the order of their clients' indices.

    `average` is the average of the models, if the gate has already computed it.
    """

    participants: ClientIndices
    models: Sequence[Vector | ModelPieces]
    average: Average | None = None


class HasParticipants(Protocol):
    """Accepted replies of a round, with the indices of their participants."""

    @property
    def participants(self) -> ClientIndices:
        """Sorted indices of the participants."""
        ...


Collected = TypeVar("Collected")
Accepted = TypeVar("Accepted", bound=HasParticipants)


class RoundSteps(Federation, Protocol[Collected, Accepted]):
    """Steps of a round that an engine implements."""

    @property
    def samples(self) -> Integers:
        """|D_i| of every known client."""
        ...

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Collected:
        """Return the results of the drawn clients; at least one client is drawn."""
        ...

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Collected
    ) -> tuple[Accepted | None, tuple[Rejection, ...]]:
        """Return the usable results, or None if the round does not count, and every refused reply."""
        ...

    def average(self, setup: RoundSetup, accepted: Accepted) -> Average | None:
        """Return the mean and the drifts of the accepted results, or None if the round does not count."""
        ...


def run_round(steps: RoundSteps[Collected, Accepted], setup: RoundSetup, drawn: ClientIndices) -> RoundResult:
    """Run a round with the `drawn` clients; a round without participants leaves the model unchanged."""
    if drawn.size == 0:
        return _empty(setup)
    # Keep no reference to the collected replies: the gate keeps copies, and replies of large models fill the memory.
    accepted, rejections = steps.gate(setup, drawn, steps.collect(setup, drawn))
    average = None if accepted is None else steps.average(setup, accepted)
    if accepted is None or average is None:
        return _empty(setup, rejections)
    return RoundResult(
        step(steps, setup, accepted.participants, average),
        accepted.participants,
        steps.samples[accepted.participants],
        average.drifts,
        average.mean_shift,
        average.rounding,
        rejections,
    )


def draw(participation: Participation, key: int, setup: RoundSetup) -> ClientIndices:
    """Return the sorted participants of a round."""
    return participation.draw(setup.active, place_key(key, setup.position.branch, setup.position.round))


def gate_replies(
    federation: Federation,
    setup: RoundSetup,
    drawn: ClientIndices,
    replies: Iterable[Reply],
    rules: ReplyRules,
    forgotten: Iterable[int],
    averaging: Callable[[AcceptedModels], Average] | None = None,
) -> tuple[AcceptedModels | None, tuple[Rejection, ...]]:
    """Check the replies of a round; return the accepted models, or None if there are none, and the refused replies.

    With `averaging`, the entries of all replies are first checked together: ||theta_i - theta|| <= ||theta_i - mean|| +
    ||mean - theta|| bounds each update. If this bound is at most half the limit for every reply, no reply is read
    again, and the accepted models include their average. Replies of `forgotten` clients are always refused.

    Raises:
        RoundRejectedError: If a client is left out because its reply was refused, and the rules say `stop`.
    """
    position, replies = setup.position, list(replies)
    new_gate = partial(
        ReplyGate,
        setup.start,
        position,
        drawn.tolist(),
        federation.layout,
        federation.clients,
        rules,
        forgotten=set(forgotten),
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


def step(federation: Federation, setup: RoundSetup, participants: ClientIndices, average: Average) -> Vector:
    """Return theta + (mean - theta).

    Raises:
        RoundRejectedError: If an entry is NaN or Inf; the message names the clients that returned one.
    """
    dtype = federation.layout.dtype
    new: Vector = np.empty(setup.start.size, dtype=dtype)
    finite = not average.not_finite
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, new.size, ENTRIES_PER_BLOCK):  # process parts that fit into the processor's cache
            here = slice(first, first + ENTRIES_PER_BLOCK)
            model = setup.start[here].astype(np.float64)
            model += average.step[here]
            new[here] = model
            finite = finite and bool(np.isfinite(new[here]).all())
    if finite:
        return new
    where = _rejected(setup.position)
    advice = "; lower local.rate or look at the data"
    if not average.not_finite:
        raise RoundRejectedError(
            f"{where}every client's model is finite but the averaged model overflows {dtype}{advice}"
        )
    names = [repr(federation.clients[participants[place]].name) for place in average.not_finite]
    raise RoundRejectedError(
        f"{where}{len(names)} of {participants.size} clients returned a model with NaN or Inf ({listed(names)}){advice}"
    )


def _empty(setup: RoundSetup, rejections: tuple[Rejection, ...] = ()) -> RoundResult:
    none = np.zeros(0, dtype=np.int64)
    return RoundResult(setup.start, none, none, np.zeros(0), 0.0, 0.0, rejections=rejections)


def _rejected(position: Position) -> str:
    return f"round {position.round} of branch {position.branch} was rejected and changed nothing: "


def listed(names: Sequence[str]) -> str:
    """Join the first few names for an error message."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
