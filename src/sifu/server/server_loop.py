"""A server loop for any framework, or none: your program speaks with the clients, sifu averages, forgets, certifies.

    with sifu.ServerLoop("run", spec, clients={"site-a": 120, "site-b": 80}, initial=make_model) as run:
        while task := run.next():
            run.take({name: send_and_wait(name, model) for name, model in task.models.items()})

Requests are put into the run as always (`sifu request`, `Run.request`), also while the loop runs. Everything that must
survive lives in the run folder: after a kill the same program continues, and a round that was not saved is asked for
once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from sifu.api.start_run import check_same_spec, create_run, open_run
from sifu.choices import Level
from sifu.core.spec import Spec
from sifu.engines.outside import OutsideFederation, Task
from sifu.engines.own_models import own_training
from sifu.errors import InputError
from sifu.run.clients_and_engine import LOOP, preprocessing_of
from sifu.run.spec_files import load_spec
from sifu.server.serve import serve
from sifu.store.database import DATABASE
from sifu.theory.facts import CLAIMED, ClientProfile


class _Closed(KeyboardInterrupt):
    """The loop was left: as Ctrl-C does, it keeps every finished round."""


class ServerLoop:
    """A run whose rounds your program takes to the clients, by whatever road.

    `clients` are names and counts of samples; `initial` makes a fresh model: a torch module, or named numpy arrays. The
    spec says `regularity.kind = "assumed"` and the clients' rate as `local.rate`, since nothing is known of their
    training. With `evaluates` clients are also asked how models do. `linger` seconds are waited for requests when
    everything is done. Clients are known by the names your program gives them, which certificates name as assumed.
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
    ) -> None:
        given = _given_spec(spec, len(clients))
        training = own_training(initial, given, identity=CLAIMED, preprocessing=preprocessing_of(given))
        profiles = [ClientProfile(name, int(samples), given.local.steps) for name, samples in clients.items()]
        self._engine = OutsideFederation(training, profiles, given.seed, self._exchange, evaluates=evaluates)
        if not (Path(folder) / DATABASE).exists():
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

    def close(self) -> None:
        """End the loop; every finished round is saved, and the same loop continues later."""
        if self._worker.is_alive():
            self._replies.put(_Closed())
        if self._worker.ident is not None:
            self._worker.join()
        self._task = None

    def __enter__(self) -> ServerLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            serve(self.run, self._engine, linger=self._linger, level=self._level)
        except BaseException as error:
            self._tasks.put(error)
        else:
            self._tasks.put(None)


def _given_spec(spec: Spec | Mapping[str, Any] | str | Path, clients: int) -> Spec:
    if isinstance(spec, str | Path):
        spec = load_spec(spec)
    elif not isinstance(spec, Spec):
        spec = Spec.from_mapping(spec)
    data = replace(spec.data, name=LOOP, clients=clients, samples_per_client=0)
    return replace(spec, data=data, model=replace(spec.model, kind="python"))
