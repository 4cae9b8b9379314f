"""Runner of an experiment: trainings, then trajectories, data set by data set; it can be resumed at any point.

The table shows what is done. The runner does the rest; an unfinished task continues from its run folder.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sifu import InputError, RoundRejectedError, Spec, open_run
from sifu.core.engine import Engine
from sifu.core.method_info import all_method_infos
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.training import Progress
from sifu_paper.baselines import register_all
from sifu_paper.distance_measurements import DistanceTask, distance_tasks, measure_task
from sifu_paper.engines import ClientCache, EngineSource, Failure, StoppedError, engine_source
from sifu_paper.group_measurements import GroupMeasurement, last_place
from sifu_paper.group_trials import GroupTrial, TrialClients, trials_of
from sifu_paper.held_out import HeldOut
from sifu_paper.metric_runs import MetricRuns
from sifu_paper.options import Options, narrowed
from sifu_paper.provenance import provenance, read_record, record
from sifu_paper.requests import choose_requests
from sifu_paper.room import check_room, room_of
from sifu_paper.settings import Experiment, load_experiment, shared_settings
from sifu_paper.table import COLUMNS_OF, REQUEST_COLUMNS, Table
from sifu_paper.trajectory import MarkCheck, TrajectoryRun, train_run, training_place, training_row
from sifu_paper.work import Training, Trajectory, Work, plan_work

register_all()  # a spawned process of a checkout that is not installed has no entry points

TABLE = "results.csv"
RUNS = "runs"
FAILURES = "failures.txt"


@dataclass(frozen=True)
class Update:
    """Content of a progress display: the numbers of done and of all tasks, and the activity of one of them."""

    done: int
    total: int
    task: str
    text: str
    finished: bool = False


@dataclass
class Result:
    """Result of a run of an experiment."""

    experiment: Experiment
    table: Table
    notes: list[str]
    failures: list[Failure[Any]] = field(default_factory=list)


class Bench:
    """One experiment in one folder."""

    def __init__(
        self,
        options: Options,
        report: Callable[[Update], None] | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare a run; `report` receives progress, `announce` receives the sentence on disk space."""
        self.options = options
        self.announce = announce or (lambda sentence: None)
        self.experiment = narrowed(load_experiment(options.name, options.scale), options.where)
        self.report = report or (lambda update: None)
        groups = self.experiment.kind == "groups"
        self.cache = TrialClients(options.data) if groups else ClientCache(options.data)
        self.held_out = HeldOut(options.data)
        self._marks: dict[Any, MarkCheck] = {}
        self._chosen: dict[Any, list[list[str]]] = {}
        self._model_bytes: dict[Any, int] = {}
        self._users: dict[Training, set[str]] = {}
        self._lock = threading.Lock()
        self._done, self._total = 0, 0

    def run(self) -> Result:
        """Do the missing work; return the table, what was left out, and the failures."""
        source = self._source[0]
        work = self.work() if self.experiment.kind == "requests" else Work((), ())
        result = self.open()
        if self.experiment.kind == "distance":
            self._run_distances(source, result)
        elif self.experiment.kind == "groups":
            self._run_groups(source, result)
        elif self.experiment.kind == "metrics":
            self._run_metrics(result)
        else:
            self._run_requests(work, source, result)
        self.write_failures(result)
        return result

    def open(self) -> Result:
        """Open the current table, in a folder that records its provenance."""
        options = self.options
        self.datasets, self.presets  # noqa: B018, a wrong name is refused before anything is written
        options.out.mkdir(parents=True, exist_ok=True)
        settings = {"experiment": options.name, "scale": options.scale, "max_rounds": options.max_rounds}
        record(options.out, settings, provenance(self.device, options.command))
        columns = COLUMNS_OF.get(self.experiment.kind, REQUEST_COLUMNS)
        return Result(self.experiment, Table(options.out / TABLE, columns), [])

    @property
    def device(self) -> str:
        """Device that computes: cpu or cuda."""
        return self._source[1]

    @cached_property
    def _source(self) -> tuple[EngineSource, str]:
        options = self.options
        return engine_source(options.device, options.lanes, self.cache, options.precision, options.engine)

    # -- selection -----------------------------------------------------------------------------------------------------

    @property
    def datasets(self) -> tuple[str, ...]:
        """Data sets to run."""
        for name in self.options.datasets:
            shared_settings().dataset(name)
        return self.options.datasets or self.experiment.datasets

    @property
    def presets(self) -> tuple[str, ...]:
        """Presets to run."""
        for name in self.options.presets:
            shared_settings().preset(name)
        return self.options.presets or self.experiment.presets

    @property
    def over(self) -> dict[str, Any]:
        """Overrides of every spec from the command line."""
        most = self.options.max_rounds
        return {} if most is None else {"stop": {"max_rounds": most}}

    def work(self) -> Work:
        """Return every trajectory of the experiment for these options."""
        methods = self.options.methods or self.experiment.methods
        known = [info.name for info in all_method_infos()]
        strange = [name for name in methods if name not in known]
        if strange:
            raise InputError(f"method {strange[0]!r} is not known: write some of {', '.join(known)}")
        return plan_work(
            self.experiment,
            datasets=self.datasets,
            seeds=self.options.seeds,
            methods=methods,
            presets=self.presets,
            scale=self.options.scale,
            over=self.over,
        )

    # -- requests ----------------------------------------------------------------------------------------

    def _run_requests(self, work: Work, source: EngineSource, result: Result) -> None:
        result.notes += work.notes
        table, experiment = result.table, self.experiment.name
        self._sweep(work, table)
        missing = [trajectory for trajectory in work.trajectories if not self._is_settled(trajectory, table)]
        self.check_room(table)
        self._total = sum(trajectory.requests.count for trajectory in work.trajectories)
        self._done = self._total - sum(trajectory.requests.count for trajectory in missing)
        for trajectory in missing:
            self._users.setdefault(trajectory.training, set()).add(trajectory.name)
        for dataset in self.datasets:
            trajectories = [trajectory for trajectory in missing if trajectory.training.dataset == dataset]
            trainings = tuple(dict.fromkeys(trajectory.training for trajectory in trajectories))
            failed = source.run(trainings, lambda task, engine: self._train(task, engine, source, table))
            result.failures += failed
            lost = {trajectory.task for trajectory in failed}
            ready = [trajectory for trajectory in trajectories if trajectory.training not in lost]
            for trajectory in [trajectory for trajectory in ready if self._is_settled(trajectory, table)]:
                ready.remove(trajectory)
                self._finished_with(trajectory)
            ready.sort(
                key=lambda trajectory: (trajectory.training.seed, trajectory.training.name)
            )  # tasks of one federation share an engine
            result.failures += source.run(ready, lambda task, engine: self._execute(task, engine, source, table))
        missed = [training for training in work.trainings if self._missed_target(training, table)]
        if missed:
            result.notes.append(
                f"{len(missed)} of {len(work.trainings)} trainings ended at their limit of rounds below the target: "
                f"{experiment} carries out no requests on them"
            )

    # -- run folders -------------------------------------------------------------------------------------

    def model_bytes(self, spec: Spec) -> int:
        """Return the bytes of one model of a federation of this shape; 0 if it cannot be made, which its task reports
        later.

        For a closed-form head, return a client's share of the sum and its kept statistics: rows of four bytes per
        number, or half of a Gram matrix if that is smaller.
        """
        key = (spec.data.name, spec.model, spec.features)
        if key not in self._model_bytes:
            try:
                engine = engine_from_spec(spec, self.cache.clients(spec))[0]
            except InputError:
                return 0
            layout = engine.layout
            size = layout.size * np.dtype(layout.dtype).itemsize
            if spec.regime.solves:
                inputs, outputs = layout.size // layout.shapes[-1][-1], layout.shapes[-1][-1]
                triangle = size + 4 * inputs * (inputs + 1)
                rows = 4 * (inputs + outputs) * max(client.samples for client in engine.clients)
                size = -(-triangle // len(engine.clients)) + min(rows, triangle)
            self._model_bytes[key] = size
        return self._model_bytes[key]

    def check_room(self, table: Table, shares: Sequence[Sequence[int]] = (), jobs: int = 1, runs: str = RUNS) -> None:
        """Announce the disk space of the run folders below `runs`; refuse to start with less.

        `shares` are the seeds of each process, if several processes share a data set.
        """
        missing = [task for task in self.work().trajectories if not self._is_settled(task, table)]
        share_of = {seed: number for number, seeds in enumerate(shares) for seed in seeds}
        parts: dict[Any, list[Trajectory]] = {}
        for task in missing:
            parts.setdefault((task.training.dataset, share_of.get(task.training.seed)), []).append(task)
        room = room_of(parts.values(), jobs, self._source[0].at_once, self.model_bytes)
        self.announce(check_room(room, self.options.out, self.options.out / runs))

    def _sweep(self, work: Work, table: Table) -> None:
        """Remove folders that an interrupted session had finished but not removed."""
        if self.options.keep_runs or self._were_kept():
            return
        for training in work.trainings:
            users = [trajectory for trajectory in work.trajectories if trajectory.training == training]
            settled = [trajectory for trajectory in users if self._is_settled(trajectory, table)]
            done: list[Training | Trajectory] = [*settled, *([training] if len(settled) == len(users) else [])]
            for task in done:
                shutil.rmtree(self._folder(task), ignore_errors=True)

    def _finished_with(self, trajectory: Trajectory) -> None:
        """Delete the run folder of a trajectory whose rows are all on disk, and with the last one its training's."""
        with self._lock:
            users = self._users[trajectory.training]
            users.discard(trajectory.name)
        if not self.options.keep_runs:
            shutil.rmtree(self._folder(trajectory), ignore_errors=True)
            if not users:
                shutil.rmtree(self._folder(trajectory.training), ignore_errors=True)

    def _were_kept(self) -> bool:
        """Return whether an earlier session was asked to keep its run folders."""
        return any("--keep-runs" in session["command"] for session in read_record(self.options.out)["sessions"])

    def _is_settled(self, trajectory: Trajectory, table: Table) -> bool:
        """Return whether nothing is left to do: all rows exist, or the training missed the target
        that requests need.
        """
        return self._is_done(trajectory, table) or self._missed_target(trajectory.training, table)

    def _missed_target(self, training: Training, table: Table) -> bool:
        """Return whether the experiment skips requests on this training, because it ended below its target."""
        if not self.experiment.only_reached:
            return False
        place = training_place(training, self.experiment.name)
        return any(row["reached"] is False and all(row[key] == place[key] for key in place) for row in table.rows)

    def _is_done(self, trajectory: Trajectory, table: Table) -> bool:
        return all(
            table.has(trajectory.place(self.experiment.name, k)) for k in range(1, trajectory.requests.count + 1)
        )

    def _folder(self, task: Training | Trajectory) -> Path:
        folder = self.options.out / RUNS
        folder.mkdir(exist_ok=True)
        return folder / task.name

    def _train(self, task: Training, engine: Engine, source: EngineSource, table: Table) -> None:
        started = time.monotonic()
        progress = self._progress_of(task.name, source)
        try:
            run = train_run(task, self._folder(task), engine, progress, self.options.data)
        except RoundRejectedError:
            # A diverging training is a result: requests continue from its last good state, and have rows as well.
            run = open_run(self._folder(task), engine=engine)
        seconds = time.monotonic() - started
        table.add(training_row(task, run, self.experiment.name, seconds, self.held_out, self.device))

    def _execute(self, task: Trajectory, engine: Engine, source: EngineSource, table: Table) -> None:
        requests = self._requests_of(task)
        folder = self._folder(task)
        marks = self._fresh_marks(task.spec) if task.spec.data.watermark else None
        before = sum(table.has(task.place(self.experiment.name, k)) for k in range(1, len(requests) + 1))
        progress = self._progress_of(task.name, source)
        TrajectoryRun(
            task,
            folder,
            self._folder(task.training),
            engine,
            table,
            self.experiment.name,
            progress,
            self.held_out,
            marks,
            self.device,
        ).execute(requests)
        with self._lock:
            self._done += len(requests) - before
            update = Update(
                self._done, self._total, task.name, self._summary(task, table, len(requests)), finished=True
            )
        self.report(update)
        self._finished_with(task)

    def _requests_of(self, task: Trajectory) -> list[list[str]]:
        """Return the clients of each request; the clients' data are read once for all methods."""
        key = (task.spec.seed, task.spec.data, task.requests, task.request_set)
        with self._lock:
            if key not in self._chosen:
                clients = self.cache.clients(task.spec)
                self._chosen[key] = choose_requests(clients, task.spec, task.requests, task.request_set)
            return self._chosen[key]

    def _summary(self, task: Trajectory, table: Table, requests: int) -> str:
        wanted = task.place(self.experiment.name, 0)
        rows = [row for row in table.rows if all(row[key] == wanted[key] for key in wanted if key != "request")]
        rounds = [row["rounds"] + (row["extra_rounds"] or 0) for row in rows]
        missed = sum(not row["reached"] for row in rows)
        text = f"{' + '.join(map(str, rounds))} rounds"
        return text + (f", {missed} of {requests} below the target" if missed else "")

    def _progress_of(self, name: str, source: EngineSource) -> Callable[[Progress], None]:
        def show(update: Progress) -> None:
            if source.stop.is_set():
                raise StoppedError
            text = f"{update.phase}, round {update.rounds}"
            if not np.isnan(update.accuracy):
                text += f", {100 * update.accuracy:.1f} %"
            self.report(Update(self._done, self._total, name, text))

        return show

    def _fresh_marks(self, spec: Spec) -> MarkCheck:
        """Return a function for the accuracy with fresh marks instead of the clients' own, on a separate engine."""
        key = (spec.seed, spec.data, spec.model)
        with self._lock:
            if key not in self._marks:
                engine, _ = engine_from_spec(spec, self.cache.clients(spec, fresh_marks=True))
                one_at_a_time = threading.Lock()

                def check(model: np.ndarray, clients: np.ndarray) -> float:
                    with one_at_a_time:
                        return engine.evaluate(model, clients).accuracy

                self._marks[key] = check
            return self._marks[key]

    # -- distances ---------------------------------------------------------------------------------------

    def _run_distances(self, source: EngineSource, result: Result) -> None:
        experiment, options = self.experiment, self.options
        tasks, notes = distance_tasks(experiment, self.datasets, options.seeds, options.scale)
        result.notes += notes
        missing = [task for task in tasks if not result.table.has(task.last_place(experiment))]
        self._done, self._total = len(tasks) - len(missing), len(tasks)
        result.failures += source.run(missing, lambda task, engine: self._measure(task, engine, result.table))

    def _measure(self, task: DistanceTask, engine: Engine, table: Table) -> None:
        text = measure_task(task, engine, self.experiment, table.add)
        with self._lock:
            self._done += 1
            update = Update(self._done, self._total, task.name, text, finished=True)
        self.report(update)

    # -- groups ------------------------------------------------------------------------------------------

    def _run_groups(self, source: EngineSource, result: Result) -> None:
        tasks = trials_of(self.experiment, self.datasets, self.options.seeds, self.options.scale)
        self._total = sum(map(len, tasks))
        for trials in tasks:  # in the order of the file: the most important first
            name = self.experiment.name
            missing = [trial for trial in trials if not result.table.has(last_place(trial, name))]
            self._done += len(trials) - len(missing)
            result.failures += source.run(missing, lambda trial, engine: self._try_groups(trial, engine, result.table))

    def _try_groups(self, trial: GroupTrial, engine: Engine, table: Table) -> None:
        GroupMeasurement(trial, engine, self.experiment.name, table.add).run()
        with self._lock:
            self._done += 1
            update = Update(self._done, self._total, trial.name, "measured", finished=True)
        self.report(update)

    # -- metrics -----------------------------------------------------------------------------------------

    def _run_metrics(self, result: Result) -> None:
        options, seeds = self.options, self.options.seeds
        self._total = len(seeds) * len(self.datasets)
        for dataset in self.datasets:
            runs = MetricRuns(
                self.experiment,
                dataset,
                options.scale,
                options.methods or self.experiment.methods,
                options.out,
                options.data,
            )
            for seed in seeds:
                task = runs.task(seed)
                try:
                    runs.measure(seed, result.table)
                except Exception as error:
                    result.failures.append(Failure.of(task, error))
                self._done += 1
                self.report(Update(self._done, self._total, task.name, "measured", finished=True))
            if not result.failures:
                runs.aggregate(seeds, result.table)
                if not options.keep_runs:
                    shutil.rmtree(options.out / RUNS, ignore_errors=True)

    def write_failures(self, result: Result) -> None:
        """Write the failures to a file next to the table; delete the file if there are none."""
        path = self.options.out / FAILURES
        if result.failures:
            path.write_text(
                "\n".join(f"{failure.task.name}\n{failure.trace}" for failure in result.failures), encoding="utf-8"
            )
        else:
            path.unlink(missing_ok=True)
