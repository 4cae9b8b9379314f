"""Flower's simulation runtime: virtual nodes on this machine (ray), with the same messages as between real nodes.

Clients' data are in a folder, one file for each, as if on separate machines. One simulation may serve several
federations in sequence: `current` in the folder names the federation that the nodes belong to.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sifu import InputError, Spec
from sifu.core.engine import Engine
from sifu.engines.flower.virtual_nodes import Patience, ReadyClient, client_app, engine_of_nodes
from sifu.store.files import write_atomically

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

CURRENT = "current"
START_ATTEMPTS = 3
UNTIL_SAVED = 60.0
"""Seconds after Ctrl-C in which a simulation may save its finished rounds."""
PATIENCE = Patience(timeout=600.0, poll=0.02, pause=1.0)
"""Long patience: the first message to a process waits until torch is imported, and no process gets lost here."""


def simulate(folder: Path, nodes: int, serve: Callable[[Grid], None]) -> None:
    """Run `serve` with a grid of virtual nodes, whose data `enter_federation` sets."""
    if importlib.util.find_spec("ray") is None:
        raise InputError('Flower\'s simulation needs ray: pip install -e ".[flower]" -e "paper[simulation]"')
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # failures are incidents, or raised here
    server = ServerApp()
    raised: list[BaseException] = []
    interrupted, finished = threading.Event(), threading.Event()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            end = time.monotonic() + PATIENCE.timeout
            while len(list(grid.get_node_ids())) < nodes and time.monotonic() < end:
                time.sleep(PATIENCE.poll)
            serve(cast("Grid", _InterruptibleGrid(grid, interrupted)))
        except BaseException as error:
            raised.append(error)
        finally:
            finished.set()

    _start_ray()
    make = partial(_load, str(folder))
    try:
        run_simulation(server, client_app(make), nodes, backend_config={"client_resources": {"num_cpus": 1}})
    except KeyboardInterrupt:
        interrupted.set()
        finished.wait(UNTIL_SAVED)  # it may have rounds to save
        raise
    if raised:
        raise raised[0]


class _InterruptibleGrid:
    """Grid that passes Ctrl-C to the thread that uses it, because that thread would get no more answers."""

    def __init__(self, grid: Grid, interrupted: threading.Event) -> None:
        self._grid, self._interrupted = grid, interrupted

    def __getattr__(self, name: str) -> Any:
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        return getattr(self._grid, name)


def _start_ray() -> None:
    """Start ray as Flower does; retry, because on a busy machine it may exceed its own time limit."""
    import ray

    search = os.pathsep.join(sys.path)
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                runtime_env={"env_vars": {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"}},
            )
            return
        except Exception as error:  # ray raises exceptions of many kinds
            ray.shutdown()
            if attempt == START_ATTEMPTS - 1:
                raise InputError(f"ray does not start here: {error}") from error


def enter_federation(grid: Grid, folder: Path, spec: Spec, data: Sequence[Any], preprocessing: str) -> Engine:
    """Return an engine of the simulation's nodes with these clients' data; it is valid until the next call."""
    if any(getattr(client, "features", "") for client in data):
        raise InputError(
            "these clients already hold features: on Flower each client computes its own, so pass the samples"
        )
    name = f"federation-{len(list(folder.glob('federation-*')))}"
    (folder / name).mkdir()
    for number, client in enumerate(data):
        np.savez(folder / name / f"{number}.npz", x=np.asarray(client.x), y=np.asarray(client.y), name=client.name)
    write_atomically(folder / CURRENT, name.encode())
    return engine_of_nodes(grid, spec, [client.name for client in data], preprocessing, PATIENCE)


def _load(folder: str, context: Context) -> ReadyClient:
    """Load the data of a virtual node, in that node's process."""
    return _read(str(Path(folder) / Path(folder, CURRENT).read_text() / f"{context.node_config['partition-id']}.npz"))


@lru_cache(maxsize=64)
def _read(path: str) -> ReadyClient:
    with np.load(path) as arrays:
        return ReadyClient(str(arrays["name"]), arrays["x"], arrays["y"])
