"""Public data sets as npz files, the form in which sifu reads them; sifu-paper reads their published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sifu_paper.data import load


def npz_sections(name: str, source: Path | None, folder: Path, people: int = 0) -> dict[str, Any]:
    """Write a public data set to an npz file in `folder`, and return the sections of a ridge head on it.

    Args:
        name: Name of the data set.
        source: Folder with the published files.
        folder: Folder of the npz file.
        people: Samples of each client if whole people are the clients' data, in the order of their numbers; 0 to let
            the spec divide the samples.
    """
    path, dataset = folder / (f"{name}-people.npz" if people else f"{name}.npz"), load(name, source)
    rows, given = np.arange(len(dataset.y_train)), None if name == "celeba" else dataset.client_train
    if people:
        rows = np.argsort(dataset.client_train, kind="stable")
        given, number, first = np.zeros(len(rows), dtype=np.int64), 0, 0
        ends = np.flatnonzero(np.diff(dataset.client_train[rows], append=-1)) + 1
        for end in ends.tolist():
            given[first:end] = number
            if end - first >= people:
                number, first = number + 1, end
        rows, given = rows[:first], given[:first]
    arrays = {"x": dataset.x_train[rows], "y": dataset.y_train[rows]} | ({} if given is None else {"client": given})
    arrays |= {"x_test": dataset.x_test, "y_test": dataset.y_test, "classes": np.array(dataset.classes)}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    data = {"name": "npz", "file": str(path), "preprocessing": "fixed"}
    return {"data": data, "model": {"kind": "ridge", "outputs": len(dataset.classes)}}
