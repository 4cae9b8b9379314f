"""The two workloads of the comparison, and the file that each contestant reads: data, first model, schedule.

numpy and torch suffice to read a workload; making one needs sifu. Every contestant gets the same file, so they start
from the same model, see the same samples and train the same clients in the same rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

SCHEDULED_ROUNDS = 1000
SEED = 2024


@dataclass(frozen=True)
class Setting:
    """Data, model and training of a workload: FedAvg, float32."""

    name: str
    title: str
    data: str
    partition: str
    shape: tuple[int, ...]
    clients: int
    samples: int
    participants: int
    steps: int
    batch: int
    rate: float
    momentum: float
    check_rounds: int
    """Rounds after which the models of the contestants are compared."""

    @property
    def samples_a_round(self) -> int:
        """Number of samples in the forward and backward passes of one round."""
        return self.participants * self.steps * self.batch


A = Setting(
    name="A",
    title="MNIST softmax regression, 10 of 100 clients, K = 10, whole batch of 100",
    data="mnist",
    partition="one_class",
    shape=(784,),
    clients=100,
    samples=100,
    participants=10,
    steps=10,
    batch=100,
    rate=0.01,
    momentum=0.0,
    check_rounds=20,
)
B = Setting(
    name="B",
    title="CIFAR-10 CNN, 5 of 100 clients, K = 5, batch 20, momentum 0.9",
    data="cifar10",
    partition="dirichlet",
    shape=(3, 32, 32),
    clients=100,
    samples=100,
    participants=5,
    steps=5,
    batch=20,
    rate=0.01,
    momentum=0.9,
    check_rounds=15,
)
SETTINGS = {"A": A, "B": B}


@dataclass(frozen=True)
class Workload:
    """A setting with its data: x is (clients, samples, ...), y (clients, samples), schedule (rounds, participants)."""

    setting: Setting
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    schedule: NDArray[np.int64]
    first: tuple[NDArray[np.float32], ...]
    source: str

    def participants(self, round_number: int) -> list[int]:
        """Return the clients that train in a round; the schedule repeats when it is used up."""
        return [int(client) for client in self.schedule[round_number % len(self.schedule)]]


class Softmax(nn.Module):
    """Softmax regression that counts the samples it is trained on."""

    seen = 0

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of a batch."""
        type(self).seen += len(x)
        return self.linear(x)


class ConvNet(nn.Module):
    """CIFAR-10 network of the paper that counts the samples it is trained on."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3)
        self.hidden, self.scores = nn.Linear(1024, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of a batch."""
        type(self).seen += len(x)
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.conv3(x)).flatten(1)
        return self.scores(functional.relu(self.hidden(x)))


def network(setting: Setting, *, seed: int = 0) -> nn.Module:
    """Return the network of a setting: A starts from zeros, B from random values."""
    if setting.name == "A":
        module = Softmax(setting.shape[0])
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        return module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvNet()


def make(setting: Setting, folder: str | None = None) -> Workload:
    """Make a workload from real data in `folder` (or in sifu's default place), else from synthetic data of the same
    shape.
    """
    from sifu.errors import InputError

    generator = np.random.default_rng(SEED)
    try:
        x, y = _real(setting, folder, generator)
        source = f"real ({setting.data})"
    except InputError:
        if folder:
            raise  # a folder was named, so report what is wrong with it
        x, y = _synthetic(setting, generator)
        source = "synthetic"
    schedule = np.stack(
        [
            np.sort(generator.choice(setting.clients, size=setting.participants, replace=False))
            for _ in range(SCHEDULED_ROUNDS)
        ]
    )
    first = tuple(parameter.detach().numpy().copy() for parameter in network(setting, seed=SEED).parameters())
    return Workload(setting, x, y, schedule, first, source)


def _real(
    setting: Setting, folder: str | None, generator: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    from sifu.data import from_dataset, partition
    from sifu_paper.data import load

    dataset = load(setting.data, folder)
    indices = partition(setting.partition, dataset.y_train, setting.clients, setting.samples, generator, alpha=0.1)
    clients = from_dataset(dataset, indices, "float32", flat=len(setting.shape) == 1)
    return np.stack([client.x for client in clients]), np.stack([client.y for client in clients])


def _synthetic(setting: Setting, generator: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return samples around ten prototypes with values from 0 to 1: learnable, and shaped like the real data."""
    classes = np.arange(setting.clients) * 10 // setting.clients
    y = np.repeat(classes[:, None], setting.samples, axis=1)
    if setting.partition != "one_class":
        y = generator.permuted(y.reshape(-1)).reshape(y.shape)
    prototypes = generator.random((10, math.prod(setting.shape)), dtype=np.float32)
    noise = generator.random((*y.shape, math.prod(setting.shape)), dtype=np.float32)
    x = 0.5 * prototypes[y] + 0.5 * noise
    return x.reshape(*y.shape, *setting.shape), y.astype(np.int64)


def save(workload: Workload, path: Path) -> None:
    """Write the file that contestants read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = {f"first_{number}": parameter for number, parameter in enumerate(workload.first)}
    np.savez(
        path,
        setting=workload.setting.name,
        source=workload.source,
        x=workload.x,
        y=workload.y,
        schedule=workload.schedule,
        **first,
    )


def read(path: str | Path) -> Workload:
    """Read a workload as `save` wrote it."""
    with np.load(path) as file:
        first = tuple(file[f"first_{number}"] for number in range(sum(key.startswith("first_") for key in file.files)))
        return Workload(
            SETTINGS[str(file["setting"])], file["x"], file["y"], file["schedule"], first, str(file["source"])
        )
