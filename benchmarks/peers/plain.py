"""Baseline: a plain PyTorch loop with nn.Module, autograd, torch.optim.SGD and a mean over clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peers.contest import Stopwatch, first_network, load, main, train_client
from peers.workloads import Workload
from torch import Tensor


class Plain:
    """Textbook FedAvg: one client after the other in one module."""

    def __init__(self, workload: Workload) -> None:
        self._setting = workload.setting
        self._data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(workload.x, workload.y, strict=True)]
        self._module = first_network(workload)
        self.model: list[Tensor] = [parameter.detach().clone() for parameter in self._module.parameters()]

    def round(self, participants: Sequence[int]) -> None:
        """Train each participant from the model, then average them."""
        mean = [torch.zeros_like(parameter) for parameter in self.model]
        for client in participants:
            load(self._module, self.model)
            train_client(self._module, *self._data[client], self._setting)
            for total, parameter in zip(mean, self._module.parameters(), strict=True):
                total.add_(parameter.detach(), alpha=1 / len(participants))
        self.model = mean


def run(workload: Workload, watch: Stopwatch, threads: int) -> None:
    """Run round after round."""
    plain = Plain(workload)
    while True:
        plain.round(workload.participants(watch.rounds))
        if not watch.round_done(lambda: plain.model):
            return


if __name__ == "__main__":
    main(run, ["torch"])
