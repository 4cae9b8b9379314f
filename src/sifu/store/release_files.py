"""Released heads of runs with `release.noise`: one file in `releases/`, and the events that record releases.

The models in `models/` are then the solved heads without noise, which are never released. Without `release.noise` the
current model is released unchanged, if there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.core.layout import Vector
from sifu.core.ledger import RELEASE_DISTANCES, Event
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.store import files
from sifu.store.reader import RELEASED, RunReader


@dataclass(frozen=True)
class ReleaseRow:
    """One release: its event, the node of the solved head, its noise, its file, and the participating clients.

    `distances` holds the distances of docs/theory.md, section 14.7, by client, and `record_distances` the maximum over
    each client's records.
    """

    seq: int
    time: str
    node: int
    noise_std: float
    digest: str
    clients: tuple[int, ...]
    distances: Mapping[int, float]
    record_distances: Mapping[int, float]


def release_noise(reader: RunReader) -> float:
    """Return the standard deviation of the noise on each release of a run, or 0 for a run without such noise."""
    return Spec.from_mapping(reader.spec).release.noise


def releases(reader: RunReader) -> list[ReleaseRow]:
    """Return all releases with noise, in order."""
    return [release_row(event) for event in reader.events() if event.kind == RELEASED]


def release_row(event: Event) -> ReleaseRow:
    """Return the release that an event records."""
    content = event.content
    measured = content[RELEASE_DISTANCES]
    clients, records = (
        {int(client): float(value) for client, value in measured[of].items()} for of in ("clients", "records")
    )
    node, noise_std, digest = int(content["node"]), float(content["noise_std"]), str(content["digest"])
    members = tuple(map(int, content["clients"]))
    return ReleaseRow(event.seq, event.time, node, noise_std, digest, members, clients, records)


def release_path(folder: Path, node: int) -> Path:
    """Return the path of the released head of a node."""
    return folder / files.RELEASES / f"{node}.safetensors"


def released_content(reader: RunReader) -> bytes:
    """Return the safetensors bytes of the model that users get, checked against its recorded digest.

    Raises:
        InputError: If the run adds noise to releases and has released nothing yet, or has no head.
    """
    if release_noise(reader) == 0.0:
        if lacks_head(reader):
            raise InputError("the run has no head since its last request ended: solve one with sifu update")
        return reader.model_content(reader.tip)
    row = _latest(reader)
    path = release_path(reader.folder, row.node)
    return files.read_content(path, f"the released head of node {row.node}", row.digest)


def released_model(reader: RunReader) -> Vector:
    """Return the released model.

    Raises:
        InputError: If the run adds noise to releases and has released nothing yet.
    """
    if release_noise(reader) == 0.0:
        return reader.load_model(reader.tip)
    row = _latest(reader)
    return files.read_model(release_path(reader.folder, row.node), reader.layout, row.digest)


def lacks_head(reader: RunReader) -> bool:
    """Return whether a closed-form run has no head: none was solved yet, or a request rolled the head back."""
    solves = Spec.from_mapping(reader.spec).regime.solves
    return solves and reader.nodes_by_number()[reader.tip].kind != "round"


def released_node(reader: RunReader) -> int | None:
    """Return the node of the model that users get, or None if nothing was released yet, or there is no head."""
    if release_noise(reader) == 0.0:
        return None if lacks_head(reader) else reader.tip
    rows = releases(reader)
    return rows[-1].node if rows else None


def write_release(folder: Path, layout: Any, node: int, vector: Vector) -> str:
    """Write a released head before the event that names it; return its digest."""
    content = files.model_bytes(layout, vector)
    files.write_atomically(release_path(folder, node), content)
    return hashlib.sha256(content).hexdigest()


def unnamed_releases(reader: RunReader) -> Sequence[Path]:
    """Return the files in `releases/` other than the file of the latest release."""
    rows = releases(reader)
    named = release_path(reader.folder, rows[-1].node) if rows else None
    folder = reader.folder / files.RELEASES
    return [path for path in sorted(folder.glob("*.safetensors")) if path != named] if folder.is_dir() else []


def _latest(reader: RunReader) -> ReleaseRow:
    rows = releases(reader)
    if not rows:
        raise InputError("nothing was released yet: finish training (sifu train), then sifu update")
    return rows[-1]
