"""A server that stays up: it trains, takes in what arrives between rounds, carries it out, and continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from sifu.api.run import Run
from sifu.choices import Level
from sifu.core.engine import Engine
from sifu.errors import NoClientResponseError, RunBusyError
from sifu.requests.client_list import recorded_clients
from sifu.requests.letters import LOOK_EVERY, WatchedInbox
from sifu.requests.worker import Tell, Worker
from sifu.run.run_view import RunView
from sifu.run.training import Progress, ProgressCallback, uninterrupted
from sifu.store import keys
from sifu.store.writer import RunWriter
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

    A request that arrives stops its clients from being sampled at once; it is carried out when the rounds of
    the request before it are done, or at once if there is none. When all is done, the server waits `linger` seconds for
    more. After being killed at any time, calling this again resumes; it waits up to `lock_wait` seconds for
    an earlier server that has not noticed its end yet. `after_mail` is called before the first round and whenever
    letters were taken in, or `more_mail` said that there is something else to look at.
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
    leave_out = getattr(engine, "leave_out", None)
    if leave_out is not None:
        view = RunView(writer)
        blocked = {entry.name for entry in recorded_clients(writer) if entry.status == "blocked"}
        leave_out(view.forgotten | view.waiting | {view.index_of[name] for name in blocked if name in view.index_of})
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
    take_incidents = getattr(engine, "take_incidents", None)
    incidents = take_incidents() if take_incidents else []
    if incidents:
        for incident in incidents:
            log.warning("round %d.%d %s: %s", incident.branch, incident.round, incident.client, incident.what)
        with uninterrupted():
            writer.record("incidents", {"incidents": [asdict(incident) for incident in incidents]})
