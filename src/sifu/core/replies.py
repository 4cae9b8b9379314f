"""Rules that close a round, and checks of its clients' replies."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from sifu.core.engine import Position, Reason, Rejection
from sifu.core.layout import ModelLayout, ModelPieces, Vector
from sifu.errors import InputError
from sifu.theory.facts import ClientProfile
from sifu.theory.rounding import norm_up

ALL = "all"
LATE = "late: "
"""Prefix of the text of an incident about a late client."""


@dataclass(frozen=True)
class Wait:
    """Condition that closes a round: a `share` or a `count` of answers, or a time in `seconds`.

    If all fields are None, the round closes once all clients have answered.
    """

    share: float | None = None
    count: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> Wait:
        """Parse the condition from `server.wait` of a spec.

        >>> Wait.parse("all"), Wait.parse("80%").share, Wait.parse("4").count, Wait.parse("30s").seconds
        (Wait(share=None, count=None, seconds=None), 0.8, 4, 30.0)
        """
        written = text.strip()
        if written == ALL:
            return Wait()
        matched = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(%|s)?", written)
        if matched:
            number, unit = float(matched[1]), matched[2]
            if unit == "%" and 0 < number <= 100:
                return Wait(share=number / 100)
            if unit == "s" and number > 0:
                return Wait(seconds=number)
            if unit is None and number.is_integer() and number >= 1:
                return Wait(count=int(number))
        raise InputError(
            f"server.wait must be all, a share such as 80%, a number of answers such as 4, or a time such as 30s, "
            f"found {text!r}"
        )

    @property
    def closes_early(self) -> bool:
        """True if a round can close without waiting for the remaining clients."""
        return self.share is not None or self.count is not None

    def enough(self, asked: int) -> int:
        """Return the number of answers that closes a round, given the number of asked clients.

        >>> Wait.parse("80%").enough(5), Wait.parse("4").enough(3), Wait.parse("30s").enough(5)
        (4, 3, 5)
        """
        if self.share is not None:
            return min(asked, math.ceil(self.share * asked - 1e-9))
        return asked if self.count is None else min(asked, self.count)


OnRejection = Literal["stop", "reply", "round"]
"""Effect of a refused reply: stop training with an error, leave out that reply, or drop the whole round."""

LOOKED_AT = 2**15
"""Number of model entries checked at once."""
LARGEST_UPDATE = 1e12
"""Largest accepted norm of an update if no `update_bound` is set; no meaningful update is larger."""

LONGEST_NAME = 80


@dataclass(frozen=True)
class Reply:
    """Unchecked reply of a client: every field may be any object."""

    client: object
    position: object
    samples: object
    vector: object
    owned: bool = False
    """True if nobody else can change the array, so that an accepted array need not be copied."""


@dataclass(frozen=True)
class ReplyRules:
    """Rules for replies: the effect of a refusal, and the largest norm of an update (0 means `LARGEST_UPDATE`)."""

    on_rejection: OnRejection = "stop"
    update_bound: float = 0.0

    def __post_init__(self) -> None:
        if self.on_rejection not in ("stop", "reply", "round"):
            raise InputError(f"server.rejected must be stop, reply or round, found {self.on_rejection!r}")
        if not (0.0 <= self.update_bound <= LARGEST_UPDATE):
            raise InputError(f"server.update_bound must be 0 (off) to {LARGEST_UPDATE:g}, found {self.update_bound}")

    @property
    def outside(self) -> tuple[str, ...]:
        """Rules that the theory does not cover; in the counterfactual, different updates may exceed the bound."""
        return ("leaving out updates beyond a bound",) if self.update_bound else ()

    @property
    def limit(self) -> float:
        """Largest accepted norm of an update."""
        return self.update_bound or LARGEST_UPDATE


class ReplyGate:
    """Gate that checks the replies of one round one by one and keeps the accepted models in `accepted`.

    With `numbers=False` the entries of the models are not checked; the caller must check them.
    """

    def __init__(
        self,
        start: Vector,
        position: Position,
        asked: Collection[int],
        layout: ModelLayout,
        clients: Sequence[ClientProfile],
        rules: ReplyRules,
        *,
        forgotten: Collection[int] = (),
        numbers: bool = True,
    ) -> None:
        self._start, self._position, self._layout, self._clients = start, position, layout, clients
        self._numbers = numbers
        self._start_norm = _length_at_most(ModelPieces((start,))) if numbers else math.inf
        self._asked, self._forgotten, self._rules = set(asked), set(forgotten), rules
        self.accepted: dict[int, Vector | ModelPieces] = {}
        self._refused: list[Rejection] = []

    def take(self, reply: Reply) -> Rejection | None:
        """Accept a reply and return None, or return its rejection; a refused reply is not kept."""
        client = self._known(reply.client)
        reason = self._refusal(client, reply)
        if reason is None and client is not None:
            # Copy: the owner of the array may change it after the check.
            self.accepted[client] = reply.vector if reply.owned else np.array(reply.vector, dtype=self._layout.dtype)  # type: ignore[assignment]
            return None
        name = self._clients[client].name if client is not None else printable(reply.client)
        rejection = Rejection(self._position, name, reason or "unknown client", False)
        self._refused.append(rejection)
        return rejection

    def finish(self) -> tuple[Rejection, ...]:
        """Close the round after its last reply and return all rejections; drop the whole round if the rules require it.

        The round is dropped only if a client whose reply was refused has no accepted reply. A refused duplicate reply,
        or a reply that was not asked for, does not drop the round.
        """
        names = {self._clients[client].name for client in self._asked - self.accepted.keys()}
        rejections = [replace(rejection, left_out=rejection.client in names) for rejection in self._refused]
        if self._rules.on_rejection == "round" and any(rejection.left_out for rejection in rejections):
            rejections += [
                Rejection(self._position, self._clients[client].name, "round dropped", True)
                for client in sorted(self.accepted)
            ]
            self.accepted.clear()
        return tuple(rejections)

    @cached_property
    def _index_of(self) -> Mapping[str, int]:
        """Index of each client by its name; built on first use, because engines name known clients by index."""
        return {client.name: index for index, client in enumerate(self._clients)}

    def _known(self, named: object) -> int | None:
        """Return the index of a client given by index or by name, or None if the client is unknown."""
        if isinstance(named, str):
            return self._index_of.get(named)
        if isinstance(named, int | np.integer) and not isinstance(named, bool) and 0 <= named < len(self._clients):
            return int(named)
        return None

    def _refusal(self, client: int | None, reply: Reply) -> Reason | None:
        if client is None:
            return "unknown client"
        if client in self._forgotten:
            return "forgotten client"
        if not isinstance(reply.position, Position) or reply.position != self._position:
            return "another round"
        if client not in self._asked:
            return "not asked"
        if client in self.accepted:
            return "twice"
        samples = reply.samples
        if isinstance(samples, bool) or not isinstance(samples, int | np.integer):
            return "wrong samples"
        if samples != self._clients[client].samples:
            return "wrong samples"
        if not self._numbers:
            return form_refusal(reply.vector, self._layout)
        return vector_refusal(reply.vector, self._start, self._layout, self._rules.limit, self._start_norm)


def form_refusal(vector: object, layout: ModelLayout) -> Reason | None:
    """Return the reason why the type or shape of a model is unusable, or None; do not read the entries."""
    if type(vector) is not np.ndarray and type(vector) is not ModelPieces:
        return "not an array"
    if vector.dtype != np.dtype(layout.dtype):
        return "wrong dtype"
    return "wrong shape" if vector.shape != (layout.size,) else None


def vector_refusal(
    vector: object,
    start: Vector,
    layout: ModelLayout,
    limit: float = LARGEST_UPDATE,
    start_norm: float = math.inf,
) -> Reason | None:
    """Return the reason why a model cannot be used, or None.

    Anything but a plain array is refused without being converted, so no code of the sender runs.

    Args:
        vector: Object that the client sent as its model.
        start: Model at the start of the round.
        layout: Layout of the model.
        limit: Largest accepted norm of the update.
        start_norm: Upper bound on ||start||. If it is finite, most models are read only once, without conversion to
            float64.
    """
    why = form_refusal(vector, layout)
    if why is not None:
        return why
    model = vector if isinstance(vector, ModelPieces) else ModelPieces((vector,))  # type: ignore[arg-type]
    if _length_at_most(model) + start_norm <= limit:
        return None
    whole = np.asarray(model)
    if not bool(np.isfinite(whole).all()):
        return "not finite"
    with np.errstate(over="ignore", invalid="ignore"):
        moved = whole.astype(np.float64) - start.astype(np.float64)
        largest = float(np.max(np.abs(moved), initial=0.0))
        # Squares overflow long before entries do.
        length = norm_up(moved) if largest < 1e100 else math.inf
    return None if length <= limit else "too large"


def _length_at_most(model: ModelPieces) -> float:
    """Return an upper bound on the norm, about 1 % too large.

    The bound is NaN or infinite if an entry is NaN or infinite, or if squares overflow. A float32 sum of 2^15 squares
    has a relative error of at most 2^15 / 2^24, and squares below 1e-38 may round to zero.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = sum(float(part @ part) for part in model.slices(LOOKED_AT))
        return 1.01 * math.sqrt(squares + 1e-37 * model.shape[0])


def printable(named: object) -> str:
    """Return the name that an unknown client gave, in a form that can be recorded and shown."""
    text = named if isinstance(named, str) else f"<{type(named).__name__}>"
    return "".join(character if character.isprintable() else "?" for character in text[:LONGEST_NAME])
