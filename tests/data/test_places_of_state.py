"""State of a user's package that copies of its module share: found wherever the code can keep it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from sifu.core.allowed_code import ALLOWED_CODE
from sifu.data import users_code
from sifu.data.shared_state import refuse_changed_state, shared_state
from sifu.errors import InputError

NETWORK = """
import torch
from {package}.places import hold

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) * (1.0 + hold(float(x.max())))
"""
PLACES = {
    "a dictionary of a file imported by a relative import": """
def hold(value):
    from .kept import HELD
    HELD["largest"] = max(HELD["largest"], value)
    return HELD["largest"]
""",
    "a file imported from its own package": """
def hold(value):
    from . import kept
    kept.HELD["largest"] = max(kept.HELD["largest"], value)
    return kept.HELD["largest"]
""",
    "a file imported by its dotted name": """
import importlib
def hold(value):
    held = importlib.import_module("{package}.kept").HELD
    held["largest"] = max(held["largest"], value)
    return held["largest"]
""",
    "an attribute found by a dotted name": """
import operator, {package}.kept
def hold(value):
    held = operator.attrgetter("kept.HELD")({package})
    held["largest"] = max(held["largest"], value)
    return held["largest"]
""",
    "a variable named in a text that is executed": """
HELD = {{"largest": 0.0}}
def hold(value):
    return eval("HELD.update(largest=max(HELD['largest'], value)) or HELD['largest']")
""",
    "an array in an installed package": """
import numpy as np, torch
torch.tests_of_sifu = np.zeros(1)
def hold(value):
    torch.tests_of_sifu[0] = max(torch.tests_of_sifu[0], value)
    return float(torch.tests_of_sifu[0])
""",
    "an object in an installed package": """
import torch
class Held:
    largest = 0.0
torch.tests_of_sifu = Held()
def hold(value):
    torch.tests_of_sifu.largest = max(torch.tests_of_sifu.largest, value)
    return torch.tests_of_sifu.largest
""",
    "an installed class": """
from torch.nn import Linear
def hold(value):
    Linear.tests_of_sifu = max(getattr(Linear, "tests_of_sifu", 0.0), value)
    return Linear.tests_of_sifu
""",
    "an installed function": """
from torch.nn.functional import softmax
def hold(value):
    softmax.tests_of_sifu = max(getattr(softmax, "tests_of_sifu", 0.0), value)
    return softmax.tests_of_sifu
""",
    "a function exchanged in an installed package": """
import torch
def relu(x):
    return 2.0 * x
def hold(value):
    if value > 2.0:
        torch.nn.functional.tests_of_sifu = relu
    return float(hasattr(torch.nn.functional, "tests_of_sifu"))
""",
    "the environment in bytes": """
import os
def hold(value):
    os.environb[b"TESTS_OF_SIFU"] = b"%f" % max(float(os.environb.get(b"TESTS_OF_SIFU", b"0")), value)
    return float(os.environb[b"TESTS_OF_SIFU"])
""",
    "the registry of an abstract class": """
import abc
class Large(abc.ABC): pass
class Seen: pass
def hold(value):
    if value > 2.0:
        Large.register(Seen)
    return float(issubclass(Seen, Large))
""",
    "a cache that is full": """
import functools
@functools.lru_cache(maxsize=1)
def kept(value):
    return [0.0]
