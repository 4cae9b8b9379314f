"""A server that stays up between requests, on Flower, or as a loop for any framework, or none.

A server loop for any framework, or none: your program speaks with the clients, sifu averages, forgets, certifies.

    with sifu.ServerLoop("run", spec, clients={"site-a": 120, "site-b": 80}, initial=make_model) as run:
        while task := run.next():
            run.take({name: send_and_wait(name, model) for name, model in task.models.items()})

Requests are put into the run as always (`sifu request`, `Run.request`), also while the loop runs. Everything that must
survive lives in the run folder: after a kill the same program continues, and a round that was not saved is asked for
once more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sifu.api.run import Run
from sifu.api.start_run import check_same_spec, create_run, load_spec, open_run
from sifu.choices import Level
from sifu.core.engine import Engine, LeavesOut, NotesIncidents
from sifu.core.replies import Wait
from sifu.core.spec import Spec
from sifu.engines.outside import OutsideFederation, Task
from sifu.engines.own_models import own_training
from sifu.errors import InputError, NoClientResponseError, RunBusyError
from sifu.requests.client_list import recorded_clients
from sifu.requests.letters import LOOK_EVERY, WatchedInbox
from sifu.requests.worker import Tell, Worker
from sifu.run.clients_and_engine import LOOP, preprocessing_of
from sifu.run.run_view import RunView
from sifu.run.training import Progress, ProgressCallback
from sifu.store import keys
from sifu.store.database import DATABASE
from sifu.store.projection import NewEvent
from sifu.store.reader import JOINED, RunReader
from sifu.store.writer import RunWriter
from sifu.theory.facts import BY_OPERATOR, CLAIMED, CLOSED_EARLY, ClientProfile
from sifu.verify.integrity import check_integrity

log = logging.getLogger(__name__)


def serve(
    run: Run,
    engine: Engine,
    *,
    linger: float = 0.0,
    lock_wait: float = 0.0,
    level: Level | None = None,
    progress: ProgressCallback | None = None,
    tell: Tell = log.info,
    after_mail: Callable[[RunWriter], None] | None = None,
    more_mail: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Train until the stop rule holds, carrying requests out as they arrive; returns those that were carried out.

    A request that arrives, and is approved where the spec demands it, stops its clients from being sampled at once; it
    is carried out when the rounds of the request before it are done, or at once if there is none. When all is done, the
    server waits `linger` seconds for more. After being killed at any time, calling this again resumes; it waits up to
    `lock_wait` seconds for an earlier server that has not noticed its end yet. `after_mail` is called before the first
    round and whenever letters were taken in, or `more_mail` said that there is something else to look at.
    """
    with _open_patiently(run.folder, lock_wait, tell) as writer:
        check_integrity(writer)
        keys.load_key(run.folder, writer.value("public_key"))  # a missing key is noticed before the work is done
        # Clients that were blocked or asked to be forgotten take part in no further round.
        inbox = WatchedInbox(writer, lambda opened: _settle(opened, engine, after_mail), look_every=0.0, also=more_mail)
        worker = Worker(writer, engine, _recording(writer, engine, progress), inbox, tell)
        idle_since, told = time.monotonic(), False
        try:
            inbox.take_in()
            while True:
                if worker.step(level):
                    idle_since, told = time.monotonic(), False
                elif time.monotonic() - idle_since >= linger:
                    return worker.done
                else:
                    if not told:
                        tell(f"nothing is left to do: waiting {linger:g} s for requests")
                    told = True
                    time.sleep(LOOK_EVERY)
                _record_incidents(writer, engine)  # evaluations come after the last round
        except NoClientResponseError:
            _record_incidents(writer, engine)  # why they did not
            raise


def _open_patiently(folder: Path, lock_wait: float, tell: Tell) -> RunWriter:
    """The run's writer; another one may need a moment to let go of it."""
    end, told = time.monotonic() + lock_wait, False
    while True:
        try:
            return RunWriter.open(folder)
        except RunBusyError as error:
            if time.monotonic() >= end:
                raise
            if not told:
                tell(f"waiting up to {lock_wait:g} s: {error}")
            told = True
            time.sleep(LOOK_EVERY)


