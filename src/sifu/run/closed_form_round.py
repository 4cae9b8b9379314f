"""Recorded solve of a closed-form head from the sum of the clients' statistics.

If the run keeps each client's statistics, only clients without stored statistics are asked. The new sum is the stored
sum plus the statistics of clients that joined, minus the statistics of clients that left. Integer sums are exact, so
forgetting costs the same for any number of clients. If only the sum is kept, all clients are asked again after a client
left and, with masked statistics, after one joined. A client that does not answer is left out of the head until a later
solve.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from sifu.core.closed_form_engine import MaskedStatisticsEngine, StatisticsEngine
from sifu.core.engine import Engine, Position, Rejection, evaluate_present
from sifu.core.round_stream import StreamedRound
from sifu.errors import InputError, NoClientResponseError, RoundRejectedError
from sifu.run.kept_statistics import own_statistics
from sifu.run.releases import is_due, publish
from sifu.run.run_view import RunView, measures_training_rows
from sifu.run.training import Progress, ProgressCallback, RecordedTraining
from sifu.store.files import uninterrupted
from sifu.store.statistics_files import OwnStatistics, StatisticsRow, read_statistics, write_sum
from sifu.store.writer import RunWriter
from sifu.theory.closed_form import Rows, Statistics, fit_head, total
from sifu.theory.closed_form.sums import RunningSum

log = logging.getLogger(__name__)
UNUSABLE = "unusable samples"
HELD_BYTES = 1 << 29
"""Largest total size of newcomers' statistics kept in memory between check and solve; others are requested again."""


@dataclass
class _Gathered:
    """Replies of the clients that were asked for statistics."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Records of the statistics files that were written."""
    clients_asked: int = 0
    bytes_sent: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)
    """Clients that did not answer."""
    stored: Statistics | None = None
    """Stored sum, if it was read."""


