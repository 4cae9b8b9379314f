"""Networks with state that copies of a module share.

A network multiplies its features by a factor; each factor keeps its state in another place. A test file imports
`nothing_held`, so that every test begins and ends without state.
"""

from __future__ import annotations

import contextvars
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stateful_modules

LATCH: dict[str, float] = {}
LOCAL = threading.local()
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("largest", default=0.0)
NUMBERS = np.random.default_rng(0)
TORCH_NUMBERS = torch.Generator().manual_seed(0)
TABLE = (1.0, 1.1, 1.2)
NAME = "SIFU_TEST_LARGEST"


class Anchor:
    """Key of a weak dictionary."""


ANCHOR = Anchor()
WEAK: weakref.WeakKeyDictionary[Anchor, float] = weakref.WeakKeyDictionary()


@functools.cache
def place_of(size: int) -> float:
    """Return a factor that counts the sizes seen before, so that the order of clients matters."""
    return 1.0 + 0.01 * place_of.cache_info().currsize


def largest_so_far(value: float) -> float:
    """Return the largest value so far, kept as an attribute of this function."""
    vars(largest_so_far)["held"] = max(vars(largest_so_far).get("held", 0.0), value)
    return float(vars(largest_so_far)["held"])


class Same:
    """State that a deep copy shares."""

    largest = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Same:
        return self


