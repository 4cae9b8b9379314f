"""Groups as lanes: cost on a GPU of a round of S groups of M/S clients, against a round of one federation of M.

Both are timed in turns in one process; then the groups' rounds are compared with those of each group alone (bit for
bit) and with the CPU's. A time is the best of three turns, after a warm-up that compiles and captures everything. A
keyed hash assigns the groups, so they differ in size. Data are random, because speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.round_times import B, random_clients

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_group_rounds
from sifu.core.spec import StopSpec
from sifu.engines.sim import LocalTraining, ModuleModel, SimulatedFederation, SimulationSettings
from sifu.engines.sim.lanes import lane_engines
from sifu.engines.sim.networks import CONV_NETS, ConvNet
from sifu.theory.merging import members_by_group
from sifu.theory.participation import Participation
from sifu_paper.provenance import commit

NETWORKS = {
    "cnn_cifar10": CONV_NETS["cnn_cifar10"]((3, 32, 32), 10),
    "cnn_fashion_mnist": CONV_NETS["cnn_fashion_mnist"]((1, 28, 28), 10),
}
PARTICIPATION = {"all": Participation("all"), "poisson(0.2)": Participation("poisson", rate=0.2)}
SAMPLES = 100


def federation_of(
    network: ConvNet, clients: tuple, participation: str, training: LocalTraining = B
) -> SimulatedFederation:
    """Return a federation of a network in float32."""
    return SimulatedFederation(
        clients,
        ModuleModel(network),
        training,
        SimulationSettings(participation=PARTICIPATION[participation], dtype="float32", seed=1),
    )


def groups_of(federation: SimulatedFederation, count: int) -> list[np.ndarray]:
    """Return the clients of each group, by a hash of their names."""
    names = [client.name for client in federation.clients]
    return [np.array(members) for members in members_by_group(bytes(32), names, range(len(names)), count)]


def rounds_of(engine: Any, models: list, groups: list, rounds: int) -> list[list[np.ndarray]]:
    """Return the models of each group after each round."""
    wanted = RoundsWanted(
        StopSpec(0.0, 0, rounds, 2**40), models[0].astype(np.float64), evaluated=np.zeros(0, dtype=np.int64)
    )
    stream = stream_group_rounds(engine, models, Position(0, 0), groups, wanted)
    return [[done.fetch_model() for done in together] for together in stream]


def agreement(name: str, precision: str, count: int = 3) -> dict[str, Any]:
    """Compare groups trained together with each alone, bit for bit, and with the CPU over two rounds."""
    network = NETWORKS[name]
    clients = random_clients(8, 40, network.input_shape, 10, "float32")
    federation = federation_of(network, clients, "all", LocalTraining(0.01, 2, 20, 0.9))
    (engine,) = lane_engines([federation], [clients], "cuda", precision)
    start, groups = federation.initial_model(0), [members for members in groups_of(federation, count) if members.size]
    together = rounds_of(engine, [start] * len(groups), groups, 2)
    alone = [rounds_of(engine, [start], [members], 2) for members in groups]
    engine.close()
    on_cpu = rounds_of(federation, [start] * len(groups), groups, 2)
    pairs = [(together[k][g], alone[g][k][0], on_cpu[k][g]) for k in range(2) for g in range(len(groups))]
    return {
        "network": name,
        "precision": precision,
        "groups": [int(members.size) for members in groups],
        "same_bits_as_alone": all(mine.tobytes() == lone.tobytes() for mine, lone, _ in pairs),
        "largest_difference_to_cpu": max(
            float(np.abs(mine - reference).max() / np.abs(reference).max()) for mine, _, reference in pairs
        ),
    }


def take(engine: Any, models: list, groups: list, rounds: int) -> float:
    """Return the milliseconds per round."""
    wanted = RoundsWanted(
        StopSpec(0.0, 0, rounds, 2**40), models[0].astype(np.float64), evaluated=np.zeros(0, dtype=np.int64)
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    for together in stream_group_rounds(engine, models, Position(0, 0), groups, wanted):
        last = together
    [done.fetch_model() for done in last]
    return (time.perf_counter() - began) / rounds * 1000


def one_by_one(engine: Any, models: list, groups: list, rounds: int) -> float:
    """Return the milliseconds per round of all groups, trained one by one."""
    return sum(take(engine, [model], [members], rounds) for model, members in zip(models, groups, strict=True))


def ratio(name: str, participation: str, clients_count: int, count: int, rounds: int) -> dict[str, Any]:
    """Compare a round of groups with a round of everyone, in turns."""
    network = NETWORKS[name]
    clients = random_clients(clients_count, SAMPLES, network.input_shape, 10, "float32")
    federation = federation_of(network, clients, participation)
    (engine,) = lane_engines([federation], [clients], "cuda", "tf32")
    start, groups = federation.initial_model(0), groups_of(federation, count)
    everyone, models = [np.arange(clients_count)], [start] * count
    take(engine, [start], everyone, 60)
    take(engine, models, groups, 60)
    turns = [(take(engine, [start], everyone, rounds), take(engine, models, groups, rounds)) for _ in range(3)]
    separate = one_by_one(engine, models, groups, rounds)
    engine.close()
    whole, grouped = (min(turn[place] for turn in turns) for place in range(2))
    return {
        "network": name,
        "participation": participation,
        "clients": clients_count,
        "groups": [int(members.size) for members in groups],
        "ms_one_federation": round(whole, 3),
        "ms_groups": round(grouped, 3),
        "ms_groups_one_by_one": round(separate, 3),
        "ratio": round(grouped / whole, 3),
        "turns": [[round(value, 3) for value in turn] for turn in turns],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--networks", default=",".join(NETWORKS))


def run(options: argparse.Namespace) -> None:
    """Run all checks and measurements; print a line after each."""
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "agreement": [],
        "rounds": [],
    }

    def keep(place: str, line: dict[str, Any]) -> None:
        result[place].append(line)
        print(json.dumps(line), flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    names = options.networks.split(",")
    for participation in PARTICIPATION:
        for name in names:
            keep("rounds", ratio(name, participation, options.clients, options.groups, options.rounds))
    for name in names:
        for precision in ("tf32", "float32"):
            keep("agreement", agreement(name, precision))
