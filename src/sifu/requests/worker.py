"""Worker of `train`, `forget` and the server: it trains, executes requests and ingests inbox messages.

Each step of a request is one event of the ledger (received, planned, rolled back, done). The rollback event records the
new starting model, its source, the charges, and all erased files. After a crash at any time, a new worker continues
from the last event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Protocol, cast

from sifu.choices import Level
from sifu.core.closed_form_engine import StatisticsEngine
from sifu.core.engine import Engine
from sifu.core.request_terms import Terms
from sifu.errors import InputError, NotCertifiableError, RoundRejectedError
from sifu.methods.registry import method_for, plan_request
from sifu.planning.plan import Plan, least_level
from sifu.requests.failures import noting_failure
from sifu.requests.filing import check_level
from sifu.requests.issue import issue_certificates
from sifu.requests.messages import WatchedInbox
from sifu.requests.request_record import row_of
from sifu.requests.roll_back import RollBack
from sifu.run.closed_form_round import RecordedSolve, training_of
from sifu.run.few_clients import consequences, staying_without
from sifu.run.group_state import are_separate, groups_to_build, has_groups
from sifu.run.group_training import GroupTraining, record_first_merge
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback, RecordedTraining
from sifu.store.actors import actor_name
from sifu.store.given_approvals import approvals_needed, approved_requests
from sifu.store.projection import NewEvent, RequestRow
from sifu.store.reader import JOINED, RunReader, remainder_to_join
from sifu.store.writer import RunWriter
from sifu.theory.facts import IN_PROCESS

log = logging.getLogger(__name__)
Tell = Callable[[str], None]
"""Callback that receives a progress message."""


class BuildsEngines(Protocol):
    """Builder of the engines that requests need, from the clients' data (`run.run_engines.RunEngines`)."""

    def prepare_records(self, reader: RunReader, terms: Terms) -> None:
        """Build the engine without the records of `terms`, before anything is rolled back."""

    def again(self) -> Engine:
        """Return the engine with the client that rejoins after some of its records were forgotten."""

    def digest_of(self, client: int) -> str | None:
        """Return the digest of a client's samples, or None if it is unknown."""


