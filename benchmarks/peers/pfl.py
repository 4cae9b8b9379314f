"""Apple's pfl-research: `FederatedAveraging` on a `SimulatedBackend`, one process, clients one after the other."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from peers.contest import Stopwatch, first_network, main
from peers.workloads import Workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional


class Asked(TrainingProcessCallback):
    """Callback that asks the stopwatch after each round."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Stop when enough rounds are timed."""
        return not self._watch.round_done(lambda: list(model.pytorch_model.parameters())), Metrics()


def _with_loss(module: nn.Module) -> nn.Module:
    """Add the methods that pfl needs to the module; its metrics are constant, because nothing is evaluated."""
    module.loss = lambda x, y: functional.cross_entropy(module(x), y)  # type: ignore[assignment]
    module.metrics = lambda x, y: {"nothing": Weighted(0.0, 1.0)}  # type: ignore[assignment]
    return module


def run(workload: Workload, watch: Stopwatch, threads: int) -> None:
    """Run pfl's own loop without printing its metrics; clients' data are tensors, shuffled once per round."""
    setting = workload.setting
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(workload.x, workload.y, strict=True)]
    one_epoch = setting.samples // setting.batch

    def dataset(client: int) -> PyTorchTensorDataset:
        tensors: tuple[Any, ...] = data[client]
        if one_epoch > 1:
            order = torch.randperm(setting.samples)
            tensors = tuple(tensor[order] for tensor in tensors)
        return PyTorchTensorDataset(tensors, user_id=str(client))

    module = _with_loss(first_network(workload))
    model = PyTorchModel(
        module,
        functools.partial(torch.optim.SGD, momentum=setting.momentum),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    scheduled = itertools.cycle(int(client) for client in workload.schedule.ravel())
    federated = FederatedDataset(dataset, lambda: next(scheduled))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=setting.participants,
            val_cohort_size=None,
        ),
        SimulatedBackend(federated, federated, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=setting.batch,
            local_num_epochs=setting.steps // one_epoch,
            local_learning_rate=setting.rate,
        ),
        callbacks=[Asked(watch)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(run, ["pfl", "torch"])
