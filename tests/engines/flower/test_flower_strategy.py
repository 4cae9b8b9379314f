"""Arguments and methods of Flower's FedAvg: `ForgettingFedAvg` honours each, or refuses it with a message."""

from __future__ import annotations

import inspect
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedProx,
    FedYogi,
    Result,
)
from memory_grid import MemoryGrid

import sifu
from sifu.engines.flower.exchange import Patience
from sifu.engines.flower.wire import EVALUATE, TRAIN
from sifu.errors import InputError, NoClientResponseError
from sifu.flower import ForgettingFedAvg, add_profile

TARGETS = [np.array([1.0, 2.0]), np.array([3.0, -1.0]), np.array([0.0, 4.0]), np.array([2.0, 2.0])]
ROUNDS = 3


def mean_app(number: int, wrong: bool = False) -> ClientApp:
    """Return a client like those of Flower's examples; a `wrong` one answers with NaN."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        weights = message.content["arrays"]["w"].numpy()
        moved = weights + 0.5 * (TARGETS[number] - weights)
        arrays = ArrayRecord({"w": Array(moved * np.nan if wrong else moved)})
        metrics = MetricRecord({"num-examples": 10 * (number + 1), "train_loss": float(number)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10 * (number + 1), "eval_loss": 1.0, "own": float(number)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def four_nodes(wrong: int = -1) -> MemoryGrid:
    grid = MemoryGrid()
    for number in range(4):
        grid.add(100 + number, mean_app(number, number == wrong))
    return grid


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the patience, because nodes in memory answer at once."""
    monkeypatch.setattr("sifu.server.flower_settings.Settings.patience", Patience(timeout=0.05, pause=0.0, poll=0.01))