class RecordedSolve(RecordedTraining):
    """Recorded computation of the active clients' head, which is skipped if the current model already is that head."""

    _progress: ProgressCallback | None = None
    held: dict[int, Statistics | Rows] | None = None
    """Statistics of newcomers that `check_newcomers` collected."""

    def check_newcomers(self) -> dict[int, Statistics | Rows]:
        """Check the engine's clients that are not recorded yet, and return their statistics for `held`, by client.

        Once recorded, a client whose statistics cannot be used or added would block every later solve.

        Raises:
            InputError: If a client's samples cannot be used.
            RoundRejectedError: If its statistics are refused for another reason.
        """
        engine, held = cast("StatisticsEngine", self.engine), dict[int, Statistics | Rows]()
        new = range(len(self.view.clients), len(self.engine.clients))
        if isinstance(engine, MaskedStatisticsEngine) or not new:
            return held
        whole = next((row for row in self.writer.statistics().values() if row.is_sum), None)
        result, size = RunningSum(engine.fixed), 0
        if whole is not None:
            result.add(read_statistics(self.writer.folder, whole, engine.fixed))
        for client, sent in engine.collect(new, self._position):
            if isinstance(sent, Rejection) and sent.reason == UNUSABLE:
                raise InputError(f"{sent.client} cannot join, and nothing was recorded: {sent.detail}")
            if isinstance(sent, Rejection):
                raise _refusal(sent)
            if sent is None:
                continue
            result.add(sent)  # `add` refuses a sum that would overflow
            size += sent.nbytes
            if size <= HELD_BYTES:
                held[client] = sent
        return held

    def run(
        self, phase: str, progress: ProgressCallback | None = None, pause: Callable[[], bool] | None = None
    ) -> bool:
        """Solve if necessary, and release the head if the run adds noise to releases and a release is due.

        Return True; `pause` is ignored, because a solve is not interrupted.
        """
        ended = super().run(phase, progress, pause)
        if self.view.spec.release.noise > 0.0 and is_due(self.writer, self._tip):
            released = publish(self.writer, self.engine, self.view.spec, self._tip.node, progress)
            if self._measures:
                taken = np.array(sorted(self._taken()), dtype=np.int64)
                self._record_evaluation(evaluate_present(self.engine, released, taken))
                self.commit()
        return ended

    @cached_property
    def _measures(self) -> bool:
        """False if this solve belongs to a request and only `sifu evaluate` measures training rows in this run."""
        runs = any(row.status == "running" for row in self.view.requests)
        return not runs or measures_training_rows(self.view)

    def _until_stopped(self, phase: str, progress: ProgressCallback | None, pause: Callable[[], bool] | None) -> bool:
        self._progress = progress
        is_theirs = self._tip.kind == "round" and self._taken() <= set(self.active.tolist())
        if not is_theirs or self.missing():  # not the head of exactly the active clients that were not refused
            self._solve()
        if progress:
            progress(Progress(phase, self._tip.position, self._accuracy or 0.0, 0.0, 1))
        return True

    def _keep(self, psi_max: float) -> None:
        """Do nothing: no request rolls back to an earlier head."""

    def missing(self) -> set[int]:
        """Return the active clients that the current head lacks and that were not refused."""
        tip = self._tip
        refused = {
            self.view.index_of[row.client]
            for row in self.writer.rejections()
            if (row.branch, row.round) == (tip.branch, tip.position - 1) and row.left_out
        }
        return set(self.active.tolist()) - self._taken() - refused

    def _taken(self) -> set[int]:
        """Return the clients of the current head, or an empty set if the current model is not a head."""
        tip = self._tip
        if tip.kind != "round":
            return set()
        return set(self.writer.participation(first=tip.node).between(tip.node, tip.node).clients.tolist())

    def _solve(self) -> None:
        own = own_statistics(self.view)
        whole = next((row for row in self.writer.statistics().values() if row.is_sum), None)
        gathered = _Gathered()
        statistics = self._sum(own, whole, gathered)
        refused = {self.view.index_of[rejection.client] for rejection in gathered.rejections}
        left_out = refused | gathered.absent
        taken = np.array([client for client in self.active.tolist() if client not in left_out], dtype=np.int64)
        if gathered.absent and not taken.size:
            raise NoClientResponseError(
                "no client sent its statistics: nothing was changed; check that the nodes are connected and start again"
            )
        if gathered.absent and not refused and set(taken.tolist()) == self._taken():
            return  # the same clients are still missing
        head = fit_head(statistics, self.view.regime.penalty)
        vector = head.weights.ravel()
        if whole is not None and gathered.stored is None and list(whole.clients) == taken.tolist():
            gathered.stored = read_statistics(self.writer.folder, whole, statistics.fixed)
        if whole is not None and list(whole.clients) == taken.tolist() and statistics == gathered.stored:
            digest = whole.digest
        else:
            row = write_sum(self.writer.folder, self._next, taken.tolist(), statistics)
            digest = row["digest"]
            gathered.rows.append(row)
            if whole is not None:
                self._pending.dropped_statistics.append(whole.file)
        self._pending.statistics = gathered.rows
        self._pending.solve = {
            "sum": digest,
            "samples": statistics.samples,
            "relative_penalty": head.relative_penalty,
            "asked": gathered.clients_asked,
            "bytes_sent": gathered.bytes_sent,
            "left_out": sorted(self.view.left_out),
        }
        if gathered.absent:
            self._pending.solve["absent"] = sorted(gathered.absent)
        # With noise on releases, only a released head is measured: figures of the solved head would leave the folder.
        measured = self._measures and self.view.spec.release.noise == 0.0
        evaluation = evaluate_present(self.engine, vector, taken) if measured else None
        sizes = np.array([self.view.clients[client].samples for client in taken.tolist()], dtype=np.int64)
        with uninterrupted():
            self._ingest(
                StreamedRound(
                    taken,
                    sizes,
                    np.full(taken.size, np.inf),
                    np.inf,  # not recorded: the distance would permanently reveal something about clients' data
                    0.0,
                    0.0,
                    lambda: vector,
                    evaluation,
                    rejections=tuple(gathered.rejections),
                )
            )

    def _sum(self, own: OwnStatistics, whole: StatisticsRow | None, gathered: _Gathered) -> Statistics:
        """Return the sum of the active clients' statistics."""
        engine, wanted = cast("StatisticsEngine", self.engine), set(self.active.tolist())
        if isinstance(engine, MaskedStatisticsEngine):
            return self._masked_sum(engine, whole, wanted, gathered)
        if whole is None:
            return total(engine.fixed, self._statistics_of(sorted(wanted), own, gathered))
        there = set(whole.clients)
        gathered.stored = result = self._stored_sum(whole)
        leaving = there - wanted
        if not leaving <= own.rows.keys():
            # Without the leaving client's statistics the sum cannot be corrected, so everyone is asked again.
            return self._sum(own, None, gathered)
        if leaving:
            running = RunningSum(engine.fixed, result)
            for client in sorted(leaving):
                running.subtract(own.read(self.writer.folder, client))
            result = running.statistics()
        joining = sorted(wanted - there)
        if joining:
            result = total(engine.fixed, itertools.chain([result], self._statistics_of(joining, own, gathered)))
        return result

    def _stored_sum(self, whole: StatisticsRow) -> Statistics:
        """Return the stored sum; it is not read again if a rollback in this process has just written it."""
        written, self.writer.written_sum = self.writer.written_sum, None
        if written is not None and written[0] == whole.digest:
            return written[1]
        return read_statistics(self.writer.folder, whole, cast("StatisticsEngine", self.engine).fixed)

    def _masked_sum(
        self, engine: MaskedStatisticsEngine, whole: StatisticsRow | None, wanted: set[int], gathered: _Gathered
    ) -> Statistics:
        """Return the sum over all clients that answer, or the stored sum if nobody left or can be added."""
        statistics = cast("StatisticsEngine", engine)
        if whole is not None and set(whole.clients) <= wanted:
            new = sorted(wanted - set(whole.clients))
            if not statistics.reachable(new):
                gathered.absent.update(new)
                gathered.stored = read_statistics(self.writer.folder, whole, statistics.fixed)
                return gathered.stored
        result = engine.collect_sum(sorted(wanted), self._position)
        gathered.clients_asked = result.sent
        gathered.bytes_sent = result.sent * result.statistics.nbytes
        for rejection in result.rejections:
            self._refuse(rejection, gathered)
        refused = {self.view.index_of[rejection.client] for rejection in result.rejections}
        gathered.absent.update(wanted - set(result.clients) - refused)
        return result.statistics

    @property
    def _position(self) -> Position:
        return Position(self._tip.branch, self._tip.position)

    def _refuse(self, rejection: Rejection, gathered: _Gathered) -> None:
        """Leave out a client whose statistics cannot be used, or raise an error if the spec demands it."""
        client, founders = self.view.index_of[rejection.client], len(self.view.clients) - len(self.writer.joined())
        # `joined`: the client joined after the first training and does not contribute to any head yet.
        joined = client >= founders and not self.writer.participation([client]).clients.size
        if rejection.reason == UNUSABLE and joined:
            log.warning(
                "%s joined with samples that cannot be used and is left out: %s", rejection.client, rejection.detail
            )
            gathered.absent.add(client)
            return
        if self.view.spec.server.rejected != "reply":
            raise _refusal(rejection)
        gathered.rejections.append(rejection)

    def _statistics_of(
        self, clients: list[int], own: OwnStatistics, gathered: _Gathered
    ) -> Iterator[Statistics | Rows]:
        """Yield the statistics of each client: read from disk if they are stored, otherwise requested and written."""
        engine, folder = cast("StatisticsEngine", self.engine), self.writer.folder
        for client in clients:
            if client in own.rows:
                yield own.read(folder, client)
        lacking = [client for client in clients if client not in own.rows]
        held = self.held or {}
        to_ask = [client for client in lacking if client not in held]
        available = ((client, held.pop(client)) for client in lacking if client in held)
        for client, sent in itertools.chain(available, engine.collect(to_ask, self._position)):
            if sent is None:
                gathered.absent.add(client)
                continue
            gathered.clients_asked += 1
            if self._progress:
                self._progress(Progress("statistics", gathered.clients_asked, math.nan, 0.0, len(lacking), "client"))
            if isinstance(sent, Rejection):
                self._refuse(sent, gathered)
                continue
            gathered.bytes_sent += sent.nbytes
            if self.view.spec.keep.statistics == "clients":
                gathered.rows.append(own.write(folder, self._next, client, sent))
            yield sent


def _refusal(rejection: Rejection) -> RoundRejectedError:
    return RoundRejectedError(
        f"the statistics of client {rejection.client!r} were refused and nothing was changed: "
        f"{rejection.reason}{f' ({rejection.detail})' if rejection.detail else ''}. See server.rejected"
    )


def training_of(engine: Engine, writer: RunWriter, view: RunView) -> RecordedTraining:
    """Return the recorded training, or the solve, that continues a run until the stop rule holds."""
    return (RecordedSolve if view.regime.solves else RecordedTraining)(engine, writer, view)
