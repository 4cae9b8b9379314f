"""Built-in models of remote clients: a client's computations, and the server's description of the training.

A Flower node starts a process for every message, and computing features of images takes far longer than a local step.
Features are therefore cached in a folder per client (`CachedFeatures`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.closed_form_engine import head_facts, head_layout, head_profile, targets_of
from sifu.core.engine import Engine
from sifu.core.replies import ReplyRules
from sifu.core.spec import Spec
from sifu.core.spec.sections import LINEAR_KINDS, FeaturesSpec, RidgeSpec
from sifu.data.feature_maps import CachedFeatures, FeatureMap, fixed_point
from sifu.data.feature_maps.build import module_of_features, specified_map, texts_as_tokens
from sifu.engines.plans import Arrays, Instruction, Origin, WirePlan, WireProfile
from sifu.engines.remote import Blueprint
from sifu.engines.sim import (
    LinearModel,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
    make_model,
)
from sifu.engines.sim.embedded_clients import OBJECTIVES, count_outputs, input_shape
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.engines.sim.float_rounding import ClientSizes, proven_allowance
from sifu.engines.sim.simulator import training_facts
from sifu.engines.sim.trainers import OWN
from sifu.errors import InputError
from sifu.theory.closed_form import Rows, Statistics
from sifu.theory.facts import DRAWN_FROM_SEED
from sifu.theory.participation import ClientIndices, Participation


def common_shape(profiles: Sequence[WireProfile]) -> tuple[int, ...]:
    """Return the shape of a sample; raise `InputError` if it differs between clients."""
    shapes = {profile.input_shape for profile in profiles}
    if len(shapes) != 1 or () in shapes:
        raise InputError(f"the clients' samples have different shapes, {sorted(shapes)[:3]}: they must agree")
    return next(iter(shapes))


@lru_cache(maxsize=8)
def received_map(text: str, shape: tuple[int, ...]) -> FeatureMap:
    """Return the feature map of a `[features]` section received as JSON; cached, because making a map takes time."""
    return specified_map(_section(text), shape)


def _section(text: str) -> FeaturesSpec:
    return FeaturesSpec(**json.loads(text))


@lru_cache(maxsize=32)
def reading_tokens(client: ReadyClient, features: str) -> ReadyClient:
    """Return the client with token ids instead of texts; cached, because other caches use the object as a key."""
    x = texts_as_tokens(client.x, _section(features)) if features else client.x
    return client if x is client.x else replace(client, x=x)


def _head_profile(client: ReadyClient, plan: WirePlan) -> WireProfile:
    """Return the profile for a closed-form head, which contains only the shape and the counts of the client's data."""
    ridge = RidgeSpec(**json.loads(plan.ridge))
    labels = np.asarray(client.y)
    if ridge.task == "classification":
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not labels.size or labels.min() < 0:
            raise InputError(f"labels must be class numbers from 0, one per sample; found an array of {labels.dtype}")
        outputs = max(2, 1 + int(labels.max()))
    else:
        outputs = labels.shape[1] if labels.ndim == 2 else 1
    head_of(client, plan, max(outputs, plan.outputs))  # fail if labels or samples cannot be used
    return WireProfile(client.name, len(labels), 1, 1.0, input_shape([client]), outputs)


@lru_cache(maxsize=32)
def head_of(client: ReadyClient, plan: WirePlan, outputs: int) -> ClosedFormFederation:
    """Return a federation of one client, which computes its statistics and evaluates a head on its data."""
    features, ridge = received_map(plan.features, input_shape([client])), RidgeSpec(**json.loads(plan.ridge))
    targets = targets_of(ridge, outputs)
    fixed = fixed_point(features, targets)
    return ClosedFormFederation([client], features, targets, fixed, None)


def _asked_head(client: ReadyClient, plan: WirePlan) -> ClosedFormFederation:
    return head_of(reading_tokens(client, plan.features), plan, plan.outputs)


def _blueprint_of_head(
    spec: Spec, profiles: Sequence[WireProfile], *, identity: str, preprocessing: str
) -> tuple[Blueprint, Spec]:
    """Return the result of `blueprint` for a closed-form head."""
    ridge, counted = spec.ridge, {profile.outputs for profile in profiles}
    outputs = spec.model.outputs or max(counted)
    if outputs < max(counted) or (ridge.task != "classification" and counted != {outputs}):
        raise InputError(f"model.outputs = {outputs}, but the clients' labels need {sorted(counted)}")
    plan, features = plan_of(spec, outputs), specified_map(spec.features, common_shape(profiles))
    fixed = fixed_point(features, targets_of(ridge, outputs))
    layout = head_layout(fixed)
    facts = head_facts(
        features.digest(),
        declared=features.is_declared,
        module=module_of_features(features, spec),
        from_labels=ridge.task == "classification" and not spec.model.outputs,
        preprocessing=preprocessing,
        identity=identity,
    )
    of_head = Blueprint(
        layout,
        tuple(head_profile(profile.name, profile.samples) for profile in profiles),
        facts,
        lambda branch: np.zeros(layout.size),
        spec.seed,
        plan.to_text(),
        head=fixed,
    )
    return of_head, replace(spec, **spec.regime.settled("sum", fixed.features))