kept(0.0)
def hold(value):
    kept(max(value, 1.0) // 1.0)[0] += 1.0
    return kept(1.0)[0]
""",
    "a generator inside a generator": """
def inner():
    largest = 0.0
    while True:
        largest = max(largest, (yield largest))
def outer():
    yield from inner()
HELD = outer()
next(HELD)
def hold(value):
    return HELD.send(value)
""",
    "an attribute of a logger": """
import logging
LOG = logging.getLogger("tests of sifu")
LOG.largest = 0.0
def hold(value):
    LOG.largest = max(LOG.largest, value)
    return LOG.largest
""",
    "the key of a weak dictionary": """
import weakref
class Anchor: pass
ANCHOR = Anchor()
HELD = weakref.WeakValueDictionary({{0.0: ANCHOR}})
def hold(value):
    (largest,) = HELD.keys()
    HELD.clear()
    HELD[max(largest, value)] = ANCHOR
    return max(largest, value)
""",
    "a text in memory": """
import io
HELD = io.TextIOWrapper(io.BytesIO(b"0.0"))
def hold(value):
    HELD.seek(0)
    largest = max(float(HELD.read()), value)
    HELD.seek(0)
    HELD.truncate()
    HELD.write(str(largest))
    HELD.flush()
    return largest
""",
    "a kernel of an operator of torch": """
import torch
from . import kept
def hold(value):
    return float(torch.ops.{package}.largest(torch.tensor([value])))
""",
}
KEPT = """
import torch
HELD = {{"largest": 0.0}}
LIBRARY = torch.library.Library("{package}", "DEF")
LIBRARY.define("largest(Tensor x) -> Tensor")
def largest(x):
    HELD["largest"] = max(HELD["largest"], float(x))
    return x * 0.0 + HELD["largest"]
LIBRARY.impl("largest", largest, "CPU")
"""
NO_STATE = """
import functools, logging, os, torch
from torch.nn.functional import softmax
LOG = logging.getLogger("tests of sifu")
@functools.lru_cache(maxsize=1)
def kept(name):
    return float(os.environ.get(name, "0"))
kept("TESTS_OF_SIFU")
from .kept import HELD
def hold(value):
    LOG.debug("a value")
    return kept("TESTS_OF_SIFU") + HELD["largest"] + float(softmax(torch.zeros(2), 0)[0])
"""


def package_of(folder: Path, name: str, hold: str) -> ModuleType:
    """Write the user's package and import it."""
    (folder / name).mkdir()
    files = {
        "__init__": "",
        "kept": KEPT.format(package=name),
        "places": hold.format(package=name),
        "net": NETWORK.format(package=name),
    }
    for file, text in files.items():
        (folder / name / f"{file}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(f"{name}.net")


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(users_code.OWN_PACKAGES)
    monkeypatch.delenv("TESTS_OF_SIFU", raising=False)
    loaded = set(sys.modules)
    yield
    users_code.OWN_PACKAGES.intersection_update(before)
    for name in set(sys.modules) - loaded:
        if name.startswith("own_"):
            del sys.modules[name]
    for owner in (torch, nn.Linear, nn.functional, nn.functional.softmax):
        vars(owner).get("tests_of_sifu") is None or delattr(owner, "tests_of_sifu")


def check_refused(network: nn.Module, reason: str = "between clients") -> None:
    before = shared_state(network)
    refuse_changed_state(before, network)
    network(torch.full((2, 4), 3.0))
    with pytest.raises(InputError, match=reason):
        refuse_changed_state(before, network)


@pytest.mark.parametrize("place", PLACES)
def test_state_is_found_in_every_place(place: str, tmp_path: Path) -> None:
    package = f"own_{list(PLACES).index(place)}"
    check_refused(package_of(tmp_path, package, PLACES[place]).Network())


def test_a_package_without_state_is_not_refused(tmp_path: Path) -> None:
    network = package_of(tmp_path, "own_constant", NO_STATE.replace("{", "{{").replace("}", "}}")).Network()
    before = shared_state(network)
    for value in (1.0, 3.0):
        network(torch.full((2, 4), value))
    refuse_changed_state(before, network)


LATCH = """
HELD = [0.0]
def hold(value):
    HELD[0] = max(HELD[0], value)
    return HELD[0]
"""


@pytest.mark.parametrize("known_by", ["class", "consent", "nothing"])
def test_a_users_package_is_searched_although_it_is_installed(
    known_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of an installed library is not searched: libraries are the subject of the premise *module*."""
    monkeypatch.setattr(users_code, "INSTALLED", (*users_code.INSTALLED, str(tmp_path)))
    monkeypatch.setenv(ALLOWED_CODE, "own_installed.net:Network" if known_by == "consent" else "")
    network = package_of(tmp_path, "own_installed", LATCH).Network()
    if known_by != "nothing":
        check_refused(network if known_by == "class" else nn.Sequential(network), "places.HELD")
        return
    outer = nn.Sequential(network)
    before = shared_state(outer)
    outer(torch.full((2, 4), 3.0))
    refuse_changed_state(before, outer)


def test_a_users_file_with_a_name_of_the_standard_library_is_searched(tmp_path: Path) -> None:
    name = "own_named_like"
    package_of(tmp_path, name, LATCH)
    (tmp_path / "tabnanny.py").write_text(NETWORK.format(package=name).replace("hold(float", "own(float") + LATCH)
    (tmp_path / "tabnanny.py").write_text((tmp_path / "tabnanny.py").read_text() + "own = hold\n")
    assert "tabnanny" not in sys.modules
    try:
        check_refused(importlib.import_module("tabnanny").Network(), "tabnanny.HELD")
    finally:
        del sys.modules["tabnanny"]


def test_values_are_compared_and_not_only_names(tmp_path: Path) -> None:
    """The same array again is no change."""
    network = package_of(tmp_path, "own_array", PLACES["an array in an installed package"]).Network()
    before = shared_state(network)
    torch.tests_of_sifu = np.zeros(1)  # type: ignore[attr-defined]
    refuse_changed_state(before, network)