class Worker:
    """Worker on a run that this process may write to; `engines` is None if clients are on other machines."""

    def __init__(
        self,
        writer: RunWriter,
        engine: Engine,
        progress: ProgressCallback | None = None,
        inbox: WatchedInbox | None = None,
        tell: Tell = log.info,
        engines: BuildsEngines | None = None,
    ) -> None:
        self.writer, self.engine, self.progress, self._tell, self._engines = writer, engine, progress, tell, engines
        self.inbox = inbox or WatchedInbox(writer)
        self.done: list[str] = []
        """Requests this worker finished, in order."""
        self._plans: dict[tuple[str, Terms, Level | None, tuple[int, str]], Plan] = {}
        """Plans made before their requests were received; the key ends with the last event of the run."""
        self._tried: set[int] = set()
        """Clients already asked for their statistics, which the closed-form head lacks."""
        self.refused: dict[str, NotCertifiableError] = {}
        """Requests that cannot be executed at the demanded level; they wait and do not block later requests."""

    def step(self, level: Level | None = None) -> bool:
        """Ingest inbox messages, then do the most urgent work.

        A request is executed at this `level` or above. First training and group rebuilds stop when a message arrives; a
        running request continues.

        Returns:
            False if there was nothing to do.
        """
        if self.inbox.waiting():
            self.inbox.ingest()
        if self.finish_running() or self.execute_next(level):
            return True
        if self.writer.phase == "training":
            self.train(until_message=True)
            return True
        return self._complete_head() or self.rebuild_groups(until_message=True) > 0

    def _complete_head(self) -> bool:
        """Solve a closed-form head again with missing clients that are reachable now; return whether it was solved.

        Each client is tried once; a client that reconnects is tried again.
        """
        view = RunView(self.writer)
        if self.writer.phase != "ready" or not view.regime.solves:
            return False
        solve = RecordedSolve(self.engine, self.writer, view)
        there = set(cast("StatisticsEngine", self.engine).reachable(sorted(solve.missing())))
        self._tried &= there
        if there <= self._tried:
            return False
        self._tried |= there
        solve.run("joining", self.progress)
        return True

    def train(self, until_message: bool = False) -> None:
        """Continue the first training until its stop rule holds or, with `until_message`, a message was ingested."""
        if not self._merge_groups(until_message):
            return
        training = self._run_rounds("training", until_message=until_message)
        if training is not None:
            training.finish()

    def _merge_groups(self, until_message: bool = False) -> bool:
        """Let the groups finish their separate rounds, and merge them; return False if a message stopped them."""
        while are_separate(view := RunView(self.writer)):
            if GroupTraining(self.engine, self.writer, view).run("separate groups", self.progress, self.inbox.waiting):
                record_first_merge(self.writer, RunView(self.writer))
                continue
            self.inbox.ingest()
            if until_message:
                return False
        return True

    def rebuild_groups(self, until_message: bool = False) -> int:
        """Rebuild the groups whose models were erased, and return the number of such groups.

        With `until_message`, stop after a message was ingested.
        """
        view = RunView(self.writer)
        if self.writer.phase != "ready" or not has_groups(view):
            return 0
        count = len(groups_to_build(view))
        while groups_to_build(view):
            training = GroupTraining(self.engine, self.writer, view)
            if not training.run("groups built again", self.progress, self.inbox.waiting):
                self.inbox.ingest()
                if until_message:
                    break
            view = RunView(self.writer)
        return count

    def finish_running(self) -> list[str]:
        """Continue requests that were interrupted; return their ids."""
        running = [row.request for row in self.writer.requests() if row.status == "running"]
        for request in running:
            self._finish(request)
        return running

    def execute_next(self, level: Level | None = None, among: Collection[str] | None = None) -> bool:
        """Execute the first approved request that is not in `refused`; return False if there is none.

        A request that lacks approvals keeps waiting and does not block later requests.
        """
        waiting = [
            row
            for row in approved_requests(self.writer)
            if row.request not in self.refused and (among is None or row.request in among)
        ]
        if not waiting:
            return False
        row = waiting[0]
        try:
            self._check_level_approved(row, level)
            self._tell(f"request {row.request} is being executed")
            self._execute(row, level)
        except NotCertifiableError as error:
            if not row_of(self.writer, row.request).waits:
                raise
            self._tell(f"request {row.request} keeps waiting: {error}")
            self.refused[row.request] = error
        return True

    def execute_records(self, besides: str | None = None) -> list[str]:
        """Execute the approved requests to forget records, except `besides`, and return the executed requests.

        The next release then lacks exactly the records of the executed requests. A request that cannot be executed
        keeps waiting with a warning, and its client stays in the model.
        """
        executed = []
        for row in approved_requests(self.writer):
            if not row.records or row.request == besides:
                continue
            try:
                self._execute(row, None)
            except (InputError, NotCertifiableError) as error:
                if not row_of(self.writer, row.request).waits:
                    raise
                log.warning("request %s keeps waiting, and its client stays in: %s", row.request, error)
            else:
                executed.append(row.request)
        return executed

    def bring_up_to_date(self) -> int:
        """Bring the released model up to date with the clients that should be in it.

        A closed-form head is solved again unless it already covers exactly the active clients. Other models are up to
        date.

        Returns:
            The rounds or solves that were recorded, or 0 if the model was up to date.
        """
        view = RunView(self.writer)
        if not view.regime.solves:
            return 0
        before = view.path.nodes[-1].position
        self._run_rounds("release")
        return RunView(self.writer).path.nodes[-1].position - before

    def _check_level_approved(self, row: RequestRow, level: Level | None) -> None:
        """Check that a command does not change the level, which is one of the approved terms."""
        approved = least_level(row.terms)
        if approvals_needed(self.writer) and least_level(row.terms, level) != approved:
            raise NotCertifiableError(
                f"request {row.request} was approved at level {approved!r}, not {level!r}: leave --level out, or "
                "file a new request with that level"
            )

    def _execute(self, row: RequestRow, level: Level | None) -> None:
        """Plan a request, record its rollback with the new starting model, retrain and certify."""
        if row.records and self._engines is None:
            raise NotCertifiableError(
                f"request {row.request} is about records, which need the client's data: execute it with sifu forget"
            )
        with noting_failure(self.writer, row):
            if row.records and self._engines is not None:
                self._engines.prepare_records(self.writer, row.terms)
            self._merge_groups()
            view = RunView(self.writer)
            plan = self._plans.pop((row.request, row.terms, level, self.writer.last_event()), None)
            plan = plan or plan_request(view, row.terms, level)
            method = method_for(view, plan.terms.method)
            check_level(plan, level)
            if row.status != "planned":
                content = {
                    "request": row.request,
                    "actor": actor_name(),
                    "method": plan.terms.method,
                    "source_node": plan.source_node,
                    "noise_std": plan.noise_std,
                    "level": plan.level,
                }
                self.writer.record(NewEvent("request planned", content))
            staying = staying_without(view, row.terms.clients, records=bool(row.terms.records))
            for warning in consequences(view, staying):
                log.warning("request %s: %s", row.request, warning)
            start = method.starting_model(view, plan, self.engine)
        RollBack(self.writer, self.engine, view, plan, row.request, start).record()
        self._finish(row.request)

    def hand_on(self, request: str, plan: Plan, terms: Terms, level: Level | None) -> None:
        """Use `plan` when the request is executed, unless the run changes in the meantime.

        Args:
            request: Id of the request; its reception must be the last event of the run.
            plan: Plan that was made and checked before the request was received.
            terms: Terms that the plan was made for.
            level: Lowest accepted level.
        """
        self._plans[request, terms, level, self.writer.last_event()] = plan

    def _join_again(self) -> None:
        """Let the client of a request to forget records rejoin with its remaining records, before retraining starts."""
        remainder = remainder_to_join(self.writer)
        if remainder is None:
            return
        if len(self.engine.clients) <= remainder.client and self._engines is not None:
            self.engine = self._engines.again()
        if len(self.engine.clients) <= remainder.client or self.engine.clients[remainder.client].name != remainder.name:
            raise InputError(
                f"{remainder.name} cannot rejoin: the engine does not have its remaining records. Open the run with "
                "its clients' data (sifu.open_run(folder, clients=...)), not with an engine, and forget again"
            )
        profile = self.engine.clients[remainder.client]
        digest = None if self._engines is None else self._engines.digest_of(remainder.client)
        payload = {"client": profile.name, "request": remainder.request}
        self.writer.record(NewEvent(JOINED, payload, joined=profile, joined_digest=digest))

    def _finish(self, request: str) -> None:
        """Finish a request after its rollback; record an error together with the command that continues the request."""
        with noting_failure(self.writer, row_of(self.writer, request)):
            self._join_again()
            self._retrain(request)

    def _retrain(self, request: str) -> None:
        """Retrain without the request's clients, then issue the certificate."""
        row = row_of(self.writer, request)
        try:
            self._run_rounds(f"retraining {request}")
        except RoundRejectedError as error:
            # Clients in this process would send the same reply again, so the request ends with the last good model.
            view = RunView(self.writer)
            if view.facts.identity != IN_PROCESS or view.regime.solves:
                raise
            log.warning("request %s ends before its stop rule holds: %s", request, error)
        issue_certificates(self.writer, self.engine, row)
        self.done.append(request)
        self._tell(f"request {request} is done: {row_of(self.writer, request).level}")

    def _run_rounds(self, phase: str, until_message: bool = False) -> RecordedTraining | None:
        """Run recorded rounds until the stop rule holds, and ingest messages in between.

        Returns:
            The training, or None if `until_message` is set and a message ended it.
        """
        while True:
            view = RunView(self.writer)
            training = training_of(self.engine, self.writer, view)
            if training.run(phase, self.progress, self.inbox.waiting):
                return training
            self.inbox.ingest()
            if until_message:
                return None