STEPS = ("steps", "batch", "momentum", "weight_decay")
"""Fields of a plan that have the same names as keys of the spec's section `[local]`."""


def plan_of(spec: Spec, outputs: int = 0) -> WirePlan:
    """Return the settings of a spec that clients need; `outputs` is 0 before the profiles are known."""
    model, regime, rate = spec.model, spec.regime, spec.local.rate
    return WirePlan(
        model.kind,
        outputs,
        model.init,
        model.dtype,
        spec.seed,
        None if rate == "auto" or regime.solves else float(rate),
        **{name: getattr(spec.local, name) for name in STEPS},
        features=_text(spec.features) if regime.maps_samples else "",
        ridge=_text(spec.ridge) if regime.solves else "",
    )


def _text(section: FeaturesSpec | RidgeSpec) -> str:
    return json.dumps(asdict(section), sort_keys=True)


def _training(plan: WirePlan) -> LocalTraining:
    rate = math.inf if plan.rate is None else plan.rate
    return LocalTraining(rate, plan.steps, plan.batch or None, plan.momentum, plan.weight_decay)


@dataclass(frozen=True, eq=False)
class ReadyClient:
    """Client that trains a built-in model on its data: `x` (n, ...) and `y` in the format of `engines.sim`.

    `x` may be a list of strings if features come from a language model (`features.kind = "transformers"`); every node
    then needs the model under the name in the spec. `cache` is a folder on the node for features of its samples.
    Without it, every new process computes them again.
    """

    name: str
    x: Any
    y: Any
    cache: str | Path | None = None

    def profile(self, instruction: Instruction) -> WireProfile:
        """Return the profile of the data: shape, counts and bounds only."""
        plan = WirePlan.of_text(instruction.plan)
        client = reading_tokens(self, plan.features)
        if plan.ridge:
            return _head_profile(client, plan)
        outputs = count_outputs([client], OBJECTIVES[plan.model if plan.model in OBJECTIVES else "softmax"])
        shape = input_shape([client])
        profile = WireProfile(self.name, int(np.shape(client.x)[0]), plan.steps, None, shape, outputs)
        if plan.model not in OBJECTIVES:
            return profile
        federation = _federation_of(client, replace(plan, outputs=max(outputs, plan.outputs)), 0)
        sizes, own = federation.sizes, federation.clients[0]
        assert sizes is not None  # `sizes` is None only for models that are not linear
        return replace(
            profile,
            expansion=own.expansion,
            rate=float(sizes.rates[0]),
            steepness=float(sizes.steepness[0]),
            batch_ratio=float(sizes.batch_ratios[0]),
            energy=float(sizes.energy[0]),
            target_norm=float(sizes.target_norms[0]),
        )

    def train(self, model: Arrays, instruction: Instruction) -> tuple[Arrays, int]:
        """Return the trained model and the client's number of samples. The client's index keys the batches."""
        plan = WirePlan.of_text(instruction.plan)
        client = reading_tokens(self, plan.features)
        federation = _federation_of(client, plan, instruction.client)
        start = federation.layout.flatten(model)
        moved = federation.local_models(start, instruction.position, np.array([0]))[0]
        return dict(federation.layout.unflatten(moved)), federation.clients[0].samples

    def evaluate(self, model: Arrays, instruction: Instruction) -> tuple[int, int, float]:
        """Return the numbers of samples and of correct predictions, and the summed loss, on the client's data."""
        plan = WirePlan.of_text(instruction.plan)
        federation: Engine = (
            _asked_head(self, plan)
            if plan.ridge
            else _federation_of(reading_tokens(self, plan.features), plan, instruction.client)
        )
        evaluation = federation.evaluate(federation.layout.flatten(model), np.array([0]))
        return int(evaluation.samples[0]), int(evaluation.correct[0]), float(evaluation.loss_sum[0])

    def statistics(self, instruction: Instruction) -> tuple[Statistics | Rows, Origin]:
        """Return the statistics (G, H, n, q) of the data, or its rows, for a closed-form head, and their origin."""
        plan = WirePlan.of_text(instruction.plan)
        if not plan.ridge:
            raise InputError(f"statistics need a closed-form head, but the model of this plan is {plan.model!r}")
        head = _asked_head(self, plan)
        sent = head.sent_by(0)
        return sent, Origin(sent.samples, head.facts.features, sent.fixed.describe())


