"""Apps like Flower's quickstarts (PyTorch with BatchNorm, a Lightning loop, scikit-learn), unchanged or with the diff
of docs/flower.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_federation import HASTY, small_spec
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid
from served_runs import new_key
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from torch import nn

import sifu
from run_tools import Command
from sifu.core.spec import Spec, commented_toml
from sifu.engines.flower.wire import EVALUATE, TRAIN
from sifu.errors import InputError
from sifu.flower import ForgettingFedAvg
from sifu.requests.client_list import ask_for_change, fingerprint_of_file
from sifu.server.flower_app import serve_on_flower
from sifu.server.flower_settings import OwnServer, Settings

RUN_CONFIG = {"local-epochs": 1, "batch-size": 16}


def share_of(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return a node's part of the digits."""
    x, y = load_digits(return_X_y=True)
    part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return (x[part::parts][:40] / 16.0).astype(np.float32), y[part::parts][:40]


class Net(nn.Module):
    """Small network with a layer whose state contains an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def torch_app() -> ClientApp:
    """Return an app like Flower's PyTorch quickstart."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x, y = share_of(context)
        optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
        for _ in range(RUN_CONFIG["local-epochs"]):
            for batch in torch.arange(len(y)).split(RUN_CONFIG["batch-size"]):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(torch.from_numpy(x[batch])), torch.from_numpy(y[batch]))
                loss.backward()
                optimizer.step()
        metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": len(y)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        model.eval()
        x, y = share_of(context)
        with torch.no_grad():
            outputs = model(torch.from_numpy(x))
        accuracy = float((outputs.argmax(1).numpy() == y).mean())
        loss = float(nn.functional.cross_entropy(outputs, torch.from_numpy(y)))
        metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def sklearn_app(*, evaluates: bool = True) -> ClientApp:
    """Return an app like Flower's scikit-learn quickstart: a loss called `test_logloss`, arrays without a framework."""
    app = ClientApp()

    def model_of(msg: Message) -> SGDClassifier:
        model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, random_state=0)
        arrays = msg.content["arrays"].to_numpy_ndarrays()
        model.coef_, model.intercept_, model.classes_ = arrays[0].copy(), arrays[1].copy(), np.arange(10)
        return model

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = model_of(msg)
        x, y = share_of(context)
        coef, intercept = model.coef_, model.intercept_
        model.fit(np.r_[x, np.zeros((10, 64))], np.r_[y, np.arange(10)], coef_init=coef, intercept_init=intercept)
        arrays = [model.coef_.astype(np.float64), model.intercept_.astype(np.float64)]
        metrics = MetricRecord({"num-examples": len(y), "train_logloss": 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=msg)

    if evaluates:

        @app.evaluate()
        def evaluate(msg: Message, context: Context) -> Message:
            model = model_of(msg)
            x, y = share_of(context)
            metrics = {
                "num-examples": len(y),
                "test_logloss": log_loss(y, model.predict_proba(x), labels=np.arange(10)),
                "score": float(model.score(x, y)),
            }
            return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    return app


def grid_with(app: Callable[[], ClientApp], nodes: int = 4) -> MemoryGrid:
    """Return a grid whose nodes all run the same app, as in Flower."""
    grid = MemoryGrid()
    for number in range(nodes):
        grid.add(100 + number, app(), **{"partition-id": number, "num-partitions": nodes})
    return grid


def own_spec(**sections: object) -> Spec:
    return small_spec(
        model={"kind": "python", "outputs": 0},
        local={"rate": 0.1, "steps": 1},
        regularity={"kind": "assumed", "factor": 1.0},
        **({"stop": {"max_rounds": 4, "target": 0.0}} | sections),
    )


def settings_of(folder: Path, spec: Spec) -> Settings:
    (folder / "spec.toml").write_text(commented_toml(spec))
    return Settings(str(folder / "run"), str(folder / "spec.toml"), True, clients=4, wait=0.1)


def test_a_pytorch_app_trains_forgets_and_is_certified_as_it_is(tmp_path: Path) -> None:
    grid, saved, central, told = grid_with(torch_app), [], [], []
    make = OwnServer(
        Net,
        config={"lr": 0.1},
        evaluate_fn=lambda rounds, model: central.append(rounds) or MetricRecord({"accuracy": 0.5}),
        save_model=saved.append,
    )
    settings = settings_of(tmp_path, own_spec())
    serve_on_flower(grid, settings, make, HASTY, tell=told.append)
    run = sifu.open_run(tmp_path / "run")
    assert run.status().rounds == 4
    assert central == [1, 2, 3, 4]
    assert "central evaluation after 4 rounds: {'accuracy': 0.5}" in told
    state = saved[-1].to_torch_state_dict()
    Net().load_state_dict(state)  # the state is complete, with the counter of BatchNorm
    assert state["layers.1.num_batches_tracked"] == 0
    assert np.isfinite(state["layers.1.running_mean"].numpy()).all()
    # Scratch, because noise would make a variance of BatchNorm negative and every output NaN.
    run.request(["node-102"], "leaves", method="scratch")
    grid.sent.clear()
    assert serve_on_flower(grid, settings, make, HASTY) == ["leaves"]
    trained = {message.metadata.dst_node_id for message in grid.sent if message.metadata.message_type == TRAIN}
    assert trained == {100, 101, 103}
    assert run.certificate("leaves").body["level"] == "conditional"
    assert run.verify().problems == []


def test_what_a_model_carries_is_named(tmp_path: Path) -> None:
    make = OwnServer(Net, config={"lr": 0.1})
    blueprint, _ = make(own_spec(), [], identity="claimed", preprocessing="")
    assert blueprint.facts.outside == (
        "keeping whole numbers of the model (layers.1.num_batches_tracked) at their initial values",
    )
    again, _ = make(own_spec(), [], identity="claimed", preprocessing="")
    np.testing.assert_array_equal(blueprint.initial_model(1), again.initial_model(1))
    assert not np.array_equal(blueprint.initial_model(0), blueprint.initial_model(1))


def test_a_scikit_learn_app_with_metrics_of_its_own_names_stops_at_its_target(tmp_path: Path) -> None:
    fresh = [np.zeros((10, 64)), np.zeros(10)]
    make = OwnServer(lambda: fresh, loss="test_logloss", accuracy="score")
    settings = settings_of(tmp_path, own_spec(stop={"max_rounds": 30, "target": 0.6}))
    serve_on_flower(grid_with(sklearn_app), settings, make, HASTY)
    run = sifu.open_run(tmp_path / "run")
    with run.reader() as reader:
        latest = reader.evaluations()[-1]
    assert latest.samples == 160
    assert run.status().rounds < 30
    assert run.verify().problems == []


def test_an_app_without_evaluation_trains_for_its_rounds(tmp_path: Path) -> None:
    fresh = [np.zeros((10, 64)), np.zeros(10)]
    make = OwnServer(lambda branch: fresh, evaluates=False)
    grid = grid_with(lambda: sklearn_app(evaluates=False))
    settings = settings_of(tmp_path, own_spec())
    serve_on_flower(grid, settings, make, HASTY)
    run = sifu.open_run(tmp_path / "run")
    assert run.status().phase == "ready"
    assert run.status().rounds == 4
    assert all(message.metadata.message_type != EVALUATE for message in grid.sent)
    run.request(["node-101"], "leaves", method="scratch")
    assert serve_on_flower(grid, settings, make, HASTY) == ["leaves"]
    assert run.verify().problems == []


@pytest.mark.parametrize(
    ("initial", "config", "sentence"),
    [
        (Net, {"lr": 0.2}, r"sent lr = 0\.2, and the spec has local\.rate = 0\.1"),
        (Net, {"round": 1}, "'round' is a key of sifu's own messages"),
        (lambda: 3, {}, "must be a torch module, numpy arrays by name, or a list of them, found int"),
        (lambda: {"a": np.zeros(2), "b": np.zeros(2, np.float32)}, {}, "its arrays hold float32 and float64"),
        (lambda: {"a": np.zeros(2), "b": np.array(["x"])}, {}, "'b' holds <U1"),
    ],
)
def test_what_cannot_be_served_is_refused(initial: Callable, config: dict, sentence: str) -> None:
    make = OwnServer(initial, config=config)
    with pytest.raises(InputError, match=sentence):
        make(own_spec(), [], identity="claimed", preprocessing="")


PAGE = Path(__file__).resolve().parents[3] / "docs" / "flower.md"
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "pytorchexample"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr>=1.41", "torch"]

[tool.flwr.app]
publisher = "tester"

[tool.flwr.app.components]
serverapp = "pytorchexample.server_app:app"
clientapp = "pytorchexample.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 3
fraction-evaluate = 0.5
lr = 0.1
"""
SERVER_APP = """from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_evaluate: float = context.run_config["fraction-evaluate"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["lr"]
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_evaluate=fraction_evaluate)
    result = strategy.start(
        grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": lr}), num_rounds=num_rounds
    )
    results.append(result)
"""


class LitNet(nn.Module):
    """Module like a LightningModule: it defines the training step and the optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
        self.decoder = nn.Linear(8, 64)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=rate)


