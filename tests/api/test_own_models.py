"""A user's own network and data, from Python, end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import sifu
from run_tools import query, scalars, state
from sifu.errors import InputError

SPEC: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"dtype": "float32"},
    "local": {"rate": 0.05, "steps": 2},
    "stop": {"target": 0.0, "max_rounds": 4},
    "regularity": {"kind": "assumed", "factor": 1.0},
}


def small_cnn() -> nn.Module:
    """Return a network for 1 x 8 x 8 images and three classes."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)
    )


def other_cnn() -> nn.Module:
    """Return a network with another number of parameters."""
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 64, 3))


def arrays() -> dict[str, tuple[Any, Any]]:
    generator = np.random.default_rng(7)
    return {
        f"hospital {k}": (
            generator.random((8 + k, 1, 8, 8), dtype=np.float32),
            np.concatenate([[0, 1, 2], generator.integers(0, 3, 5 + k)]),
        )
        for k in range(6)
    }


class Pairs(Dataset[Any]):
    """Map-style data set that is not a TensorDataset."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return torch.as_tensor(self.x[row]), int(self.y[row])


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": arrays,
    "lists": lambda: {name: [x.tolist(), y.tolist()] for name, (x, y) in arrays().items()},
    "tensor data sets": lambda: {
        name: TensorDataset(torch.as_tensor(x), torch.as_tensor(y)) for name, (x, y) in arrays().items()
    },
    "own data sets": lambda: {name: Pairs(x, y) for name, (x, y) in arrays().items()},
}


def test_all_ways_to_hand_over_data_record_the_same(tmp_path: Path) -> None:
    recorded = [
        scalars(sifu.train(SPEC, run=tmp_path / str(number), model=small_cnn, clients=make()).folder)
        for number, make in enumerate(WAYS.values())
    ]
    assert all(values == recorded[0] for values in recorded)


def test_going_on_without_the_model_or_the_data_is_refused(tmp_path: Path) -> None:
    sifu.train(SPEC, run=tmp_path / "run", model=small_cnn, clients=arrays())
    before = state(tmp_path / "run")
    with pytest.raises(InputError, match="open_run"):
        sifu.open_run(tmp_path / "run", clients=arrays()).forget(["hospital 1"])
    with pytest.raises(InputError):
        sifu.open_run(tmp_path / "run", model=small_cnn).forget(["hospital 1"])
    with pytest.raises(InputError, match=r"parameter|model|layout"):
        sifu.open_run(tmp_path / "run", model=other_cnn, clients=arrays()).forget(["hospital 1"], sigma=5.0)
    fewer = {name: pair for name, pair in arrays().items() if name != "hospital 5"}
    with pytest.raises(InputError, match="the data of client 'hospital 5' are missing"):
        sifu.open_run(tmp_path / "run", model=small_cnn, clients=fewer).forget(["hospital 1"])
    renamed = {name.replace("hospital", "clinic"): pair for name, pair in arrays().items()}
    with pytest.raises(InputError, match="the data of client 'hospital 0' are missing"):
        sifu.open_run(tmp_path / "run", model=small_cnn, clients=renamed).forget(["hospital 1"])
    assert state(tmp_path / "run") == before


def test_own_networks_need_an_assumed_regularity(tmp_path: Path) -> None:
    measured = {**SPEC, "regularity": {"kind": "measured"}}
    with pytest.raises(InputError, match=r"regularity\.kind = 'assumed'"):
        sifu.train(measured, run=tmp_path / "run", model=small_cnn, clients=arrays())
    with pytest.raises(InputError, match="rate"):
        sifu.train({**SPEC, "local": {"rate": "auto"}}, run=tmp_path / "run", model=small_cnn, clients=arrays())
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        sifu.train(SPEC, run=tmp_path / "run", model=lambda: 3, clients=arrays())
    with pytest.raises(InputError, match=r"parameter 0\.weight has no shape"):
        sifu.train(SPEC, run=tmp_path / "run", model=lambda: nn.Sequential(nn.LazyLinear(3)), clients=arrays())
    with pytest.raises(InputError, match="TorchScript"):
        sifu.train(SPEC, run=tmp_path / "run", model=lambda: torch.jit.script(nn.Linear(4, 3)), clients=arrays())
    assert not (tmp_path / "run").exists()


def test_what_lies_outside_the_theory_is_named(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    run = sifu.train(SPEC, run=tmp_path / "run", model=model, clients=arrays())
    plan = run.plan(["hospital 1"], sigma=5.0)
    assert plan.level == "conditional"
    named = [premise.statement.lower() for premise in plan.premises if premise.name == "outside the theory"]
    assert any("dropout" in text for text in named), named
    run.forget(["hospital 1"], sigma=5.0)
    assert run.verify().problems == []


def test_an_own_linear_model_is_measured(tmp_path: Path) -> None:
    from sifu.engines.sim import LinearModel

    clients = {name: (x.reshape(len(x), -1), y) for name, (x, y) in arrays().items()}
    spec = {
        "data": {"preprocessing": "fixed"},
        "local": {"steps": 2},
        "stop": {"target": 0.0, "max_rounds": 4},
    }
    model = LinearModel("softmax", 64, 3)
    run = sifu.train(spec, run=tmp_path / "run", model=model, clients=clients)
    (outcome,) = run.forget(["hospital 1"], sigma=2.0)
    assert outcome.level == "proven"
    again = sifu.open_run(tmp_path / "run", model=model, clients=clients)
    again.forget(["hospital 2"], sigma=2.0)
    assert again.verify().problems == []


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (dict, "client"),
        (lambda: {"a": 3, "b": 4}, "'a'"),
        (lambda: {"a": (np.ones((2, 3)), np.array([0, 1])), "b": (np.ones((2, 4)), np.array([0, 1]))}, "'b'"),
        (lambda: {"a": (np.ones((2, 3)), np.array([0, 1, 1])), "b": (np.ones((2, 3)), np.array([0, 1]))}, "'a'"),
        (lambda: {"a": (np.ones((2, 3)), np.array([0, -1])), "b": (np.ones((2, 3)), np.array([0, 1]))}, "'a'"),
        (lambda: {"a": (np.full((2, 3), np.nan), np.array([0, 1])), "b": (np.ones((2, 3)), np.array([0, 1]))}, "'a'"),
        (lambda: {"a": (np.array([["x"]]), np.array([0])), "b": (np.ones((1, 1)), np.array([0]))}, "'a'"),
        (lambda: {"": (np.ones((2, 3)), np.array([0, 1])), "b": (np.ones((2, 3)), np.array([0, 1]))}, "name"),
        (lambda: [("a", 1)], "client"),
        (lambda: {"only": (np.ones((2, 3)), np.array([0, 1]))}, "client"),
        (lambda: {"a": (np.ones((2, 3)), np.array([0, 1])), "b": TensorDataset(torch.ones(2, 3))}, "client"),
    ],
    ids=["none", "numbers", "shapes", "labels", "negative", "nan", "text", "no name", "a list", "one", "mixed"],
)
def test_bad_data_from_python_is_refused_by_name(tmp_path: Path, make: Callable[[], Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        sifu.train({"local": {"steps": 2}}, run=tmp_path / "run", clients=make())
    assert not (tmp_path / "run" / "run.db").exists()


def test_terms_from_python_are_checked(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    before = state(own_trained)
    for call, word in (
        (lambda: run.plan("client-000"), "list of names"),
        (lambda: run.forget("client-000"), "list of names"),
        (lambda: run.plan(["client-000"], epsilom=3), "epsilom"),
        (lambda: run.plan(["client-000"], epsilon="3"), "epsilon"),
        (lambda: run.plan(["client-000"], sigma="much"), "sigma"),
        (lambda: run.plan(["client-000"], sigma=True), "sigma"),
        (lambda: run.plan([3]), "client"),
        (lambda: run.forget(["client-000"], 7), "request id"),
        (lambda: run.forget(["client-000"], level="best"), "level must be one of"),
    ):
        with pytest.raises(InputError, match=word):
            call()
    assert state(own_trained) == before


def test_the_spec_may_be_a_spec_a_mapping_or_a_file(tmp_path: Path) -> None:
    mapping = {"data": {"clients": 5}, "local": {"steps": 1}, "stop": {"target": 0.0, "max_rounds": 2}}
    path = tmp_path / "spec.toml"
    path.write_text("[data]\nclients = 5\n[local]\nsteps = 1\n[stop]\ntarget = 0.0\nmax_rounds = 2\n")
    recorded = [
        scalars(sifu.train(given, run=tmp_path / str(k)).folder)
        for k, given in enumerate([mapping, sifu.Spec.from_mapping(mapping), path, str(path)])
    ]
    assert all(values == recorded[0] for values in recorded)
    assert query(tmp_path / "0", "SELECT COUNT(*) FROM clients") == [(5,)]


class Normalised(nn.Module):
    """Module with batch normalisation after a layer, which may be pretrained and frozen."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        normalise = nn.BatchNorm1d(64)
        if frozen:
            normalise.requires_grad_(False).running_mean.fill_(0.5)  # type: ignore[union-attr, operator]
        self.layers = nn.Sequential(nn.Flatten(), normalise, nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x)
        return scores