@lru_cache(maxsize=32)
def _federation_of(client: ReadyClient, plan: WirePlan, number: int) -> SimulatedFederation:
    """Return a federation of one client; cached, because a process may answer several messages for a client."""
    if plan.features:
        features = received_map(plan.features, input_shape([client]))
        if client.cache is not None:
            features = CachedFeatures(features, Path(client.cache))
        rows = np.concatenate([phi for _, phi in features.chunks(np.asarray(client.x))])
        client = replace(client, x=rows.astype(plan.dtype))
    model = make_model(plan.model, input_shape([client]), plan.outputs, init=plan.init)  # type: ignore[arg-type]
    return SimulatedFederation(
        [client],
        model,
        _training(plan),
        SimulationSettings(
            dtype=plan.dtype,  # type: ignore[arg-type]
            seed=plan.seed,
            numbers=[number],
            trainer=OWN,  # the server's record says nothing of packages on a node
        ),
    )


def blueprint(
    spec: Spec, profiles: Sequence[WireProfile], *, identity: str, preprocessing: str
) -> tuple[Blueprint, Spec]:
    """Return the server's description of a spec's training on these clients, and the spec without automatic values.

    Raises:
        InputError: If the spec does not fit the clients' data.
    """
    describe = _blueprint_of_head if spec.regime.solves else _blueprint_of_rounds
    return describe(spec, profiles, identity=identity, preprocessing=preprocessing)


def _blueprint_of_rounds(
    spec: Spec, profiles: Sequence[WireProfile], *, identity: str, preprocessing: str
) -> tuple[Blueprint, Spec]:
    """Return the result of `blueprint` for training in rounds."""
    shape = common_shape(profiles)
    features = None if spec.features.kind == "none" else specified_map(spec.features, shape)
    counted = max(profile.outputs for profile in profiles)
    linear_values = spec.model.kind in ("logistic", "least_squares")
    outputs = spec.model.outputs or counted
    if outputs < counted:
        raise InputError(f"model.outputs = {outputs}, but the clients' labels need {counted}")
    clients = tuple(profile.client for profile in profiles)
    if spec.local.rate == "auto" and spec.model.kind not in LINEAR_KINDS:
        raise InputError('local.rate = "auto" needs a linear model: give a number')
    plan = plan_of(spec, outputs)
    training = _training(plan)
    model: LinearModel | ModuleModel = make_model(
        plan.model, shape if features is None else (features.features,), outputs, init=spec.model.init
    )
    server, rules = spec.server, ReplyRules(spec.server.rejected, spec.server.update_bound)
    rounding = _rounding(model, training, profiles, spec.model.dtype)
    facts = training_facts(
        model,
        training,
        rules,
        participation=Participation.parse(server.participation),
        dtype=spec.model.dtype,
        rounding_bounded=rounding is not None,
        preprocessing=preprocessing,
        shape_from_labels=not spec.model.outputs and not linear_values,
        identity=identity,
        initial=DRAWN_FROM_SEED,
        features="" if features is None else features.digest(),
        features_declared=features is not None and features.is_declared,
        module="" if features is None else module_of_features(features, spec),
    )

    training_blueprint = Blueprint(
        model.layout(spec.model.dtype),
        clients,
        facts,
        lambda branch: model.initial(spec.seed, branch, spec.model.dtype),
        spec.seed,
        plan.to_text(),
        rounding,
        rules,
    )
    return training_blueprint, spec


def _rounding(
    model: LinearModel | ModuleModel,
    training: LocalTraining,
    profiles: Sequence[WireProfile],
    dtype: str,
) -> Callable[[float, ClientIndices], float] | None:
    """Return `Blueprint.rounding` from the bounds that clients report, or None if no bound is proven."""
    needed = [
        (profile.batch_ratio, profile.rate, profile.steepness, profile.energy, profile.target_norm)
        for profile in profiles
    ]
    if not isinstance(model, LinearModel) or any(None in row for row in needed):
        return None
    columns = [np.array(column, dtype=np.float64) for column in zip(*needed, strict=True)]
    samples = np.array([profile.samples for profile in profiles], dtype=np.int64)
    return proven_allowance(model, training, ClientSizes(samples, *columns), dtype)
