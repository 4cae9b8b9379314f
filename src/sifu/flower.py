"""For Flower apps that exist: a strategy that forgets and certifies, and a mod by which clients witness it.

    strategy = ForgettingFedAvg(context, fraction_evaluate=0.5)     # in place of FedAvg
    app = ClientApp(mods=[witness_mod])                             # optional, on the clients

The app's run config needs `run`, the run folder on the server's machine; `spec` may name a TOML file (`sifu init`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from sifu.api.start_run import load_spec
from sifu.core.spec import Spec
from sifu.engines.flower.checkpoints_of_nodes import witness_mod
from sifu.engines.flower.client import add_profile, client_app
from sifu.engines.own_models import RATE_KEYS
from sifu.errors import InputError
from sifu.run.training import Progress
from sifu.server.flower_app import OwnServer, Settings, serve_on_flower

__all__ = ["ForgettingFedAvg", "add_profile", "client_app", "witness_mod"]

log = logging.getLogger("flwr")
"""Flower's own: its lines and ours look alike in the stream of `flwr run`."""
USUAL = FedAvg()


class ForgettingFedAvg(FedAvg):
    """Federated averaging that carries out requests to be forgotten while it runs, and certifies them.

    Of FedAvg's arguments `fraction_evaluate = 0` turns evaluation off; clients are drawn as the spec's
    `server.participation` says, and records have their usual names. `start` creates the run or continues it.
    """

    def __init__(self, context: Context, **options: Any) -> None:
        super().__init__(**options)
        self._config: Mapping[str, Any] = context.run_config
        for name in ("fraction_train", "weighted_by_key", "arrayrecord_key", "configrecord_key"):
            if getattr(self, name) != getattr(USUAL, name):
                raise InputError(
                    f"{name} = {getattr(self, name)!r} is not for {type(self).__name__}: leave it out. "
                    "server.participation of the spec says who takes part"
                )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train for `num_rounds`, carry out every request that waits, and return the released model."""
        result, config = Result(), {**(evaluate_config or {}), **(train_config or {})}
        settings = Settings.of({"timeout": timeout, **self._config})
        given = load_spec(settings.spec) if settings.spec else self._usual_spec(config)
        spec = replace(
            given,
            model=replace(given.model, kind="python"),
            stop=replace(given.stop, max_rounds=num_rounds),
        )
        log.info("Starting %s strategy:", type(self).__name__)
        log.info("\t├──> Number of rounds: %d", num_rounds)
        log.info("\t└──> Run folder: %s", settings.run)

        def evaluated(rounds: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(rounds, arrays) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[rounds] = metrics
            return metrics

        first = {name: array.numpy() for name, array in initial_arrays.items()}
        own = OwnServer(
            lambda: first,
            config,
            evaluates=self.fraction_evaluate > 0.0,
            evaluate_fn=evaluated if evaluate_fn else None,
            save_model=partial(setattr, result, "arrays"),
        )
        serve_on_flower(grid, settings, own, spec=spec, progress=partial(_tell_round, result), tell=log.info)
        return result

    def _usual_spec(self, config: Mapping[str, Any]) -> Spec:
        """What holds without a spec: the rate is the one that clients are told, and what cannot be used is left out.

        Clients that are told none count as taking one step of rate 1 along the whole of their update.
        """
        rate = next((float(config[key]) for key in RATE_KEYS if key in config), 1.0)
        return Spec.from_mapping(
            {
                "model": {"kind": "python"},
                "local": {"rate": rate, "steps": 1},
                "regularity": {"kind": "assumed", "factor": 1.0},
                "server": {"rejected": "reply"},
                "stop": {"target": 0.0},
            }
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refused: a loop of your own would record nothing."""
        raise InputError("this strategy runs its own rounds, which it records: call start()")


def _tell_round(result: Result, progress: Progress) -> None:
    """A round, as Flower's strategies tell it."""
    log.info("[ROUND %d/%d] %s", progress.rounds, progress.max_rounds, progress.phase)
    if progress.accuracy == progress.accuracy:  # not NaN: clients evaluated
        metrics = MetricRecord({"accuracy": progress.accuracy})
        result.evaluate_metrics_clientapp[progress.rounds] = metrics
        log.info("\t└──> Aggregated MetricRecord: %s", metrics)
