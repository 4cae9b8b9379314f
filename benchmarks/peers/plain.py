"""The yardstick: a plain PyTorch loop with nn.Module, autograd, torch.optim.SGD and a mean over clients."""

from __future__ import annotations

import torch
from contest import Stopwatch, first_network, load, main, train_client
from workloads import Workload


def run(workload: Workload, watch: Stopwatch, threads: int) -> None:
    """FedAvg as one would write it on a blackboard: one client after the other in one module."""
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(workload.x, workload.y, strict=True)]
    module = first_network(workload)
    model = [one.detach().clone() for one in module.parameters()]
    while True:
        participants = workload.participants(watch.rounds)
        mean = [torch.zeros_like(one) for one in model]
        for client in participants:
            load(module, model)
            train_client(module, *data[client], workload.setting)
            for total, one in zip(mean, module.parameters(), strict=True):
                total.add_(one.detach(), alpha=1 / len(participants))
        model = mean
        if not watch.round_done(lambda model=model: model):
            return


if __name__ == "__main__":
    main(run, ["torch"])
