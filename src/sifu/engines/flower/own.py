"""Models of the users' own on Flower: named arrays to start from, and whatever the clients do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sifu.core.layout import ModelLayout
from sifu.core.replies import ReplyRules
from sifu.core.spec import Spec
from sifu.engines.flower.blueprint import Blueprint
from sifu.engines.flower.wire import Arrays, WireProfile
from sifu.errors import InputError
from sifu.theory.facts import MADE_BY_OPERATOR, NO_NOISE, TrainingFacts
from sifu.theory.participation import Participation


def own_blueprint(
    initial: Callable[[int], Arrays],
    spec: Spec,
    profiles: Sequence[WireProfile],
    *,
    identity: str,
    preprocessing: str,
) -> tuple[Blueprint, Spec]:
    """Training that only the clients know; `initial(branch)` makes a model that no client's data has touched.

    Nothing is proven of a training function: certificates are `conditional` at best, and the spec must say what
    expansion is assumed (`regularity.kind = "assumed"`).
    """
    if spec.local.rate == "auto":
        raise InputError("local.rate cannot be found for a model of your own: give the rate your clients use")
    if spec.server.clip > 0.0:
        raise InputError("server.clip is for ready-made models: clip in your own training function")
    if spec.local.clip > 0.0:
        raise InputError("local.clip is for ready-made models: clip in your own training function")
    first = initial(0)
    odd = [name for name, value in first.items() if not np.issubdtype(np.asarray(value).dtype, np.floating)]
    if odd:
        raise InputError(f"the parameter {odd[0]!r} holds no real numbers: leave it out of what travels")
    layout = ModelLayout(
        tuple(first), tuple(tuple(np.shape(value)) for value in first.values()), str(next(iter(first.values())).dtype)
    )
    rules = ReplyRules(spec.server.rejected, spec.server.update_bound)
    facts = TrainingFacts(
        local_rate=spec.local.rate,
        momentum=spec.local.momentum,
        nesterov=spec.local.nesterov,
        weight_decay=spec.local.weight_decay,
        batch_size=spec.local.batch or None,
        server_rate=spec.server.rate,
        participation=Participation.parse(spec.server.participation),
        dtype=layout.dtype,
        smooth_model=False,
        rounding_bounded=False,
        preprocessing=preprocessing,
        outside=rules.outside,
        noise_source=NO_NOISE,
        identity=identity,
        initial=MADE_BY_OPERATOR,
    )
    clients = tuple(profile.client for profile in profiles)
    several = all(profile.several for profile in profiles)
    blueprint = Blueprint(
        layout,
        clients,
        facts,
        lambda branch: layout.flatten(initial(branch)),
        spec.seed,
        replies=rules,
        several=several,
    )
    return blueprint, spec
