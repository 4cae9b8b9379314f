"""Whether the stored models are those of the ledger, and as far apart as their record says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sifu.core.method_info import method_info
from sifu.record.run_view import RunView
from sifu.store import files
from sifu.store.lock import is_locked
from sifu.store.reader import RunReader
from sifu.store.table_rows import ModelRow
from sifu.verify.value_comparison import TOLERANCE


def check_models(reader: RunReader) -> Iterator[str]:
    """Every model of the table is there as recorded, the current one among them."""
    rows, busy = reader.models(), is_locked(reader.folder)
    for node, row in rows.items():
        problem = _model_problem(reader.folder, row)
        if problem and not (busy and _model_problem(reader.folder, _model_now(reader.folder, node)) is None):
            yield problem
    if reader.tip not in rows:
        yield f"models: the current model (node {reader.tip}) is not there"


def check_moved(reader: RunReader) -> Iterator[str]:
    """Where a model and the one it was made from are both stored: it moved as far as its record says.

    Noise N(0, sigma^2 I) in d dimensions has a norm of sigma (sqrt(d) + t) with |t| > 8 less than once in 10^13 draws;
    a round moves the model by g ||mean - theta||, of which `mean_shift` is an upper bound.
    """
    if is_locked(reader.folder):
        return  # its writer may erase a model that is about to be read
    at_hand, view = reader.models(), RunView(reader)
    # A method that promises nothing may go on from whatever it makes of the model.
    free = {
        request.noise_node
        for request in view.requests
        if request.noise_node is not None and method_info(request.method).protection == "nothing"
    }
    for row in reader.node_rows():
        node = row.node
        if node.kind not in ("round", "noise") or node.node in free or node.parent is None:
            continue
        if not {node.node, node.parent} <= at_hand.keys():
            continue
        model, start = (reader.load_model(node).astype(np.float64) for node in (node.node, node.parent))
        moved = float(np.linalg.norm(model - start))
        slack = 64.0 * float(np.finfo(reader.layout.dtype).eps) * float(np.linalg.norm(model) + np.linalg.norm(start))
        low, high = 0.0, view.facts.server_rate * node.mean_shift * (1.0 + TOLERANCE)
        if node.kind == "noise":
            low, high = (node.noise_std * (math.sqrt(model.size) + far) for far in (-8.0, 8.0))
        if not low - slack <= moved <= high + slack:
            yield (
                f"models: node {node.node} lies {moved:.6g} from the one it was made from; by its record it would be "
                f"{max(low, 0.0):.6g} to {high:.6g}"
            )


def _model_problem(folder: Path, row: ModelRow | None) -> str | None:
    """What is wrong with the file of a row; a row that is gone needs none."""
    if row is None:
        return None
    try:
        content = files.model_path(folder, row.node).read_bytes()
    except OSError:
        return f"models: the file of node {row.node} is missing"
    if hashlib.sha256(content).hexdigest() != row.digest or len(content) != row.bytes:
        return f"models: the file of node {row.node} was changed"
    return None


def _model_now(folder: Path, node: int) -> ModelRow | None:
    """The row as it is now, beside a writer at work."""
    with RunReader(folder) as reader:
        return reader.models().get(node)
