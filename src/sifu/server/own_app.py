"""A ServerApp for ClientApps that were written for Flower's FedAvg and know nothing of us.

    app = own_server_app(Net, config={"lr": 0.01})

`Net` makes a fresh model. The app's run config needs `run` and `spec`; nothing changes on the clients' side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.engines.flower.wire import TRAIN, Instruction, model_message
from sifu.engines.own_models import fresh_model, own_blueprint
from sifu.engines.remote import MetricNames
from sifu.requests.worker import Tell
from sifu.server.flower_app import Hooks, MakeBlueprint, server_app

if TYPE_CHECKING:
    from flwr.serverapp import ServerApp


class OwnOptions(TypedDict, total=False):
    """What can be said of an app of one's own.

    `config` is what Flower's FedAvg calls `train_config`. `loss` and `accuracy` name the metrics of an evaluation where
    they are not called as usual; `evaluates = False` is for apps without any. `evaluate_fn` is called with the number
    of rounds and the model after each, and what it returns is shown; it decides nothing. `save_model` gets the model
    when the server ends.
    """

    config: Mapping[str, Any]
    loss: str
    accuracy: str
    evaluates: bool
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    save_model: Callable[[ArrayRecord], None]


def own_server_app(initial: Callable[..., Any], **options: Unpack[OwnOptions]) -> ServerApp:
    """The ServerApp of a model of your own (`OwnOptions`).

    `initial` makes a fresh model: a torch module, or named numpy arrays; it may take the number of the branch.
    """
    return server_app(*make_own_server(initial, **options))


def make_own_server(initial: Callable[..., Any], **options: Unpack[OwnOptions]) -> tuple[MakeBlueprint, Hooks]:
    """What `own_server_app` gives to the server."""
    config, evaluate = options.get("config", {}), options.get("evaluate_fn")
    make = partial(
        own_blueprint,
        initial,
        config=config,
        metrics=MetricNames(options.get("loss", ""), options.get("accuracy", "")),
        evaluates=options.get("evaluates", True),
    )
    hooks = Hooks(
        first_message=lambda spec, node, timeout: _first_message(initial, config, spec, node, timeout),
        after_round=None if evaluate is None else partial(_show_central_evaluation, evaluate),
        save_model=options.get("save_model"),
    )
    return make, hooks


def _first_message(
    initial: Callable[..., Any], config: Mapping[str, Any], spec: Spec, node: int, timeout: float
) -> Message:
    """A training whose result is thrown away: an app that knows nothing of us says its samples only in an answer."""
    arrays = {name: Array(np.ascontiguousarray(value)) for name, value in fresh_model(initial, 0, spec.seed).items()}
    return model_message(ArrayRecord(arrays), Instruction(Position(0, 0), 0, 1), node, TRAIN, timeout, config)


def _show_central_evaluation(
    evaluate: Callable[[int, ArrayRecord], MetricRecord | None], tell: Tell, position: Position, model: ArrayRecord
) -> None:
    metrics = evaluate(position.round + 1, model)
    if metrics is not None:
        tell(f"central evaluation after {position.round + 1} rounds: {dict(metrics)}")
