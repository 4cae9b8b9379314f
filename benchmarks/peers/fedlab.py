"""FedLab: its standalone pipeline with the serial FedAvg trainer, one process, clients one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peers.contest import Stopwatch, first_network, let_torchvision_in, main

_declared = let_torchvision_in()  # must come before the imports that need it

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from peers.workloads import Setting, Workload
from torch import Tensor


class Batches:
    """Epoch of prepared batches: a lighter loader than torch's, which FedLab accepts as well."""

    def __init__(self, x: Tensor, y: Tensor, batch: int) -> None:
        self._x, self._y, self._batch = x, y, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._batch == len(self._x):
            yield self._x, self._y
            return
        for rows in torch.randperm(len(self._x)).split(self._batch):
            yield self._x[rows], self._y[rows]


class Federation:
    """FedLab data set with a loader for each client."""

    def __init__(self, workload: Workload) -> None:
        self._data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(workload.x, workload.y, strict=True)]

    def get_dataloader(self, client: int, batch_size: int) -> Batches:
        """Return the batches of one client."""
        return Batches(*self._data[client], batch_size)


class Trainer(FedAvgSerialClientTrainer):
    """FedLab's trainer with momentum that restarts for each client; FedLab would continue it with the next one."""

    def use(self, setting: Setting) -> None:
        """Set the optimizer's settings."""
        self._setting = setting
        self.setup_optim(setting.steps // (setting.samples // setting.batch), setting.batch, setting.rate)

    def train(self, model_parameters: Tensor, train_loader: Batches) -> list[Tensor]:
        """Train one client."""
        self.optimizer = torch.optim.SGD(self._model.parameters(), self._setting.rate, self._setting.momentum)
        return super().train(model_parameters, train_loader)


class Handler(FedAvgServerHandler):
    """FedLab's server with the common schedule."""

    workload: Workload

    def sample_clients(self) -> list[int]:
        """Return the participants of the round."""
        return self.workload.participants(self.round)


class Pipeline(StandalonePipeline):
    """FedLab's loop, which asks the stopwatch instead of evaluating."""

    watch: Stopwatch

    def evaluate(self) -> None:
        """Stop when enough rounds are timed."""
        if not self.watch.round_done(lambda: list(self.handler.model.parameters())):
            self.handler.global_round = self.handler.round


def run(workload: Workload, watch: Stopwatch, threads: int) -> None:
    """Run `StandalonePipeline.main`."""
    setting, model = workload.setting, first_network(workload)
    handler = Handler(model, global_round=10**9, sample_ratio=setting.participants / setting.clients)
    handler.workload = workload
    trainer = Trainer(model, setting.clients)
    trainer.setup_dataset(Federation(workload))
    trainer.use(setting)
    pipeline = Pipeline(handler, trainer)
    pipeline.watch = watch
    pipeline.main()


if __name__ == "__main__":
    main(run, ["fedlab", "torch"])