def lightning_app() -> ClientApp:
    """Return an app like Flower's Lightning quickstart: an autoencoder, a trainer's loop, a loss and no accuracy."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = LitNet()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x = torch.from_numpy(share_of(context)[0])
        optimizer = model.configure_optimizers(msg.content["config"]["lr"])
        for batch in x.split(16):
            optimizer.zero_grad()
            model.training_step(batch).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model = LitNet()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x = torch.from_numpy(share_of(context)[0])
        metrics = MetricRecord({"test_loss": float(model.training_step(x).detach()), "num-examples": len(x)})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def patched(files: dict[str, str]) -> tuple[dict[str, str], int]:
    """Return an app with the diff of the page applied, and the number of lines that the diff changes or adds."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    changed, name, before, stays, count = dict(files), "", "", False, 0
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ b/")
        elif line.startswith("+"):
            assert changed[name].count(f"{before}\n") == 1, f"{before!r} is not a line of {name}"
            kept = f"{before}\n" if stays else ""
            changed[name] = changed[name].replace(f"{before}\n", f"{kept}{line[1:]}\n")
            count += 1
        else:
            before, stays = line[1:], line.startswith(" ")
    return changed, count


FILES = {"pyproject.toml": PYPROJECT, "pytorchexample/server_app.py": SERVER_APP}


