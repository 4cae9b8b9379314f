"""Flower engines of closed-form heads: clients' nodes compute statistics, and a round solves for the head.

`FlowerStatistics` sees every client's statistics and checks each of them. `MaskedFlowerStatistics` sees only their sum:
masks are pairwise and modulo 2^64 (`masking`), and int64 statistics can be masked without loss. The masks of the ready
clients cancel only in the sum over all of them. If one part is missing, nothing can be decoded and the round is
repeated without that client; a wrong sum is never returned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.closed_form_engine import GroupNetwork, MaskedStatisticsEngine, MaskedSum, TunedEngine
from sifu.core.engine import Incident, Position, Reason, Rejection, RoundResult
from sifu.core.round import RoundSetup
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import ATTEMPTS, Patience, Roster
from sifu.engines.flower.flower_engine import FlowerFederation
from sifu.engines.flower.wire import (
    PREPARE_STATISTICS,
    SEND_MASKED_STATISTICS,
    STATISTICS,
    Origin,
    Sent,
    read_masked,
    read_prepared,
    read_statistics_sent,
)
from sifu.engines.remote import Blueprint, HeadPlan
from sifu.engines.sim.embedded_heads import checked
from sifu.errors import InputError, NoClientResponseError, RoundRejectedError
from sifu.theory.closed_form import Rows, Statistics
from sifu.theory.closed_form.rows import kept_bytes, words_at
from sifu.theory.closed_form.statistics_check import find_flaw
from sifu.theory.facts import LEAST_MASKED, MASKED_STATISTICS, TrainingFacts

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

BYTES_AT_ONCE = 1 << 28
"""Maximum number of bytes of statistics requested at once; larger requests are split into batches of clients."""


class FlowerStatistics(FlowerFederation):
    """Engine, and `StatisticsEngine`, of nodes that send unmasked statistics."""

    def __init__(self, grid: Grid, roster: Roster, blueprint: Blueprint, patience: Patience | None = None) -> None:
        super().__init__(grid, roster, blueprint, patience)
        if blueprint.head is None:
            raise InputError("these clients train a model in rounds and send no statistics")
        self._head: HeadPlan = blueprint.head
        self.fixed, self.relative_penalty = self._head.fixed, self._head.relative_penalty
        self._check_room(blueprint)

    def renew(self, blueprint: Blueprint) -> None:
        """Continue with additional clients, if the sum of all samples still fits the number format."""
        self._check_room(blueprint)
        super().renew(blueprint)

    def _check_room(self, blueprint: Blueprint) -> None:
        """Refuse a possible overflow before any client sends statistics."""
        samples = sum(client.samples for client in blueprint.clients)
        if samples > self.fixed.samples_at_most:
            raise InputError(
                f"the clients have {samples} samples, and sums of whole numbers have room for "
                f"{self.fixed.samples_at_most}: use fewer ridge.feature_bits, or a smaller features.norm"
            )

    def reachable(self, clients: Sequence[int]) -> list[int]:
        """Return the clients whose node is online and may be asked."""
        return sorted(self._messenger.nodes(clients)) if clients else []

    def collect(
        self, clients: Sequence[int], position: Position
    ) -> Iterator[tuple[int, Statistics | Rows | Rejection | None]]:
        """Yield each client's statistics or rows after checking them; None for a client that does not reply in time."""
        largest = max((kept_bytes(self.fixed, self.clients[client].samples) for client in clients), default=1)
        at_once = max(1, BYTES_AT_ONCE // largest)
        for first in range(0, len(clients), at_once):
            some = clients[first : first + at_once]
            answers = self._messenger.ask(
                self._messages(some, position, STATISTICS), read_statistics_sent, position, "statistics: "
            )
            for client in some:
                answer = answers.pop(client, None)
                yield client, None if answer is None else self._checked(client, position, *answer)

    def _checked(self, client: int, position: Position, origin: Origin, sent: Sent) -> Statistics | Rows | Rejection:
        profile = self.clients[client]
        reason = self._refusal(client, origin)
        if reason is None:
            try:
                read = Rows(self.fixed, *sent) if isinstance(sent, tuple) else Statistics(self.fixed, sent)
                return checked(read, self.fixed, profile, position)
            except InputError:
                reason = "wrong shape"
        return Rejection(position, profile.name, reason, left_out=True)

    def _refusal(self, client: int, origin: Origin) -> Reason | None:
        """Return why statistics of this origin are refused; None if they are accepted."""
        if origin.features != self.facts.features:
            return "another feature map"
        if origin.numbers != self.fixed.describe():
            return "wrong shape"
        return None if origin.samples == self.clients[client].samples else "wrong samples"

    def _messages(
        self, clients: Sequence[int], position: Position, kind: str, more: dict[str, Any] | None = None
    ) -> dict[int, Message]:
        nodes = self._messenger.online(position, clients, everybody=True)
        return self._messenger.messages(nodes, None, position, kind, more=more or {})

    def run_together(self, setups: Sequence[RoundSetup], *, separate: bool) -> list[RoundResult]:
        """Raise `InputError`: a head is solved from statistics, not trained in rounds."""
        raise InputError("a head in closed form is solved from statistics and cannot be trained in rounds")

    def local_updates(self, *arguments: Any) -> NDArray[np.floating]:
        """Raise `InputError`: a closed-form head has no updates."""
        raise InputError("clients of a closed-form head send statistics once, and no updates")


class MaskedFlowerStatistics(FlowerStatistics, MaskedStatisticsEngine):
    """A `FlowerStatistics` that is also a `MaskedStatisticsEngine`: the server learns only the sum of statistics."""

    @property
    def facts(self) -> TrainingFacts:
        """Training facts, including that single clients' statistics could not be checked."""
        facts = super().facts
        return replace(facts, outside=(*facts.outside, MASKED_STATISTICS))

    def collect(
        self, clients: Sequence[int], position: Position
    ) -> Iterator[tuple[int, Statistics | Rows | Rejection | None]]:
        """Raise `InputError`: the statistics of a single client are never visible."""
        raise InputError("masked statistics are available only as a sum (collect_sum)")

    def collect_sum(self, clients: Sequence[int], position: Position) -> MaskedSum:
        """Return the sum over all clients that are ready; repeat without clients that do not send their part."""
        rejections: dict[int, Rejection] = {}
        missing: set[int] = set()
        sent = 0
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._patience.pause)
            keys = self._prepared([client for client in clients if client not in missing], position, rejections)
            if len(keys) < LEAST_MASKED:
                self.note(position, None, f"{len(keys)} were ready, a masked sum needs {LEAST_MASKED}")
                continue
            total, came = self._total(keys, position)
            sent += len(came)
            if set(came) == set(keys):
                statistics = self._sum(total, sorted(keys))
                return MaskedSum(statistics, tuple(sorted(keys)), tuple(rejections.values()), sent)
            missing |= set(keys) - set(came)
            again = f"{len(came)} of {len(keys)} masked statistics came: the sum is done again without the others"
            self.note(position, None, again)
        raise NoClientResponseError(
            f"no sum of masked statistics came together in {ATTEMPTS} attempts (it needs {LEAST_MASKED} clients that "
            "stay to the end): nothing was changed; check that the nodes are connected and start again. With fewer "
            f"than {LEAST_MASKED} clients left set masked-statistics = false"
        )

    def _prepared(
        self, clients: Sequence[int], position: Position, rejections: dict[int, Rejection]
    ) -> dict[int, bytes]:
        """Return the keys of clients that have prepared the right statistics; add the others to `rejections`."""
        acceptable = [client for client in clients if client not in rejections]
        messages = self._messages(acceptable, position, PREPARE_STATISTICS)
        keys = {}
        for client, (origin, key) in sorted(
            self._messenger.ask(messages, read_prepared, position, "statistics: ").items()
        ):
            reason = self._refusal(client, origin)
            if reason is None:
                keys[client] = key
            else:
                rejections[client] = Rejection(position, self.clients[client].name, reason, left_out=True)
        return keys

    def _total(self, keys: dict[int, bytes], position: Position) -> tuple[NDArray[np.uint64], list[int]]:
        """Return the sum of the masked words received, and their clients.

        The masks cancel only if every client in `keys` has replied; only then is this the sum of their statistics.
        """
        size = words_at(self.fixed) + 1
        total = np.zeros(size, dtype=np.uint64)

        def add(reply: Message) -> None:
            nonlocal total
            total += read_masked(reply, size)  # keep nothing else: statistics of many clients would fill the memory

        order = sorted(keys)
        more = {"clients": order, "keys": [keys[client] for client in order]}
        messages = self._messages(order, position, SEND_MASKED_STATISTICS, more)
        return total, list(self._messenger.ask(messages, add, position, "statistics: "))

    def _sum(self, total: NDArray[np.uint64], clients: Sequence[int]) -> Statistics:
        """Return the sum as statistics of all `clients`; refuse a sum that their data cannot have given."""
        words, samples = total.view(np.int64), sum(self.clients[client].samples for client in clients)
        statistics = Statistics(self.fixed, words[:-1].copy())
        flaw, detail = find_flaw(statistics)
        if words[-1] != len(clients) or statistics.samples != samples or flaw is not None:
            why = f"{flaw.value} ({detail})" if flaw is not None else f"{statistics.samples} samples, not {samples}"
            raise RoundRejectedError(
                f"the sum of the masked statistics of {len(clients)} clients is refused and nothing was changed: "
                f"{why}. Masking hides which client sent them: to find out, continue with masked-statistics = false, "
                "where each client's statistics are checked"
            )
        return statistics


