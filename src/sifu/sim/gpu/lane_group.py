"""Many runs as lanes of one program: whoever waits is taken along, whoever is done drops out.

Each run has an engine of its own (`LaneEngine`) and a thread that uses it like any other engine. A thread that wants
rounds hands in a job and waits; the group takes all waiting jobs ahead together, some rounds at a time, and hands the
scalars back. Models stay on the device until somebody fetches one. While half of the threads look at their rounds,
the other half's are being run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.draws import base_key
from sifu.core.engine import Position
from sifu.core.errors import RoundRejectedError
from sifu.core.spec import StopSpec
from sifu.core.streaming import is_evaluated
from sifu.sim.gpu.schedule import Drawing, LaneTables, Schedule, ScheduleDrawer, batches_of, scores

CHUNK = 20
"""Rounds that run before anything is read back."""
LONE_CHUNK = 60
"""The same for a single lane, whose rounds are so short that reading back counts."""
PATIENCE = 0.02
"""Seconds after which those who wait are run, however few."""
CAPACITIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Numbers of lanes a program is made for; lanes beyond the jobs at hand stay empty."""


class Program(Protocol):
    """What runs lanes: the model after k rounds of lane l is history[k, l], in device order."""

    history: Tensor
    origins: Tensor
    measured: Tensor
    params: Tensor
    clip: Tensor
    noise: Tensor
    noise_seeds: Tensor

    def load(self, schedule: Schedule) -> None: ...
    def run(self, rounds: int) -> None: ...
    def local_steps(self, steps: int) -> None: ...
    def evaluate(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class LaneSource:
    """What the lanes of a group share."""

    drawing: Drawing
    size: int
    make_program: Callable[[int, int], Program]


@dataclass
class Job:
    """Rounds that one lane waits for."""

    lane: int
    model: Tensor
    origin: Tensor
    position: Position
    active: NDArray[np.bool_]
    absent: NDArray[np.bool_]
    stop: StopSpec
    most: int
    want_updates: Callable[[int], bool]
    done: threading.Event = field(default_factory=threading.Event)
    result: Chunk | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Chunk:
    """What a job got: scalars of its rounds, and where its models lie.

    `participants` and `measured` are (rounds, slots) and (rounds, slots + 3): drifts, then ||mean - theta||,
    ||next - origin|| and ||theta||. `models` is (rounds + 1, size) on the device. `evaluated` holds correct
    predictions and losses of every client after some of the rounds, counted from 1.
    """

    participants: NDArray[np.int64]
    measured: NDArray[np.float64]
    models: Tensor
    evaluated: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]]
    updates: Tensor | None


