"""Heads in closed form on Flower: what a ready-made client computes of its data, and what the server knows of it."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Protocol

import numpy as np

from sifu.core.closed_form_engine import head_facts, head_layout, head_profile, solved_once, targets_of
from sifu.core.spec import Spec
from sifu.core.spec.sections import FeaturesSpec, RidgeSpec
from sifu.data.feature_maps import FeatureMap, fixed_point
from sifu.data.feature_maps.build import specified_map
from sifu.engines.flower.blueprint import Blueprint, HeadPlan
from sifu.engines.flower.wire import WirePlan, WireProfile
from sifu.engines.sim.embedded_clients import ClientData, input_shape
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.errors import InputError

FEWEST_CLASSES = 2


class NodeData(ClientData, Hashable, Protocol):
    """A node's client: its name and its data, the same object for as long as the process lives."""


def common_shape(profiles: Sequence[WireProfile]) -> tuple[int, ...]:
    """The shape of a sample, which all clients must share."""
    shapes = {profile.input_shape for profile in profiles}
    if len(shapes) != 1 or () in shapes:
        raise InputError(f"the clients' samples have different shapes, {sorted(shapes)[:3]}: they must agree")
    return next(iter(shapes))


def features_text(features: FeaturesSpec) -> str:
    """The section `[features]` as it travels."""
    return json.dumps(asdict(features), sort_keys=True)


@lru_cache(maxsize=8)
def travelled_map(text: str, shape: tuple[int, ...]) -> FeatureMap:
    """The map of a section that travelled; kept, since drawing one takes a while."""
    return specified_map(FeaturesSpec(**json.loads(text)), shape)


def head_wire_profile(client: NodeData, plan: WirePlan) -> WireProfile:
    """A client's data in figures: the shape, the counts, and nothing else."""
    ridge = RidgeSpec(**json.loads(plan.ridge))
    labels = np.asarray(client.y)
    if ridge.task == "classification":
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not labels.size or labels.min() < 0:
            raise InputError(f"class numbers from 0 on were expected, one for each sample; found {labels.dtype}")
        outputs = max(FEWEST_CLASSES, 1 + int(labels.max()))
    else:
        outputs = labels.shape[1] if labels.ndim == 2 else 1
    head_of(client, plan, max(outputs, plan.outputs))  # labels and samples that cannot be used are named now
    return WireProfile(client.name, len(labels), 1, 0.0, 0.0, input_shape([client]), outputs)


@lru_cache(maxsize=32)
def head_of(client: NodeData, plan: WirePlan, outputs: int) -> ClosedFormFederation:
    """A federation of this client alone, which computes its statistics and evaluates a head on its data."""
    features, ridge = travelled_map(plan.features, input_shape([client])), RidgeSpec(**json.loads(plan.ridge))
    targets = targets_of(ridge, outputs)
    fixed = fixed_point(features, targets, feature_bits=ridge.feature_bits, target_bits=ridge.target_bits)
    return ClosedFormFederation([client], features, targets, fixed, None)


def head_blueprint(
    spec: Spec, profiles: Sequence[WireProfile], plan: WirePlan, *, identity: str, preprocessing: str
) -> tuple[Blueprint, Spec]:
    """The head that a spec describes on clients with these profiles, and the spec with what was left open filled in."""
    ridge, counted = spec.ridge, {profile.outputs for profile in profiles}
    outputs = spec.model.outputs or max(counted)
    if outputs < max(counted) or (ridge.task != "classification" and counted != {outputs}):
        raise InputError(f"model.outputs = {outputs}, but the clients' labels need {sorted(counted)}")
    features = specified_map(spec.features, common_shape(profiles))
    targets = targets_of(ridge, outputs)
    fixed = fixed_point(features, targets, feature_bits=ridge.feature_bits, target_bits=ridge.target_bits)
    layout = head_layout(fixed)
    facts = head_facts(
        features.digest(),
        declared=features.is_declared,
        from_labels=ridge.task == "classification" and not spec.model.outputs,
        preprocessing=preprocessing,
        identity=identity,
    )
    blueprint = Blueprint(
        layout,
        tuple(head_profile(profile.name, profile.samples) for profile in profiles),
        facts,
        lambda branch: np.zeros(layout.size),
        spec.seed,
        plan.to_text(),
        several=all(profile.several for profile in profiles),
        head=HeadPlan(fixed, None if ridge.regularisation == "auto" else ridge.regularisation),
    )
    return blueprint, solved_once(spec, "sum")
