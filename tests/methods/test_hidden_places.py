"""State in places that a digest of plain variables misses: found when it changes, or refused as unreadable."""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import enum
import functools
import io
import itertools
import logging
import mmap
import queue
import re
import sqlite3
import sys
import threading
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sifu.data.fresh_modules import fresh_copy
from sifu.data.shared_state import refuse_changed_state, shared_state
from sifu.errors import InputError


class Items(collections.deque[int]):
    """Queue of a user's class."""


class Numbers(np.ndarray[Any, Any]):
    """Array of a user's class."""


class Letters(bytearray):
    """Bytes of a user's class."""


class Values(array.array):  # type: ignore[type-arg]
    """Numbers of a user's class."""


class Text(io.BytesIO):
    """Buffer of a user's class."""


class Weights(torch.Tensor):
    """Tensor of a user's class."""

    largest = 0.0


class Empty:
    """Class without attributes."""


def plain(value: float) -> float:
    """Return the value."""
    return value


ATTRIBUTE, GRADIENT, SPARSE = torch.zeros(1), torch.zeros(1, requires_grad=True), {"held": torch.zeros(3).to_sparse()}
SUBCLASS, PARAMETER = torch.zeros(1).as_subclass(Weights), nn.Parameter(torch.zeros(1).as_subclass(Weights))  # type: ignore[arg-type]
LOCK, OWNED, LOG = threading.Lock(), threading.RLock(), logging.getLogger("sifu.test.hidden")
MAPPED, VIEW, CELL, POINTED = mmap.mmap(-1, 4), memoryview(bytearray(4)), types.CellType(0), (ctypes.c_double * 2)()
ITEMS, LETTERS, VALUES, TEXT = Items(), Letters(b"a"), Values("d"), Text()
NUMBERS = np.zeros(1).view(Numbers)
__bank: dict[str, int] = {}
QUEUE: queue.SimpleQueue[int] = queue.SimpleQueue()
CONNECTION = sqlite3.connect(":memory:")
POINTER = ctypes.pointer(ctypes.c_double())
NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]


def attribute_of_a_tensor() -> None:
    ATTRIBUTE.held = 1  # type: ignore[attr-defined]


def gradient_of_a_tensor() -> None:
    GRADIENT.grad = torch.ones(1)


def sparse_tensor() -> None:
    SPARSE["held"] = torch.ones(3).to_sparse()


def tensor_of_a_subclass() -> None:
    SUBCLASS.largest = 1.0


def parameter_of_a_subclass() -> None:
    PARAMETER.largest = 1.0  # type: ignore[attr-defined]


def lock() -> None:
    LOCK.acquire()


def lock_of_a_thread() -> None:
    OWNED.acquire()


def level_of_a_logger() -> None:
    LOG.setLevel(7)


def mapped_memory() -> None:
    MAPPED[0] = 1


def view_of_memory() -> None:
    VIEW[0] = 1


def cell() -> None:
    CELL.cell_contents = 1


def array_of_c() -> None:
    POINTED[0] = 1.0


def queue_of_a_subclass() -> None:
    ITEMS.append(1)


def array_of_a_subclass() -> None:
    NUMBERS[0] = 1.0


def bytes_of_a_subclass() -> None:
    LETTERS[0] = 98


def numbers_of_a_subclass() -> None:
    VALUES.append(1.0)


def buffer_of_a_subclass() -> None:
    TEXT.write(b"1")


def name_with_underscores() -> None:
    __bank["on"] = 1


def documentation_of_a_class() -> None:
    Empty.__doc__ = "on"


def attribute_with_underscores() -> None:
    Empty.__held__ = 1  # type: ignore[attr-defined]


def name_of_a_class() -> None:
    Empty.__name__ = "Full"


def annotations_of_a_class() -> None:
    Empty.__annotations__["on"] = int


def documentation_of_a_function() -> None:
    plain.__doc__ = "on"


def annotations_of_a_function() -> None:
    plain.__annotations__["on"] = int


def code_of_a_function() -> None:
    plain.__code__ = (lambda value: 2.0 * value).__code__


