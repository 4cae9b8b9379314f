"""Erasure of files with uncovered influence of forgotten clients, and a report of what remains and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.ledger import Event
from sifu.core.spec.sections import FeaturesSpec
from sifu.errors import InputError
from sifu.requests import figures_policy
from sifu.requests.what_remains import KeptFigure, copies_elsewhere, kept_figures
from sifu.run.group_state import is_hit
from sifu.run.run_view import RunView
from sifu.store import erased_figures, sealed
from sifu.store.actors import actor_name
from sifu.store.events_check import ReplayedLedger, ReplayedTables
from sifu.store.keys import KEY_FILE
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader
from sifu.store.statistics_files import OwnStatistics, StatisticsRow, can_be_used, read_statistics, write_statistics
from sifu.store.unfinished import unfinished_copies
from sifu.store.writer import SCRUB_FILE, RunWriter
from sifu.theory.closed_form.blocks import drop, parts_of_rows, parts_through
from sifu.theory.closed_form.sums import RunningSum
from sifu.theory.rollback import Exposure, Subject


@dataclass(frozen=True)
class SumLeft:
    """Sum of statistics that replaces an erased one.

    Attributes:
        made_of: The sum it is computed from.
        clients: Clients in the new sum.
        trunks: Nodes of the networks that compute its features.
    """

    made_of: StatisticsRow
    clients: tuple[int, ...]
    trunks: tuple[int, ...]


def statistics_to_erase(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int] = ()
) -> tuple[str, ...]:
    """Return the files of statistics to erase.

    Args:
        stored: Stored files of statistics.
        gone: Clients that are forgotten.
        networks: Nodes of networks that are erased; statistics of features that they computed are erased as well.
    """
    left, erased = set(gone), set(networks)
    return tuple(sorted(row.file for row in stored if left & set(row.clients) or erased & set(row.trunks)))


def sum_left(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int], features: FeaturesSpec
) -> SumLeft | None:
    """Return the sum that replaces the stored one: without the clients that left and the blocks of erased networks.

    A client is removed by subtraction, so all parts of its own statistics must be stored.

    Args:
        stored: Stored files of statistics.
        gone: Clients that are forgotten.
        networks: Nodes of networks that are erased.
        features: The features section of the spec.

    Returns:
        The new sum; None if the stored sum can stay, or cannot be reduced.
    """
    rows = list(stored)
    whole = next((row for row in rows if row.is_sum), None)
    if whole is None:
        return None
    leaving, backbones = (
        set(whole.clients) & set(gone),
        tuple(node for node in whole.trunks if node not in set(networks)),
    )
    clients = tuple(sorted(set(whole.clients) - leaving))
    unchanged, merged = (
        not leaving and backbones == whole.trunks,
        features.tune == "merge" and backbones != whole.trunks,
    )
    if unchanged or merged or not clients:
        return None
    networks_used, in_parts = range(len(whole.trunks)), features.tune == "blocks"
    needed = {
        False: len(parts_through(networks_used)) if in_parts else 1,
        True: len(parts_of_rows(parts_through(networks_used))) if in_parts else 1,
    }
    available = Counter(
        (row.clients[0], row.is_rows) for row in rows if not row.is_sum and can_be_used(row, whole.trunks)
    )
    subtracted = all(any(available[client, form] == needed[form] for form in needed) for client in leaving)
    return SumLeft(whole, clients, backbones) if subtracted else None


def write_sum_left(
    writer: RunWriter, view: RunView, gone: Collection[int], networks: Collection[int], node: int
) -> list[dict[str, Any]]:
    """Subtract the clients that left, drop erased blocks, and write the remaining sum.

    Args:
        writer: Writer of the run.
        view: View of the run at this instant.
        gone: Clients that are forgotten.
        networks: Nodes of networks that are erased.
        node: Last node that the next event records.

    Returns:
        The row of the new file, to be named by the next event; empty if there is no such sum.
    """
    rows = list(writer.statistics().values())
    left = sum_left(rows, gone, networks, view.spec.features)
    if left is None:
        return []
    fixed, groups = recorded_fixed_point(view.spec, writer.layout), writer.group_models()
    blocks = recorded_blocks(view.spec, writer.layout) if view.spec.features.tune == "blocks" else None
    own = OwnStatistics.among(rows, fixed, blocks, {groups[backbone].grp: backbone for backbone in left.made_of.trunks})
    running = RunningSum(fixed, read_statistics(writer.folder, left.made_of, fixed), in_place=True)
    for client in sorted(set(left.made_of.clients) & set(gone)):
        running.subtract(own.read(writer.folder, client, own.parts()))
    statistics = running.statistics()
    dropped = [groups[backbone].grp for backbone in left.made_of.trunks if backbone not in left.trunks]
    if blocks is not None and dropped:
        statistics = drop(statistics, blocks, dropped)
    row = write_statistics(
        writer.folder, node, left.clients, statistics, is_sum=True, seed=writer.salt_seed(), backbones=left.trunks
    )
    writer.written_sum = row["digest"], statistics
    return [row]


AUDIT = "audit"
"""Default folder of `sifu audit`."""


@dataclass(frozen=True)
class ToPurge:
    """Models and files of updates that the strict rule erases at one time, for all clients forgotten before it."""

    models: tuple[int, ...]
    updates: tuple[str, ...]


@dataclass(frozen=True)
class Purge:
    """Result of a purge: the erased models and files, and the remaining information with the reasons.

    Attributes:
        models: Nodes whose models were erased.
        updates: Files of updates that were erased.
        bytes: Size of the erased files.
        complete: False if another process still reads erased content.
        remains: Remaining information about forgotten clients, each item with the reason.
        copies: Unfinished copies of the run, left by an interrupted backup or restore, that were deleted.
        figures: Places that still hold figures derived from the data of forgotten clients.
    """

    models: tuple[int, ...]
    updates: tuple[str, ...]
    bytes: int
    complete: bool
    remains: tuple[tuple[str, str], ...]
    copies: tuple[str, ...] = ()
    figures: tuple[KeptFigure, ...] = ()


def everyone_forgotten(view: RunView, among: set[int] | None = None) -> list[Exposure]:
    """Return the exposure of every subject of the executed requests, or only of the subjects in `among`."""
    requests = {row.request: row for row in view.requests}
    subjects = []
    for row in view.reader.subjects():
        if among is not None and row.subject not in among:
            continue
        request = requests[row.request]
        order = request.request_order or 0
        subjects.append(Subject(row.subject, row.clients, 1.0, request.terms.scope, order, 0.0, 0.0))
    return view.exposures(subjects)


def to_purge(view: RunView, available: set[int], stored: dict[str, int], among: set[int] | None = None) -> ToPurge:
    """Return the models and files of updates with uncovered influence (Psi > 0) of a forgotten client.

    The current model is never erased, because it is released.

    Args:
        view: The history at the instant of the purge.
        available: Nodes with a stored model.
        stored: Node of each file of updates.
        among: Subjects to consider; by default all.
    """
    depth_of, nodes = view.path.depth_of, view.path.nodes
    forgotten = everyone_forgotten(view, among)

    def held(depth: int) -> bool:
        return any(exposure.psi_to_hide(depth) > 0.0 for exposure in forgotten)

    # Models of groups are on no path; the request already erased the models of groups that held a forgotten client.
    on_path = [node for node in sorted(available) if node in depth_of]
    models = [node for node in on_path if node != nodes[-1].node and held(depth_of[node])]
    updates = []
    for file, node in sorted(stored.items()):
        depth = depth_of[node]
        if held(depth if nodes[depth].kind == "heuristic" else depth - 1):
            updates.append(file)
    return ToPurge(tuple(models), tuple(updates))


def forgetting_models(view: RunView, clients: Sequence[int], available: set[int]) -> tuple[int, ...]:
    """Return the models, except the current one, influenced by clients whose request is not yet executed."""
    subjects = [Subject(0, (client,), 1.0, "all", view.next_order, 0.0, 0.0) for client in clients]
    exposures, depth_of, groups = view.exposures(subjects), view.path.depth_of, view.reader.group_models()

    def holds(node: int) -> bool:
        if node in groups:
            return is_hit(groups[node], clients)
        # The fresh model kept for the groups is on no path and holds no client's data.
        return node in depth_of and any(exposure.psi_to_hide(depth_of[node]) > 0.0 for exposure in exposures)

    return tuple(node for node in sorted(available) if node != view.path.nodes[-1].node and holds(node))


def purge(writer: RunWriter, verified: str | None = None) -> Purge:
    """Permanently erase the models and updates with uncovered influence of a forgotten client.

    Args:
        writer: Writer of the run.
        verified: Head of the ledger at which the whole run was just verified. If given, also erase all figures that a
            plain purge would keep: the figures that noise certificates depend on, and the list of kept models.

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
        # Earlier events will no longer name all models and files; this event drops the models and files they still
        # name.
        named = ReplayedLedger(erased_figures.rest_of(writer.events(), wish["models"])).tables
        named_models = sorted(node for (node,) in named["models"] if node not in wish["models"])
        recorded = ToPurge(tuple(named_models), tuple(sorted(file for (file,) in named["updates"])))
    payload[erased_figures.FIGURES_ERASED] = sealed.ALL_FIGURES in payload or not figures_policy.why_figures_stay(
        writer
    )
    size = sum(on_disk[node].bytes for node in gone.models) + sum(stored[file].bytes for file in gone.updates)
    models, updates = recorded.models, recorded.updates
    writer.record(NewEvent(sealed.PURGED, payload, dropped_models=models, dropped_updates=updates, for_good=True))
    complete = not (writer.folder / SCRUB_FILE).exists()
    noisy = view.spec.release.noise != 0.0
    figures = kept_figures(view.regime, _what_is_erased(writer), noisy_releases=noisy)
    return Purge(gone.models, gone.updates, size, complete, tuple(remains(writer)), writer.copies_removed, figures)


