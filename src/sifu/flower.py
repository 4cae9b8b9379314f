"""Tools for existing Flower apps: a strategy that forgets and certifies, and a mod by which clients act as witnesses.

    strategy = ForgettingFedAvg(context, fraction_evaluate=0.5)     # in place of FedAvg
    app = ClientApp(mods=[witness_mod])                             # optional, on the clients

The app's run config needs `run`, the run folder on the server's machine; `spec` may name a TOML file (`sifu init`).
"""

from __future__ import annotations

import inspect
import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from sifu.api.spec_file import load_spec
from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.engines.flower.checkpoints_of_nodes import witness_mod
from sifu.engines.flower.client import add_profile, client_app
from sifu.engines.flower.exchanged import EvaluationSample, Exchanged, Reporter
from sifu.engines.flower.wire import TRAIN
from sifu.engines.own_models import RATE_KEYS
from sifu.errors import InputError
from sifu.server.flower_app import serve_on_flower
from sifu.server.flower_settings import OwnServer, Settings
from sifu.store.database import DATABASE

__all__ = ["ForgettingFedAvg", "add_profile", "client_app", "witness_mod"]

log = logging.getLogger("flwr")
"""Flower's logger, so that all lines in the output of `flwr run` look alike."""

HONOURED = frozenset(
    {
        "fraction_train",
        "fraction_evaluate",
        "min_train_nodes",
        "min_evaluate_nodes",
        "min_available_nodes",
        "train_metrics_aggr_fn",
        "evaluate_metrics_aggr_fn",
        "proximal_mu",
    }
)
"""Supported arguments of Flower's strategies; `proximal_mu` belongs to FedProx."""
USUAL_NAMES = "the messages of a recorded run use Flower's usual names: leave it out"
SERVER_STATE = (
    "the server would keep moments of all clients' past updates. Going back to an earlier model does not remove a "
    "client from them, and the bound on a client's influence covers a plain mean only (docs/theory.md, section 2.1)"
)
ROBUST = (
    "which replies count, or how, would depend on the other clients' replies, and the bound on a client's influence "
    "covers a plain mean only (docs/theory.md, section 2.1)"
)
REFUSED = {
    "weighted_by_key": "certificates depend on weights by num-examples: leave it out",
    "arrayrecord_key": USUAL_NAMES,
    "configrecord_key": USUAL_NAMES,
    **dict.fromkeys(("eta", "eta_l", "beta_1", "beta_2", "tau"), f"FedAdam, FedYogi and FedAdagrad: {SERVER_STATE}"),
    **dict.fromkeys(("server_learning_rate", "server_momentum"), f"FedAvgM: {SERVER_STATE}"),
    **dict.fromkeys(("num_malicious_nodes", "num_nodes_to_select", "beta", "q"), ROBUST),
}
"""Unsupported arguments of Flower's strategies, with the reason."""
OVERRIDABLE = frozenset({"aggregate_evaluate", "summary", "start"})
"""Methods of FedAvg that a subclass may override, because no model depends on them."""
NOT_OVERRIDABLE = {
    "aggregate_train": "certificates depend on the mean of the replies. For metrics pass train_metrics_aggr_fn, to "
    "look at models pass an evaluate_fn to start()",
    "configure_train": "certificates depend on recorded draws and steps. Pass a train_config to start(), "
    "and set the share of participants with fraction_train",
    "configure_evaluate": "pass an evaluate_config to start(), and fraction_evaluate and min_evaluate_nodes here",
}
OWN_ROUNDS = (
    "this strategy runs and records its own rounds: call its start(). Flower's DifferentialPrivacy wrappers cannot "
    "wrap it, since they change replies and models without a record; clip and add noise on the clients "
    "(fixedclipping_mod, LocalDpMod)"
)


