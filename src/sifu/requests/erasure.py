"""Purges, which erase models that forgotten clients influenced."""

from __future__ import annotations

from dataclasses import dataclass

from sifu.errors import InputError
from sifu.requests.files_to_erase import everyone_forgotten, influenced
from sifu.requests.what_remains import remains
from sifu.run.run_view import RunView
from sifu.store.client_accuracy import STANDING_FILE
from sifu.store.last_failure import FAILURE_FILE
from sifu.store.projection import NewEvent
from sifu.store.reader import PURGED
from sifu.store.writer import REPORT, SCRUB_FILE, RunWriter

SHOWING = (REPORT, STANDING_FILE, FAILURE_FILE)
"""Names in the run folder that may show erased content, which a purge deletes as well."""


@dataclass(frozen=True)
class Purge:
    """Result of a purge.

    Attributes:
        models: Nodes whose models were erased.
        bytes: Size of the erased files.
        complete: False if another process still reads erased content.
        remains: Information about forgotten clients that is still in the folder, each item with the reason.
        copies: Deleted copies of the run, which an interrupted backup or restore had left unfinished.
        besides: Deleted files and folders that may have shown erased content, such as the report.
    """

    models: tuple[int, ...]
    bytes: int
    complete: bool
    remains: tuple[tuple[str, str], ...]
    copies: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()


def to_purge(view: RunView, available: set[int], among: set[int] | None = None) -> tuple[int, ...]:
    """Return the nodes of the models that a purge erases.

    These are the models that a forgotten client influenced without noise to cover it (Psi > 0). The current model is
    never erased, because it is released.
    """
    depth_of, nodes = view.path.depth_of, view.path.nodes
    forgotten = everyone_forgotten(view, among)
    # Models of groups are on no path; the request already erased the models of groups that held a forgotten client.
    on_path = [node for node in sorted(available) if node in depth_of]
    return tuple(node for node in on_path if node != nodes[-1].node and influenced(forgotten, depth_of[node]))


def purge(writer: RunWriter) -> Purge:
    """Permanently erase models that forgotten clients influenced without noise to cover it.

    Raises:
        InputError: If the run is not ready.
    """
    if writer.phase != "ready":
        raise InputError(f"the run is still {writer.phase}: finish it first, then purge")
    view = RunView(writer)
    on_disk = writer.models()
    gone = to_purge(view, set(on_disk))
    payload = {"subjects": [exposure.subject.subject for exposure in everyone_forgotten(view)]}
    size = sum(on_disk[node].bytes for node in gone)
    there = [name for name in SHOWING if (writer.folder / name).exists()]
    writer.record(NewEvent(PURGED, payload, dropped_models=gone, for_good=True))
    complete = not (writer.folder / SCRUB_FILE).exists()
    besides = tuple(name for name in there if not (writer.folder / name).exists())
    return Purge(gone, size, complete, tuple(remains(writer)), writer.copies_removed, besides)