def _all_figures(writer: RunWriter, view: RunView, verified: str) -> dict[str, Any]:
    """Return the ledger's record of an erasure of all figures.

    Raises:
        InputError: If not all figures can be erased.
    """
    why = figures_policy.why_figures_stay(writer, by_choice=True)
    if not why and view.rate_source(sorted(view.forgotten)) == "forgotten":
        why = "the local rate follows from the data of a forgotten client; a request by scratch finds another"
    if not why and writer.signer().key is None:
        why = "the operator's key is not available to sign what was erased"
    if why:
        raise InputError(f"the figures of this run cannot be erased: {why}. Nothing was erased")
    if verified != writer.value("head"):
        raise InputError("the run was written to while it was verified. Nothing was erased; run the command again")
    carried_out = [row for row in writer.requests() if row.noise_node is not None]
    stay = erased_figures.kept_nodes(writer, writer.tip, by_choice=True) | {writer.tip, writer.path()[0].node.node}
    return {
        "models": sorted(stay & writer.models().keys()),
        "actor": actor_name(),
        "verified": verified,
        "requests": [row.request for row in carried_out],
        "certificates": erased_figures.erased_certificates(carried_out),
    }


def _what_is_erased(reader: RunReader) -> Literal["nothing", "all", "exact"]:
    """Return which figures are erased: nothing, all (`sifu purge --figures`), or the figures of exact requests."""
    if figures_policy.why_figures_stay(reader):
        return "nothing"
    path = reader.path()
    if not erased_figures.not_recomputed(reader) or path[0].node.order == max(row.node.order for row in path):
        return "exact"
    return "all" if erased_figures.last_erased(reader)[0] == reader.tip else "nothing"


