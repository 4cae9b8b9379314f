"""A local step of B alone, in two threads at once and in two processes at once: what sharing an interpreter costs.

    python benchmarks/conv_steps.py [--turns 5]

A step is the gradient of a batch of 20 images of CIFAR-10's network, in pieces of 10 as the CPU's trainer cuts it, as
Python runs it and compiled (`sim.scripted`), as the trainer runs it after a while. One thread of torch each.
Milliseconds a step, medians of the turns, smallest and largest in brackets. Then how long the other one of two threads
that shared an operation of torch keeps its core busy afterwards: why networks are averaged by one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import threading
import time
from typing import Any

import torch

from sifu.engines.sim.cpu_conv.conv_pass import ConvPass, padded_images, parameter_views, prepare, room_to_prepare
from sifu.engines.sim.networks import CONV_NETS
from sifu.engines.sim.threads import scripted

BATCH, PIECE, STEPS = 20, 10, 40


def steps(compiled: bool, begin: Any, milliseconds: Any) -> None:
    """Put the milliseconds of a step into `milliseconds`, after everyone at `begin` is ready."""
    torch.set_num_threads(1)
    network = CONV_NETS["cnn_cifar10"]((3, 32, 32), 10)
    generator = torch.Generator().manual_seed(1)
    parameters = parameter_views(network, 0.05 * torch.randn(network.parameters, generator=generator))
    gradients = parameter_views(network, torch.zeros(network.parameters))
    images = padded_images(network, torch.randn((BATCH, 3, 32, 32), generator=generator))
    labels = torch.arange(BATCH) % 10
    one_pass, room = ConvPass(network, PIECE, torch.float32), room_to_prepare(network, torch.float32)
    if compiled:
        one_pass = scripted(one_pass)

    def step() -> None:
        prepared = prepare(network, parameters, room)
        for rows in torch.arange(BATCH).split(PIECE):
            one_pass.gradient(images, rows, labels[rows], BATCH, None, parameters, prepared, gradients)

    for _ in range(5):
        step()
    begin.wait()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    milliseconds.put(1000 * (time.perf_counter() - began) / STEPS)


def in_threads(compiled: bool, count: int) -> float:
    """Mean milliseconds of a step of `count` threads at once."""
    begin, milliseconds = threading.Barrier(count), queue.Queue[float]()
    threads = [threading.Thread(target=steps, args=(compiled, begin, milliseconds)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.mean(milliseconds.get() for _ in threads)


def in_processes(compiled: bool, count: int) -> float:
    """Mean milliseconds of a step of `count` processes at once."""
    context = multiprocessing.get_context("spawn")
    begin, milliseconds = context.Barrier(count), context.Queue()
    processes = [context.Process(target=steps, args=(compiled, begin, milliseconds)) for _ in range(count)]
    for process in processes:
        process.start()
    times = [milliseconds.get() for _ in processes]
    for process in processes:
        process.join()
    return statistics.mean(times)


def busy_after_sharing() -> float:
    """Milliseconds that this process keeps a core busy while its only thread in Python sleeps."""
    torch.set_num_threads(2)
    values = torch.zeros(1_000_000, dtype=torch.float64)
    for _ in range(3):
        values.add_(1.0)
    began = time.process_time()
    time.sleep(0.1)
    return 1000 * (time.process_time() - began)


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    ways = {
        f"{title}, {'compiled' if compiled else 'Python'}": (run, compiled, count)
        for compiled in (False, True)
        for title, run, count in (
            ("alone", in_threads, 1),
            ("two threads", in_threads, 2),
            ("two processes", in_processes, 2),
        )
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.turns):
        for name, (run, compiled, count) in ways.items():
            times[name].append(run(compiled, count))
    times["busy after sharing"] = [busy_after_sharing() for _ in range(options.turns)]
    for name, milliseconds in times.items():
        print(
            f"{name:28s} {statistics.median(milliseconds):6.2f} ms ({min(milliseconds):.2f} to {max(milliseconds):.2f})"
        )


if __name__ == "__main__":
    main()
