"""Settings of a server on Flower: the run config of its app, and the options of a user-defined model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.engines.flower.exchange import Patience
from sifu.engines.flower.exchanged import EvaluationSample, Reporter
from sifu.engines.flower.wire import PROFILE_WANTED, TRAIN, model_message
from sifu.engines.own_models import fresh_model, own_blueprint
from sifu.engines.plans import Instruction, WireProfile
from sifu.engines.remote import NO_ROUND, Blueprint, MetricNames
from sifu.errors import InputError
from sifu.requests.worker import Tell

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message, MetricRecord

LONGEST_ABSENCE = 120.0
"""Maximum number of seconds that a round waits for a client without a connected node."""
MakeBlueprint = Callable[..., tuple[Blueprint, Spec]]
"""Function that makes the training plan from the spec and the clients' profiles, and resolves the spec."""


@dataclass(frozen=True)
class Settings:
    """The run config of the app: `[tool.flwr.app.config]` with the overrides of `--run-config`.

    `run` and `spec` are absolute paths on the server's machine. With `insecure_identity` the server trusts the names
    that nodes report and waits for `clients` nodes; certificates are then `conditional` at best. `wait` is the time to
    wait for clients before the run is created, or for an earlier server to end. `linger` is the time to wait for
    requests after training. Both are in seconds.
    With `masked_updates` the server learns only the mean of a round's updates; with `masked_statistics` it learns only
    the sum of the statistics of a head in closed form. `preprocessing = "fixed"` declares the same as
    `data.preprocessing` of a spec.
    """

    run: str
    spec: str = ""
    insecure_identity: bool = False
    clients: int = 0
    wait: float = 300.0
    linger: float = 0.0
    timeout: float = 600.0
    min_replies: int = 1
    masked_updates: bool = False
    masked_statistics: bool = True
    preprocessing: str = ""

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """Return the settings in a run config, whose keys are written with dashes."""
        names = {field.name.replace("_", "-"): field.name for field in fields(Settings)}
        given = {names[key]: value for key, value in config.items() if key in names}
        if "run" not in given:
            raise InputError(
                "the app's config needs run (the run folder), and usually spec (a TOML file, see sifu init)"
            )
        for key in ("run", "spec"):
            if key in given and not Path(str(given[key])).is_absolute():
                raise InputError(f"{key} must be an absolute path on the server's machine, found {given[key]!r}")
        if given.get("preprocessing", "") not in ("", "fixed", "unknown"):
            raise InputError(f'preprocessing must be "fixed" or "unknown", found {given["preprocessing"]!r}')
        return Settings(**given)

    def declared(self, spec: Spec) -> Spec:
        """Return the spec with the preprocessing that the config declares."""
        declared, in_spec = self.preprocessing, spec.data.preprocessing
        if not declared or declared == in_spec:
            return spec
        if self.spec and declared == "unknown":
            raise InputError(
                f'the config says preprocessing = "unknown", and {self.spec} says "{in_spec}": set it in one place'
            )
        return replace(spec, data=replace(spec.data, preprocessing="fixed"))

    @property
    def patience(self) -> Patience:
        """Time limits of the engine."""
        timeout = float(self.timeout)
        return Patience(timeout=timeout, min_replies=int(self.min_replies), absence=min(timeout, LONGEST_ABSENCE))


@dataclass(frozen=True)
class OwnServer:
    """Server for a user-defined model, with ClientApps written for Flower's FedAvg.

    Attributes:
        initial: Function that makes a fresh model, a torch module or named numpy arrays; it may take the branch number.
        config: Config of training messages, FedAvg's `train_config`.
        loss: Name of the loss among the metrics, if unusual.
        accuracy: Name of the accuracy among the metrics, if unusual.
        evaluates: False for apps without evaluation.
        evaluate_config: Config of evaluation messages, by default `config`.
        evaluation_sample: Fraction and minimum number of the clients that evaluate.
        reporter: Listener that receives every round's messages and replies.
        evaluate_fn: Callback that receives the number of rounds and the model after each round; its result is only
            displayed.
        save_model: Callback that receives the model when the server ends.
    """

    initial: Callable[..., Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    loss: str = ""
    accuracy: str = ""
    evaluates: bool = True
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None
    save_model: Callable[[ArrayRecord], None] | None = None
    evaluate_config: Mapping[str, Any] | None = None
    evaluation_sample: EvaluationSample = EvaluationSample()
    reporter: Reporter | None = None

    def __call__(self, spec: Spec, profiles: Sequence[WireProfile], **known: str) -> tuple[Blueprint, Spec]:
        """Return the training plan for clients with these profiles, and the resolved spec."""
        return own_blueprint(
            self.initial,
            spec,
            profiles,
            config=self.config,
            evaluate_config=self.evaluate_config,
            metrics=MetricNames(self.loss, self.accuracy),
            evaluates=self.evaluates,
            **known,
        )

    def first_message(self, spec: Spec, node: int, timeout: float) -> Message:
        """Return a training message that asks for the number of samples; the model in the reply is discarded."""
        from flwr.app import Array, ArrayRecord

        fresh, config = fresh_model(self.initial, 0, spec.seed), {**self.config, PROFILE_WANTED: True}
        arrays = ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in fresh.items()})
        return model_message(arrays, Instruction(NO_ROUND, 0, 1), node, TRAIN, timeout, config)

    def after_round(self, tell: Tell, position: Position, model: ArrayRecord) -> None:
        """Display the result of the central evaluation of a round's model."""
        metrics = self.evaluate_fn(position.round + 1, model) if self.evaluate_fn else None
        if metrics is not None:
            tell(f"central evaluation after {position.round + 1} rounds: {dict(metrics)}")
