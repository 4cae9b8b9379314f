"""Group of lanes that run in one program: waiting runs join the next batch, and finished runs leave.

Each run has its own engine (`LaneEngine`) and a thread that uses it like any other engine. A thread that needs rounds
opens a stream and takes chunks of rounds from it. The group's worker thread submits the next rounds of all streams
together, without waiting for the device. While the threads process one chunk, the device computes the next from models
that stay on it. A lane that stops discards the rounds computed in advance. Every random choice of a round is keyed by
its position, so computing in advance does not change the results.

A lane may have several streams at a time, one for each of its separately trained groups. They are opened and read
together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import Position
from sifu.core.round_stream import is_evaluated
from sifu.engines.sim.gpu.device_queue import DeviceQueue
from sifu.theory.participation import base_key
from sifu_kernels.conv_program import ConvProgram
from sifu_kernels.lane_stream import Chunk, Evaluated, LaneSource, LaneStream
from sifu_kernels.schedule import (
    LaneTables,
    Schedule,
    ScheduleDrawer,
    rounded_up,
    width_for,
)

CHUNK = 20
"""Number of rounds that run before results are read back."""
LONE_CHUNK = 60
"""Number of rounds per chunk of a single lane, whose rounds are so short that reading back takes noticeable time."""
AHEAD = 2
"""Maximum number of chunks of a stream: one being processed and one being computed."""
PATIENCE = 0.02
"""Seconds an idle device waits for missing lanes, because a batch of few lanes takes almost as long as one of many."""
POLL_SECONDS = 0.002
"""Polling interval of a busy device, in seconds."""
CHUNK_BYTES = 2**28
"""Maximum size of a chunk's models on the host; large models reduce the rounds per chunk."""
STAYING_BYTES = 2**32
"""Maximum size of a chunk's models that stay on the device, in addition to `history`, which has the same size."""
MOST_PROGRAMS = 8
"""Maximum number of cached programs, with their buffers on the device."""
CAPACITIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Numbers of lanes for which programs are made; unused lanes stay empty."""


class LaneGroup:
    """Scheduler for the streams of several lanes."""

    def __init__(
        self,
        source: LaneSource,
        rows: Tensor,
        sizes: Tensor,
        seeds: Sequence[int],
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
        self._programs: dict[tuple[int, int, int], ConvProgram] = {}
        self._drawers: dict[tuple[int, int], ScheduleDrawer] = {}
        self._chunk = LONE_CHUNK if len(seeds) == 1 else CHUNK
        self.queue, self._copies = DeviceQueue(self.device), DeviceQueue(self.device)
        self.entries = torch.from_numpy(source.entries).to(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the tensors above were created in another queue
        self._last = self.queue.mark()
        self._changed = threading.Condition()
        self._device_lock = threading.RLock()
        self._streams: list[LaneStream] = []
        self._feeding = False
        self._away: set[int] = set()
        self._open = set(range(len(seeds)))
        self._worker = threading.Thread(target=self._work, name="lanes", daemon=True)
        self._worker.start()

    def _keys(self, seeds: Sequence[int], purpose: str) -> Tensor:
        keys = np.array([base_key(seed, purpose) for seed in seeds], dtype=np.uint64)
        return torch.from_numpy(keys.view(np.int64)).to(self.device)

    # -- interface for lanes -------------------------------------------------------------------------------------

    def open(self, streams: Sequence[LaneStream]) -> None:
        """Start to compute rounds of one lane's streams, which begin at the same position; call `end` afterwards."""
        with self._changed:
            self._streams.extend(streams)
            self._changed.notify_all()

    def take(self, streams: Sequence[LaneStream]) -> list[Chunk] | None:
        """Return the next chunk of each stream, all with equally many rounds, or None if no rounds are left.

        A call also releases the chunks of the previous call.
        """
        with self._changed:
            for stream in streams:
                stream.held = False
            self._changed.notify_all()
            while not all(stream.chunks for stream in streams):
                for stream in streams:
                    if stream.error is not None:
                        raise stream.error
                if streams[0].left <= 0:
                    return None
                self._changed.wait()
            chunks = [stream.chunks.popleft() for stream in streams]
            for stream in streams:
                stream.held = True
        for chunk in chunks:
            chunk.ready.synchronize()
        with self._changed:
            # Threads share one interpreter lock, so processing a chunk now would delay the thread that feeds the
            # device.
            while self._feeding:
                self._changed.wait()
        return chunks

    def end(self, streams: Sequence[LaneStream]) -> None:
        """Close these streams and discard the rounds computed in advance."""
        with self._changed:
            self._streams = [stream for stream in self._streams if stream not in streams]
            for stream in streams:
                stream.chunks.clear()
                stream.left = 0
            self._changed.notify_all()

    def close(self, lane: int) -> None:
        """Remove a lane; the last lane that leaves waits for running work and releases the device."""
        with self._changed:
            self._open.discard(lane)
            self._streams = [stream for stream in self._streams if stream.lane != lane]
            last = not self._open
            self._changed.notify_all()
        if last:
            self._worker.join()
            self.queue.synchronize()
            self._copies.synchronize()
            self._programs.clear()
            self._drawers.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # let other processes use the memory

    def evaluate(self, queue: DeviceQueue, lane: int, model: Tensor) -> Evaluated:
        """Return the evaluation of all clients of a lane, without waiting for the group's queue."""
        with self._device_lock, self.queue.here():
            program = next(iter(self._programs.values()), None) or self._lone_program()
        with queue.here():
            evaluated = self._evaluate(queue, program, model[None], [lane])[0]
        queue.synchronize()
        return evaluated

    # -- the worker ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            streams = self._gather()
            if streams is None:
                return
            try:
                with self._device_lock, self.queue.here():
                    chunks = self._run(streams)
                    self._last = self.queue.mark()
            except BaseException as error:  # every waiting thread raises it
                with self._changed:
                    self._feeding = False
                    for stream in streams:
                        stream.error = error
                    self._changed.notify_all()
                continue
            with self._changed:
                self._feeding = False
                for stream, chunk in zip(streams, chunks, strict=True):
                    if stream in self._streams:
                        stream.model = chunk.tip
                        stream.position = Position(stream.position.branch, stream.position.round + chunk.rounds)
                        stream.left -= chunk.rounds
                        stream.chunks.append(chunk)
                self._changed.notify_all()

    def _gather(self) -> list[LaneStream] | None:
        """Return the streams to run next, or None when all lanes are closed.

        These are all expected streams, or the available streams once an idle device has waited for `PATIENCE` seconds.
        """
        since, last_count = time.monotonic(), 0
        with self._changed:
            while self._open:
                streams = [stream for stream in self._streams if stream.wants(AHEAD)]
                missing = self._expected() - {stream.lane for stream in streams}
                now = time.monotonic()
                if len(streams) != last_count or not self._last.query():
                    since, last_count = now, len(streams)  # a stream has arrived, so others may follow soon
                if streams and (not missing or now - since > PATIENCE):
                    # Do not wait for a late lane again until it has returned.
                    self._away = (self._away | missing) - {stream.lane for stream in streams}
                    self._feeding = True
                    return streams
                self._changed.wait(POLL_SECONDS if streams else None)
        return None

    def _expected(self) -> set[int]:
        """Return the lanes that will soon need rounds: open lanes that are not late and have rounds left."""
        ending = {stream.lane for stream in self._streams if stream.left <= 0}
        going = {stream.lane for stream in self._streams if stream.left > 0}
        return self._open - self._away - (ending - going)

    def _run(self, streams: list[LaneStream]) -> list[Chunk]:
        """Submit the next rounds of the streams and the copies of their results; return one chunk per stream."""
        count = len(streams)
        capacity = next((size for size in CAPACITIES if size >= count), count)
        # Slots per lane, rounded up to a power of two, so that groups of similar size share programs.
        most, whole = max(stream.slots for stream in streams), self.source.drawing.slots
        slots = min(whole, 1 << (most - 1).bit_length()) if most > 0 else 1
        width = width_for(self.source.drawing.participation, [stream.clients for stream in streams])
        program = self._program(capacity, slots, min(rounded_up(max(width, 1)), capacity * slots))
        drawer = self._drawers[capacity, slots]
        size, staying = program.size * program.history.element_size(), sum(stream.models_stay for stream in streams)
        rooms = ((STAYING_BYTES, staying), (CHUNK_BYTES, count - staying))
        room = min(limit // (size * models) for limit, models in rooms if models)
        rounds = max(1, min(self._chunk, room, max(stream.left for stream in streams)))
        where = np.zeros((3, capacity), dtype=np.int64)
        where[:, :count] = np.array(
            [(stream.lane, stream.position.branch, stream.position.round) for stream in streams]
        ).T
        drawer.places.copy_(self.queue.upload(where))
        drawer.active.zero_()
        torch.stack([stream.active for stream in streams], out=drawer.active[:count])
        torch.stack([stream.model for stream in streams], out=program.history[0, :count])
        torch.stack([stream.origin for stream in streams], out=program.origins[:count])
        schedule = drawer.draw()
        program.load(schedule)
        program.run(rounds)
        return self._read(program, schedule, streams, rounds)

    def _read(self, program: ConvProgram, schedule: Schedule, streams: list[LaneStream], rounds: int) -> list[Chunk]:
        count = len(streams)
        # The next run overwrites the history: copy all that is needed later.
        history = program.history[: rounds + 1, :count]
        tips = history[rounds].clone()
        own = [min(rounds, stream.left) for stream in streams]
        evaluated: list[dict[int, Evaluated]] = [{} for _ in streams]
        for ahead in range(1, rounds + 1):
            looked = [
                place
                for place, stream in enumerate(streams)
                if ahead <= own[place]
                and is_evaluated(stream.wanted.stop, stream.position.round + ahead)
                and (stream.wanted.evaluated is None or len(stream.wanted.evaluated))
            ]
            if looked:
                chosen = history[ahead].index_select(0, self.queue.upload(np.array(looked)))
                here = [streams[place] for place in looked]
                scores_of_lanes = self._evaluate(
                    self.queue, program, chosen, [stream.lane for stream in here], _looked_at(here)
                )
                for place, scores_of_lane in zip(looked, scores_of_lanes, strict=True):
                    evaluated[place][ahead] = scores_of_lane
        measured = self.queue.download(program.measured[:rounds, :count])
        participants = self.queue.download(schedule.participants[:rounds, :count])
        total = schedule.drawn[:rounds].sum(dim=1, keepdim=True)
        # If a round had too many participants, report this to every lane.
        drawn = self.queue.download(torch.where(total > program.width, total, schedule.drawn[:rounds, :count]))
        fetched = self._fetch(history[1:], streams)
        ready = self._copies.mark()
        return [
            Chunk(
                stream.position.round, participants[: own[place], place], drawn[: own[place], place],
                measured[: own[place], place], fetched[place][: own[place]], tips[place], evaluated[place],
                ready,
            )
            for place, stream in enumerate(streams)
        ]  # fmt: skip

    def _fetch(self, history: Tensor, streams: list[LaneStream]) -> list[NDArray[Any] | Tensor]:
        """Return the models (rounds, parameters) of each stream: on the host, or in device order if they stay."""
        coming = [place for place, stream in enumerate(streams) if not stream.models_stay]
        fetched: list[NDArray[Any] | Tensor] = [history[:, place] for place in range(len(streams))]
        if len(coming) < len(streams):
            # Only few of the models that stay on the device are read, so each is reordered when it is read.
            fetched = list(history.clone().unbind(dim=1))
        # Models are copied to the host in parallel with the next rounds, so that reading one later waits neither for
        # the device nor for the interpreter lock.
        chosen = history if len(coming) == len(streams) else history[:, coming]
        if coming:
            chosen = chosen.index_select(2, self.entries)
        self._copies.after(self.queue)
        if coming:
            with self._copies.here():
                host: NDArray[Any] = self._copies.download(chosen)
            for number, place in enumerate(coming):
                fetched[place] = host[:, number]
        return fetched

    def _evaluate(
        self,
        queue: DeviceQueue,
        program: ConvProgram,
        models: Tensor,
        lanes: list[int],
        clients: NDArray[np.int64] | None = None,
    ) -> list[Evaluated]:
        """Return the evaluation of each lane's clients, valid once a later mark is reached.

        If `clients` is given, only these clients are evaluated, and all other clients have zeros.
        """
        tables = self._tables.rows.index_select(0, queue.upload(np.array(lanes)))
        everyone = tables.shape[1]
        chosen = None if clients is None else queue.upload(clients)
        if chosen is not None:
            tables = tables.index_select(1, chosen)
        count, some, most = tables.shape
        correct, losses = program.evaluate(models, tables.reshape(count, -1).to(torch.int32))
        sums = [correct.reshape(count, some, most).sum(dim=2), losses.double().reshape(count, some, most).sum(dim=2)]
        if chosen is not None:
            sums = [part.new_zeros((count, everyone)).index_copy_(1, chosen, part) for part in sums]
        hits, total = (queue.download(part) for part in sums)
        return [(hits[place], total[place]) for place in range(count)]

    def _lone_program(self) -> ConvProgram:
        """Return a program of one lane with as many slots as a round may need."""
        slots = self.source.drawing.slots
        return self._program(1, slots, slots)

    def _program(self, capacity: int, slots: int, width: int) -> ConvProgram:
        key = (capacity, slots, width)
        if key not in self._programs:
            # Wait for work of a dropped program and for the new program's data; new programs are rare.
            self.queue.synchronize()
            while len(self._programs) >= MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            plan = replace(self.source.plan, lanes=capacity, slots=slots, chunk=self._chunk, width=width)
            self._programs[key] = self.source.make_program(plan)
            if (capacity, slots) not in self._drawers:
                drawing = replace(self.source.drawing, slots=slots)
                self._drawers[capacity, slots] = ScheduleDrawer(self._tables, drawing, capacity, self._chunk)
            self.queue.synchronize()
        self._programs[key] = self._programs.pop(key)  # keep the least recently used program first
        return self._programs[key]


def _looked_at(streams: list[LaneStream]) -> NDArray[np.int64] | None:
    """Return the clients on which these streams' models are evaluated, or None for all clients."""
    first, *others = (stream.wanted.evaluated for stream in streams)
    if first is None:
        return None
    same = all(other is not None and np.array_equal(other, first) for other in others)
    return np.asarray(first, dtype=np.int64) if same else None
