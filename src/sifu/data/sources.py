"""One way in: a data set by its name, from wherever its files are."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sifu.data import celeba, cifar, hospitals, idx
from sifu.data.dataset import Dataset
from sifu.data.download import Opener, Progress, download_official
from sifu.data.idx import read_digits
from sifu.data.npz import read_npz
from sifu.errors import InputError

NAMES = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "celeba", "hospitals")
ENVIRONMENT_VARIABLE = "SIFU_DATA"

WANTED = {
    "mnist": idx.FILES,
    "fashion_mnist": idx.FILES,
    "cifar10": (cifar.LAYOUTS["cifar10"].archive,),
    "cifar100": (cifar.LAYOUTS["cifar100"].archive,),
    "celeba": celeba.FILES,
    "hospitals": hospitals.FILES,
}
"""The official files of each set, as named when they are missing."""

TORCHVISION_FOLDERS = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}


def load(
    name: str,
    folder: Path | str | None = None,
    download: bool = False,
    progress: Progress | None = None,
    *,
    opener: Opener | None = None,
    held_out_by: str = "content",
) -> Dataset:
    """The data set `name`: one of `NAMES`, or a user's own file as `npz:PATH`, `PATH.npz`, or npz and a path.

    Looked for in `folder`, in the folder of the environment variable SIFU_DATA and in ~/.cache/sifu/data,
    in this order; in each, official files come before `NAME.npz`, and a sub-folder `NAME/` is searched too.
    With `download`, missing official files are fetched into the sub-folder of the first of these folders.
    `progress(done, total)` counts bytes while downloading and images while decoding CelebA. `held_out_by` says what the
    patients of hospitals are held out by, their content or their number.
    """
    own = _own_file(name, folder)
    if own is not None:
        if not own.is_file():
            raise InputError(f"there is no file {own}; give the path of an npz file with arrays x and y")
        return read_npz(own)
    if name not in NAMES:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), [*NAMES, "table", "npz"], n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"data set {name!r} is not known: {hint}Known are {', '.join(NAMES)}, and with the path of a file "
            "table and npz"
        )
    if name == "digits":
        return read_digits()
    if folder is not None and not Path(folder).expanduser().is_dir() and not download:
        raise InputError(f"the data folder {folder} does not exist; create it, or name another one (--data DIR)")
    roots = search_folders(folder)
    for root in roots:
        reader = _find(name, root, progress, held_out_by)
        if reader is not None:
            return reader()
    if download:
        target = download_official(name, roots[0] / name, progress, opener=opener)
        reader = _find_official(name, target, progress, held_out_by)
        if reader is not None:
            return reader()
    by_hand = {
        "celeba": "its licence forbids an automatic download, so get them at "
        "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
        "hospitals": "get them at https://archive.ics.uci.edu/dataset/45/heart+disease",
    }
    fetch = by_hand.get(name, "let them be fetched (sifu train --download)")
    same_names = (
        ". MNIST and FashionMNIST share their file names: keep each in its sub-folder" if name in idx.CLASSES else ""
    )
    raise InputError(
        f"data set {name!r} was not found in {', '.join(str(root) for root in roots)} nor in a sub-folder {name} of "
        f"these. Wanted are {', '.join(WANTED[name])}, or {name}.npz: put them there, name their folder (--data DIR "
        f"or the environment variable {ENVIRONMENT_VARIABLE}), or {fetch}{same_names}"
    )


def search_folders(folder: Path | str | None) -> list[Path]:
    """Where data are looked for, in order: `folder`, SIFU_DATA, ~/.cache/sifu/data."""
    places: list[Path | str] = [] if folder is None else [folder]
    if os.environ.get(ENVIRONMENT_VARIABLE):
        places.append(os.environ[ENVIRONMENT_VARIABLE])
    places.append("~/.cache/sifu/data")
    # os.path leaves ~ alone where there is no home, pathlib raises.
    return list(dict.fromkeys(Path(os.path.expanduser(place)) for place in places))


def _own_file(name: str, folder: Path | str | None) -> Path | None:
    """The path of a user's own npz file, or None when `name` names a public set."""
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


def _find(name: str, root: Path, progress: Progress | None, held_out_by: str) -> Callable[[], Dataset] | None:
    """How to read `name` from `root` or its sub-folders; None when it is not there."""
    own = [root, root / name]
    raw = [root / TORCHVISION_FOLDERS[name]] if name in TORCHVISION_FOLDERS else []
    packed = [partial(read_npz, place / f"{name}.npz", name) for place in own if (place / f"{name}.npz").is_file()]
    official = (_find_official(name, place, progress, held_out_by) for place in own + raw)
    return next(filter(None, official), next(iter(packed), None))


def _find_official(name: str, place: Path, progress: Progress | None, held_out_by: str) -> Callable[[], Dataset] | None:
    if name in idx.CLASSES:
        return partial(idx.read_idx_dataset, name, place) if idx.find(name, place) else None
    if name in cifar.LAYOUTS:
        batches = cifar.find(name, place)
        return partial(cifar.read_cifar, name, batches) if batches else None
    if name == "hospitals":
        complete = all((place / file).is_file() for file in hospitals.FILES)
        return partial(hospitals.read_hospitals, place, held_out_by) if complete else None
    return partial(celeba.read_celeba, place, progress) if celeba.find(place) else None