def remains(reader: RunReader) -> Iterator[tuple[str, str]]:
    """Yield each kind of information that the folder still holds about forgotten clients, and the reason."""
    view = RunView(reader)
    forgotten = everyone_forgotten(view)
    if not forgotten:
        yield "everything", "no client was forgotten yet"
        return
    tip = view.path.tip
    held = {client for exposure in forgotten if exposure.psi_to_hide(tip) > 0.0 for client in exposure.subject.clients}
    uncovered = sorted(view.clients[client].name for client in held)
    if uncovered:
        names = ", ".join(uncovered[:5]) + (f" and {len(uncovered) - 5} more" if len(uncovered) > 5 else "")
        yield (
            f"the current model, which may hold the part of {names}",
            "their request was executed by a method that adds no noise; sifu or scratch would hide it",
        )
    else:
        yield "the current model", "it is released; no forgotten client is in it, or noise covers its part"
    groups = reader.group_models()
    kept = [row for row in reader.models().values() if row.kept and row.node != reader.tip and row.node not in groups]
    of_groups = sum(1 for node in reader.models() if node in groups)
    if of_groups:
        yield f"{of_groups} models of groups", "no forgotten client was ever in them; models are made from them"
    depth_of = view.path.depth_of
    clean = [
        row
        for row in kept
        if row.node not in depth_of  # the fresh model that groups start from
        or not any(exposure.psi_to_hide(depth_of[row.node]) > 0.0 for exposure in forgotten)
    ]
    if clean:
        yield (
            f"kept models ({len(clean)})",
            "no forgotten client touched them, or noise covers it; kept for later requests",
        )
    if len(kept) > len(clean):
        yield (
            f"kept models that hold an uncovered part ({len(kept) - len(clean)})",
            "their requests keep them for later ones; sifu purge erases them",
        )
    grams = reader.query("SELECT COUNT(*) FROM grams")[0][0]
    if grams:
        yield f"{grams} Gram matrices in run.db", "joint certificates are recomputed from them; they are the auditor's"
    statistics = len(reader.statistics())
    if statistics:
        yield (
            f"files of statistics ({statistics})",
            "no forgotten client is in any of them; the head is solved from them",
        )
    if not view.regime.records_figures:
        yield "numbers of samples and clients in run.db and certificates", "certificates are recomputed from them"
    elif why := figures_policy.why_figures_stay(reader):
        by_choice = (
            ""
            if figures_policy.why_figures_stay(reader, by_choice=True)
            else "; sifu purge --figures erases it if you choose"
        )
        yield (
            "the auditor's record: drifts, smoothness, sample counts and Psi in run.db, certificates/*.auditor.json",
            f"{why}; with all other clients' data it can confirm a guess of a forgotten record, so it is confidential "
            f"(docs/store.md, section 5c, lists it){by_choice}",
        )
    else:
        more = figures_policy.erases_more_by_choice(reader)
        yield (
            "numbers of samples, clients, rounds and kept models in run.db and certificates",
            "the history is made of them; a guess that would have led to other numbers can be ruled out"
            + ("; sifu purge --figures erases the list of kept models" if more else ""),
        )
    measured = len(sealed.erased_by_next_purge(reader.events()))
    if measured:
        yield (
            f"what {measured} events measured on clients' data while the forgotten were among them",
            "forecasts start from it; sifu purge erases it",
        )
    yield from copies_elsewhere(reader)
    if (reader.folder / AUDIT).exists():
        yield (
            f"the folder {AUDIT}, with what sifu audit measured of the forgotten",
            "it is evidence, and belongs to the auditor's record; delete it if it is no longer needed",
        )
    yield "clients' names in requests and certificates", "they say whose request was executed"
    still = {*reader.models(), *reader.statistics()}
    payloads = reader.query("SELECT seq, payload FROM events WHERE kind = 'backup made' ORDER BY seq")
    backups = [(int(seq), json.loads(payload)) for seq, payload in payloads]
    # Runs created before statistics existed recorded none.
    erased = erased_figures.erasure_of_all(reader.events())
    old = [
        backup
        for seq, backup in backups
        if {*backup["held_models"], *backup.get("held_statistics", [])} - still
        or (erased is not None and seq < erased.seq)
    ]
    if old:
        yield (
            f"backups outside this folder that hold models, statistics or figures erased since ({len(old)}): "
            + ", ".join(backup["backup"] for backup in old[:5]),
            "sifu cannot reach them; destroy them or make new ones",
        )
    for copy in unfinished_copies(reader.folder):
        yield (
            f"{copy.path}, which an interrupted backup or restore may have left",
            "it holds the operator's key and models, and could not be reached; delete it yourself",
        )
    yield f"{KEY_FILE}", "it signs certificates and holds nothing of any client"