@pytest.mark.parametrize(("net", "app"), [(Net, torch_app), (LitNet, lightning_app)])
def test_a_quickstart_forgets_with_at_most_five_changed_lines(
    tmp_path: Path, net: type[nn.Module], app: Callable[[], ClientApp]
) -> None:
    changed, count = patched(FILES)
    assert count <= 5
    run, results, grid = tmp_path / "run", [], grid_with(app)
    config = {"num-server-rounds": 3, "fraction-evaluate": 0.5, "lr": 0.1, "insecure-identity": True}
    context = Context(1, 1, {}, RecordDict(), config | {"run": str(run), "wait": 0.1})

    def serve() -> None:
        names = {"Net": net, "results": results}
        exec(changed["pytorchexample/server_app.py"], names)
        names["app"](grid, context)  # type: ignore[operator]

    serve()
    net().load_state_dict(results[-1].arrays.to_torch_state_dict())
    opened = sifu.open_run(run)
    assert opened.status().rounds == 3
    opened.request(["node-102"], "held", method="scratch")
    opened.request(["node-101"], "withdrawn")
    opened.decide("withdrawn", "withdrawn")
    grid.sent.clear()
    serve()
    trained = {message.metadata.dst_node_id for message in grid.sent if message.metadata.message_type == TRAIN}
    assert trained == {100, 101, 103}
    assert [outcome.request for outcome in opened.outcomes()] == ["held"]
    assert opened.verify().problems == []


