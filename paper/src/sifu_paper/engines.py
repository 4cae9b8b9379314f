"""Sources of engines: one after the other on a CPU, many at once as lanes of one program on a GPU.

A task has a `spec`; `work(task, engine)` executes it. The failure of one task is recorded and the others continue. An
interrupt stops all of them at their next round, and every finished round is kept.
"""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from sifu import InputError, Spec
from sifu.core.engine import Engine
from sifu.engines.sim import LocalTraining, SimulatedFederation
from sifu.engines.sim.lanes import lane_engines
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec, known_outputs, preprocessing_of
from sifu.run.devices import check_choice, on_device, why_no_gpu


class Named(Protocol):
    """Object with a name that can fail."""

    @property
    def name(self) -> str: ...


class Task(Named, Protocol):
    """Object that needs an engine."""

    @property
    def spec(self) -> Spec: ...


AnyTask = TypeVar("AnyTask", bound=Task)
AnyNamed = TypeVar("AnyNamed", bound=Named)
DEFAULT_LANES = 48
MOST_KEPT = 12
"""Largest number of federations whose data stay in memory."""


@dataclass(frozen=True)
class Failure(Generic[AnyNamed]):
    """Unfinished task, and the reason."""

    task: AnyNamed
    error: str
    trace: str

    @staticmethod
    def of(task: AnyNamed, error: BaseException) -> Failure[AnyNamed]:
        """Return the failure of a task for the exception that ended it."""
        return Failure(task, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


class StoppedError(Exception):
    """Interrupt raised in a task's thread at its next round."""


class ClientCache:
    """Cache of the clients' data of specs."""

    def __init__(self, data_folder: Path | None) -> None:
        self._folder = data_folder
        self._kept: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def clients(self, spec: Spec, *, fresh_marks: bool = False) -> Any:
        """Return the clients of a spec."""
        key = (spec.seed, spec.data, spec.model.kind, spec.model.dtype, spec.features, fresh_marks)
        with self._lock:
            if key not in self._kept:
                if len(self._kept) >= MOST_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = clients_from_spec(spec, self._folder, fresh_marks=fresh_marks)
            return self._kept[key]


class EngineSource(Protocol):
    """Source that decides which engine a task gets, and which tasks run concurrently."""

    stop: threading.Event
    at_once: int
    """Largest number of concurrent tasks."""

    def run(self, tasks: Sequence[AnyTask], work: Callable[[AnyTask, Engine], None]) -> list[Failure[AnyTask]]:
        """Run all tasks; return those that failed."""
        ...


class OneByOne:
    """Source of engines in this process, for one task after the other; tasks of the same federation share an engine.

    A `device` other than the CPU is only used for the features of closed-form heads.
    """

    def __init__(self, cache: ClientCache, device: str = "cpu") -> None:
        self._cache, self._device, self.at_once = cache, device, 1
        self._last: tuple[Any, Engine] | None = None
        self.stop = threading.Event()

    def run(self, tasks: Sequence[AnyTask], work: Callable[[AnyTask, Engine], None]) -> list[Failure[AnyTask]]:
        """Run the tasks one after the other, in this thread."""
        failures = []
        for task in tasks:
            try:
                work(task, self._engine(task.spec))
            except Exception as error:
                failures.append(Failure.of(task, error))
        return failures

    def _engine(self, spec: Spec) -> Engine:
        key = (spec.seed, *same_program(spec))
        if self._last is None or self._last[0] != key:
            self._last = None
            clients = self._cache.clients(spec)
            engine = engine_from_spec(spec, clients)[0]
            self._last = (key, on_device(engine, clients, spec, self._device, "float32"))
        return self._last[1]


class OnFlower:
    """Source of engines on Flower's simulation: virtual nodes on this machine, one task after the other."""

    def __init__(self, cache: ClientCache) -> None:
        self._cache, self.at_once = cache, 1
        self.stop = threading.Event()

    def run(self, tasks: Sequence[AnyTask], work: Callable[[AnyTask, Engine], None]) -> list[Failure[AnyTask]]:
        """Run all tasks in one simulation, with as many nodes as the largest federation has clients."""
        from sifu_paper.flower_simulation import enter_federation, simulate

        failures: list[Failure[AnyTask]] = []
        with_data: list[tuple[AnyTask, Any]] = []
        for task in tasks:
            try:
                with_data.append((task, self._cache.clients(task.spec)))
            except Exception as error:
                failures.append(Failure.of(task, error))
        if not with_data:
            return failures

        def serve(grid: Any) -> None:
            last: tuple[Any, Engine] | None = None
            for task, data in with_data:
                try:
                    key = (task.spec.seed, *same_program(task.spec))
                    if last is None or last[0] != key:
                        spec = replace(task.spec, model=replace(task.spec.model, outputs=known_outputs(task.spec)))
                        last = (key, enter_federation(grid, Path(folder), spec, data, preprocessing_of(spec)))
                    work(task, last[1])
                except StoppedError:
                    return
                except Exception as error:
                    failures.append(Failure.of(task, error))

        with tempfile.TemporaryDirectory(prefix="sifu-flower-") as folder:
            try:
                simulate(Path(folder), max(len(data) for _, data in with_data), serve)
            except KeyboardInterrupt:
                self.stop.set()
                raise
        return failures


class Lanes:
    """Source of engines that run as lanes of one batched program, with a thread per task (`sifu.engines.sim.lanes`)."""

    def __init__(self, cache: ClientCache, device: str, lanes: int, precision: str = "float32") -> None:
        self._cache, self._device, self.at_once, self._precision = cache, device, lanes, precision
        self._one_by_one = OneByOne(cache, device)
        self.stop = self._one_by_one.stop

    def run(self, tasks: Sequence[AnyTask], work: Callable[[AnyTask, Engine], None]) -> list[Failure[AnyTask]]:
        """Run tasks of the same program together, `lanes` at once; heads in closed form run separately.

        When a task is done, the next one in the given order begins, so that after an interrupt the first tasks are
        complete.
        """
        groups: dict[Any, list[AnyTask]] = {}
        heads = [task for task in tasks if task.spec.regime.solves]
        failures = self._one_by_one.run(heads, work)
        for task in tasks:
            if not task.spec.regime.solves:
                groups.setdefault(same_program(task.spec), []).append(task)
        for group in groups.values():
            failures += self._run_group(group, work)
        return failures

    def _run_group(self, group: Sequence[AnyTask], work: Callable[[AnyTask, Engine], None]) -> list[Failure[AnyTask]]:
        # Lanes of one seed differ in their requests, not in their participants, so they share a federation.
        federations: dict[int, SimulatedFederation] = {}
        programs: dict[LocalTraining, list[AnyTask]] = {}
        failures: list[Failure[AnyTask]] = []
        for task in group:
            try:
                if task.spec.seed not in federations:
                    engine = engine_from_spec(task.spec, self._cache.clients(task.spec))[0]
                    federations[task.spec.seed] = cast("SimulatedFederation", engine)
                # Automatic local rates may differ between seeds, which then need separate programs.
                programs.setdefault(federations[task.spec.seed].training, []).append(task)
            except Exception as error:
                failures.append(Failure.of(task, error))
        for tasks in programs.values():
            try:
                engines = lane_engines(
                    [federations[task.spec.seed] for task in tasks],
                    [self._cache.clients(task.spec) for task in tasks],
                    self._device,
                    self._precision,
                )
            except Exception as error:
                failures += [Failure.of(task, error) for task in tasks]
                continue
            failures += in_threads(list(zip(tasks, engines, strict=True)), work, self.stop, self.at_once)
        return failures


def in_threads(
    pairs: Sequence[tuple[AnyTask, Engine]],
    work: Callable[[AnyTask, Engine], None],
    stop: threading.Event,
    at_once: int = DEFAULT_LANES,
) -> list[Failure[AnyTask]]:
    """Run tasks in `at_once` threads; close an engine as soon as its task is done, so that nothing waits for it.

    Once `stop` is set, no further task begins.
    """
    failures: list[Failure[AnyTask]] = []
    waiting = iter(pairs)
    one_at_a_time = threading.Lock()

    def execute(task: AnyTask, engine: Engine) -> None:
        try:
            if not stop.is_set():
                work(task, engine)
        except StoppedError:
            pass
        except BaseException as error:
            failures.append(Failure.of(task, error))
        finally:
            close = getattr(engine, "close", None)
            if close is not None:
                close()

    def take_in_turn() -> None:
        while True:
            with one_at_a_time:
                pair = next(waiting, None)
            if pair is None:
                return
            execute(*pair)

    threads = [threading.Thread(target=take_in_turn, daemon=True) for _ in range(min(at_once, len(pairs)))]
    for thread in threads:
        thread.start()
    try:
        _join(threads)
    except KeyboardInterrupt:
        stop.set()
        _join(threads)
        raise
    return failures


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # a join without a timeout would delay Ctrl-C


def same_program(spec: Spec) -> tuple[Any, ...]:
    """Return the settings two runs must share to be lanes of one program; seeds, budgets and stop rules may differ."""
    extras = spec.round_extras
    clipped = extras.update_clip, extras.update_noise
    return (spec.data, spec.model, spec.features, spec.local, spec.server, clipped)


def engine_source(
    device: str, lanes: int | None, cache: ClientCache, precision: str = "float32", engine: str = "embedded"
) -> tuple[EngineSource, str]:
    """Return the source for `auto`, `cpu` or `cuda`, and its device; `precision` applies to networks on a GPU.

    `engine` is `embedded`, or `flower` for Flower's simulation.
    """
    check_choice(device, precision)
    if engine not in ("embedded", "flower"):
        raise InputError(f"the engine is embedded or flower, found {engine!r}")
    if engine == "flower":
        if device == "cuda":
            raise InputError("Flower's simulation computes on the CPU: leave out --device")
        if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
            raise InputError(
                '--engine flower needs Flower and its simulation: pip install -e ".[flower]" -e "paper[simulation]"'
            )
        return OnFlower(cache), "cpu"
    if lanes is not None and lanes < 1:
        raise InputError(f"--lanes must be at least 1, found {lanes}")
    if device != "cpu":
        missing = why_no_gpu()
        if device == "cuda" and missing is not None:
            raise InputError(f"--device cuda cannot be used here: {missing}")
        if missing is None:
            return Lanes(cache, "cuda", lanes or DEFAULT_LANES, precision), "cuda"
    return OneByOne(cache), "cpu"
