"""Bad data and settings: refused with a message before anything has run."""

from __future__ import annotations

import numpy as np
import pytest

from sifu.core.engine import Engine
from sifu.engines.sim import LocalTraining, SimulatedFederation, SimulationSettings
from sifu.errors import InputError

TRAINING = LocalTraining(0.1, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "local rate must be a positive number, found 0.0"),
        ({"rate": float("nan")}, "local rate must be a positive number, found nan"),
        ({"steps": 0}, "local steps must be a whole number of at least 1, found 0"),
        ({"steps": 2.5}, "local steps must be a whole number of at least 1, found 2.5"),
        ({"batch_size": 0}, "batch size must be a whole number of at least 1, or None for all data, found 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, found 1.0"),
        ({"weight_decay": -1.0}, "weight decay must be a number of at least 0, found -1.0"),
    ],
)
def test_local_training(settings, message):
    with pytest.raises(InputError, match=message):
        LocalTraining(**{"rate": 0.1, "steps": 5, **settings})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "float64, float32 or tf32, found dtype 'float16'"),
    ],
)
def test_federation_settings(make_federation, options, message):
    with pytest.raises(InputError, match=message):
        make_federation(**options)


def broken(make_clients, kind="softmax", **changes):
    clients = make_clients(kind, sizes=(4, 6, 5))
    for name, value in changes.items():
        setattr(clients[1], name, value)
    return clients


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((0, 5)), "y": np.zeros(0, int)}, "client 'client-1' has no samples"),
        ({"x": np.full((6, 5), np.nan)}, "x of client 'client-1' holds 30 values that are NaN or Inf"),
        ({"x": np.zeros((6, 4))}, r"client 'client-1' has samples of shape \(6, 4\).* as client 'client-0' has"),
        ({"x": np.zeros(6)}, r"client 'client-1' has samples of shape \(6,\)"),
        ({"name": "client-0"}, "two clients are called 'client-0'"),
        ({"y": np.array([0, 1, 2, -1, -2, 0])}, r"client 'client-1' has 2 labels outside 0..2, the first is -1"),
        ({"y": np.array([0, 1, 2, 0.5, 0, 0])}, r"1 labels outside 0..2, the first is 0.5"),
        ({"y": np.array([0, 1, np.inf, 0, 0, 0])}, "y of client 'client-1' holds 1 values that are NaN or Inf"),
        ({"y": np.zeros(5, int)}, r"has 6 samples but targets of shape \(5,\)"),
        ({"y": np.zeros((6, 2), int)}, r"labels of shape \(6, 2\); one label per sample"),
    ],
)
def test_classification_data(make_clients, changes, message):
    from sifu.engines.sim import LinearModel

    with pytest.raises(InputError, match=message):
        SimulatedFederation(broken(make_clients, **changes), LinearModel("softmax", 5, 3), TRAINING)


def test_other_targets(make_clients):
    with pytest.raises(InputError, match=r"6 labels outside 0..1, the first is 2"):
        SimulatedFederation(broken(make_clients, "logistic", y=np.full(6, 2)), "logistic", TRAINING)
    with pytest.raises(InputError, match=r"targets of shape \(6, 2\); 3 values each were expected"):
        SimulatedFederation(broken(make_clients, "least_squares", y=np.zeros((6, 2))), "least_squares", TRAINING)
    clients = broken(make_clients)
    clients[1].x[0, :3] = 1e60
    with pytest.raises(InputError, match="x of client 'client-1' holds 3 values that are NaN or Inf"):
        SimulatedFederation(clients, "softmax", TRAINING, SimulationSettings(dtype="float32"))
    with pytest.raises(InputError, match="at least one client, found none"):
        SimulatedFederation([], "softmax", TRAINING)


def test_read_only_and_integer_data_are_taken(make_clients, recwarn):
    clients = make_clients("softmax", sizes=(4, 6))
    for client in clients:
        client.x = np.round(client.x * 10).astype(np.uint8)
        client.x.setflags(write=False)
        client.y.setflags(write=False)
    for strategy in ("loop", "auto"):
        federation = SimulatedFederation(clients, "softmax", TRAINING, SimulationSettings(strategy=strategy))
        assert federation.clients[0].samples == 4
    assert not [warning for warning in recwarn if "writ" in str(warning.message)]


def test_it_is_an_engine(make_federation):
    engine: Engine = make_federation(momentum=0.5, weight_decay=0.1, batch_size=4)
    facts = engine.facts
    assert (facts.local_rate, facts.momentum, facts.weight_decay) == (0.1, 0.5, 0.1)
    assert (facts.batch_size, facts.dtype) == (4, "float64")
    assert [client.name for client in engine.clients] == [f"client-{i}" for i in range(5)]
    assert all(client.local_steps == 5 for client in engine.clients)