def check_purges(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each purge that did not erase the models and updates that the rule selects.

    Purges before an erasure of all figures are skipped, because their events no longer name the erased files.
    """
    last = erased_figures.erasure_of_all(reader.events())
    for event, before in ReplayedLedger.of(reader).moments():
        if event.kind != sealed.PURGED or (last is not None and event.seq < last.seq):
            continue
        content, by_choice = event.content, sealed.ALL_FIGURES in event.content
        subjects = {int(subject) for (subject,) in before.rows["subjects"]}
        purged = ToPurge(tuple(content.get("dropped_models", [])), tuple(content.get("dropped_updates", [])))
        if by_choice:
            left, kept = (
                before.model_nodes - set(purged.models),
                erased_figures.kept_nodes(reader, before.tip, by_choice=True),
            )
            too_much = left - kept - {before.tip, reader.path(before.tip)[0].node.node}
            told = sorted(left) == content[sealed.ALL_FIGURES]["models"] and before.tip in left
            if too_much or not told or len(purged.updates) < len(before.rows["updates"]):
                yield f"purge at event {event.seq}: it left models {sorted(left)} or updates, against the rule"
            yield from _check_all_figures(reader, event, before)
        else:
            stored = {str(file): int(row["node"]) for (file,), row in before.rows["updates"].items()}
            wanted = to_purge(RunView(reader, tip=before.tip), before.model_nodes, stored, subjects)
            if purged != wanted:
                yield f"purge at event {event.seq}: it erased {purged}, the rule says {wanted}"
        if content["subjects"] != sorted(subjects):
            yield f"purge at event {event.seq}: it names subjects {content['subjects']}, not {sorted(subjects)}"
        erased = content.get(erased_figures.FIGURES_ERASED, False)
        if erased != (by_choice or not figures_policy.why_figures_stay(reader, before)) and "kept_rows" in content:
            yield f"purge at event {event.seq}: it records figures_erased = {erased}, which contradicts the rule"
        if erased:
            forgotten = {client for row in before.rows["subjects"].values() for client in json.loads(row["clients"])}
            path = erased_figures.kept_nodes(reader, before.tip, by_choice=by_choice)
            for figures in erased_figures.figures_that_came_back(reader, path, content["kept_rows"]["last"], forgotten):
                yield f"purge at event {event.seq}: it erased the figures of {figures}, and they are there again"


def _check_all_figures(reader: RunReader, event: Event, before: ReplayedTables) -> Iterator[str]:
    """Yield a problem if an erasure of all figures is unsigned, or contradicts the record."""
    said, previous = event.content[sealed.ALL_FIGURES], reader.events()[event.seq - 2]
    carried_out = [row for row in reader.requests() if (row.request,) in before.rows["requests"]]
    carried_out = [row for row in carried_out if before.rows["requests"][row.request,].get("noise_node") is not None]
    expected = {
        "verified": f"{previous.seq}:{previous.hash.hex()}",
        "requests": [row.request for row in carried_out],
        "certificates": erased_figures.erased_certificates(carried_out),
    }
    if {key: said.get(key) for key in expected} != expected or event.signature is None:
        yield f"purge at event {event.seq}: its statement on all figures is not signed, or differs from the record"
