"""Clients without sifu's ready app: existing ClientApps, functions of any framework, and the strategy that only
records.
"""

from __future__ import annotations

import sys
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flower_federation import HASTY, both_engines, everyone, small_spec
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid

import sifu
from sifu.core.engine import Position
from sifu.core.layout import ModelLayout
from sifu.core.spec import commented_toml
from sifu.engines.flower.client import FunctionClient, add_profile, client_app
from sifu.engines.own_models import FreshModels, own_blueprint
from sifu.errors import InputError
from sifu.server.flower_app import serve_on_flower
from sifu.server.flower_settings import Settings
from sifu.theory.facts import CLAIMED

TARGETS = [np.array([1.0, 2.0]), np.array([3.0, -1.0]), np.array([0.0, 4.0]), np.array([2.0, 2.0])]


def usual_app(target: np.ndarray, samples: int) -> ClientApp:
    """Return a ClientApp like those of Flower's own examples, without any sifu code."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        weights = message.content["arrays"]["w"].numpy()
        moved = ArrayRecord({"w": Array(weights + 0.5 * (target - weights))})
        metrics = MetricRecord({"num-examples": samples, "train_loss": 0.1})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        loss = float(np.square(message.content["arrays"]["w"].numpy() - target).sum())
        metrics = MetricRecord({"num-examples": samples, "eval_loss": loss, "eval_acc": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def function_app(target: np.ndarray, samples: int, name: str) -> ClientApp:
    """Return the same client as a function over named arrays."""
    mine = FunctionClient(
        name,
        samples,
        lambda arrays: {"w": arrays["w"] + 0.5 * (target - arrays["w"])},
        lambda arrays: (samples // 2, samples * float(np.square(arrays["w"] - target).sum())),
    )
    return client_app(lambda context: mine)


def _with_profile(app: ClientApp, number: int, samples: int) -> ClientApp:
    """Add a profile to an app that all nodes share: each node's name and sample count come from its context."""
    nodes = {100 + number: (f"site-{number}", samples)}
    return add_profile(app, lambda context: nodes[context.node_id][0], lambda context: nodes[context.node_id][1])


def test_clients_of_any_kind_take_part_forget_and_are_conditional(tmp_path: Path) -> None:
    grid = MemoryGrid()
    for number, target in enumerate(TARGETS):
        samples = 10 * (number + 1)
        app = usual_app(target, samples) if number % 2 else function_app(target, samples, f"site-{number}")
        grid.add(100 + number, _with_profile(app, number, samples) if number % 2 else app)
    spec = small_spec(
        model={"kind": "python", "outputs": 0},
        local={"rate": 0.5, "steps": 1},
        regularity={"kind": "assumed", "factor": 1.0},
        stop={"max_rounds": 5, "target": 0.0},
    )
    (tmp_path / "spec.toml").write_text(commented_toml(spec))
    settings = Settings(str(tmp_path / "run"), str(tmp_path / "spec.toml"), True, clients=4, wait=0.1)
    make = partial(own_blueprint, lambda branch: {"w": np.zeros(2)})
    serve_on_flower(grid, settings, make, HASTY)
    run = sifu.open_run(tmp_path / "run")
    reader = run.reader()
    expected = np.zeros(2)
    weights = np.array([1, 2, 3, 4]) / 10.0
    for _ in range(5):
        expected = sum(w * (expected + 0.5 * (t - expected)) for w, t in zip(weights, TARGETS, strict=True))
    np.testing.assert_allclose(reader.load_model(reader.tip), expected, atol=1e-12)
    reader.close()
    run.request(["site-2"], "one")
    assert serve_on_flower(grid, settings, make, HASTY) == ["one"]
    (outcome,) = run.outcomes()
    assert outcome.level == "conditional"
    assert run.verify().problems == []


def test_own_models_must_say_what_is_assumed() -> None:
    spec = small_spec(model={"kind": "python"})
    with pytest.raises(InputError, match=r"local\.rate"):
        own_blueprint(lambda branch: {"w": np.zeros(2)}, spec, [], identity=CLAIMED, preprocessing="")
    with pytest.raises(InputError, match="its arrays hold none"):
        own_blueprint(
            lambda branch: {"w": np.zeros(2, dtype=int)}, small_spec(local={"rate": 0.1}), [], identity=CLAIMED,
            preprocessing="",
        )  # fmt: skip


def test_the_ready_app_is_a_flower_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sifu.cli.federation_commands import default_run, write_app
    from sifu.core.spec import Spec

    write_app(tmp_path / "app", tmp_path / "run", insecure=True)
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    settings = Settings.of(config["config"])
    assert settings.insecure_identity
    assert settings.run == str(tmp_path / "run")
    Spec.from_mapping(tomllib.loads(Path(settings.spec).read_text()))
    with pytest.raises(InputError, match="sends an app's files to every node"):
        write_app(tmp_path / "other", tmp_path / "other" / "run", insecure=True)
    assert not (tmp_path / "other").exists()
    assert default_run(tmp_path / "other") == tmp_path / "other-run"
    with pytest.raises(InputError, match="not empty"):
        write_app(tmp_path / "app", tmp_path / "run", insecure=False)
    with pytest.raises(InputError, match="absolute"):
        Settings.of({"run": "run", "spec": settings.spec})
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    from federation.client_app import app, load  # type: ignore[import-not-found]
    from federation.server_app import app as server  # type: ignore[import-not-found]

    context = Context(1, 1, {"partition-id": 1, "num-partitions": 40}, RecordDict(), {})
    assert load(context).name == "client-001"
    assert callable(app)
    assert server is not None
    for name in [module for module in sys.modules if module.partition(".")[0] == "federation"]:
        monkeypatch.delitem(sys.modules, name)


def test_the_server_holds_nothing_of_a_client_that_is_left_out() -> None:
    _, flower, _ = both_engines(small_spec())
    flower.leave_out(range(8))
    result = flower.run_round(flower.initial_model(0), Position(0, 0), everyone(flower))
    assert result.participants.size == 0


def test_a_function_that_hands_out_a_trained_model_is_found_out() -> None:
    """A server that shares a module with its clients would start Scratch from trained weights; it is refused."""
    kept = {"w": np.zeros(2)}
    handed_out = FreshModels(lambda: kept, 0, ModelLayout(("w",), ((2,),), "float64"))
    fresh = handed_out(1)
    kept["w"] += 1.0
    assert fresh.tolist() == [0.0, 0.0]
    with pytest.raises(InputError, match="returned a different one than before, probably a trained one"):
        handed_out(2)
    other_each_time = iter(range(9))
    layout = ModelLayout(("w",), ((1,),), "float64")
    changing = FreshModels(lambda: {"w": np.full(1, float(next(other_each_time)))}, 0, layout)
    assert changing(1).tolist() == [2.0]
