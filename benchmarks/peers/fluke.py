"""fluke: `FedAVG` with its own client, server and fast loader, in memory, one process, clients one after the other."""

from __future__ import annotations

import torch
from peers.contest import Stopwatch, first_network, let_torchvision_in, main

_declared = let_torchvision_in()  # must come before the imports that need it

from fluke import FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import EarlyStopping, Server
from fluke.utils import FederationObserver
from peers.workloads import Workload


class Scheduled(Server):
    """fluke's server with the common schedule."""

    def follow(self, workload: Workload, watch: Stopwatch) -> None:
        """Set the schedule, and the stopwatch that knows the round."""
        self._workload, self._watch = workload, watch

    def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
        """Return the participants of the round."""
        return [self.clients[client] for client in self._workload.participants(self._watch.rounds)]


class Asked(FederationObserver):
    """Observer that asks the stopwatch after each round."""

    def __init__(self, server: Server, watch: Stopwatch) -> None:
        self._server, self._watch = server, watch

    def end_round(self, round: int) -> None:
        """Stop when enough rounds are timed."""
        if not self._watch.round_done(lambda: list(self._server.model.parameters())):
            raise EarlyStopping(round)


def run(workload: Workload, watch: Stopwatch, threads: int) -> None:
    """Run `FedAVG.run` without evaluation; clients drop their optimizer, so that each round resets the momentum."""
    setting = workload.setting
    environment = FlukeENV()
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(locals=False, server=False, pre_fit=False, post_fit=False)
    optimizer = OptimizerConfigurator({"name": "SGD", "lr": setting.rate, "momentum": setting.momentum})
    clients = [
        Client(
            index=number,
            train_set=FastDataLoader(
                torch.from_numpy(x),
                torch.from_numpy(y),
                num_labels=10,
                batch_size=setting.batch,
                shuffle=setting.batch < setting.samples,
            ),
            test_set=None,
            optimizer_cfg=optimizer,
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=setting.steps // (setting.samples // setting.batch),
            persistency=False,
        )
        for number, (x, y) in enumerate(zip(workload.x, workload.y, strict=True))
    ]
    server = Scheduled(first_network(workload), None, clients, weighted=True)
    server.follow(workload, watch)
    federation = FedAVG(len(clients), None, {}, clients=clients, server=server)
    federation.set_callbacks([Asked(server, watch)])
    federation.run(n_rounds=10**6, eligible_perc=setting.participants / setting.clients)


if __name__ == "__main__":
    main(run, ["fluke-fl", "torch"])
