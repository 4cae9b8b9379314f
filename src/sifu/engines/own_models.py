"""Blueprint of training whose code only the clients have: its initial models and the facts about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.layout import ModelLayout, Vector
from sifu.core.replies import ReplyRules
from sifu.core.spec import Spec
from sifu.engines.plans import WireProfile
from sifu.engines.remote import Blueprint
from sifu.errors import InputError
from sifu.theory.facts import MADE_BY_OPERATOR, ClientProfile, TrainingFacts
from sifu.theory.participation import Participation, base_key, place_key

CARRIED = "keeping whole numbers of the model ({}) at their initial values"
"""Assumption stated in the certificates of a model with integer arrays; the placeholder is for their names."""


def fresh_model(initial: Callable[..., Any], branch: int, seed: int) -> dict[str, NDArray[Any]]:
    """Make an initial model as named arrays.

    Args:
        initial: Function that returns a torch module, a mapping or a list of arrays; it takes the branch or nothing.
        branch: Branch that starts from the model.
        seed: Seed of the run. PyTorch is seeded per branch, so that a branch always starts from the same torch module.

    Raises:
        InputError: If `initial` returns an object of another type.
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
    if isinstance(model, list | tuple):  # use Flower's names: 0, 1, 2, ...
        model = {str(number): value for number, value in enumerate(model)}
    if not isinstance(model, Mapping):
        raise InputError(
            "a fresh model must be a torch module, numpy arrays by name, or a list of them, found "
            f"{type(model).__name__}"
        )
    return {str(name): np.array(value) for name, value in model.items()}  # copy: training may change the originals


class FreshModels:
    """Initial models of one layout, one vector per branch, made by the user's function.

    Every call makes the model of branch 0 again and raises `InputError` if it differs from the first one, because the
    function then probably returned a trained model. This check is skipped for a function whose models always differ;
    such a function is trusted, as certificates state.
    """

    def __init__(self, initial: Callable[..., Any], seed: int, layout: ModelLayout) -> None:
        self._initial, self._seed, self._layout = initial, seed, layout
        self._first = self._make(0)
        self._repeats = np.array_equal(self._first, self._make(0))

    def __call__(self, branch: int) -> Vector:
        """Return the initial model of a branch."""
        if self._repeats and not np.array_equal(self._first, self._make(0)):
            raise InputError(
                "the function that makes a fresh model returned a different one than before, probably a trained one: "
                "make a new model in every call"
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
    """Return the blueprint of training whose code only the clients have.

    Nothing is proven about a user's training function. Certificates of models with noise are therefore `conditional` at
    best, and the spec must state the assumed expansion (`regularity.kind = "assumed"`).

    Raises:
        InputError: If the spec or the model cannot be used with a user's own training.
    """
    if spec.local.rate == "auto":
        raise InputError("local.rate cannot be determined for your own model: set it to the rate your clients use")
    first = fresh_model(initial, 0, spec.seed)
    floating = {name: value for name, value in first.items() if np.issubdtype(value.dtype, np.floating)}
    carried = {name: value for name, value in first.items() if name not in floating}
    odd = [name for name, value in carried.items() if value.dtype.kind not in "iub"]
    dtypes = sorted({str(value.dtype) for value in floating.values()})
    if odd or len(dtypes) != 1:
        wrong = (
            f"{odd[0]!r} holds {first[odd[0]].dtype}" if odd else f"its arrays hold {' and '.join(dtypes) or 'none'}"
        )
        raise InputError(f"all floating-point parameters of the model must have one type: {wrong}")
    layout = ModelLayout(tuple(floating), tuple(tuple(value.shape) for value in floating.values()), dtypes[0])
    rules = ReplyRules(spec.server.rejected, spec.server.update_bound)
    facts = TrainingFacts(
        local_rate=float(spec.local.rate),
        momentum=spec.local.momentum,
        weight_decay=spec.local.weight_decay,
        batch_size=spec.local.batch or None,
        participation=Participation.parse(spec.server.participation),
        dtype=layout.dtype,
        smooth_model=False,
        rounding_bounded=False,
        preprocessing=preprocessing,
        outside=(*rules.outside, *((CARRIED.format(", ".join(carried)),) if carried else ())),
        identity=identity,
        initial=MADE_BY_OPERATOR,
    )
    fresh = FreshModels(initial, spec.seed, layout)
    return Blueprint(layout, tuple(clients), facts, fresh, spec.seed, replies=rules, carried=carried, **more)


RATE_KEYS = ("lr", "learning-rate", "learning_rate")
"""Names under which the configuration of a message may contain the local rate."""
OUR_KEYS = frozenset({"branch", "round", "server-round", "client", "steps", "plan", "networks"})
"""Keys of every message on Flower (`sifu.engines.plans.Instruction`)."""


def own_blueprint(
    initial: Callable[..., Any],
    spec: Spec,
    profiles: Sequence[WireProfile],
    *,
    config: Mapping[str, Any] = MappingProxyType({}),
    evaluate_config: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[Blueprint, Spec]:
    """Return the blueprint of `own_training` for clients on Flower, and the unchanged spec.

    `config` and `evaluate_config` are those of `Blueprint`; `more` are further arguments of `own_training`.

    Raises:
        InputError: If the configuration contradicts the spec or uses keys of sifu's own messages.
    """
    taken = sorted(OUR_KEYS & {*config, *(evaluate_config or {})})
    if taken:
        raise InputError(f"the configuration's {taken[0]!r} is a key of sifu's own messages: give it another name")
    for key in RATE_KEYS:
        if key in config and spec.local.rate != "auto" and float(config[key]) != float(spec.local.rate):
            raise InputError(
                f"the clients are sent {key} = {config[key]}, and the spec has local.rate = {spec.local.rate}: make "
                "them equal"
            )
    clients = (profile.client for profile in profiles)
    more |= {"config": config, "evaluate_config": evaluate_config}
    return own_training(initial, spec, clients, **more), spec
