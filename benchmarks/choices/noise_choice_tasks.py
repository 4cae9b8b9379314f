"""Federations on which `noise_choice.py` compares methods of choosing the noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.spec import Spec
from sifu.data import ClientData, Dataset, from_dataset, partition
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.run.clients_and_engine import clients_from_spec
from sifu_paper.data import load


@dataclass(frozen=True)
class Task:
    """Federation, its budget, and its requests."""

    name: str
    spec: dict[str, Any]
    requests: int = 1
    clients_a_request: int = 5
    features: bool = False

    def requested_clients(self) -> list[list[str]]:
        """Return the requesting clients of each request."""
        size = self.clients_a_request
        count = self.spec["data"]["clients"]
        width = max(3, len(str(count - 1)))
        return [[f"client-{k:0{width}d}" for k in range(n * size, (n + 1) * size)] for n in range(self.requests)]


def linear(name: str, clients: int, samples: int, target: float, epsilon: float = 10.0, **other: Any) -> dict[str, Any]:
    """Return the spec of softmax regression; `other` gives keys of `data`, `local` and `server`."""
    scale = "standard" if name == "digits" else "unit"
    return {
        "seed": 3,
        "data": {
            "name": "digits" if name == "digits" else "python",
            "clients": clients,
            "samples_per_client": samples,
            "normalise": scale,
            "preprocessing": "fixed",
        }
        | other.get("data", {}),
        "local": {"steps": 10} | other.get("local", {}),
        "server": other.get("server", {}),
        "stop": {"target": target, "max_rounds": 3000},
        "privacy": {"epsilon": epsilon, "delta": 0.01},
    }


def dirichlet(alpha: float) -> dict[str, Any]:
    """Return the spec section of a partition with random class proportions per client."""
    return {"data": {"partition": "dirichlet", "alpha": alpha}}


ONE_CLASS = {"data": {"partition": "one_class"}}

HALF = {"server": {"participation": "poisson(0.5)"}}

TASKS = (
    Task("digits 160x10 iid, eps 10", linear("digits", 160, 10, 0.95)),
    Task("digits 160x10 iid, eps 1", linear("digits", 160, 10, 0.95, 1.0)),
    Task("digits 50x30 iid, eps 10", linear("digits", 50, 30, 0.96), clients_a_request=1),
    Task("digits 140x10 one class, eps 10", linear("digits", 140, 10, 0.94, **ONE_CLASS)),
    Task("digits 110x14 poisson 0.5, eps 10", linear("digits", 110, 14, 0.95, **HALF), clients_a_request=3),
    Task("digits 160x10 iid, eps 10, 4 in a row", linear("digits", 160, 10, 0.95), requests=4),
    Task("cifar10 features 1000x10 iid, eps 10", linear("cifar10", 1000, 10, 0.43), features=True),
    Task("cifar10 features 1000x10 iid, eps 1", linear("cifar10", 1000, 10, 0.43, 1.0), features=True),
    Task("mnist 1000x5 iid, eps 10", linear("mnist", 1000, 5, 0.88), clients_a_request=10),
    Task("mnist 1000x5 iid, eps 1", linear("mnist", 1000, 5, 0.88, 1.0), clients_a_request=1),
    Task("fashion 500x8 one class, eps 10", linear("fashion_mnist", 500, 8, 0.76, **ONE_CLASS), clients_a_request=1),
    Task("fashion 400x10 iid, eps 10", linear("fashion_mnist", 400, 10, 0.79), clients_a_request=1),
    Task("mnist 300x15 dirichlet 0.5, eps 10", linear("mnist", 300, 15, 0.88, **dirichlet(0.5)), clients_a_request=2),
    Task("mnist 2000x2 iid, eps 10", linear("mnist", 2000, 2, 0.86), clients_a_request=1),
)

SMOKE = (Task("digits 40x10 iid, eps 10", linear("digits", 40, 10, 0.95), clients_a_request=1),)


def trained_convolutions(public: Dataset, *, filters: int = 32, epochs: int = 8, seed: int = 0) -> Any:
    """Return the backbone of a small network trained on public data, in place of a pretrained one."""
    import torch

    x = torch.as_tensor(public.features("train", dtype="float32", flat=False, normalise="unit"))
    y = torch.as_tensor(np.asarray(public.y_train, dtype=np.int64))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = torch.nn.Sequential(
            torch.nn.Conv2d(x.shape[1], filters, 5, stride=2, padding=2),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(filters, 2 * filters, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(2),
            torch.nn.Flatten(),
        )
        head = torch.nn.Linear(8 * filters, int(y.max()) + 1)
        optimiser = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=2e-3)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(x)), 64):
                loss = torch.nn.functional.cross_entropy(head(backbone(x[batch])), y[batch])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return backbone.requires_grad_(False).double()


def clients_of(task: Task, data: Path | None) -> Any:
    """Return the clients of a task: their images, or features from a network that saw only CIFAR-100."""
    spec, name = Spec.from_mapping(task.spec), task.name.split()[0]
    dataset = load({"fashion": "fashion_mnist"}.get(name, name), data)
    if not task.features:
        return clients_from_spec(replace(spec, data=replace(spec.data, name="npz")), dataset=dataset)
    parts = partition(
        spec.data.partition,
        dataset.y_train,
        spec.data.clients,
        spec.data.samples_per_client,
        np.random.default_rng(spec.seed),
    )
    images = from_dataset(dataset, parts, flat=False)
    network = trained_convolutions(load("cifar100", data))
    features = NetworkFeatures(network, images[0].x.shape[1:], norm=4.0)
    return [ClientData(client.name, features(client.x), client.y) for client in images]


def folder_name(task: Task) -> str:
    """Return a task's name as a file name."""
    return task.name.replace(" ", "_").replace(",", "")
