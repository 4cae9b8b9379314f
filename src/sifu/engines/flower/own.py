"""Models of the users' own on Flower: named arrays to start from, and whatever the clients do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sifu.core.spec import Spec
from sifu.engines.flower.blueprint import Blueprint
from sifu.engines.flower.wire import USUAL_METRICS, Instruction, MetricNames, WireProfile
from sifu.engines.own_models import own_training
from sifu.errors import InputError

RATE_KEYS = ("lr", "learning-rate", "learning_rate")
"""What apps call the local rate in the configuration of a message."""
OUR_KEYS = frozenset(Instruction.__dataclass_fields__) - {"position"} | {"branch", "round", "server-round"}


def own_blueprint(
    initial: Callable[..., Any],
    spec: Spec,
    profiles: Sequence[WireProfile],
    *,
    identity: str,
    preprocessing: str,
    config: Mapping[str, Any] = MappingProxyType({}),
    metrics: MetricNames = USUAL_METRICS,
    evaluates: bool = True,
) -> tuple[Blueprint, Spec]:
    """Training that only the clients know, of a model that `initial` makes (`own_training`).

    `config` goes into every message, as `train_config` of Flower's FedAvg does.
    """
    _check_config(spec, config)
    training = own_training(initial, spec, identity=identity, preprocessing=preprocessing)
    blueprint = Blueprint(
        training.layout,
        tuple(profile.client for profile in profiles),
        training.facts,
        training.initial_model,
        spec.seed,
        replies=training.replies,
        several=all(profile.several for profile in profiles),
        carried=training.carried,
        config=config,
        metrics=metrics,
        evaluates=evaluates,
    )
    return blueprint, spec


def _check_config(spec: Spec, config: Mapping[str, Any]) -> None:
    """What the clients are told must not contradict the spec, nor our own messages."""
    taken = sorted(OUR_KEYS & set(config))
    if taken:
        raise InputError(f"the configuration's {taken[0]!r} is a key of sifu's own messages: give it another name")
    for key in RATE_KEYS:
        if key in config and spec.local.rate != "auto" and float(config[key]) != float(spec.local.rate):
            raise InputError(
                f"the clients are told {key} = {config[key]}, and the spec says local.rate = {spec.local.rate}: say "
                "the same in both"
            )
