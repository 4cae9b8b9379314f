"""A server that keeps running between requests, on Flower or as a loop for any other framework.

In the loop, your program communicates with the clients; sifu averages, forgets and certifies.

    with sifu.ServerLoop("run", spec, clients={"site-a": 120, "site-b": 80}, initial=make_model) as run:
        while task := run.next():
            run.take({name: send_and_wait(name, model) for name, model in task.models.items()})

Requests are filed as usual (`sifu request`, `Run.request`), also while the loop runs. All persistent state is in the
run folder: after an interruption the same program continues, and repeats a round that was not saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sifu.api.run import Run
from sifu.api.spec_file import load_spec
from sifu.api.start_run import check_same_spec, create_run, open_run
from sifu.checking.integrity import check_integrity
from sifu.choices import Level
from sifu.core.engine import Engine, LeavesOut, NotesIncidents
from sifu.core.operator_words import LOOP, unmasked_setting
from sifu.core.replies import Wait
from sifu.core.round import NormalSource
from sifu.core.spec import Spec
from sifu.engines.outside import Task
from sifu.engines.outside_statistics import outside_federation
from sifu.engines.own_models import own_training
from sifu.engines.plans import WireProfile
from sifu.engines.ready import blueprint
from sifu.engines.remote import Blueprint
from sifu.errors import InputError, NoClientResponseError, RunBusyError
from sifu.requests.client_list import ask_for_change, recorded_clients
from sifu.requests.messages import LOOK_EVERY, WatchedInbox
from sifu.requests.worker import Tell, Worker
from sifu.run.clients_and_engine import preprocessing_of
from sifu.run.run_view import RunView
from sifu.run.training import Progress, ProgressCallback
from sifu.store import keys
from sifu.store.database import DATABASE
from sifu.store.projection import NewEvent
from sifu.store.reader import JOINED, RunReader
from sifu.store.writer import RunWriter
from sifu.theory.facts import BY_OPERATOR, CLAIMED, CLOSED_EARLY, ClientProfile

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
    """Train until the stop rule holds, and execute requests as they arrive; return the ids of the executed requests.

    The clients of a request are no longer sampled once it has arrived and, if the spec requires it, is approved. The
    request is executed when the rounds of the previous request are done. After an interruption, a new call continues
    the run.

    It waits `lock_wait` seconds for an earlier server to end, and `linger` seconds for more requests when all work is
    done. `after_mail` is called before the first round, and after messages were ingested or `more_mail` returned true.
    """
    with _open_patiently(run, lock_wait, tell) as writer:
        check_integrity(writer)
        keys.load_key(run.folder, writer.value("public_key"))  # fail before any work if the key is missing
        # Blocked clients and clients to be forgotten take part in no further round.
        inbox = WatchedInbox(writer, lambda opened: _settle(opened, engine, after_mail), look_every=0.0, also=more_mail)
        worker = Worker(writer, engine, _recording(writer, engine, progress), inbox, tell)
        idle_since, told = time.monotonic(), False
        try:
            inbox.ingest()
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
                _record_incidents(writer, engine)  # record incidents of evaluations after the last round
        except NoClientResponseError:
            _record_incidents(writer, engine)  # record the incidents that caused the failure
            raise


def _open_patiently(run: Run, lock_wait: float, tell: Tell) -> RunWriter:
    """Open the run for writing; wait up to `lock_wait` seconds for another writer."""
    end, told = time.monotonic() + lock_wait, False
    while True:
        try:
            return run.writer()
        except RunBusyError as error:
            if time.monotonic() >= end:
                raise
            if not told:
                tell(f"waiting up to {lock_wait:g} s: {error}")
            told = True
            time.sleep(LOOK_EVERY)


def _settle(writer: RunWriter, engine: Engine, after_mail: Callable[[RunWriter], None] | None) -> None:
    """Call `after_mail`, and tell an engine with remote clients which of them it must no longer contact."""
    if after_mail:
        after_mail(writer)
    if isinstance(engine, LeavesOut):
        view = RunView(writer)
        blocked = {entry.name for entry in recorded_clients(writer) if entry.status == "blocked"}
        gone = {view.index_of[name] for name in blocked if name in view.index_of}
        engine.leave_out(view.forgotten | view.left_out | gone)


def _recording(writer: RunWriter, engine: Engine, progress: ProgressCallback | None) -> ProgressCallback:
    """Return a progress callback that also records the incidents of each round."""

    def after_round(done: Progress) -> None:
        _record_incidents(writer, engine)
        if progress:
            progress(done)

    return after_round


def _record_incidents(writer: RunWriter, engine: Engine) -> None:
    """Record the incidents since the last call, if the engine collects them."""
    incidents = engine.take_incidents() if isinstance(engine, NotesIncidents) else []
    if incidents:
        for incident in incidents:
            log.warning("round %d.%d %s: %s", incident.branch, incident.round, incident.client, incident.what)
        writer.record(NewEvent("incidents", {"incidents": [asdict(incident) for incident in incidents]}))


class _Closed(KeyboardInterrupt):
    """Signal that the loop was closed; as with Ctrl-C, every finished round is saved."""


class ServerLoop:
    """A run whose rounds your program sends to the clients, by any transport.

    The spec sets `regularity.kind = "assumed"` and the clients' rate as `local.rate`, because nothing is known of their
    training. If the spec is a mapping without `server.rejected`, an unusable reply is ignored and recorded. A client
    that is new to the run joins at the next round (see also `join`). If `server.wait` lets your program close a round
    before the slowest clients have answered, certificates list this as an assumption. A closed-form head
    (`model.kind = "ridge"`) needs `model.outputs` in the spec, and a `sifu.LoopClient` on each client.

    Args:
        folder: The run folder.
        spec: A Spec, a mapping, or the path of a TOML file.
        clients: Number of samples of each client, by name.
        initial: Function that makes a fresh model: a torch module, or named numpy arrays.
        sample_shape: Shape of a sample, instead of `initial`, for a closed-form head.
        masked_statistics: True if the server learns only the sum of the clients' statistics.
        evaluates: True if clients also evaluate models.
        linger: Number of seconds to wait for requests when all work is done.
        level: Lowest level at which requests are executed.
        authenticated: True if your program authenticates all clients, for example by mutual TLS. The statement is
            recorded and trusted; without it, certificates list the identity of the clients as an assumption.
        noise: Source of noise as in `sifu.train`.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: Spec | Mapping[str, Any] | str | Path,
        clients: Mapping[str, int],
        initial: Callable[..., Any] | None = None,
        *,
        sample_shape: Sequence[int] = (),
        masked_statistics: bool = True,
        evaluates: bool = False,
        linger: float = 0.0,
        level: Level | None = None,
        authenticated: bool = False,
        noise: NormalSource | None = None,
    ) -> None:
        begun = (Path(folder) / DATABASE).exists()
        known, founders, recorded = _recorded(Path(folder)) if begun else (list(clients), len(clients), None)
        given = _given_spec(spec, founders, recorded)
        self._train = partial(
            _training,
            given,
            initial,
            tuple(sample_shape),
            evaluates=evaluates,
            identity=BY_OPERATOR if authenticated else CLAIMED,
            preprocessing=preprocessing_of(given),
        )
        self._steps = given.local.steps
        profiles = {name: ClientProfile(name, int(samples), self._steps) for name, samples in clients.items()}
        training, resolved = self._train([profiles[name] for name in known if name in profiles])
        if Wait.parse(given.server.wait).closes_early:
            facts = replace(training.facts, outside=(*training.facts.outside, CLOSED_EARLY))
            training = replace(training, facts=facts)
        if training.head is not None and masked_statistics:
            check_keeps_sum(resolved)
        self._engine = outside_federation(training, self._exchange, masked_statistics=masked_statistics)
        self._newcomers = deque(profile for name, profile in profiles.items() if name not in known)
        if not begun:
            create_run(Path(folder), given, resolved, self._engine, noise=noise).close()
        self.run = open_run(folder, engine=self._engine, noise=noise)
        check_same_spec(self.run, given)
        self.run.engine()  # fail if the clients or the model differ from the run's
        self._linger, self._level = linger, level
        self._tasks: SimpleQueue[Task | BaseException | None] = SimpleQueue()
        self._replies: SimpleQueue[Mapping[str, Any] | _Closed] = SimpleQueue()
        self._task: Task | None = None
        self._worker = threading.Thread(target=self._work, daemon=True)

    def next(self) -> Task | None:
        """Return the current task of the clients until it is answered, or None when all work is done."""
        if self._worker.ident is None:
            self._worker.start()
            self._await_task()
        return self._task

    def take(self, replies: Mapping[str, Any]) -> None:
        """Submit the clients' replies to the current task; a missing client counts as absent from the round.

        Returns after the replies were checked and averaged. Unusable replies are recorded, and `server.rejected`
        decides whether they stop the loop with an error.

        Args:
            replies: Replies by client name.

        Raises:
            InputError: If no task is open, or `replies` is not a mapping.
        """
        if self._task is None:
            raise InputError("no task is open: get one with next() before you submit replies")
        if not isinstance(replies, Mapping):
            raise InputError(f"replies must be a mapping from client names, found {type(replies).__name__}")
        self._replies.put(dict(replies))
        self._await_task()

    def join(self, name: str, samples: int) -> None:
        """Let another client take part from the next round on.

        Args:
            name: Name of the client, which no client of the run has had before.
            samples: Number of samples of the client.

        Raises:
            InputError: If the run has, or had, a client of this name.
        """
        if name in {client.name for client in (*self._engine.clients, *self._newcomers)}:
            raise InputError(f"{name} is or was a client of this run: choose a new name")
        self._newcomers.append(ClientProfile(name, int(samples), self._steps))

    def leave(self, name: str) -> None:
        """Exclude a client from all tasks after the current one.

        Its contribution stays in the model until a request forgets it. The run records the departure, as `sifu clients
        block` does, so the client stays excluded after a restart.

        Args:
            name: Name of the client.

        Raises:
            InputError: If the run has no client of this name.
        """
        if name not in {client.name for client in self._engine.clients}:
            raise InputError(f"there is no client {name!r} in this run: name one that takes part")
        ask_for_change(self.run.folder, {"do": "block", "name": name})

    def _admit(self, writer: RunWriter) -> None:
        """Record new clients. The worker's thread calls this between two rounds."""
        while self._newcomers:
            training, _ = self._train([*self._engine.clients, self._newcomers[0]])
            self._engine.renew(replace(training, facts=self._engine.blueprint.facts))
            joined = training.clients[-1]
            writer.record(NewEvent(JOINED, {"client": joined.name}, joined=joined))
            self._newcomers.popleft()

    def close(self) -> None:
        """End the loop; every finished round is saved, and a new loop continues the run."""
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
        """Pass a task to the program and return its replies. The engine calls this in the worker's thread."""
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
    """Return the clients of an existing run, the number of its founders, and its spec."""
    with RunReader(folder) as reader:
        names = [client.name for client in reader.clients()]
        return names, len(names) - len(reader.joined()), RunView(reader).spec