class LaneGroup:
    """Runs the jobs of its lanes."""

    def __init__(
        self,
        source: LaneSource,
        rows: Tensor,
        sizes: Tensor,
        seeds: Sequence[int],
        clips: Sequence[tuple[float, float]],
    ) -> None:
        self.source, self.device, self.size = source, rows.device, source.size
        self._tables = LaneTables(
            rows,
            sizes,
            self._keys(seeds, "participation"),
            self._keys(seeds, "batches"),
            self._keys(seeds, "dropout"),
            int(sizes.min()),
        )
        self._noise_keys = self._keys(seeds, "training noise")
        self._clips = torch.tensor(clips, dtype=torch.float64, device=self.device)
        self._clipped = any(clip > 0.0 for clip, _ in clips)
        self._programs: dict[int, Program] = {}
        self._drawers: dict[int, ScheduleDrawer] = {}
        self._chunk = LONE_CHUNK if len(seeds) == 1 else CHUNK
        self._changed = threading.Condition()
        self._device_lock = threading.RLock()
        self._waiting: list[Job] = []
        self._open = set(range(len(seeds)))
        self._lanes = len(seeds)
        self._worker = threading.Thread(target=self._work, name="lanes", daemon=True)
        self._worker.start()

    def _keys(self, seeds: Sequence[int], purpose: str) -> Tensor:
        keys = np.array([base_key(seed, purpose) for seed in seeds], dtype=np.uint64)
        return torch.from_numpy(keys.view(np.int64)).to(self.device)

    # -- what lanes call -----------------------------------------------------------------------------------------

    @property
    def lone(self) -> bool:
        """Whether a single lane has the device for itself."""
        return self._lanes == 1

    def submit(self, job: Job) -> None:
        """Hand in a job."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()

    def wait(self, job: Job) -> Chunk:
        """The rounds of a job that was handed in."""
        job.done.wait()
        if job.error is not None:
            raise job.error
        assert job.result is not None
        return job.result

    def close(self, lane: int) -> None:
        """A lane will not ask again; the last one to say so waits for what still runs, and lets go of the device."""
        with self._changed:
            self._open.discard(lane)
            last = not self._open
            self._changed.notify_all()
        if last:
            self._worker.join()
            self._programs.clear()
            self._drawers.clear()

    def evaluate(self, lane: int, model: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Correct predictions and losses of every client of a lane."""
        with self._device_lock:
            return self._evaluate(model[None], [lane])[0]

    def local_updates(
        self, lane: int, model: Tensor, position: Position, clients: NDArray[np.int64], steps: int
    ) -> Tensor:
        """theta_i - model of some clients after `steps` steps, in device order."""
        with self._device_lock:
            program, slots = self._program(1), self.source.drawing.slots
            tables = self._tables.select(torch.tensor([lane], device=self.device))
            program.history[0, 0] = model
            rows = []
            for start in range(0, clients.size, slots):
                part = clients[start : start + slots]
                who = torch.full((1, 1, slots), -1, dtype=torch.int64, device=self.device)
                who[0, 0, : part.size] = torch.from_numpy(part).to(self.device)
                branch, at = self._one(position.branch), self._one(position.round)[None]
                program.load(batches_of(tables, who, branch, at, self.source.drawing))
                program.local_steps(steps)
                rows.append((program.params[: part.size] - model).clone())
            return torch.cat(rows)

    def _one(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self.device)

    # -- the worker ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._ready():
                    # Nobody new for a while: run those who wait, instead of waiting for threads that are busy.
                    if not self._changed.wait(PATIENCE if self._waiting else None) and self._waiting:
                        break
                if not self._open and not self._waiting:
                    return
                jobs, self._waiting = self._waiting, []
            try:
                with self._device_lock:
                    self._run(jobs)
            except BaseException as error:  # handed to every thread that waits
                for job in jobs:
                    job.error = error
            for job in jobs:
                job.done.set()

    def _ready(self) -> bool:
        """Whether enough lanes wait: half of those that are still open."""
        return not self._open or (bool(self._waiting) and 2 * len(self._waiting) >= len(self._open))

    def _run(self, jobs: list[Job]) -> None:
        count = len(jobs)
        capacity = next((one for one in CAPACITIES if one >= count), count)
        program = self._program(capacity)
        rounds = min(self._chunk, *(job.most for job in jobs)) if count > 1 else min(self._chunk, jobs[0].most)
        # A round whose updates are wanted ends a chunk: they lie in the slots until the next round begins.
        for ahead in range(rounds):
            if any(job.want_updates(job.position.round + ahead) for job in jobs):
                rounds = ahead + 1
                break
        drawer = self._drawers[capacity]
        drawer.active.zero_()
        drawer.absent.zero_()
        empty = [0] * (capacity - count)
        drawer.lanes.copy_(torch.tensor([job.lane for job in jobs] + empty))
        drawer.branches.copy_(torch.tensor([job.position.branch for job in jobs] + empty))
        drawer.starts.copy_(torch.tensor([job.position.round for job in jobs] + empty))
        drawer.active[:count] = torch.from_numpy(np.stack([job.active for job in jobs])).to(self.device)
        drawer.absent[:count] = torch.from_numpy(np.stack([job.absent for job in jobs])).to(self.device)
        program.history[0, :count] = torch.stack([job.model for job in jobs])
        program.origins[:count] = torch.stack([job.origin for job in jobs])
        schedule = drawer.draw()
        program.load(schedule)
        self._load_noise(program, schedule, drawer, rounds)
        program.run(rounds)
        self._deliver(program, schedule, jobs, rounds)

    def _load_noise(self, program: Program, schedule: Schedule, drawer: ScheduleDrawer, rounds: int) -> None:
        """Clipping and noise of each lane, with a seed for every slot of every round."""
        if not self._clipped:
            return
        program.clip.copy_(self._clips[drawer.lanes, 0])
        program.noise.copy_(self._clips[drawer.lanes, 1])
        position = drawer.starts[None, :] + torch.arange(rounds, device=self.device)[:, None]
        key = scores(scores(self._noise_keys[drawer.lanes][None, :], drawer.branches[None, :]), position)
        seeds = scores(key[:, :, None], schedule.participants[:rounds].clamp(min=0))
        program.noise_seeds[:rounds] = (seeds & (2**62 - 1)).reshape(rounds, -1)

    def _deliver(self, program: Program, schedule: Schedule, jobs: list[Job], rounds: int) -> None:
        models = program.history[: rounds + 1, : len(jobs)].clone()
        wanted = [job.want_updates(job.position.round + rounds - 1) for job in jobs]
        updates = program.params.clone() if any(wanted) else None
        evaluated: list[dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]]] = [{} for _ in jobs]
        for ahead in range(1, rounds + 1):
            looked = [place for place, job in enumerate(jobs) if is_evaluated(job.stop, job.position.round + ahead)]
            if looked:
                found = self._evaluate(models[ahead, looked], [jobs[place].lane for place in looked])
                for place, one in zip(looked, found, strict=True):
                    evaluated[place][ahead] = one
        measured = program.measured[:rounds, : len(jobs)].cpu().numpy().copy()  # the program writes there again
        participants = schedule.participants[:rounds, : len(jobs)].cpu().numpy().copy()
        slots = self.source.drawing.slots
        if int(schedule.most) > slots:
            raise RoundRejectedError(
                f"{int(schedule.most)} clients were drawn for a round that has room for {slots}; the last good state "
                "stays. Use the embedded engine (device cpu) for this run"
            )
        for place, job in enumerate(jobs):
            own = None
            if updates is not None and wanted[place]:
                own = updates[place * slots : (place + 1) * slots] - models[rounds - 1, place]
            job.result = Chunk(participants[:, place], measured[:, place], models[:, place], evaluated[place], own)

    def _evaluate(self, models: Tensor, lanes: list[int]) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        tables = self._tables.rows[torch.tensor(lanes, device=self.device)]
        count, clients, most = tables.shape
        program = next(iter(self._programs.values())) if self._programs else self._program(1)
        correct, losses = program.evaluate(models, tables.reshape(count, -1).to(torch.int32))
        hits = correct.reshape(count, clients, most).sum(dim=2).cpu().numpy()
        total = losses.to(torch.float64).reshape(count, clients, most).sum(dim=2).cpu().numpy()
        return [(hits[place].astype(np.int64), total[place]) for place in range(count)]

    def _program(self, capacity: int) -> Program:
        if capacity not in self._programs:
            for other in [one for one in self._programs if one > 2 * max(len(self._open), capacity)]:
                del self._programs[other], self._drawers[other]
            self._programs[capacity] = self.source.make_program(capacity, self._chunk)
            self._drawers[capacity] = ScheduleDrawer(self._tables, self.source.drawing, capacity, self._chunk)
        return self._programs[capacity]
