"""Models of the users' own, whose training only the clients know: what they start from, and what is known of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.layout import ModelLayout, Vector
from sifu.core.replies import ReplyRules
from sifu.core.spec import Spec
from sifu.engines.remote import Blueprint
from sifu.errors import InputError
from sifu.theory.facts import MADE_BY_OPERATOR, NO_NOISE, ClientProfile, TrainingFacts
from sifu.theory.participation import Participation, base_key, place_key

if TYPE_CHECKING:
    from sifu.engines.flower.wire import WireProfile

CARRIED = "keeping whole numbers of the model ({}) at their initial values"


def fresh_model(initial: Callable[..., Any], branch: int, seed: int) -> dict[str, NDArray[Any]]:
    """The named arrays of a fresh model, which may come as a mapping, a list of arrays or a torch module.

    `initial` may take the number of the branch. A torch module is created under a seed per branch, so a branch begins
    in the same way whenever it is created.
    """
    takes_branch = len(inspect.signature(initial).parameters) > 0
    try:
        import torch
    except ModuleNotFoundError:
        model = initial(branch) if takes_branch else initial()
    else:
        with torch.random.fork_rng():
            torch.manual_seed(int(place_key(base_key(seed, "initial"), branch, 0)) % 2**63)
            model = initial(branch) if takes_branch else initial()
            if isinstance(model, torch.nn.Module):
                model = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    if isinstance(model, list | tuple):  # as Flower names them
        model = {str(number): value for number, value in enumerate(model)}
    if not isinstance(model, Mapping):
        raise InputError(
            "a fresh model must be a torch module, numpy arrays by name, or a list of them, found "
            f"{type(model).__name__}"
        )
    return {str(name): np.array(value) for name, value in model.items()}  # copies: they may be trained elsewhere


class FreshModels:
    """Fresh models of one layout, a vector for each branch; a function that hands out a trained one is found out.

    What it made first is made again with every other branch. A function that never makes the same twice cannot be told
    from one that hands out what was trained: that is trusted, as certificates say.
    """

    def __init__(self, initial: Callable[..., Any], seed: int, layout: ModelLayout) -> None:
        self._initial, self._seed, self._layout = initial, seed, layout
        self._first = self._make(0)
        self._repeats = np.array_equal(self._first, self._make(0))

    def __call__(self, branch: int) -> Vector:
        """The model that a branch begins with."""
        if self._repeats and not np.array_equal(self._first, self._make(0)):
            raise InputError(
                "the function that makes a fresh model makes another one than before: it seems to hand out a model "
                "that was trained since. Make a new one in every call"
            )
        return self._make(branch)

    def _make(self, branch: int) -> Vector:
        arrays = fresh_model(self._initial, branch, self._seed)
        return self._layout.flatten({name: value for name, value in arrays.items() if name in self._layout.names})


def own_training(
    initial: Callable[..., Any],
    spec: Spec,
    clients: Iterable[ClientProfile],
    *,
    identity: str,
    preprocessing: str,
    **more: Any,
) -> Blueprint:
    """Training that only the clients know, of a model that `initial` makes and no data has touched (`fresh_model`).

    Nothing is proven of a training function: certificates are `conditional` at best, and the spec must say what
    expansion is assumed (`regularity.kind = "assumed"`). `more` goes into the blueprint.
    """
    if spec.local.rate == "auto":
        raise InputError("local.rate cannot be found for a model of your own: give the rate your clients use")
    if spec.local.clip > 0.0 or spec.round_extras.update_clip > 0.0:
        raise InputError("steps and updates of ready-made models are clipped: clip in your own training function")
    first = fresh_model(initial, 0, spec.seed)
    floating = {name: value for name, value in first.items() if np.issubdtype(value.dtype, np.floating)}
    carried = {name: value for name, value in first.items() if name not in floating}
    odd = [name for name, value in carried.items() if value.dtype.kind not in "iub"]
    dtypes = sorted({str(value.dtype) for value in floating.values()})
    if odd or len(dtypes) != 1:
        wrong = (
            f"{odd[0]!r} holds {first[odd[0]].dtype}" if odd else f"its arrays hold {' and '.join(dtypes) or 'none'}"
        )
        raise InputError(f"the model's real numbers must all be of one floating type, whole numbers apart: {wrong}")
    layout = ModelLayout(tuple(floating), tuple(tuple(value.shape) for value in floating.values()), dtypes[0])
    rules = ReplyRules(spec.server.rejected, spec.server.update_bound)
    facts = TrainingFacts(
        local_rate=float(spec.local.rate),
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
        outside=(*rules.outside, *((CARRIED.format(", ".join(carried)),) if carried else ())),
        noise_source=NO_NOISE,
        identity=identity,
        initial=MADE_BY_OPERATOR,
    )
    fresh = FreshModels(initial, spec.seed, layout)
    return Blueprint(layout, tuple(clients), facts, fresh, spec.seed, replies=rules, carried=carried, **more)


RATE_KEYS = ("lr", "learning-rate", "learning_rate")
"""What apps call the local rate in the configuration of a message."""
OUR_KEYS = frozenset({"branch", "round", "server-round", "client", "steps", "plan", "networks"})
"""Of every message on Flower (`sifu.engines.flower.wire.Instruction`)."""


def own_blueprint(
    initial: Callable[..., Any],
    spec: Spec,
    profiles: Sequence[WireProfile],
    *,
    config: Mapping[str, Any] = MappingProxyType({}),
    evaluate_config: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[Blueprint, Spec]:
    """As `own_training` of clients on Flower; `config` goes into every message, as `train_config` of FedAvg does.

    Evaluations get `evaluate_config` instead where it is given. What the clients are told must not contradict the spec,
    nor our own messages.
    """
    taken = sorted(OUR_KEYS & {*config, *(evaluate_config or {})})
    if taken:
        raise InputError(f"the configuration's {taken[0]!r} is a key of sifu's own messages: give it another name")
    for key in RATE_KEYS:
        if key in config and spec.local.rate != "auto" and float(config[key]) != float(spec.local.rate):
            raise InputError(
                f"the clients are told {key} = {config[key]}, and the spec says local.rate = {spec.local.rate}: say "
                "the same in both"
            )
    several = all(profile.several for profile in profiles)
    clients = (profile.client for profile in profiles)
    more |= {"config": config, "evaluate_config": evaluate_config, "several": several}
    return own_training(initial, spec, clients, **more), spec