def _settle(writer: RunWriter, engine: Engine, after_mail: Callable[[RunWriter], None] | None) -> None:
    """Tell an engine that speaks to other machines whom it must not speak to any more."""
    if isinstance(engine, LeavesOut):
        view = RunView(writer)
        blocked = {entry.name for entry in recorded_clients(writer) if entry.status == "blocked"}
        gone = {view.index_of[name] for name in blocked if name in view.index_of}
        engine.leave_out(view.forgotten | view.left_out | gone)
    if after_mail:
        after_mail(writer)


def _recording(writer: RunWriter, engine: Engine, progress: ProgressCallback | None) -> ProgressCallback:
    """Progress that also writes down what went wrong in a round."""

    def after_round(done: Progress) -> None:
        _record_incidents(writer, engine)
        if progress:
            progress(done)

    return after_round


def _record_incidents(writer: RunWriter, engine: Engine) -> None:
    """Record what has gone wrong in rounds since the last time, where the engine knows."""
    incidents = engine.take_incidents() if isinstance(engine, NotesIncidents) else []
    if incidents:
        for incident in incidents:
            log.warning("round %d.%d %s: %s", incident.branch, incident.round, incident.client, incident.what)
        writer.record(NewEvent("incidents", {"incidents": [asdict(incident) for incident in incidents]}))


class _Closed(KeyboardInterrupt):
    """The loop was left: as Ctrl-C does, it keeps every finished round."""


