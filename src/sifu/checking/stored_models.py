"""Checks of stored models: they match the ledger."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sifu.errors import RunDamagedError
from sifu.store.files import is_locked, read_plain, stored_path
from sifu.store.projection import ModelRow
from sifu.store.reader import RunReader

TOLERANCE = 1e-9
"""Relative tolerance of recomputed figures: another processor or library may differ in the last digits."""


def agree(recorded: Any, recomputed: Any) -> bool:
    """Return whether two values are equal, or are numbers within the tolerance; `True` does not equal 1."""
    if isinstance(recorded, bool) or isinstance(recomputed, bool):
        return recorded is recomputed
    if isinstance(recorded, int | float) and isinstance(recomputed, int | float):
        if recorded == recomputed or not (math.isfinite(recorded) and math.isfinite(recomputed)):
            return recorded == recomputed  # infinity equals only itself
        return abs(recorded - recomputed) <= TOLERANCE * max(abs(recorded), abs(recomputed))
    return bool(type(recorded) is type(recomputed) and recorded == recomputed)


ABSENT = object()
"""Marker for a missing field, as opposed to a field that is null."""


def differing(stated: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each field in which two JSON values differ, as its name, the value found and the value expected."""
    if isinstance(stated, dict) and isinstance(expected, dict):
        for key in sorted(stated.keys() | expected.keys()):
            inner = f"{name}.{key}" if name else str(key)
            yield from differing(stated.get(key, ABSENT), expected.get(key, ABSENT), inner)
    elif isinstance(stated, list) and isinstance(expected, list) and len(stated) == len(expected):
        for index, (item, expected_item) in enumerate(zip(stated, expected, strict=True)):
            yield from differing(item, expected_item, f"{name}[{index}]")
    elif isinstance(stated, dict | list) or isinstance(expected, dict | list) or not agree(stated, expected):
        yield name, stated, expected


def said(value: Any) -> str:
    """Return the value of a field, shortened to fit a line."""
    return "nothing" if value is ABSENT else repr(value)[:200]


def check_models(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each stored model that is missing or changed, and for a current model without a file."""
    problems = {node: problem for node, row in reader.models().items() if (problem := _file_problem(reader, row))}
    if problems:  # a writer may have changed both since the snapshot
        with RunReader(reader.folder) as later:
            now = later.models()
        yield from (problems[node] for node in problems if node in now and _file_problem(reader, now[node]))
    if reader.tip not in reader.models():
        yield f"models: the current model (node {reader.tip}) is not there"


def check_moved(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each model whose distance from its predecessor contradicts the record; both must be stored.

    Noise N(0, sigma^2 I) in d dimensions has a norm of sigma (sqrt(d) + t) with |t| > 8 less than once in 10^13 draws.
    A round moves the model by ||mean - theta||, and `mean_shift` is an upper bound on ||mean - theta||.
    """
    if is_locked(reader.folder):
        return  # a writer may erase a model that is about to be read
    available = reader.models()
    for node in reader.nodes():
        if node.kind not in ("round", "noise") or node.parent is None:
            continue
        if not {node.node, node.parent} <= available.keys() or math.isinf(node.noise_std):  # a purge erased sigma
            continue
        model, start = (reader.load_model(number).astype(np.float64) for number in (node.node, node.parent))
        moved = float(np.linalg.norm(model - start))
        slack = 64.0 * float(np.finfo(reader.layout.dtype).eps) * float(np.linalg.norm(model) + np.linalg.norm(start))
        low, high = 0.0, node.mean_shift * (1.0 + TOLERANCE)
        if node.kind == "noise":
            low, high = (node.noise_std * (math.sqrt(model.size) + far) for far in (-8.0, 8.0))
        if not low - slack <= moved <= high + slack:
            yield (
                f"models: node {node.node} lies {moved:.6g} from the one it was made from; by its record it would be "
                f"{max(low, 0.0):.6g} to {high:.6g}"
            )


def _file_problem(reader: RunReader, row: ModelRow) -> str:
    """Return the problem of a model's file, or an empty string."""
    name = f"models: the file of node {row.node}"
    try:
        content = read_plain(stored_path(reader.folder, "models", row.node))
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except RunDamagedError as error:
        return f"models: {error}"
    changed = hashlib.sha256(content).hexdigest() != row.digest or len(content) != row.bytes
    return f"{name} was changed" if changed else ""
