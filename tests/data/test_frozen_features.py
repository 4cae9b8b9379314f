"""Frozen features: the module is applied to each sample separately, and certificates of a head on them are proven."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sifu  # noqa: E402
from sifu.data import (  # noqa: E402
    ClientData,
    from_dataset,
    frozen_features,
    load,
    partition,
)
from sifu.errors import InputError  # noqa: E402


def digit_clients(count: int, samples: int) -> tuple[ClientData, ...]:
    dataset = load("digits")
    parts = partition("iid", dataset.y_train, count, samples, np.random.default_rng(0))
    return from_dataset(dataset, parts, flat=False)


def filters(count: int) -> torch.nn.Module:
    """Return a module of random filters followed by means over 2 x 2 regions."""
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(1, count, 3, padding=1, dtype=torch.float64)
    return torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())


def test_features_of_a_sample_do_not_depend_on_the_samples_beside_it() -> None:
    mixing = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, dtype=torch.float64),
        torch.nn.BatchNorm2d(3, dtype=torch.float64),
        torch.nn.Dropout(0.5),
    )
    clients = digit_clients(3, 6)
    whole = frozen_features(clients, mixing)
    alone = frozen_features([ClientData("one", clients[1].x[2:3], clients[1].y[2:3])], mixing)
    np.testing.assert_allclose(alone[0].x[0], whole[1].x[2], rtol=1e-12)
    assert mixing.training  # the mode is unchanged
    # Negative control: in training mode batch norm and dropout would make them differ.
    with torch.no_grad():
        single, all_ = (mixing(torch.as_tensor(x)).numpy() for x in (clients[1].x[2:3], clients[1].x))
    assert not np.allclose(single[0], all_[2])


class Remembers(torch.nn.Module):
    """Module that divides samples by the largest one so far, kept in an attribute or a class variable."""

    largest = 0.0

    def __init__(self, owner: type | None = None) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, x):
        owner = self.owner or self
        owner.largest = max(owner.largest, float(x.max()))
        return x.flatten(1) / owner.largest


def test_a_client_shapes_no_features_of_the_next_one() -> None:
    clients = [ClientData(name, np.full((2, 3), value), np.array([0, 1])) for name, value in (("a", 9.0), ("b", 1.0))]
    _, after = frozen_features(clients, Remembers(), norm=None)
    np.testing.assert_array_equal(after.x, 1.0)
    with pytest.raises(InputError, match=r"Remembers\.largest"):
        frozen_features(clients, Remembers(Remembers), norm=None)


@pytest.mark.parametrize("norm", [1.0, 4.0])
def test_every_sample_has_the_length_asked_for(norm: float) -> None:
    mapped = frozen_features(digit_clients(2, 5), filters(8), norm=norm)
    for client in mapped:
        np.testing.assert_allclose(np.linalg.norm(client.x, axis=1), norm, rtol=1e-12)


def test_features_are_the_modules_output_when_they_are_not_scaled() -> None:
    clients, module = digit_clients(2, 5), filters(4)
    mapped = frozen_features(clients, module, norm=None)
    assert mapped[0].x.shape == (5, 4 * 2 * 2)
    np.testing.assert_array_equal(mapped[1].x, module(torch.as_tensor(clients[1].x)).detach().numpy())


def test_a_module_without_a_row_for_each_sample_is_refused() -> None:
    class Nothing(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, 0] * float("nan")

    with pytest.raises(InputError, match="client-000"):
        frozen_features(digit_clients(2, 5), Nothing())
    with pytest.raises(InputError, match="length"):
        frozen_features(digit_clients(2, 5), torch.nn.Identity(), norm=0.0)


def test_a_head_on_frozen_features_is_proven(tmp_path: Path) -> None:
    mapped = frozen_features(digit_clients(30, 10), filters(12), norm=4.0)
    spec = {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "softmax", "outputs": 10},
        "local": {"steps": 5},
        "stop": {"target": 0.0, "max_rounds": 6},
    }
    run = sifu.train(spec, run=tmp_path / "run", clients=mapped)
    beta = max(client.smoothness for client in run.reader().clients())
    assert beta <= (4.0**2 + 1.0) / 2.0 * (1.0 + 1e-6)
    (outcome,) = run.forget(["client-003"], sigma=0.5, level="proven")
    assert outcome.level == "proven"
    assert run.verify().holds