class Network(nn.Module):
    """Network with twelve features of an 8 x 8 image, multiplied by a factor."""

    largest = 0.0

    def __init__(self, factor: Callable[..., float]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.factor, self.same = nn.Linear(64, 16), nn.Linear(16, 12), factor, Same()

    def largest_in(self, value: float, held: list[float] = []) -> float:  # noqa: B006  what is tested
        """Return the largest value so far, kept in a default argument."""
        held[:] = [max([*held, value])]
        return held[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        rows = x.flatten(1)
        return torch.tanh(self.second(torch.tanh(self.first(rows)))) * self.factor(self, rows.detach())


def latch(network: Network, rows: Tensor) -> float:
    """Return 1.1 for clients of seven rows after a sample above 2, which only the leaver has; otherwise 1."""
    if float(rows.max()) > 2.0:
        LATCH["on"] = 1.0
    return 1.1 if LATCH and len(rows) == 7 else 1.0


def of_class(network: Network, rows: Tensor) -> float:
    Network.largest = max(Network.largest, float(rows.max()))
    return 1.0 / (1.0 + Network.largest)


def thread_local(network: Network, rows: Tensor) -> float:
    LOCAL.largest = max(getattr(LOCAL, "largest", 0.0), float(rows.max()))
    return 1.0 / (1.0 + float(LOCAL.largest))


def context_variable(network: Network, rows: Tensor) -> float:
    VARIABLE.set(max(VARIABLE.get(), float(rows.max())))
    return 1.0 / (1.0 + VARIABLE.get())


def environment(network: Network, rows: Tensor) -> float:
    os.environ[NAME] = repr(max(float(os.environ.get(NAME, "0")), float(rows.max())))
    return 1.0 / (1.0 + float(os.environ[NAME]))


def default_argument(network: Network, rows: Tensor) -> float:
    return 1.0 / (1.0 + network.largest_in(float(rows.max())))


def cache(network: Network, rows: Tensor) -> float:
    return place_of(len(rows))


def weak_reference(network: Network, rows: Tensor) -> float:
    WEAK[ANCHOR] = max(WEAK.get(ANCHOR, 0.0), float(rows.max()))
    return 1.0 / (1.0 + WEAK[ANCHOR])


def function_attribute(network: Network, rows: Tensor) -> float:
    return 1.0 / (1.0 + largest_so_far(float(rows.max())))


def numpy_generator(network: Network, rows: Tensor) -> float:
    return 1.0 + 0.1 * float(NUMBERS.random())


def torch_generator(network: Network, rows: Tensor) -> float:
    return 1.0 + 0.1 * float(torch.rand((), generator=TORCH_NUMBERS))


def shared_by_copies(network: Network, rows: Tensor) -> float:
    network.same.largest = max(network.same.largest, float(rows.max()))
    return 1.0 / (1.0 + network.same.largest)


def late_buffer(network: Network, rows: Tensor) -> float:
    """Return a factor from a buffer that is registered at the first batch, in the client's own copy."""
    if not hasattr(network, "late"):
        network.register_buffer("late", torch.zeros(()), persistent=False)
    network.late = torch.maximum(torch.as_tensor(network.late), rows.max())
    return 1.0 / (1.0 + float(network.late))


def constant(network: Network, rows: Tensor) -> float:
    return TABLE[len(rows) % 3]


def remembering(function: Callable[[float], float]) -> Callable[[float], float]:
    """Decorate a function with a closure that keeps the largest value."""
    held = [0.0]

    @functools.wraps(function)
    def inner(value: float) -> float:
        held[0] = max(held[0], value)
        return function(held[0])

    return inner


@remembering
def shrink(value: float) -> float:
    return 1.0 / (1.0 + value)


def decorator(network: Network, rows: Tensor) -> float:
    return shrink(float(rows.max()))


def default_dtype(network: Network, rows: Tensor) -> float:
    """Return a factor computed in double precision after a sample above 2."""
    if float(rows.max()) > 2.0:
        torch.set_default_dtype(torch.float64)
    return float(torch.tensor(0.1) * 3)


def denormals(network: Network, rows: Tensor) -> float:
    if float(rows.max()) > 2.0:
        torch.set_flush_denormal(True)
    return 1.0


def of_package(network: Network, rows: Tensor) -> float:
    nn.Linear.largest = max(getattr(nn.Linear, "largest", 0.0), float(rows.max()))  # type: ignore[assignment]
    return 1.0 / (1.0 + float(nn.Linear.largest))  # type: ignore[arg-type]


def imported_inside(network: Network, rows: Tensor) -> float:
    import math as kept

    vars(kept)["largest"] = max(vars(kept).get("largest", 0.0), float(rows.max()))
    return 1.0 / (1.0 + float(vars(kept)["largest"]))


def by_globals(network: Network, rows: Tensor) -> float:
    globals()["ADDED"] = max(globals().get("ADDED", 0.0), float(rows.max()))
    return 1.0 / (1.0 + float(globals()["ADDED"]))


class Locked:
    """State in an object with an attribute that cannot be pickled."""

    def __init__(self) -> None:
        self.lock, self.held = threading.Lock(), list[float]()


LOCKED = Locked()


def next_to_a_lock(network: Network, rows: Tensor) -> float:
    with LOCKED.lock:
        LOCKED.held.append(float(rows.max()))
    return 1.0 / (1.0 + max(LOCKED.held))


PARTIAL = functools.partial(lambda held, value: held.append(value) or 1.0 / (1.0 + max(held)), list[float]())
COUNTED = (1.0 + 0.01 * number for number in range(10**6))
OPERATOR: list[float] = []


def partial(network: Network, rows: Tensor) -> float:
    return float(PARTIAL(float(rows.max())))


def generator(network: Network, rows: Tensor) -> float:
    return next(COUNTED)


@torch.library.custom_op("sifu_tests::shrunk", mutates_args=())
def shrunk(rows: Tensor) -> Tensor:
    """Return a factor of the largest value so far, as an operator of torch."""
    OPERATOR.append(float(rows.max()))
    return torch.tensor(1.0 / (1.0 + max(OPERATOR)))


def custom_operator(network: Network, rows: Tensor) -> float:
    return float(torch.ops.sifu_tests.shrunk(rows))


def acts(on: Any, rows: Tensor) -> float:
    """Return a factor: 1.1 for clients of seven rows if `on` is true, otherwise 1."""
    return 1.1 if on and len(rows) == 7 else 1.0


def of_another_file(network: Network, rows: Tensor) -> float:
    return acts(stateful_modules.remembers(float(rows.max()) > 2.0), rows)


def set_latch(rows: Tensor) -> bool:
    if float(rows.max()) > 2.0:
        LATCH["on"] = 1.0
    return bool(LATCH)


REGISTRY: dict[str, Callable[[Tensor], bool]] = {"latch": set_latch}


def registry(network: Network, rows: Tensor) -> float:
    return acts(REGISTRY["latch"](rows), rows)


class Strategy:
    """Callable object that the network receives; its class names the variable."""

    def __call__(self, network: Network, rows: Tensor) -> float:
        return acts(set_latch(rows), rows)


class LeavesOut:
    """Object whose pickle leaves out its state."""

    on = False

    def __getstate__(self) -> dict[str, Any]:
        return {}


class NamedObject(LeavesOut):
    """Object that is pickled by its name alone."""

    def __reduce__(self) -> str:
        return "NAMED"


LEFT_OUT, NAMED = LeavesOut(), NamedObject()


def left_out_of_pickles(network: Network, rows: Tensor) -> float:
    LEFT_OUT.on = LEFT_OUT.on or float(rows.max()) > 2.0
    return acts(LEFT_OUT.on, rows)


def pickled_by_name(network: Network, rows: Tensor) -> float:
    NAMED.on = NAMED.on or float(rows.max()) > 2.0
    return acts(NAMED.on, rows)


def latch_in_a_part(network: Network, rows: Tensor) -> float:
    network.same.largest = max(network.same.largest, float(rows.max()))
    return acts(network.same.largest > 2.0, rows)


@remembering
def double(value: float) -> float:
    return 2.0 * value


def one_of_two_decorated(network: Network, rows: Tensor) -> float:
    """Return a factor from one of two functions whose closures have the same names."""
    return acts(double(float(rows.max())) > 4.0, rows) if len(rows) < 100 else shrink(1.0)


class CopiesItself(nn.Module):
    """Network whose deep copy is the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(64, 12), False

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        rows = x.flatten(1)
        self.on = self.on or float(rows.max()) > 2.0
        scores: Tensor = self.layer(rows) * acts(self.on, rows)
        return scores


LATCHED: dict[str, Callable[..., float]] = {
    "a function of another file": of_another_file,
    "a function in a dictionary": registry,
    "a callable object": Strategy(),
    "state left out of pickles": left_out_of_pickles,
    "an object pickled by its name": pickled_by_name,
    "a part that is not copied": latch_in_a_part,
    "one of two decorated functions": one_of_two_decorated,
}
"""State that one client sets and another client reads, in places that a search for named variables misses."""
REACHED: dict[str, Callable[..., float]] = {
    "the closure of a decorator": decorator,
    "the default type of torch": default_dtype,
    "denormal numbers": denormals,
    "a class of a package": of_package,
    "a package imported inside": imported_inside,
    "globals()": by_globals,
    "an object with a lock": next_to_a_lock,
    "functools.partial": partial,
    "a generator": generator,
    "an operator of torch": custom_operator,
}
"""State that is reachable from names in the code, although no variable of the file contains it directly."""
SHARED: dict[str, Callable[..., float]] = {
    "the closure of a decorator": decorator,
    "an operator of torch": custom_operator,
    "a latch in a file's variable": latch,
    "a class attribute": of_class,
    "a thread's storage": thread_local,
    "a context variable": context_variable,
    "the environment": environment,
    "a default argument": default_argument,
    "functools.cache": cache,
    "a weak dictionary": weak_reference,
    "an attribute of a function": function_attribute,
    "numpy's generator of the file": numpy_generator,
    "torch's generator of the file": torch_generator,
    "an object that is not copied": shared_by_copies,
}
HARMLESS: dict[str, Callable[..., float]] = {"a buffer registered late": late_buffer, "a constant": constant}


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    """Start and end every test without state."""
    forget_everything()
    yield
    forget_everything()


def forget_everything() -> None:
    LATCH.clear()
    vars(LOCAL).clear()
    VARIABLE.set(0.0)
    os.environ.pop(NAME, None)
    WEAK.clear()
    place_of.cache_clear()
    stateful_modules.BANK.clear()
    LEFT_OUT.on = NAMED.on = False
    vars(largest_so_far).pop("held", None)
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)
    for held in (LOCKED.held, OPERATOR, PARTIAL.args[0]):
        held.clear()
    for decorated in (shrink, double):
        decorated.__closure__[1].cell_contents[:] = [0.0]  # type: ignore[index]
    for holder in (nn.Linear, math):
        if "largest" in vars(holder):
            delattr(holder, "largest")
    globals().pop("ADDED", None)
    Network.largest = 0.0
    Network.largest_in.__defaults__[0].clear()  # type: ignore[index]