@pytest.mark.parametrize(
    ("with_spec", "preprocessing", "keyed", "level"),
    [
        (True, "fixed", True, "exact"),
        (True, "unknown", True, "conditional"),
        (True, "fixed", False, "conditional"),
        (False, "unknown", True, "conditional"),
        (False, "fixed", True, "exact"),
        (False, "fixed", False, "conditional"),
    ],
)
def test_scratch_is_exact_with_keys_and_declared_preprocessing_only(
    tmp_path: Path, cli: Command, with_spec: bool, preprocessing: str, keyed: bool, level: str
) -> None:
    """The conditions for an exact Scratch in docs/flower.md are necessary and sufficient."""
    run, grid = tmp_path / "run", grid_with(torch_app)
    config: dict[str, object] = {"run": str(run), "wait": 0.2, "insecure-identity": not keyed}
    if with_spec:
        assert cli("init", tmp_path / "spec.toml").code == 0
        text = (tmp_path / "spec.toml").read_text()
        for usual, own in (
            ('\npreprocessing = "unknown"', f'\npreprocessing = "{preprocessing}"'),
            ('\nkind = "measured"', '\nkind = "assumed"'),
            ('\nrate = "auto"', "\nrate = 0.1"),
        ):
            assert text.count(usual) == 1
            text = text.replace(usual, own)
        (tmp_path / "spec.toml").write_text(text)
        config["spec"] = str(tmp_path / "spec.toml")
    elif preprocessing == "fixed":
        config["preprocessing"] = "fixed"
    for node in list(grid.apps) if keyed else []:
        path, grid.keys[node] = new_key(tmp_path, f"node-{node}")
        ask_for_change(run, {"do": "add", "name": f"node-{node}", "key": fingerprint_of_file(path)})

    def serve() -> None:
        strategy = ForgettingFedAvg(Context(1, 1, {}, RecordDict(), config), fraction_evaluate=0.0)
        train_config = ConfigRecord({"lr": 0.1})
        strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=2, train_config=train_config)

    torch.manual_seed(1)
    serve()
    opened = sifu.open_run(run)
    opened.request(["node-102"], "leaves", method="scratch")
    serve()
    assert opened.certificate("leaves").body["level"] == level
    assert opened.verify().problems == []


def test_an_app_with_the_diff_is_built_by_flower(tmp_path: Path) -> None:
    changed, _ = patched(FILES)
    for name, text in {
        **changed,
        "pytorchexample/__init__.py": "",
        "pytorchexample/client_app.py": "app = 1\n",
    }.items():
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).write_text(text)
    command = [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(tmp_path / "app")]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert len(list(tmp_path.glob("*.fab"))) == 1


def test_clients_that_are_told_no_rate_take_one_step_along_their_update(tmp_path: Path) -> None:
    """Without a rate in `train_config`, as in Flower's scikit-learn quickstart, a client's update counts as one step at
    rate 1.
    """
    run, first = tmp_path / "run", [np.zeros((10, 64)), np.zeros(10)]
    config = {"run": str(run), "insecure-identity": True, "wait": 0.1}

    def serve() -> None:
        context = Context(1, 1, {}, RecordDict(), config)
        ForgettingFedAvg(context).start(grid_with(sklearn_app), ArrayRecord(first), num_rounds=2)

    serve()
    opened = sifu.open_run(run)
    assert (opened.spec.local.rate, opened.spec.local.steps) == (1.0, 1)
    opened.request(["node-102"], "gone", sigma=0.5)
    serve()
    assert opened.outcomes()[0].level == "conditional"
    assert opened.verify().problems == []


def test_what_the_strategy_cannot_do_is_refused(tmp_path: Path) -> None:
    context = Context(1, 1, {}, RecordDict(), {"run": str(tmp_path / "run"), "insecure-identity": True})
    with pytest.raises(InputError, match=r"fraction_train must be above 0 and at most 1, found 0\.0"):
        ForgettingFedAvg(context, fraction_train=0.0)
    with pytest.raises(InputError, match="preprocessing must be"):
        Settings.of({"run": str(tmp_path / "run"), "preprocessing": "mine"})
    assert not (tmp_path / "run").exists()


def test_flare_starts_flower_with_an_option_that_flower_refuses() -> None:
    """FLARE starts Flower with an option that Flower refuses (docs/flower.md). If this fails, try FLARE again."""
    flare = pytest.importorskip("nvflare.app_opt.flower")
    (option,) = {"--serverappio-api-address"} & {
        word.strip("\"'f{},") for path in Path(flare.__file__).parent.rglob("*.py") for word in path.read_text().split()
    }
    command = [str(Path(sys.executable).parent / "flower-superlink"), "--insecure", option, "127.0.0.1:1"]
    started = subprocess.run(command, capture_output=True, text=True)
    assert started.returncode != 0
    assert "no longer supported" in started.stderr