class ForgettingFedAvg(FedAvg):
    """Federated averaging that executes and certifies requests to be forgotten while it runs.

    It takes the arguments of FedAvg. With `fraction_train` below 1, each client takes part in a round with that
    probability. `proximal_mu` is sent to clients as in FedProx. Unsupported arguments are refused. A subclass
    may override only the methods in `OVERRIDABLE`. `start` creates or continues the run.
    """

    def __init__(self, context: Context, *arguments: Any, **options: Any) -> None:
        usual = inspect.signature(FedAvg).parameters
        options = {**dict(zip(usual, arguments, strict=False)), **options}
        name = type(self).__name__
        for key, value in options.items():
            default = usual[key].default if key in usual else None
            if key not in HONOURED and (key not in usual or value != default):
                reason = REFUSED.get(key, "this version of sifu does not know it: leave it out")
                raise InputError(f"{key} = {value!r} does not apply to {name}: {reason}")
        for method, _ in inspect.getmembers(FedAvg, inspect.isfunction):
            overridden = getattr(type(self), method) is not getattr(ForgettingFedAvg, method)
            if overridden and not method.startswith("_") and method not in OVERRIDABLE:
                reason = NOT_OVERRIDABLE.get(method, "this version of sifu does not know it")
                raise InputError(f"{name} overrides {method}, which would be ignored: {reason}")
        self._proximal = {"proximal-mu": options.pop("proximal_mu")} if "proximal_mu" in options else {}
        super().__init__(**options)
        if not 0.0 < self.fraction_train <= 1.0:
            raise InputError(f"fraction_train must be above 0 and at most 1, found {self.fraction_train}")
        if self.fraction_train < 1.0 and self.min_train_nodes > usual["min_train_nodes"].default:
            raise InputError(
                f"min_train_nodes = {self.min_train_nodes} and fraction_train = {self.fraction_train} cannot be "
                "combined: each client is drawn independently, so a round has no minimum number of clients. Write "
                f'server.participation = "fixed({self.min_train_nodes})" in a spec and leave both out; certificates '
                "then state it as an assumption"
            )
        self._config: Mapping[str, Any] = context.run_config

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
        """Train for `num_rounds`, execute every waiting request, and return the released model with the metrics.

        It takes the arguments of FedAvg's `start`.
        """
        result, began, config = Result(), time.monotonic(), {**(train_config or {}), **self._proximal}
        settings = Settings.of({"timeout": timeout, **self._config})
        least = max(self.min_available_nodes, self.min_train_nodes, self.min_evaluate_nodes)
        settings = replace(settings, clients=max(int(settings.clients), least))
        spec = self._spec(settings, config, num_rounds)
        log.info("Starting %s strategy:", type(self).__name__)
        log.info("\t├──> Number of rounds: %d", num_rounds)
        log.info("\t├──> Run folder: %s", settings.run)
        self.summary()

        def evaluated(rounds: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(rounds, arrays) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[rounds] = metrics
            return metrics

        if evaluate_fn and not (Path(settings.run) / DATABASE).exists():
            log.info("Initial global evaluation results: %s", evaluated(0, initial_arrays))
        first = {name: array.numpy() for name, array in initial_arrays.items()}
        own = OwnServer(
            lambda: first,
            config,
            evaluates=self.fraction_evaluate > 0.0,
            evaluate_fn=evaluated if evaluate_fn else None,
            save_model=partial(setattr, result, "arrays"),
            evaluate_config=dict(evaluate_config or {}),
            evaluation_sample=EvaluationSample(self.fraction_evaluate, self.min_evaluate_nodes),
            reporter=Reporter(partial(_tell_asked, num_rounds), partial(self._tell_answered, result)),
        )
        patience = replace(settings.patience, nodes=least)
        serve_on_flower(grid, settings, own, patience, spec=spec, tell=log.info)
        log.info("")
        log.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        log.info("")
        log.info("Final results:")
        for line in io.StringIO(str(result)):
            log.info("\t%s", line.rstrip("\n"))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse the call: rounds of a user-defined loop would not be recorded."""
        raise InputError(OWN_ROUNDS)

    def _spec(self, settings: Settings, config: Mapping[str, Any], num_rounds: int) -> Spec:
        """Return the spec of the run: read from the file, or the default spec with this strategy's arguments."""
        takes_part = "all" if self.fraction_train == 1.0 else f"poisson({float(self.fraction_train)!r})"
        given = load_spec(settings.spec) if settings.spec else _usual_spec(config, takes_part)
        if self.fraction_train < 1.0 and given.server.participation != takes_part:
            raise InputError(
                f"fraction_train = {self.fraction_train} and server.participation = {given.server.participation!r} of "
                f"{settings.spec} differ: leave fraction_train out, or write {takes_part!r} there"
            )
        stop = replace(given.stop, max_rounds=num_rounds)
        return replace(given, model=replace(given.model, kind="python"), stop=stop)

    def _tell_answered(self, result: Result, exchanged: Exchanged) -> None:
        """Log the replies as FedAvg does, and aggregate their metrics; an error in the metrics never stops a run."""
        rounds, trained = exchanged.position.round + 1, exchanged.kind == TRAIN
        metrics = None
        if trained:
            failures = exchanged.asked - exchanged.results
            log.info("aggregate_train: Received %s results and %s failures", exchanged.results, failures)
        try:
            if not trained:
                metrics = self.aggregate_evaluate(rounds, [*exchanged.counted, *exchanged.errors])
            elif exchanged.counted:
                contents = [message.content for message in exchanged.counted]
                metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # the app's own function may fail on clients' data
            log.warning("\t> the metrics of round %d cannot be aggregated: %s", rounds, error)
        for note in exchanged.notes:
            log.warning("\t> %s", note)
        if metrics is not None:
            (result.train_metrics_clientapp if trained else result.evaluate_metrics_clientapp)[rounds] = metrics
            log.info("\t└──> Aggregated MetricRecord: %s", metrics)


def _usual_spec(config: Mapping[str, Any], participation: str) -> Spec:
    """Return the default spec, which ignores unusable replies and takes the local rate from the config of the clients.

    Without a rate in that config, a client's whole update counts as one step of rate 1.
    """
    rate = next((float(config[key]) for key in RATE_KEYS if key in config), 1.0)
    return Spec.from_mapping(
        {
            "model": {"kind": "python"},
            "local": {"rate": rate, "steps": 1},
            "regularity": {"kind": "assumed", "factor": 1.0},
            "server": {"rejected": "reply", "participation": participation},
            "stop": {"target": 0.0},
        }
    )


def _tell_asked(num_rounds: int, kind: str, position: Position, asked: int, known: int) -> None:
    """Log the sampled clients of a round as FedAvg does; rounds restart at 1 after a request."""
    if kind == TRAIN:
        again = f", after {position.branch} rollbacks" if position.branch else ""
        log.info("")
        log.info("[ROUND %s/%s]%s", position.round + 1, num_rounds, again)
    log.info("configure_%s: Sampled %s nodes (out of %s)", "train" if kind == TRAIN else "evaluate", asked, known)
