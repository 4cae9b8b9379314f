"""Models: layouts, fresh starts per branch, networks, and layers outside the theory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sifu.core.engine import Position
from sifu.engines.sim import (
    LinearModel,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
    make_model,
)
from sifu.engines.sim.embedded_clients import OBJECTIVES
from sifu.errors import InputError
from sifu.theory.facts import BUFFERS

ALL = np.arange(5)


@pytest.mark.parametrize(("kind", "outputs"), [("softmax", 3), ("logistic", 1), ("least_squares", 3)])
def test_linear_layout_is_weight_then_bias(make_federation, kind, outputs):
    layout = make_federation(kind).layout
    assert layout.names == ("weight", "bias")
    assert layout.shapes == ((5, outputs), (outputs,))
    assert layout.dtype == "float64"


def test_initial_models_of_linear_models(make_federation):
    zeros = make_federation().initial_model(0)
    assert not zeros.any()
    random = make_federation(model=LinearModel("softmax", 5, 3, init="random"), dtype="float32")
    first, again, second = (random.initial_model(branch) for branch in (0, 0, 1))
    assert first.dtype == np.float32
    assert first.tobytes() == again.tobytes() != second.tobytes()
    assert 0.3 < np.abs(first).max() <= 1 / np.sqrt(5)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_networks_train_replay_and_learn(make_clients, name, dtype):
    clients = make_clients("softmax", sizes=(12, 20), features=64)
    for client in clients:
        client.x = client.x.reshape(-1, 8, 8)
    state = torch.random.get_rng_state()
    training = LocalTraining(0.1, 10, batch_size=8, momentum=0.9)
    federation, twin = (SimulatedFederation(clients, name, training, SimulationSettings(dtype=dtype)) for _ in range(2))
    start = federation.initial_model(0)
    assert start.dtype == dtype
    assert start.tobytes() == twin.initial_model(0).tobytes() != federation.initial_model(1).tobytes()
    model = start
    for number in range(6):
        result = federation.run_round(model, Position(0, number), np.arange(2))
        other = twin.run_round(model, Position(0, number), np.arange(2))
        assert result.model.tobytes() == other.model.tobytes()
        model = result.model
    assert federation.evaluate(model, np.arange(2)).loss < 0.8 * federation.evaluate(start, np.arange(2)).loss
    assert federation.evaluate(model, np.arange(2)).accuracy > 0.6
    assert not federation.facts.smooth_model
    assert federation.facts.outside == ()
    assert torch.equal(state, torch.random.get_rng_state())  # torch's own generator is unchanged


def noisy_network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def test_dropout_and_batch_normalisation_are_named_and_replay(make_federation):
    federation = make_federation(model=ModuleModel(noisy_network), batch_size=None)
    assert federation.facts.outside == (BUFFERS, "dropout")
    assert federation.layout.names == (
        "0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias", "1.running_mean", "1.running_var",
    )  # fmt: skip
    start = federation.initial_model(0)
    first = federation.run_round(start, Position(0, 0), ALL)
    evaluation = federation.evaluate(start, ALL)
    again = federation.run_round(start, Position(0, 0), ALL)
    assert first.model.tobytes() == again.model.tobytes()
    assert (federation.evaluate(start, ALL).loss_sum == evaluation.loss_sum).all()
    assert first.model.tobytes() != federation.run_round(start, Position(0, 1), ALL).model.tobytes()
    alone = federation.run_round(start, Position(0, 0), np.array([3])).model
    among = federation.run_round(start, Position(0, 0), np.array([1, 3])).model
    other = federation.run_round(start, Position(0, 0), np.array([1])).model
    assert np.abs(alone * 12 / 19 + other * 7 / 19 - among).max() < 1e-14


def test_dropout_of_zero_and_other_buffers():
    assert ModuleModel(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))).outside == ()

    class WithBuffer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("offset", torch.ones(2))

    assert ModuleModel(WithBuffer).outside == (BUFFERS,)


def test_a_module_of_a_linear_model_is_the_linear_model(make_federation):
    """nn.Linear through the module path gives the rounds of the softmax model, with transposed weights."""
    linear = make_federation("softmax", rate=0.01, batch_size=4, momentum=0.5)
    assert (linear.plan.rates == 0.01).all()
    module = make_federation(
        "softmax", rate=0.01, batch_size=4, momentum=0.5, model=ModuleModel(lambda: nn.Linear(5, 3))
    )
    start = module.initial_model(0)
    arrays = module.layout.unflatten(start)
    twin = np.concatenate([arrays["weight"].T.reshape(-1), arrays["bias"]])
    expected = linear.layout.unflatten(linear.run_round(twin, Position(0, 0), ALL).model)
    parameters = module.layout.unflatten(module.run_round(start, Position(0, 0), ALL).model)
    assert np.abs(parameters["weight"].T - expected["weight"]).max() < 1e-14
    assert np.abs(parameters["bias"] - expected["bias"]).max() < 1e-14
    assert not module.facts.smooth_model  # nothing can be proven about a user's module


@pytest.mark.parametrize("kind", ["logistic", "least_squares"])
def test_modules_with_other_targets_and_losses(make_federation, kind):
    outputs = 1 if kind == "logistic" else 3
    federation = make_federation(kind, model=ModuleModel(lambda: nn.Linear(5, outputs), kind))
    start = federation.initial_model(0)
    result = federation.run_round(start, Position(0, 0), ALL)
    assert federation.evaluate(result.model, ALL).loss < federation.evaluate(start, ALL).loss
    huber = ModuleModel(
        lambda: nn.Linear(5, outputs), kind, lambda z, t: nn.functional.huber_loss(z, t.view_as(z).double())
    )
    other = make_federation(kind, model=huber).run_round(start, Position(0, 0), ALL)
    assert other.model.tobytes() != result.model.tobytes()


def test_unusable_models_are_sentences(make_federation):
    with pytest.raises(InputError, match="model 'svm' is unknown: use one of softmax, logistic"):
        make_model("svm", (5,), 3)
    with pytest.raises(InputError, match=r"'cnn' needs images .* found samples of shape \(5,\)"):
        make_federation(model="cnn")
    with pytest.raises(InputError, match="takes 9 features, the clients have 5"):
        make_federation(model=LinearModel("softmax", 9, 3))
    with pytest.raises(InputError, match="'logistic' has one output, found 2"):
        LinearModel("logistic", 5, 2)
    with pytest.raises(InputError, match="'zeros' or 'random', found init 'ones'"):
        LinearModel("softmax", 5, 2, init="ones")
    with pytest.raises(InputError, match="cannot take the samples of client 'client-0'"):
        make_federation(model=ModuleModel(lambda: nn.Linear(9, 3)))
    with pytest.raises(InputError, match=r"outputs of shape \(2,\), 3 are needed"):
        make_federation(model=ModuleModel(lambda: nn.Linear(5, 2)), sizes=(5, 40), data_seed=1)
    with pytest.raises(InputError, match="with parameters, it made ReLU"):
        ModuleModel(nn.ReLU)


@pytest.mark.parametrize("kind", ["softmax", "logistic", "least_squares"])
def test_an_objective_is_the_same_wherever_the_outputs_lie(kind):
    """Residuals, losses and hits agree with outputs last and outputs before rows; few distinct
    scores give many ties.
    """
    objective, outputs = OBJECTIVES[kind], 1 if kind == "logistic" else 4
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-1, 2, (3, 50, outputs), generator=generator).to(torch.float64)
    labels = torch.randint(0, max(outputs, 2), (3, 50), generator=generator)
    targets = torch.eye(outputs, dtype=torch.float64)[labels] if outputs > 1 else labels[..., None].to(torch.float64)
    turned = [values.transpose(1, 2).contiguous() for values in (scores, targets)]
    assert torch.allclose(objective.residual(*turned, dim=1).transpose(1, 2), objective.residual(scores, targets))
    assert torch.allclose(objective.row_loss(*turned, dim=1), objective.row_loss(scores, targets))
    assert torch.equal(objective.hits(*turned, dim=1), objective.hits(scores, targets))
    if kind == "softmax":  # of equal scores the first is the prediction, as in numpy's argmax
        assert objective.hits(scores, targets).tolist() == (scores.numpy().argmax(axis=-1) == labels.numpy()).tolist()