class TunedFlowerStatistics(FlowerStatistics, TunedEngine):
    """A `FlowerStatistics` that is also a `TunedEngine`: members of each group tune its network.

    Later messages contain the tuned parameters, and nothing else of the networks. If a client is excluded or busy, this
    applies to both kinds of rounds.
    """

    tuning: FlowerFederation

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        blueprint: Blueprint,
        patience: Patience | None = None,
        *,
        masked_updates: bool = False,
    ) -> None:
        super().__init__(grid, roster, blueprint, patience)
        tuning, networks = self._head.tuning, self._head.networks
        if tuning is None or networks is None:
            raise InputError("the features of these clients come from a network that no group tunes")
        self._networks = networks
        self.tuning = FlowerFederation(grid, roster, tuning, patience, masked=masked_updates, exchange=self._exchange)

    @property
    def facts(self) -> TrainingFacts:
        """Training facts, including the assumptions of the groups' rounds."""
        facts, tuning = super().facts, self.tuning.facts.outside
        return replace(facts, outside=(*facts.outside, *(what for what in tuning if what not in facts.outside)))

    def use_backbones(self, backbones: Sequence[GroupNetwork]) -> None:
        """Compute features with these networks from now on."""
        networks = self._networks(backbones)
        self._messenger.networks = {group: self.tuning.record(networks[group]) for group in sorted(networks)}

    def renew(self, blueprint: Blueprint) -> None:
        """Continue with additional clients."""
        super().renew(blueprint)
        if blueprint.head is not None and blueprint.head.tuning is not None:
            self.tuning.renew(blueprint.head.tuning)

    def show_checkpoints(self, shown: ShownCheckpoint) -> None:
        """Include ledger checkpoints in messages of both kinds."""
        super().show_checkpoints(shown)
        self.tuning.show_checkpoints(shown)

    def leave_out(self, clients: Iterable[int]) -> None:
        """Exclude these clients from rounds of both kinds."""
        chosen = list(clients)
        super().leave_out(chosen)
        self.tuning.leave_out(chosen)

    def take_incidents(self) -> list[Incident]:
        """Return the incidents of rounds of both kinds, and clear them."""
        return [*self.tuning.take_incidents(), *super().take_incidents()]


class MaskedTunedFlowerStatistics(TunedFlowerStatistics, MaskedFlowerStatistics):
    """A `TunedFlowerStatistics` in which the server learns only the sum of statistics."""


def make_federation(
    grid: Grid,
    roster: Roster,
    blueprint: Blueprint,
    patience: Patience | None = None,
    *,
    masked_updates: bool = False,
    masked_statistics: bool = True,
) -> FlowerFederation:
    """Make the engine of a blueprint.

    Args:
        grid: Flower's grid.
        roster: Lookup of the clients' nodes.
        blueprint: Description of the training.
        patience: Waiting times.
        masked_updates: True if single clients' updates are hidden from the server.
        masked_statistics: True if single clients' statistics are hidden from the server.
    """
    if blueprint.head is None:
        return FlowerFederation(grid, roster, blueprint, patience, masked=masked_updates)
    if blueprint.head.tuning is not None:
        tuned = MaskedTunedFlowerStatistics if masked_statistics else TunedFlowerStatistics
        return tuned(grid, roster, blueprint, patience, masked_updates=masked_updates)
    statistics = MaskedFlowerStatistics if masked_statistics else FlowerStatistics
    return statistics(grid, roster, blueprint, patience)
