"""Conversion of clients and models that a Python program passes to sifu."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from sifu.core.spec import Spec
from sifu.data.client_data import is_frame
from sifu.data.feature_maps.build import texts_as_tokens
from sifu.errors import InputError
from sifu.run.clients_and_engine import clients_from_spec, framed
from sifu.run.features import with_features

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import nn
    from torch.utils.data import Dataset

    from sifu.data import ClientData
    from sifu.engines.sim.models import Model

ModelGiven: TypeAlias = "Callable[[], nn.Module] | Model"
"""A function without arguments that makes a torch module (such as a class), or a model of `sifu.engines.sim`."""
ClientsGiven: TypeAlias = "Mapping[str, Sequence[ArrayLike] | Dataset[Any]] | Sequence[ClientData] | Frame"
"""Pairs (x, y) of arrays, or torch data sets, by client name; `ClientData` objects; or a frame of all rows."""


class Frame(Protocol):
    """Frame of pandas or polars, table of pyarrow, or data set of Hugging Face, with columns accessible by name.

    As for a table in a file, the spec names the columns of the label (`data.label`) and the client (`data.client`), and
    says how the others are coded.
    """

    def __getitem__(self, column: Any, /) -> Any: ...
    def __len__(self) -> int: ...


def as_clients(data: ClientsGiven, spec: Spec, device: str = "cpu") -> tuple[Any, ...]:
    """Convert clients that a program passes to the form that the engine accepts; features are computed on `device`.

    Raises:
        InputError: If `data` has another form, or fewer than two clients.
    """
    from sifu.data import from_arrays, from_torch

    if is_frame(data):
        return clients_from_spec(**framed(spec, data), device=device)
    named: Any = data
    if isinstance(data, Mapping):
        frame = next((name for name, value in data.items() if is_frame(value)), None)
        if frame is not None:
            raise InputError(
                f"{frame!r} is a table: put all clients into one table, with a column for the client (data.client), or "
                "give pairs (x, y) of arrays"
            )
        pairs = {name: isinstance(value, tuple | list) for name, value in data.items()}
        odd = [name for name, pair in pairs.items() if not pair and not hasattr(data[name], "__getitem__")]
        if odd:
            raise InputError(
                f"client {odd[0]!r} has {data[odd[0]]!r}: give a pair (x, y) of arrays, or a torch data set"
            )
        if len(set(pairs.values())) > 1:
            raise InputError(
                "some clients have pairs of arrays and some torch data sets: give all of them in the same form"
            )
        convert = from_arrays if all(pairs.values()) else from_torch
        clients = convert(_with_tokens(named, spec), dtype=spec.model.dtype)
    elif not isinstance(data, Iterable):
        raise InputError(f"clients must be a dict of names and pairs (x, y) of arrays, found {type(data).__name__}")
    else:
        clients = tuple(named)
        strange = [client for client in clients if not all(hasattr(client, name) for name in ("name", "x", "y"))]
        if strange:
            kind = type(strange[0]).__name__
            raise InputError(f"a client must have a name, x and y; found a {kind}. Or give a dict of (x, y)")
    check_names_differ(clients)
    if len(clients) < 2:
        raise InputError(f"a federation needs at least 2 clients, found {len(clients)}")
    return with_features(spec, clients, device)


def _with_tokens(data: Mapping[str, Any], spec: Spec) -> Mapping[str, Any]:
    """Return pairs (x, y) with token ids instead of texts, if features come from a language model."""
    return {
        name: (texts_as_tokens(pair[0], spec.features), *pair[1:]) if isinstance(pair, tuple | list) else pair
        for name, pair in data.items()
    }


def check_names_differ(clients: Any) -> None:
    """Check that all clients have different names, since requests refer to them by name."""
    if isinstance(clients, Mapping) or is_frame(clients):
        return
    names = [getattr(client, "name", None) for client in clients]
    for name, times in Counter(name for name in names if isinstance(name, str)).items():
        if times > 1:
            raise InputError(f"two clients have the same name, {name!r}: every client needs its own")


def as_model(model: ModelGiven | None) -> Model | None:
    """Convert a model to the form that the engine accepts: a function that makes a module becomes a `ModuleModel`."""
    if model is None:
        return None
    from torch import nn

    from sifu.engines.sim import LinearModel, ModuleModel

    if isinstance(model, LinearModel | ModuleModel):
        return model
    name = type(model).__name__
    if isinstance(model, nn.Module):
        raise InputError(
            f"model is a {name} instance, and every new model of a run must be fresh: give a function that makes one, "
            f"model={name}, or model=lambda: {name}(...) if it needs arguments"
        )
    if not callable(model):
        raise InputError(f"model must be a function that makes a torch.nn.Module, found {model!r}")
    return ModuleModel(model)