def frozen_normalisation() -> nn.Module:
    return Normalised(frozen=True)


def recorded_and_counted(run: sifu.Run, module: nn.Module) -> tuple[Any, list[int]]:
    """Return correct predictions client by client: the counts of the engine, and the counts of a module."""
    with run.reader() as reader:
        vector = reader.load_model(reader.tip)
    recorded = run.engine().evaluate(vector, np.arange(len(arrays()))).correct.tolist()
    counted = [int((module(torch.as_tensor(x)).argmax(1).numpy() == y).sum()) for x, y in arrays().values()]
    return recorded, counted


@pytest.mark.parametrize("make", [small_cnn, Normalised, frozen_normalisation])
def test_the_module_of_a_run_computes_as_its_accuracy_was_recorded(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    spec = SPEC | {"stop": {"target": 0.0, "max_rounds": 20}}
    run = sifu.train(spec, run=tmp_path / "run", model=make, clients=arrays())
    module = run.model()
    recorded, counted = recorded_and_counted(run, module)
    assert recorded == counted
    assert recorded_and_counted(run, module.eval()) == (recorded, recorded)
    with pytest.raises(InputError, match=r"open it with the function that makes it"):
        sifu.open_run(tmp_path / "run").model()
    with pytest.raises(InputError, match="not those of the run"):
        sifu.open_run(tmp_path / "run", model=other_cnn).model()


@pytest.mark.parametrize("make", [Normalised, frozen_normalisation])
def test_an_exported_module_in_plain_eval_is_the_model_that_was_evaluated(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    """Running statistics are averaged and exported, except pretrained frozen ones, which the function makes."""
    spec = SPEC | {"stop": {"target": 0.0, "max_rounds": 20}}
    run = sifu.train(spec, run=tmp_path / "run", model=make, clients=arrays())
    path = run.export(tmp_path / "model.safetensors")
    loaded = sifu.load_model(path, module=make)
    with pytest.raises(InputError, match=r"your own module: name the function.*--module"):
        sifu.load_model(path)
    with pytest.raises(InputError, match="not those of the run"):
        sifu.load_model(path, module=other_cnn)
    plain = make()
    missing, beyond = plain.load_state_dict(load_file(path), strict=False)
    assert beyond == []
    statistics = dict(plain.named_buffers())["layers.1.running_mean"]
    if make is Normalised:
        assert missing == []
        assert statistics.abs().min() > 0.0
        with pytest.raises(InputError, match="this model has buffers"):
            run.plan(["hospital 1"], method="sifu")
    else:
        assert missing == ["layers.1.running_mean", "layers.1.running_var"]
        assert statistics.unique().tolist() == [0.5]
        run.plan(["hospital 1"], method="sifu", sigma=5.0)
    recorded, counted = recorded_and_counted(run, plain.eval())
    assert recorded == counted
    x, _ = next(iter(arrays().values()))
    np.testing.assert_array_equal(loaded.scores(x), plain(torch.as_tensor(x)).detach().numpy())
    with pytest.raises(AssertionError):  # negative control: the statistics of a batch give other scores
        np.testing.assert_array_equal(loaded.scores(x), plain.train()(torch.as_tensor(x)).detach().numpy())
    (outcome,) = run.forget(["hospital 1"], method="scratch")
    assert (outcome.level, run.verify().problems) == ("conditional", [])


class Answers(nn.Module):
    """Module that returns its outputs in the forms that some libraries use."""

    def __init__(self, answer: str = "dict") -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(64, 3), answer

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.layer(x.flatten(1))
        return {"logits": scores} if self.answer == "dict" else (scores, x)


def needs_an_argument(width: int) -> nn.Module:
    return nn.Linear(width, 3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Answers(), r"a Answers instance.*model=Answers"),
        (Answers, r"gives a dict for a batch of samples: its forward must return only a tensor"),
        (lambda: Answers("tuple"), r"gives a tuple for a batch"),
        (needs_an_argument, r"could not be made.*takes no arguments"),
        (lambda: needs_an_argument, r"must make a torch.nn.Module with parameters, it made function"),
        (lambda: nn.Flatten(), r"must make a torch.nn.Module with parameters, it made Flatten"),
        (lambda: {"net": 1}, r"it made dict"),
        ("resnet", r"must be a function that makes a torch.nn.Module, found 'resnet'"),
        (lambda: nn.Linear(5, 3), r"cannot take the samples of client 'hospital 0'"),
        (lambda: nn.ModuleList([nn.Linear(64, 3)]), r"cannot take the samples of client 'hospital 0'"),
    ],
)
def test_a_wrong_model_is_a_sentence(tmp_path: Path, model: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        sifu.train(SPEC, run=tmp_path / "run", model=model, clients=arrays())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("clients", [5, [1, 2], {"a": 3, "b": 4}])
def test_wrong_clients_are_a_sentence(tmp_path: Path, clients: Any) -> None:
    with pytest.raises(InputError, match=r"client"):
        sifu.train(SPEC, run=tmp_path / "run", model=small_cnn, clients=clients)
