"""Data sets by name: the digits, a user's npz file, and data sets of other installed packages.

A package provides a data set through the entry point group `sifu.data`. The name of the entry point is the value of
`data.name` in a spec, and the entry point loads a `NamedData`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from sifu.data.dataset import Dataset, Scale
from sifu.data.digits import CLASSES, SCALE, read_digits
from sifu.data.npz import read_npz
from sifu.errors import InputError

GROUP = "sifu.data"
ENVIRONMENT_VARIABLE = "SIFU_DATA"
OF_THE_PAPER = ("mnist", "fashion_mnist", "cifar10", "cifar100", "celeba", "hospitals")
"""Names that the package of the paper provides."""


@dataclass(frozen=True)
class NamedData:
    """A data set that a spec can name: its reader, and facts about it that depend on no client.

    Attributes:
        read: Function that returns the data set, given the user's folder (None for the default folders) and the spec's
            `data.held_out_by`, which matters if the data set holds out rows itself.
        classes: Number of classes.
        scale: Constants that convert stored bytes to features, or None if values are used as stored.
        shape: Shape of a stored sample, if all samples have the same shape.
        is_table: True if the data set holds rows of a table and assigns them to clients itself.
    """

    read: Callable[[Path | None, str], Dataset]
    classes: int
    scale: Scale | None = None
    shape: tuple[int, ...] | None = None
    is_table: bool = False


DIGITS = NamedData(lambda folder, held_out_by: read_digits(), len(CLASSES), SCALE, (8, 8))


def load(name: str, folder: Path | str | None = None) -> Dataset:
    """Return a data set by its name.

    Args:
        name: `digits`, the name of a data set that an installed package provides, or a user's own npz file as
            `npz:PATH`, `PATH.npz`, or `npz` with its path as `folder`.
        folder: Folder with the files of the data set.

    Returns:
        The data set, with the constants for its bytes.

    Raises:
        InputError: If the name is unknown, or a file is missing or damaged.
    """
    own = _own_file(name, folder)
    if own is not None:
        if not own.is_file():
            raise InputError(f"there is no file {own}; give the path of an npz file with arrays x and y")
        return read_npz(own)
    named = find_data(name)
    if named is None:
        choices = sorted({"digits", *_provided()})
        close = difflib.get_close_matches(name.lower().replace("-", "_"), [*choices, "table", "npz"], n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"data set {name!r} is unknown: {hint}write one of {', '.join(choices)}, or table or npz with the path of "
            "a file"
        )
    place = None if folder is None else Path(folder).expanduser()
    return replace(named.read(place, "content"), scale=named.scale)


def find_data(name: str) -> NamedData | None:
    """Return the data set that a spec calls `name`, or None for other names, such as `npz` and `table`.

    Raises:
        InputError: If the data set belongs to the paper's package, which is not installed.
    """
    if name == "digits":
        return DIGITS
    if name in _provided():
        return _loaded(name)
    if name in OF_THE_PAPER:
        raise InputError(
            f"data set {name!r} is not part of sifu: install the paper's package with pip install ./paper in sifu's "
            "repository"
        )
    return None


def has_fixed_constants(name: str) -> bool:
    """Return whether a named data set (the digits or a data set of the paper) is preprocessed with constants only.

    Data sets of other packages do not count, because their readers see the rows of all clients and may use them for
    preprocessing.
    """
    if name not in ("digits", *OF_THE_PAPER):
        return False
    entry = _provided().get(name)
    return name == "digits" or entry is None or entry.value.startswith("sifu_paper.")


def scale_of(name: str) -> Scale | None:
    """Return the constants for the bytes of a data set, or None."""
    named = find_data(name)
    return named.scale if named else None


@cache
def _provided() -> dict[str, EntryPoint]:
    """Return the entry points of the data sets that installed packages provide, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@cache
def _loaded(name: str) -> NamedData:
    """Return a data set that an installed package provides."""
    named = _provided()[name].load()
    if not isinstance(named, NamedData):
        raise InputError(f"the entry point {name!r} of {GROUP} is a {type(named).__name__}, not a sifu.data.NamedData")
    return named


def search_folders(folder: Path | str | None) -> list[Path]:
    """Return the folders to search for the files of a named data set: `folder`, SIFU_DATA, ~/.cache/sifu/data."""
    places: list[Path | str] = [] if folder is None else [folder]
    if os.environ.get(ENVIRONMENT_VARIABLE):
        places.append(os.environ[ENVIRONMENT_VARIABLE])
    places.append("~/.cache/sifu/data")
    # Without a home directory os.path keeps ~, while pathlib raises.
    return list(dict.fromkeys(Path(os.path.expanduser(place)) for place in places))


def _own_file(name: str, folder: Path | str | None) -> Path | None:
    """Return the path of a user's own npz file, or None if `name` is the name of a data set."""
    if name == "npz":
        if folder is None:
            raise InputError("npz needs the path of a file: write npz:PATH")
        return Path(folder).expanduser()
    path = name.removeprefix("npz:")
    if path == name and not name.endswith(".npz"):
        return None
    relative = Path(path).expanduser()
    inside = None if folder is None else Path(folder).expanduser() / relative
    return inside if inside is not None and inside.is_file() else relative