class ServerLoop:
    """A run whose rounds your program takes to the clients, by whatever road.

    `clients` are names and counts of samples; `initial` makes a fresh model: a torch module, or named numpy arrays. The
    spec says `regularity.kind = "assumed"` and the clients' rate as `local.rate`, since nothing is known of their
    training. With `evaluates` clients are also asked how models do. `linger` seconds are waited for requests when
    everything is done. A reply that cannot be used is left out and recorded, unless the spec says another
    `server.rejected`. A client that a run does not know yet joins at the next round (also `join`).

    Certificates name it as assumed that clients are who your program says, unless it has `authenticated` every one of
    them, for example by mutual TLS: your statement, which is recorded and trusted. They also name it if the spec's
    `server.wait` lets your program close a round before the slowest have answered.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: Spec | Mapping[str, Any] | str | Path,
        clients: Mapping[str, int],
        initial: Callable[..., Any],
        *,
        evaluates: bool = False,
        linger: float = 0.0,
        level: Level | None = None,
        authenticated: bool = False,
    ) -> None:
        begun = (Path(folder) / DATABASE).exists()
        known, founders, recorded = _recorded(Path(folder)) if begun else (list(clients), len(clients), None)
        given = _given_spec(spec, founders, recorded)
        self._train = partial(
            own_training,
            initial,
            given,
            identity=BY_OPERATOR if authenticated else CLAIMED,
            preprocessing=preprocessing_of(given),
            evaluates=evaluates,
        )
        self._steps = given.local.steps
        profiles = {name: ClientProfile(name, int(samples), self._steps) for name, samples in clients.items()}
        training = self._train([profiles[name] for name in known if name in profiles])
        if Wait.parse(given.server.wait).closes_early:
            facts = replace(training.facts, outside=(*training.facts.outside, CLOSED_EARLY))
            training = replace(training, facts=facts)
        self._engine = OutsideFederation(training, self._exchange)
        self._newcomers = deque(profile for name, profile in profiles.items() if name not in known)
        if not begun:
            create_run(Path(folder), given, given, self._engine).close()
        self.run = open_run(folder, engine=self._engine)
        check_same_spec(self.run, given)
        self.run.engine()  # refuses clients or a model that are not those of the run
        self._linger, self._level = linger, level
        self._tasks: SimpleQueue[Task | BaseException | None] = SimpleQueue()
        self._replies: SimpleQueue[Mapping[str, Any] | _Closed] = SimpleQueue()
        self._task: Task | None = None
        self._worker = threading.Thread(target=self._work, daemon=True)

    def next(self) -> Task | None:
        """What clients are to do now, again and again until it is answered; None when nothing is left to do."""
        if self._worker.ident is None:
            self._worker.start()
            self._await_task()
        return self._task

    def take(self, replies: Mapping[str, Any]) -> None:
        """Hand in the clients' replies to the open task, by name; a client that is missing was absent from the round.

        Returns when the replies were checked and averaged; what cannot be used is recorded, and `server.rejected` says
        whether it stops the loop with an error.
        """
        if self._task is None:
            raise InputError("no task is open: ask for one with next(), and hand in its replies")
        if not isinstance(replies, Mapping):
            raise InputError(f"replies come as a mapping from clients' names, found {type(replies).__name__}")
        self._replies.put(dict(replies))
        self._await_task()

    def join(self, name: str, samples: int) -> None:
        """Let another client take part from the next round on.

        Args:
            name: Its name, which no client of the run has had.
            samples: Its number of samples.

        Raises:
            InputError: If the run has, or had, a client of this name.
        """
        if name in {client.name for client in (*self._engine.clients, *self._newcomers)}:
            raise InputError(f"{name} is, or was, a client of this run: a client joins under a name of its own")
        self._newcomers.append(ClientProfile(name, int(samples), self._steps))

    def _admit(self, writer: RunWriter) -> None:
        """Record who joins; called in the worker's thread between two rounds."""
        while self._newcomers:
            joined = self._newcomers[0]
            training = self._train([*self._engine.clients, joined])
            self._engine.renew(replace(training, facts=self._engine.blueprint.facts))
            writer.record(NewEvent(JOINED, {"client": joined.name}, joined=joined))
            self._newcomers.popleft()

    def close(self) -> None:
        """End the loop; every finished round is saved, and the same loop continues later."""
        if self._worker.is_alive():
            self._replies.put(_Closed())
        if self._worker.ident is not None:
            self._worker.join()
        self._task = None

    def __enter__(self) -> ServerLoop:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _await_task(self) -> None:
        self._task = None
        task = self._tasks.get()
        if isinstance(task, BaseException):
            raise task
        self._task = task

    def _exchange(self, task: Task) -> Mapping[str, Any]:
        """Called by the engine, in the worker's thread."""
        self._tasks.put(task)
        replies = self._replies.get()
        if isinstance(replies, _Closed):
            raise replies
        return replies

    def _work(self) -> None:
        try:
            serve(
                self.run,
                self._engine,
                linger=self._linger,
                level=self._level,
                after_mail=self._admit,
                more_mail=lambda: bool(self._newcomers),
            )
        except BaseException as error:
            self._tasks.put(error)
        else:
            self._tasks.put(None)


def _recorded(folder: Path) -> tuple[list[str], int, Spec]:
    """Return the clients of a run that was begun, how many of them founded it, and its spec."""
    with RunReader(folder) as reader:
        names = [client.name for client in reader.clients()]
        return names, len(names) - len(reader.joined()), RunView(reader).spec


def _given_spec(spec: Spec | Mapping[str, Any] | str | Path, clients: int, recorded: Spec | None) -> Spec:
    """Return the spec as it is given; where a mapping does not say `server.rejected`, single replies are left out."""
    if isinstance(spec, str | Path):
        spec = load_spec(spec)
    elif not isinstance(spec, Spec):
        says = "rejected" in spec.get("server", {})
        spec = Spec.from_mapping(spec)
        if not says:  # a run that was begun goes on as it was
            rejected = recorded.server.rejected if recorded else "reply"
            spec = replace(spec, server=replace(spec.server, rejected=rejected))
    data = replace(spec.data, name=LOOP, clients=clients, samples_per_client=0)
    return replace(spec, data=data, model=replace(spec.model, kind="python"))
