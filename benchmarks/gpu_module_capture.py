"""Rounds of a module on a GPU as captured graphs: which way of capturing them ends in an illegal memory access.

    python benchmarks/gpu_module_capture.py                      # every way in a process for itself, under a minute
    compute-sanitizer --tool memcheck python benchmarks/gpu_module_capture.py --only "shared pool"

Captured rounds of the residual network once ended in an illegal memory access on an H200, so modules run kernel by
kernel (`sifu.engines.sim.gpu.module_program`). Their graphs shared one pool of memory then. Here ten groups and one
group of all clients take turns, so that two programs are replayed one after the other, and one of them is dropped and
captured again. Each way prints how far its model is from that of rounds that were not captured, or how it ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_group_rounds
from sifu.core.spec import StopSpec
from sifu.data.client_data import ClientData
from sifu.engines.sim import LocalTraining, SimulatedFederation, make_model
from sifu.engines.sim.gpu.device_queue import without_collector
from sifu.engines.sim.gpu.module_program import ModuleProgram
from sifu.engines.sim.lanes import lane_engines

SHAPE, CLIENTS, GROUPS, ROUNDS = (3, 32, 32), 20, 4, 6


def federation() -> tuple[SimulatedFederation, list[ClientData]]:
    """The residual network on random images."""
    clients = []
    for number in range(CLIENTS):
        generator = np.random.default_rng(number)
        x = generator.standard_normal((40, *SHAPE), dtype=np.float32)
        clients.append(ClientData(f"client-{number}", x, generator.integers(0, 10, 40)))
    training = LocalTraining(0.01, 3, 20, 0.9)
    model = make_model("resnet_small", SHAPE, 10)
    return SimulatedFederation(clients, model, training, dtype="float32", seed=1, strategy="loop"), clients


class Captured:
    """A round of a program as a graph; `shared` graphs take their memory from one pool, `cleared` ones leave no
    workspace of cuBLAS behind in it."""

    def __init__(self, *, shared: bool = False, cleared: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle() if shared else None
        self._cleared = cleared
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, program: ModuleProgram, rounds: int) -> None:
        """In the place of `ModuleProgram.run`."""
        if id(program) not in self._graphs:
            self._graphs[id(program)] = self._capture(program)
        program.counter.zero_()
        for _ in range(rounds):
            self._graphs[id(program)].replay()

    def forget(self) -> None:
        """Drop the graphs, as a program does that makes room for another."""
        torch.cuda.synchronize()
        self._graphs.clear()

    def _capture(self, program: ModuleProgram) -> torch.cuda.CUDAGraph:
        kept = program.history[:2].clone()
        program.counter.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            program._round()
        torch.cuda.current_stream().wait_stream(stream)
        self._clear()
        graph = torch.cuda.CUDAGraph()
        with without_collector(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            program._round()
        self._clear()
        program.history[:2] = kept
        return graph

    def _clear(self) -> None:
        if self._cleared:
            torch._C._cuda_clearCublasWorkspaces()


def last_model(turns: int, after_turn: Callable[[], None] = lambda: None, *, watched: bool = False) -> np.ndarray:
    """Rounds of groups and of everyone in turn; the last model of everyone. `watched`: another thread evaluates."""
    whole, clients = federation()
    (engine,) = lane_engines([whole], [clients], "cuda", "float32")
    start, everyone = whole.initial_model(0), np.arange(CLIENTS)
    groups = [everyone[first::GROUPS] for first in range(GROUPS)]
    wanted = RoundsWanted(StopSpec(0.0, 0, ROUNDS, 2**62), start.astype(np.float64), evaluated=np.zeros(0, np.int64))
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            engine.evaluate(start, everyone)

    watcher = threading.Thread(target=watch)
    if watched:
        watcher.start()
    try:
        for _ in range(turns):
            for members in (groups, [everyone]):
                *_, last = stream_group_rounds(engine, [start] * len(members), Position(0, 0), members, wanted)
            model = last[0].fetch_model()
            torch.cuda.synchronize()
            after_turn()
    finally:
        stop.set()
        if watched:
            watcher.join()
        engine.close()
    return model


WAYS: dict[str, Callable[[], Captured]] = {
    "own pools": Captured,
    "own pools, cuBLAS cleared": lambda: Captured(cleared=True),
    "shared pool": lambda: Captured(shared=True),
    "shared pool, cuBLAS cleared": lambda: Captured(shared=True, cleared=True),
}


def try_way(name: str) -> None:
    """One way, then the same while another thread evaluates."""
    plain, run = last_model(1), ModuleProgram.run
    for watched in (False, True):
        captured, begun = WAYS[name](), time.perf_counter()
        ModuleProgram.run = lambda program, rounds, captured=captured: captured.run(program, rounds)  # type: ignore
        away = np.abs(last_model(3, captured.forget, watched=watched) - plain).max()
        ModuleProgram.run = run  # type: ignore[method-assign]
        seconds = time.perf_counter() - begun
        print(f"{name}{', watched' if watched else ''}: {away:.2g} off, {seconds:.1f} s", flush=True)


def main() -> None:
    """Every way in a process for itself: an illegal access ends the process it happens in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WAYS)
    name = parser.parse_args().only
    if name:
        try_way(name)
        return
    for name in WAYS:
        ended = subprocess.run([sys.executable, __file__, "--only", name], capture_output=True, text=True, timeout=120)
        print(ended.stdout, end="")
        if ended.returncode:
            last = [line for line in ended.stderr.splitlines() if "Error" in line][-1:]
            print(f"{name}: ended with {ended.returncode}, {''.join(last)}", flush=True)


if __name__ == "__main__":
    main()
