"""Public data sets by name, wherever their files are."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sifu import InputError
from sifu.data import Dataset
from sifu_paper.data import celeba, cifar, hospitals, idx
from sifu_paper.data.download import Opener, Progress, download_official
from sifu_paper.data.subset import read_subset

WANTED = {
    "mnist": idx.FILES,
    "fashion_mnist": idx.FILES,
    "cifar10": (cifar.LAYOUTS["cifar10"].archive,),
    "cifar100": (cifar.LAYOUTS["cifar100"].archive,),
    "celeba": celeba.FILES,
    "hospitals": hospitals.FILES,
}
"""Official files of each set, for the message when they are missing."""

TORCHVISION_FOLDERS = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}
BY_HAND = {
    "celeba": "its licence forbids an automatic download, so get them at "
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
    "hospitals": "get them at https://archive.ics.uci.edu/dataset/45/heart+disease",
}


def search_folders(folder: Path | None) -> list[Path]:
    """Return the folders to search for data files: `folder`, SIFU_DATA, ~/.cache/sifu/data."""
    named = [folder, os.environ.get("SIFU_DATA"), "~/.cache/sifu/data"]
    return list(dict.fromkeys(Path(os.path.expanduser(place)) for place in named if place))


def read_public(name: str, folder: Path | None, held_out_by: str) -> Dataset:
    """Return a public data set.

    The function searches `folder`, the folder of the environment variable SIFU_DATA and ~/.cache/sifu/data, in this
    order. In each, official files come before `NAME.npz`, and a sub-folder `NAME/` is searched too. Patients of
    hospitals are held out by their content or their number.
    """
    if folder is not None and not folder.is_dir():
        raise InputError(f"the data folder {folder} does not exist; create it, or name another one (--data DIR)")
    roots = search_folders(folder)
    for root in roots:
        read = _find(name, root, held_out_by)
        if read is not None:
            return read()
    fetch = BY_HAND.get(name, f"let them be fetched (sifu-bench download {name})")
    same_names = (
        ". MNIST and FashionMNIST share their file names: keep each in its sub-folder" if name in idx.CLASSES else ""
    )
    raise InputError(
        f"data set {name!r} was not found in {', '.join(str(root) for root in roots)} nor in a sub-folder {name} of "
        f"these. Wanted are {', '.join(WANTED[name])}, or {name}.npz: put them there, name their folder (--data DIR "
        f"or the environment variable SIFU_DATA), or {fetch}{same_names}"
    )


def download(
    name: str, folder: Path | None = None, progress: Progress | None = None, *, opener: Opener | None = None
) -> Path:
    """Fetch the official files of a public data set into the sub-folder `name` of the first searched folder.

    Args:
        name: The data set.
        folder: Parent of the sub-folder; by default the folder of SIFU_DATA, or ~/.cache/sifu/data.
        progress: Called with the bytes fetched and the total.
        opener: Opens a URL; by default over https.

    Returns:
        The sub-folder.

    """
    return download_official(name, search_folders(folder)[0] / name, progress, opener=opener)


def _find(name: str, root: Path, held_out_by: str) -> Callable[[], Dataset] | None:
    """Return a function that reads `name` from `root` or its sub-folders; None if it is not there."""
    own = [root, root / name]
    raw = [root / TORCHVISION_FOLDERS[name]] if name in TORCHVISION_FOLDERS else []
    packed = [partial(read_subset, name, place / f"{name}.npz") for place in own if (place / f"{name}.npz").is_file()]
    return next(
        filter(None, (_find_official(name, place, held_out_by) for place in own + raw)), next(iter(packed), None)
    )


def _find_official(name: str, place: Path, held_out_by: str) -> Callable[[], Dataset] | None:
    if name in idx.CLASSES:
        return partial(idx.read_idx_dataset, name, place) if idx.find(name, place) else None
    if name in cifar.LAYOUTS:
        batches = cifar.find(name, place)
        return partial(cifar.read_cifar, name, batches) if batches else None
    if name == "hospitals":
        complete = all((place / file).is_file() for file in hospitals.FILES)
        return partial(hospitals.read_hospitals, place, held_out_by) if complete else None
    return partial(celeba.read_celeba, place) if celeba.find(place) else None
