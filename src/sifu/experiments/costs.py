"""What a request cost: local steps, traffic, and what had to lie on disk for it; from what the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sifu.store.reader import RunReader

GOES_BACK = ("sifu", "shared")
"""Keeps models to go back to. Everyone else but FedEraser and FedAccum needs the current model alone."""
KEEPS_UPDATES = ("fed_eraser", "fed_accum", "updates")


def cost_of(reader: RunReader, branch: int, method: str, outcome: Any = None) -> dict[str, int]:
    """Local steps and bytes sent in the rounds of a branch (0: training), and the bytes a method keeps on disk.

    A participant receives a model and sends one back. Where an outcome brings its own count (rounds of calibration are
    no rounds of the history), that one holds.
    """
    steps_of = np.array([one.local_steps for one in reader.clients()], dtype=np.int64)
    nodes = {row.node.node for row in reader.node_rows() if row.node.branch == branch and row.node.kind == "round"}
    rows = reader.participation()
    took_part = rows.clients[np.isin(rows.nodes, np.array(sorted(nodes), dtype=np.int64))]
    layout = reader.layout
    model_bytes = layout.size * np.dtype(layout.dtype).itemsize
    counted = {
        "local_steps": int(steps_of[took_part].sum()),
        "bytes_sent": int(2 * took_part.size * model_bytes),
        "bytes_kept": _bytes_kept(reader, method, model_bytes),
    }
    own = getattr(outcome, "cost", None)
    return {name: int(getattr(own, name, None) or value) for name, value in counted.items()}


def _bytes_kept(reader: RunReader, method: str, model_bytes: int) -> int:
    if method in GOES_BACK:
        return sum(row.bytes for row in reader.models().values())
    if method in KEEPS_UPDATES:
        return 2 * model_bytes + _bytes_of_updates(reader)
    return model_bytes


def _bytes_of_updates(reader: RunReader) -> int:
    folder = Path(reader.folder) / "updates"
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