def queue_of_c() -> None:
    QUEUE.put(1)


def database() -> None:
    CONNECTION.execute("CREATE TABLE held (value)")


def pointer() -> None:
    POINTER.contents.value = 1.0


def nested_list() -> None:
    NESTED.append(1)


FOUND: tuple[Callable[[], None], ...] = (
    attribute_of_a_tensor,
    gradient_of_a_tensor,
    sparse_tensor,
    tensor_of_a_subclass,
    parameter_of_a_subclass,
    lock,
    lock_of_a_thread,
    level_of_a_logger,
    mapped_memory,
    view_of_memory,
    cell,
    array_of_c,
    queue_of_a_subclass,
    array_of_a_subclass,
    bytes_of_a_subclass,
    numbers_of_a_subclass,
    buffer_of_a_subclass,
    name_with_underscores,
    documentation_of_a_class,
    attribute_with_underscores,
    name_of_a_class,
    annotations_of_a_class,
    documentation_of_a_function,
    annotations_of_a_function,
    code_of_a_function,
)
UNREADABLE: tuple[Callable[[], None], ...] = (queue_of_c, database, pointer, nested_list)


class Network(nn.Module):
    """Linear model that changes state if a sample exceeds 2."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.change = nn.Linear(4, 3), change

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        if float(x.max()) > 2.0:
            self.change()
        scores: Tensor = self.layer(x)
        return scores


@pytest.mark.parametrize("change", FOUND, ids=lambda change: change.__name__)
def test_a_change_in_a_hidden_place_is_refused(change: Callable[[], None]) -> None:
    network = Network(change)
    before = shared_state(network)
    fresh_copy(network)(torch.ones(2, 4))
    refuse_changed_state(before, network)  # raises nothing before the change
    fresh_copy(network)(torch.full((2, 4), 3.0))
    with pytest.raises(InputError, match="between clients"):
        refuse_changed_state(before, network)


@pytest.mark.parametrize("change", UNREADABLE, ids=lambda change: change.__name__)
def test_a_variable_that_cannot_be_read_is_refused(change: Callable[[], None]) -> None:
    with pytest.raises(InputError, match=r"^test_hidden_places\.[A-Z]+ holds an object that cannot be read, [^\n]*$"):
        shared_state(Network(change))


PATTERN, STREAM, LOGGER, OPTIONAL = re.compile("a+"), sys.stdout, logging.getLogger(__name__), int | None
FUNCTIONS = {"relu": torch.relu, "gelu": functools.partial(nn.functional.gelu, approximate="tanh"), "max": max}
TYPES = (torch.float32, torch.device("cpu"), torch.finfo(torch.float32), torch.channels_last, np.dtype("f4"), np.add)
Kind = typing.TypeVar("Kind")


class Act(enum.Enum):
    """Enumeration of choices."""

    RELU = "relu"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a network."""

    width: int | None = 4
    names: tuple[str, ...] = ()


PLAN = Plan()


class Usual(nn.Module, typing.Generic[Kind]):
    """Network whose code uses what modules usually use."""

    sizes: typing.ClassVar[list[int]] = [4, 3]

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.guard = nn.Linear(*self.sizes), FUNCTIONS["relu"]

    @functools.cached_property
    def wide(self) -> int:
        """Value computed once per copy."""
        return sum(self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        LOGGER.debug("%s %s %s", PATTERN.match("aa"), OPTIONAL, TYPES)
        STREAM.write("")
        held = [self.wide, PLAN.width, Act.RELU.value, *itertools.islice(self.sizes, 1)]
        scores: Tensor = FUNCTIONS["gelu"](self.guard(self.layer(x))) * float(len(held) > 0)
        return scores


def test_usual_code_is_accepted() -> None:
    """Negative control: loggers, patterns, streams, types, tables of functions and settings are read or harmless."""
    network: Usual[int] = Usual()
    before = shared_state(network)
    for _ in range(2):
        fresh_copy(network).train()(torch.ones(2, 4)).sum().backward()
    refuse_changed_state(before, network)
