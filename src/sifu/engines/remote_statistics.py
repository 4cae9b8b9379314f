"""Base classes of engines for closed-form heads with remote clients; subclasses implement the messages.

`RemoteStatistics` sees and checks every client's statistics. `MaskedRemoteStatistics` sees only their sum. Masks are
pairwise and modulo 2^64 (`masks`), so int64 statistics are masked without loss. The masks cancel only in the sum over
all clients that prepared statistics. If one of them sends nothing, the sum cannot be decoded and is repeated without
that client; a partial sum is never returned.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sifu.core.closed_form_engine import MaskedStatisticsEngine, MaskedSum
from sifu.core.engine import Position, Reason, Rejection, RoundResult
from sifu.core.round import RoundSetup
from sifu.engines.masks import refused_keys
from sifu.engines.plans import Origin, Sent
from sifu.engines.remote import ATTEMPTS, Blueprint, RemoteFederation
from sifu.engines.sim.embedded_heads import checked
from sifu.errors import InputError, NoClientResponseError, RoundRejectedError
from sifu.theory.arrays import Words
from sifu.theory.closed_form import Rows, Statistics
from sifu.theory.closed_form.rows import kept_bytes, words_at
from sifu.theory.closed_form.statistics_check import find_flaw
from sifu.theory.facts import LEAST_MASKED, MASKED_STATISTICS, TrainingFacts

BYTES_AT_ONCE = 1 << 28
"""Maximum number of bytes of statistics requested at once; larger requests are split into batches of clients."""


class RemoteStatistics(RemoteFederation):
    """`StatisticsEngine` for remote clients that send unmasked statistics."""

    def _use(self, blueprint: Blueprint) -> None:
        """Use a blueprint; refuse a blueprint whose sums could overflow, before any client sends statistics."""
        if blueprint.head is None:
            raise InputError("these clients train a model in rounds and send no statistics")
        fixed, samples = blueprint.head, sum(client.samples for client in blueprint.clients)
        if samples > fixed.samples_at_most:
            raise InputError(
                f"the clients have {samples} samples, but integer sums are exact for at most {fixed.samples_at_most}: "
                "reduce features.norm"
            )
        super()._use(blueprint)
        self.fixed = fixed

    @abstractmethod
    def reachable(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that can receive a message now."""

    @abstractmethod
    def _ask_statistics(self, clients: Sequence[int], position: Position) -> dict[int, tuple[Origin, Sent] | Reason]:
        """Return the statistics of the clients that reply, or the reason why a reply cannot be read."""

    def collect(
        self, clients: Sequence[int], position: Position
    ) -> Iterator[tuple[int, Statistics | Rows | Rejection | None]]:
        """Yield each client's statistics or rows after checking them, or None for a client that does not reply."""
        largest = max((kept_bytes(self.fixed, self.clients[client].samples) for client in clients), default=1)
        at_once = max(1, BYTES_AT_ONCE // largest)
        for first in range(0, len(clients), at_once):
            some = clients[first : first + at_once]
            answers = self._ask_statistics(some, position)
            for client in some:
                answer = answers.pop(client, None)
                yield client, None if answer is None else self._checked(client, position, answer)

    def _checked(
        self, client: int, position: Position, answer: tuple[Origin, Sent] | Reason
    ) -> Statistics | Rows | Rejection:
        if not isinstance(answer, tuple):
            return self._rejection(client, position, answer)
        sent, refusal = answer[1], self._refusal(client, answer[0])
        if refusal is not None:
            return self._rejection(client, position, refusal)
        try:
            read = Rows(self.fixed, *sent) if isinstance(sent, tuple) else Statistics(self.fixed, sent)
            return checked(read, self.fixed, self.clients[client], position)
        except InputError:
            return self._rejection(client, position, "wrong shape")

    def _rejection(self, client: int, position: Position, reason: Reason) -> Rejection:
        return Rejection(position, self.clients[client].name, reason, left_out=True)

    def _refusal(self, client: int, origin: Origin) -> Reason | None:
        """Return why statistics of this origin are refused, or None if they are accepted."""
        if origin.features != self.facts.features:
            return "another feature map"
        if origin.numbers != self.fixed.describe():
            return "wrong shape"
        return None if origin.samples == self.clients[client].samples else "wrong samples"

    def run_together(self, setups: Sequence[RoundSetup], *, separate: bool) -> list[RoundResult]:
        """Raise `InputError`: a head is solved from statistics, not trained in rounds."""
        raise InputError("a head in closed form is solved from statistics and cannot be trained in rounds")


class MaskedRemoteStatistics(RemoteStatistics, MaskedStatisticsEngine):
    """Base class of engines whose server learns only the sum of the clients' statistics."""

    unmasked: str
    """Setting that turns masking off, for error messages."""

    @property
    def facts(self) -> TrainingFacts:
        """Training facts, including that the statistics of individual clients could not be checked."""
        facts = super().facts
        return replace(facts, outside=(*facts.outside, MASKED_STATISTICS))

    @abstractmethod
    def _ask_keys(self, clients: Sequence[int], position: Position) -> Mapping[int, tuple[Origin, bytes] | Reason]:
        """Ask clients to prepare statistics; return each client's origin and public key, or why they are unreadable."""

    @abstractmethod
    def _ask_masked(self, keys: Mapping[int, bytes], position: Position, total: Words) -> list[int]:
        """Add the masked words of the clients in `keys` to `total`; return the clients whose words were added."""

    def collect(
        self, clients: Sequence[int], position: Position
    ) -> Iterator[tuple[int, Statistics | Rows | Rejection | None]]:
        """Raise `InputError`: the statistics of a single client are never visible."""
        raise InputError("masked statistics are available only as a sum (collect_sum)")

    def collect_sum(self, clients: Sequence[int], position: Position) -> MaskedSum:
        """Return the sum over all ready clients; repeat it without clients that do not send their masked statistics."""
        rejections: dict[int, Rejection] = {}
        missing: set[int] = set()
        sent = 0
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self.pause)
            keys = self._prepared([client for client in clients if client not in missing], position, rejections)
            if len(keys) < LEAST_MASKED:
                self.note(position, None, f"{len(keys)} were ready, a masked sum needs {LEAST_MASKED}")
                continue
            total = np.zeros(words_at(self.fixed) + 1, dtype=np.uint64)
            came = self._ask_masked(keys, position, total)
            sent += len(came)
            if set(came) == set(keys):
                statistics = self._sum(total, sorted(keys))
                return MaskedSum(statistics, tuple(sorted(keys)), tuple(rejections.values()), sent)
            missing |= set(keys) - set(came)
            again = f"{len(came)} of {len(keys)} masked statistics arrived: the sum is repeated without the others"
            self.note(position, None, again)
        raise NoClientResponseError(
            f"no masked sum of statistics was completed in {ATTEMPTS} attempts (it needs {LEAST_MASKED} clients that "
            "stay connected): nothing was changed; check that the clients are connected and start again. If fewer "
            f"than {LEAST_MASKED} clients are left, set {self.unmasked}"
        )

    def _prepared(
        self, clients: Sequence[int], position: Position, rejections: dict[int, Rejection]
    ) -> dict[int, bytes]:
        """Return the keys of clients whose prepared statistics are acceptable; add refused clients to `rejections`.

        One invalid or repeated key would stop the round, because all clients refuse it.
        """
        keys = {}
        acceptable = [client for client in clients if client not in rejections]
        for client, answer in sorted(self._ask_keys(acceptable, position).items()):
            refusal = self._refusal(client, answer[0]) if isinstance(answer, tuple) else answer
            if refusal is not None:
                rejections[client] = self._rejection(client, position, refusal)
            elif isinstance(answer, tuple):
                keys[client] = answer[1]
        refused = refused_keys(keys)
        rejections |= {client: self._rejection(client, position, "not an array") for client in refused}
        return {client: key for client, key in keys.items() if client not in refused}

    def _sum(self, total: Words, clients: Sequence[int]) -> Statistics:
        """Return the sum as statistics of all `clients`; refuse a sum that no data of these clients can produce."""
        words, samples = total.view(np.int64), sum(self.clients[client].samples for client in clients)
        statistics = Statistics(self.fixed, words[:-1].copy())
        flaw, detail = find_flaw(statistics)
        if words[-1] != len(clients) or statistics.samples != samples or flaw is not None:
            why = f"{flaw.value} ({detail})" if flaw is not None else f"{statistics.samples} samples, not {samples}"
            raise RoundRejectedError(
                f"the sum of the masked statistics of {len(clients)} clients is refused and nothing was changed: "
                f"{why}. Masking hides which client sent them: to find out, continue with {self.unmasked}, "
                "where each client's statistics are checked"
            )
        return statistics