def _given_spec(spec: Spec | Mapping[str, Any] | str | Path, clients: int, recorded: Spec | None) -> Spec:
    """Return the given spec; a mapping without `server.rejected` gets the recorded value, or "reply" in a new run."""
    if isinstance(spec, str | Path):
        spec = load_spec(spec)
    elif not isinstance(spec, Spec):
        says = "rejected" in spec.get("server", {})
        spec = Spec.from_mapping(spec)
        if not says:  # not given: keep the recorded setting
            rejected = recorded.server.rejected if recorded else "reply"
            spec = replace(spec, server=replace(spec.server, rejected=rejected))
    data = replace(spec.data, name=LOOP, clients=clients, samples_per_client=0)
    return replace(spec, data=data, model=spec.model if spec.regime.solves else replace(spec.model, kind="python"))


def _training(
    spec: Spec,
    initial: Callable[..., Any] | None,
    sample_shape: tuple[int, ...],
    clients: Sequence[ClientProfile],
    *,
    evaluates: bool,
    identity: str,
    preprocessing: str,
) -> tuple[Blueprint, Spec]:
    """Return the blueprint of the clients' training, and the spec with automatic values resolved."""
    if not spec.regime.solves:
        if initial is None or sample_shape:
            raise InputError(
                "for a model trained in rounds, pass initial (a function that makes it) and no sample_shape"
            )
        own = own_training(initial, spec, clients, identity=identity, preprocessing=preprocessing, evaluates=evaluates)
        return own, spec
    outputs = spec.model.outputs
    if initial is not None or not sample_shape or not outputs:
        raise InputError(
            f"for a closed-form head, set model.outputs (found {outputs}) and pass sample_shape, the shape of a sample "
            f"(found {sample_shape}), and no initial model"
        )
    profiles = [WireProfile(client.name, client.samples, 1, 1.0, sample_shape, outputs) for client in clients]
    head, resolved = blueprint(spec, profiles, identity=identity, preprocessing=preprocessing)
    return replace(head, evaluates=evaluates), resolved


def check_keeps_sum(spec: Spec) -> None:
    """Refuse to keep each client's statistics on a server that sees only their masked sum."""
    if spec.keep.statistics == "clients":
        raise InputError(
            'keep.statistics = "clients" needs the statistics of each client, which a server with masked statistics '
            f'never sees: write "sum", or set {unmasked_setting(spec.data.name)}'
        )
