"""Purges, which erase models, updates and figures that forgotten clients influenced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sifu.errors import InputError
from sifu.requests import figures_policy
from sifu.requests.files_to_erase import everyone_forgotten, influenced
from sifu.requests.what_remains import KeptFigure, kept_figures, remains
from sifu.run.run_view import RunView
from sifu.store import erased_figures, sealed
from sifu.store.actors import actor_name
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.store.writer import SCRUB_FILE, RunWriter


@dataclass(frozen=True)
class ToPurge:
    """Models and files of updates that a purge erases."""

    models: tuple[int, ...]
    updates: tuple[str, ...]


@dataclass(frozen=True)
class Purge:
    """Result of a purge.

    Attributes:
        models: Nodes whose models were erased.
        updates: Files of updates that were erased.
        bytes: Size of the erased files.
        complete: False if another process still reads erased content.
        remains: Information about forgotten clients that is still in the folder, each item with the reason.
        copies: Deleted copies of the run, which an interrupted backup or restore had left unfinished.
        figures: Places in the run that still hold figures derived from the data of forgotten clients.
    """

    models: tuple[int, ...]
    updates: tuple[str, ...]
    bytes: int
    complete: bool
    remains: tuple[tuple[str, str], ...]
    copies: tuple[str, ...] = ()
    figures: tuple[KeptFigure, ...] = ()


def to_purge(view: RunView, available: set[int], stored: dict[str, int], among: set[int] | None = None) -> ToPurge:
    """Return the models and the files of updates that a purge erases.

    These are the models and files that a forgotten client influenced without noise to cover it (Psi > 0). The current
    model is never erased, because it is released.

    Args:
        view: View of the run at the time of the purge.
        available: Nodes with a stored model.
        stored: Node of each file of updates.
        among: Subjects to consider, by default all.
    """
    depth_of, nodes = view.path.depth_of, view.path.nodes
    forgotten = everyone_forgotten(view, among)
    # Models of groups are on no path; the request already erased the models of groups that held a forgotten client.
    on_path = [node for node in sorted(available) if node in depth_of]
    models = [node for node in on_path if node != nodes[-1].node and influenced(forgotten, depth_of[node])]
    updates = []
    for file, node in sorted(stored.items()):
        depth = depth_of[node]
        if influenced(forgotten, depth - 1):
            updates.append(file)
    return ToPurge(tuple(models), tuple(updates))


def purge(writer: RunWriter, verified: str | None = None) -> Purge:
    """Permanently erase models and updates that forgotten clients influenced without noise to cover it.

    Args:
        writer: Writer of the run.
        verified: Head of the ledger at which the whole run was just verified. If it is given, also erase the figures
            that a plain purge keeps: figures that noise certificates depend on, and the list of kept models.

    Raises:
        InputError: If the run is not ready, or the figures cannot be erased.
    """
    if writer.phase != "ready":
        raise InputError(f"the run is still {writer.phase}: finish it first, then purge")
    view = RunView(writer)
    on_disk, stored = writer.models(), writer.updates()
    gone = to_purge(view, set(on_disk), {file: row.node for file, row in stored.items()})
    recorded = gone
    payload: dict[str, Any] = {"subjects": [exposure.subject.subject for exposure in everyone_forgotten(view)]}
    if verified is not None and figures_policy.erases_more_by_choice(writer):
        wish = payload[sealed.ALL_FIGURES] = _all_figures(writer, view, verified)
        gone = ToPurge(tuple(sorted(set(on_disk) - set(wish["models"]))), tuple(sorted(stored)))
        # Once figures are erased, earlier events name fewer models and files. This event drops only files still named.
        named = ReplayedLedger(list(erased_figures.without_figures(writer.events(), wish["models"]))).tables
        files = sorted(row.file for row in named.read("updates"))
        recorded = ToPurge(tuple(sorted(named.model_nodes - set(wish["models"]))), tuple(files))
    all_figures = sealed.ALL_FIGURES in payload
    payload[erased_figures.FIGURES_ERASED] = all_figures or not figures_policy.why_figures_stay(writer)
    size = sum(on_disk[node].bytes for node in gone.models) + sum(stored[file].bytes for file in gone.updates)
    models, updates = recorded.models, recorded.updates
    writer.record(NewEvent(sealed.PURGED, payload, dropped_models=models, dropped_updates=updates, for_good=True))
    complete = not (writer.folder / SCRUB_FILE).exists()
    noisy = view.spec.release.noise != 0.0
    figures = kept_figures(view.regime, _what_is_erased(writer), noisy_releases=noisy)
    return Purge(gone.models, gone.updates, size, complete, tuple(remains(writer)), writer.copies_removed, figures)


def _all_figures(writer: RunWriter, view: RunView, verified: str) -> dict[str, Any]:
    """Return the ledger's statement on the erasure of all figures; raise `InputError` if some must stay."""
    why = figures_policy.why_figures_stay(writer, by_choice=True)
    if not why and view.rate_source(sorted(view.forgotten)) == "forgotten":
        why = "the local rate follows from the data of a forgotten client; a request by scratch finds another"
    if not why and writer.signer().key is None:
        why = "the operator's key is not available to sign what was erased"
    if why:
        raise InputError(f"the figures of this run cannot be erased: {why}. Nothing was erased")
    if verified != writer.value("head"):
        raise InputError("the run was written to while it was verified. Nothing was erased; run the command again")
    executed = [row for row in writer.requests() if row.noise_node is not None]
    stay = erased_figures.kept_nodes(writer, writer.tip, by_choice=True) | {writer.tip, writer.path()[0].node}
    return {
        "models": sorted(stay & writer.models().keys()),
        "actor": actor_name(),
        "verified": verified,
        "requests": [row.request for row in executed],
        "certificates": erased_figures.erased_certificates(executed),
    }


def _what_is_erased(reader: RunReader) -> Literal["nothing", "all", "exact"]:
    """Return which figures were erased: `nothing`, `all` (`sifu purge --figures`), or `exact` (of exact requests)."""
    if figures_policy.why_figures_stay(reader):
        return "nothing"
    path = reader.path()
    if not erased_figures.not_recomputed(reader) or path[0].order == max(node.order for node in path):
        return "exact"
    return "all" if erased_figures.last_erased(reader)[0] == reader.tip else "nothing"
