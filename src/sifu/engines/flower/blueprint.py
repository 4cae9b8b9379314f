"""What a server on Flower knows of the training it runs, also of models of the users' own, and how long it waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from sifu.core.closed_form_engine import Trunk
from sifu.core.layout import ModelLayout, Vector
from sifu.core.replies import ReplyRules, Wait
from sifu.core.spec import Spec
from sifu.engines.flower.wire import USUAL_METRICS, Instruction, MetricNames, WireProfile, arrays_record
from sifu.engines.own_models import own_training
from sifu.engines.sim.client_updates import Clipping
from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint
from sifu.theory.facts import CLOSED_EARLY, MINIMUM_OF_ANSWERS, ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from flwr.app import ArrayRecord


@dataclass(frozen=True)
class HeadPlan:
    """A head in closed form: how statistics are written, and r of lambda (None for cross-validation).

    Where groups tune the network under it, `tuning` is the training of a group, and `networks` says what the networks
    that features go through are tuned by.
    """

    fixed: FixedPoint
    relative_penalty: float | None
    tuning: Blueprint | None = None
    networks: Callable[[Sequence[Trunk]], Mapping[int, Vector]] | None = None


@dataclass(frozen=True)
class Blueprint:
    """What a server knows of the training it runs: everything of an engine but the clients' nodes.

    `rounding` bounds floating point in a round of some participants from a model of a norm (None: nothing is proven).
    `plan` travels in every message. `several`: all clients evaluate several models at once. What follows is for
    ClientApps that were not written for us: `carried` arrays of whole numbers travel with the model and stay what they
    are, `config` goes into every message, `metrics` are what an evaluation's numbers are called, and without
    `evaluates` no client is asked to evaluate. `head` is given where clients send statistics, from which a head is
    solved, instead of models.
    """

    layout: ModelLayout
    clients: tuple[ClientProfile, ...]
    facts: TrainingFacts
    initial_model: Callable[[int], Vector]
    seed: int
    plan: str = ""
    rounding: Callable[[float, ClientIndices], float] | None = None
    clipping: Clipping | None = None
    replies: ReplyRules = ReplyRules()
    several: bool = False
    carried: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: MetricNames = USUAL_METRICS
    evaluates: bool = True
    head: HeadPlan | None = None

    def record(self, model: Vector) -> ArrayRecord:
        """A model as it travels."""
        return arrays_record(self.layout, model, self.carried)


@dataclass(frozen=True)
class Patience:
    """How long the server waits, and how few answers are enough.

    `timeout` seconds for the answers of a round or an evaluation; `min_replies` answers make a round (more than one
    couples clients to each other, which certificates then name as assumed harmless); after `rounds_without_answer`
    empty rounds in a row training stops, to be continued later; `pause` seconds pass before the next try; replies are
    looked for every `poll` seconds. `wait` says when a round closes before that (`server.wait`). Where not a single
    node is there, a round waits `absence` seconds for one: after SuperLink was started again, nodes need a minute.
    """

    timeout: float = 600.0
    min_replies: int = 1
    rounds_without_answer: int = 5
    pause: float = 5.0
    poll: float = 0.5
    wait: Wait = Wait()
    absence: float = 0.0


def with_minimum(facts: TrainingFacts, patience: Patience) -> TrainingFacts:
    """The facts of a training whose rounds need several answers, or close without the slowest.

    Without one client such a round might not have counted, or another client's answer would have.
    """
    coupled = []
    if patience.min_replies > 1:
        coupled.append(f"{MINIMUM_OF_ANSWERS} {patience.min_replies} answers a round")
    if patience.wait.closes_early:
        coupled.append(CLOSED_EARLY)
    return replace(facts, outside=(*facts.outside, *coupled)) if coupled else facts


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