Start = Callable[..., Result]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that starts a strategy with some arguments on four nodes."""

    def begin(
        grid: MemoryGrid | None = None,
        strategy: type[ForgettingFedAvg] = ForgettingFedAvg,
        options: dict | None = None,
        **more: object,
    ) -> Result:
        context = context_of(tmp_path)
        made = strategy(context, **(options or {}))
        initial = ArrayRecord({"w": Array(np.zeros(2))})
        return made.start(grid or four_nodes(), initial, num_rounds=ROUNDS, **more)  # type: ignore[arg-type]

    return begin


def context_of(folder: Path, **config: object) -> Context:
    usual = {"run": str(folder / "run"), "insecure-identity": True, "wait": 0.2}
    return Context(1, 1, {}, RecordDict(), usual | config)


def asked(grid: MemoryGrid, kind: str) -> list[int]:
    """Return, for each round, how many nodes received a message of a kind."""
    rounds: dict[int, set[int]] = {}
    for message in grid.sent:
        if message.metadata.message_type == kind and "client" in message.content["config"]:
            number = int(message.content["config"]["server-round"])
            rounds.setdefault(number, set()).add(message.metadata.dst_node_id)
    return [len(nodes) for _, nodes in sorted(rounds.items())]


def check_fraction_train(start: Start, folder: Path) -> None:
    grid = four_nodes()
    start(grid, options={"fraction_train": 0.5})
    assert sifu.open_run(folder / "run").spec.server.participation == "poisson(0.5)"
    assert asked(grid, TRAIN) == [4, 1, 2]  # the first round needs every node's sample count


def check_fraction_evaluate(start: Start, folder: Path) -> None:
    grid = four_nodes()
    start(grid, options={"fraction_evaluate": 0.5})
    assert asked(grid, EVALUATE)[1:] == [2] * (ROUNDS - 1)
    # Evaluations of the initial model and of each round's model; noised copies would be evaluated by other nodes.
    assert sum(message.metadata.message_type == EVALUATE for message in grid.sent) == 2 * (1 + ROUNDS)


def check_min_evaluate_nodes(start: Start, folder: Path) -> None:
    grid = four_nodes()
    start(grid, options={"fraction_evaluate": 0.5, "min_evaluate_nodes": 3})
    assert asked(grid, EVALUATE)[1:] == [3] * (ROUNDS - 1)


def check_min_train_nodes(start: Start, folder: Path) -> None:
    with pytest.raises(NoClientResponseError, match="still missing"):
        start(options={"min_train_nodes": 5})
    with pytest.raises(InputError, match="cannot be combined"):
        start(options={"min_train_nodes": 3, "fraction_train": 0.5})
    start(options={"min_train_nodes": 4})


def check_min_available_nodes(start: Start, folder: Path) -> None:
    with pytest.raises(NoClientResponseError, match="still missing"):
        start(options={"min_available_nodes": 5})
    assert not (folder / "run").exists()
    start(options={"min_available_nodes": 4})


def own_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    assert weighted_by_key == "num-examples"
    return MetricRecord(
        {"largest": max(float(next(iter(c.metric_records.values()))["num-examples"]) for c in contents)}
    )


def check_train_metrics_aggr_fn(start: Start, folder: Path) -> None:
    result = start(options={"train_metrics_aggr_fn": own_metrics})
    assert [dict(metrics) for metrics in result.train_metrics_clientapp.values()] == [{"largest": 40.0}] * ROUNDS


def check_evaluate_metrics_aggr_fn(start: Start, folder: Path) -> None:
    result = start(options={"evaluate_metrics_aggr_fn": own_metrics})
    assert [dict(metrics) for metrics in result.evaluate_metrics_clientapp.values()] == [{"largest": 40.0}] * ROUNDS


REFUSED = {
    "weighted_by_key": "certificates depend on",
    "arrayrecord_key": "usual names",
    "configrecord_key": "usual names",
}


@pytest.mark.parametrize("argument", inspect.signature(FedAvg).parameters)
def test_every_argument_is_honoured_or_refused(argument: str, start: Start, tmp_path: Path) -> None:
    """Every argument of FedAvg is honoured or refused; a new argument in a later version of Flower fails here."""
    if argument in REFUSED:
        with pytest.raises(
            InputError, match=f"{argument} = 'other' does not apply to ForgettingFedAvg: .*{REFUSED[argument]}"
        ):
            start(options={argument: "other"})
        start(options={argument: inspect.signature(FedAvg).parameters[argument].default})
    else:
        globals()[f"check_{argument}"](start, tmp_path)


def test_an_unknown_argument_is_refused(start: Start) -> None:
    with pytest.raises(InputError, match="unheard_of = 1 does not apply to ForgettingFedAvg: this version"):
        start(options={"unheard_of": 1})


HONOURED_METHODS = {"aggregate_evaluate", "summary", "start"}


@pytest.mark.parametrize("method", [n for n, _ in inspect.getmembers(FedAvg, inspect.isfunction) if n[0] != "_"])
def test_every_overridden_method_is_called_or_refused(method: str, start: Start) -> None:
    called = []

    def own(self: FedAvg, *arguments: object, **options: object) -> object:
        called.append(method)
        return getattr(ForgettingFedAvg, method)(self, *arguments, **options)

    strategy = type("Own", (ForgettingFedAvg,), {method: own})
    if method in HONOURED_METHODS:
        start(strategy=strategy)
        assert called
    else:
        with pytest.raises(InputError, match=f"Own overrides {method}, which would be ignored"):
            start(strategy=strategy)


@pytest.mark.parametrize(("other", "argument"), [(FedAdam, "beta_1"), (FedYogi, "tau")])
def test_servers_with_moments_are_refused_with_the_reason(other: type[FedAvg], argument: str, start: Start) -> None:
    assert argument in inspect.signature(other).parameters
    with pytest.raises(InputError, match="moments of all clients' past updates"):
        start(options={argument: 0.5})
    with pytest.raises(InputError, match="overrides aggregate_train"):
        start(strategy=type("Mixed", (ForgettingFedAvg, other), {}))


def test_the_proximal_term_is_sent_as_fedprox_sends_it(start: Start) -> None:
    assert "proximal_mu" in inspect.signature(FedProx).parameters
    grid = four_nodes()
    start(grid, options={"proximal_mu": 0.3})
    sent = [message.content["config"] for message in grid.sent if message.metadata.message_type == TRAIN]
    assert {config["proximal-mu"] for config in sent} == {0.3}


def test_a_wrapper_for_differential_privacy_is_refused(tmp_path: Path) -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(ForgettingFedAvg(context_of(tmp_path)), 1.0, 1.0, 4)
    with pytest.raises(InputError, match="DifferentialPrivacy wrappers cannot wrap it"):
        wrapped.start(four_nodes(), ArrayRecord({"w": Array(np.zeros(2))}))


def test_metrics_and_log_are_those_of_fedavg(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"propagate": True, "disabled": False}.items():  # simulations of other tests change them
        monkeypatch.setattr(logging.getLogger("flwr"), name, value)
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.INFO, "flwr")
    seen: list[int] = []
    configs = {"train_config": ConfigRecord({"lr": 0.5}), "evaluate_config": ConfigRecord({"depth": 7})}
    grid = four_nodes(wrong=3)

    def central(rounds: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(rounds)
        return MetricRecord({"norm": float(np.linalg.norm(arrays["w"].numpy()))})

    result = start(grid, evaluate_fn=central, **configs)
    assert seen == [0, 1, 2, 3]
    assert result.evaluate_metrics_serverapp[0]["norm"] == 0.0
    # The refused reply of the fourth client counts neither in the model nor in the metrics.
    loss = (10 * 0 + 20 * 1 + 30 * 2) / 60
    assert [metrics["train_loss"] for metrics in result.train_metrics_clientapp.values()] == pytest.approx([loss] * 3)
    own = (20 * 1 + 30 * 2 + 40 * 3) / 100
    assert [metrics["own"] for metrics in result.evaluate_metrics_clientapp.values()] == pytest.approx([own] * 3)
    for line in (
        "Initial global evaluation results",
        "[ROUND 2/3]",
        "configure_train: Sampled 4 nodes (out of 4)",
        "aggregate_train: Received 3 results and 1 failures",
        "node-103: refused, not finite",
        "configure_evaluate: Sampled 4 nodes (out of 4)",
        "aggregate_evaluate: Received 4 results and 0 failures",
        "Strategy execution finished in",
        "Final results:",
    ):
        assert line in caplog.text, line
    sent = {message.metadata.message_type: dict(message.content["config"]) for message in grid.sent}
    assert (sent[TRAIN]["lr"], sent[EVALUATE]["depth"]) == (0.5, 7)
    assert "lr" not in sent[EVALUATE]
    assert "depth" not in sent[TRAIN]


def test_metrics_that_cannot_be_aggregated_do_not_stop_a_run(start: Start, tmp_path: Path) -> None:
    def broken(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
        raise KeyError("no such metric")

    result = start(options={"train_metrics_aggr_fn": broken})
    assert not result.train_metrics_clientapp
    assert sifu.open_run(tmp_path / "run").status().rounds == ROUNDS


def test_no_client_that_knows_nothing_of_us_is_asked_what_it_cannot_answer(start: Start) -> None:
    """Clients without sifu code get only the messages they can answer; Flower logs a traceback for any other."""
    grid = four_nodes()
    start(grid)
    assert {message.metadata.message_type for message in grid.sent} == {TRAIN, EVALUATE}
    assert not [reply for reply in grid.received if reply.has_error()]


def test_a_simulation_is_continued_if_clients_are_named_by_their_partition(start: Start, tmp_path: Path) -> None:
    def nodes(first: int, named: bool) -> MemoryGrid:
        grid = MemoryGrid()
        for number in range(4):
            app = mean_app(number)
            if named:
                add_profile(app, lambda context: f"site-{context.node_config['partition-id']}", 10 * (number + 1))
            grid.add(first + number, app, **{"partition-id": number})
        return grid

    start(nodes(100, named=True))
    run = sifu.open_run(tmp_path / "run")
    run.request(["site-2"], "leaves", method="scratch")
    again = nodes(900, named=True)
    start(again)
    asked_nodes = {message.metadata.dst_node_id for message in again.sent if "client" in message.content["config"]}
    trained = {reply.metadata.src_node_id for reply in again.received if reply.content.array_records}
    assert asked_nodes >= trained == {900, 901, 903}
    assert [outcome.request for outcome in run.outcomes()] == ["leaves"]
    shutil.rmtree(tmp_path / "run")
    start(nodes(100, named=False))
    with pytest.raises(InputError, match="every simulation assigns again"):
        start(nodes(900, named=False))
