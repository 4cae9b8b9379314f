"""Erasing what still holds a part of the forgotten, and saying what remains and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.spec import RIDGE
from sifu.core.spec.sections import FeaturesSpec
from sifu.errors import InputError
from sifu.requests.what_remains import KeptFigure, copies_elsewhere, kept_figures
from sifu.run.group_state import is_hit
from sifu.run.run_view import RunView
from sifu.store.erased_figures import FIGURES_ERASED, figures_that_came_back, why_figures_stay
from sifu.store.events_check import ReplayedLedger
from sifu.store.keys import KEY_FILE
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader
from sifu.store.sealed import PURGED, erased_by_next_purge
from sifu.store.statistics_files import OwnStatistics, StatisticsRow, can_be_used, read_statistics, write_statistics
from sifu.store.unfinished import unfinished_copies
from sifu.store.writer import SCRUB_FILE, RunWriter
from sifu.theory.closed_form.blocks import parts_through, strike
from sifu.theory.rollback import Exposure, Subject


@dataclass(frozen=True)
class SumLeft:
    """The sum that takes the place of an erased one: of whom, through which networks (nodes), made of which file."""

    made_of: StatisticsRow
    clients: tuple[int, ...]
    trunks: tuple[int, ...]


def statistics_to_erase(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int] = ()
) -> tuple[str, ...]:
    """The files that hold something of the clients in `gone`, or went through a network (a node) that is erased."""
    left, erased = set(gone), set(networks)
    return tuple(sorted(row.file for row in stored if left & set(row.clients) or erased & set(row.trunks)))


def sum_left(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int], features: FeaturesSpec
) -> SumLeft | None:
    """What takes the place of the sum if it is erased: the sum without those who left and without struck blocks.

    A sum is made without a client by subtraction, so all parts of the client's own statistics must be there.
    """
    rows = list(stored)
    whole = next((row for row in rows if row.is_sum), None)
    if whole is None:
        return None
    leaving, trunks = set(whole.clients) & set(gone), tuple(node for node in whole.trunks if node not in set(networks))
    clients = tuple(sorted(set(whole.clients) - leaving))
    unchanged, merged = not leaving and trunks == whole.trunks, features.tune == "merge" and trunks != whole.trunks
    if unchanged or merged or not clients:
        return None
    needed = len(parts_through(range(len(whole.trunks)))) if features.tune == "blocks" else 1
    at_hand = Counter(row.clients[0] for row in rows if not row.is_sum and can_be_used(row, whole.trunks))
    return SumLeft(whole, clients, trunks) if all(at_hand[client] == needed for client in leaving) else None


def write_sum_left(
    writer: RunWriter, view: RunView, gone: Collection[int], networks: Collection[int], node: int
) -> list[dict[str, Any]]:
    """Subtract, strike, and write the sum that is left, to be named by the next event."""
    rows = list(writer.statistics().values())
    left = sum_left(rows, gone, networks, view.spec.features)
    if left is None:
        return []
    fixed, groups = recorded_fixed_point(view.spec, writer.layout), writer.group_models()
    blocks = recorded_blocks(view.spec, writer.layout) if view.spec.features.tune == "blocks" else None
    own = OwnStatistics.among(rows, fixed, blocks, {groups[trunk].grp: trunk for trunk in left.made_of.trunks})
    statistics = read_statistics(writer.folder, left.made_of, fixed)
    for client in sorted(set(left.made_of.clients) & set(gone)):
        statistics = statistics - own.read(writer.folder, client, own.parts())
    struck = [groups[trunk].grp for trunk in left.made_of.trunks if trunk not in left.trunks]
    if blocks is not None and struck:
        statistics = strike(statistics, blocks, struck)
    return [
        write_statistics(
            writer.folder,
            node,
            left.clients,
            statistics,
            is_sum=True,
            seed=writer.salt_seed(),
            trunks=left.trunks,
        )
    ]


AUDIT = "audit"
"""Where `sifu audit` writes unless it is told otherwise."""


@dataclass(frozen=True)
class ToPurge:
    """What the strict rule erases at one instant, for everyone forgotten by then."""

    models: tuple[int, ...]
    updates: tuple[str, ...]


@dataclass(frozen=True)
class Purge:
    """What a purge erased, and what remains with the reason, as sentences.

    `copies` are unfinished copies of a run that an interrupted backup or restore left, and that were taken away.
    `figures` are the places that still hold something that follows from the data of the forgotten.
    """

    models: tuple[int, ...]
    updates: tuple[str, ...]
    bytes: int
    complete: bool
    remains: tuple[tuple[str, str], ...]
    copies: tuple[str, ...] = ()
    figures: tuple[KeptFigure, ...] = ()


def everyone_forgotten(view: RunView, among: set[int] | None = None) -> list[Exposure]:
    """Every subject of a request that was carried out, whatever its method promised; or those `among` some."""
    requests = {row.request: row for row in view.requests}
    subjects = []
    for row in view.reader.subjects():
        if among is not None and row.subject not in among:
            continue
        request = requests[row.request]
        order = request.request_order or 0
        subjects.append(Subject(row.subject, row.clients, 1.0, request.terms.scope, order, 0.0, 0.0))
    return view.exposures(subjects)


def to_purge(view: RunView, at_hand: set[int], stored: dict[str, int], among: set[int] | None = None) -> ToPurge:
    """Models and files of updates (name to node) at which a forgotten client has Psi > 0 and is not covered.

    The current model stays, whatever it holds: it is what is released. `view` must be the history at that instant.
    """
    depth_of, nodes = view.path.depth_of, view.path.nodes
    forgotten = everyone_forgotten(view, among)

    def held(depth: int) -> bool:
        return any(exposure.psi_to_hide(depth) > 0.0 for exposure in forgotten)

    # Models of groups lie on no path; those that held a forgotten client were erased with the request.
    on_path = [node for node in sorted(at_hand) if node in depth_of]
    models = [node for node in on_path if node != nodes[-1].node and held(depth_of[node])]
    updates = []
    for file, node in sorted(stored.items()):
        depth = depth_of[node]
        if held(depth if nodes[depth].kind == "heuristic" else depth - 1):
            updates.append(file)
    return ToPurge(tuple(models), tuple(updates))


def forgetting_models(view: RunView, clients: Sequence[int], at_hand: set[int]) -> tuple[int, ...]:
    """Models other than the current one that hold a part of clients whose request is still to be carried out."""
    subjects = [Subject(0, (client,), 1.0, "all", view.next_order, 0.0, 0.0) for client in clients]
    exposures, depth_of, groups = view.exposures(subjects), view.path.depth_of, view.reader.group_models()

    def holds(node: int) -> bool:
        if node in groups:
            return is_hit(groups[node], clients)
        # A fresh model that is kept for the groups lies on no path, and holds no client's data.
        return node in depth_of and any(exposure.psi_to_hide(depth_of[node]) > 0.0 for exposure in exposures)

    return tuple(node for node in sorted(at_hand) if node != view.path.nodes[-1].node and holds(node))


def purge(writer: RunWriter) -> Purge:
    """Permanently erase what still holds an uncovered part of anyone forgotten, if there is anything."""
    if writer.phase != "ready":
        raise InputError(f"the run is still {writer.phase}: finish it first, then purge")
    view = RunView(writer)
    on_disk, stored = writer.models(), writer.updates()
    gone = to_purge(view, set(on_disk), {file: row.node for file, row in stored.items()})
    size = sum(on_disk[node].bytes for node in gone.models) + sum(stored[file].bytes for file in gone.updates)
    writer.record(
        NewEvent(
            PURGED,
            {
                "subjects": [exposure.subject.subject for exposure in everyone_forgotten(view)],
                FIGURES_ERASED: not why_figures_stay(writer),
            },
            dropped_models=gone.models,
            dropped_updates=gone.updates,
            for_good=True,
        )
    )
    complete = not (writer.folder / SCRUB_FILE).exists()
    figures = kept_figures(view.spec.model.kind, erased=not why_figures_stay(writer))
    return Purge(gone.models, gone.updates, size, complete, tuple(remains(writer)), writer.copies_removed, figures)


def remains(reader: RunReader) -> Iterator[tuple[str, str]]:
    """What of the forgotten is still in the folder, and why: (what, why)."""
    view = RunView(reader)
    forgotten = everyone_forgotten(view)
    if not forgotten:
        yield "everything", "no client was forgotten yet"
        return
    tip = view.path.tip
    uncovered = sorted(
        {name for exposure in forgotten if exposure.psi_to_hide(tip) > 0.0 for name in _names(view, exposure)}
    )
    if uncovered:
        names = ", ".join(uncovered[:5]) + (f" and {len(uncovered) - 5} more" if len(uncovered) > 5 else "")
        yield (
            f"the current model, which may hold the part of {names}",
            "their request was carried out by a method that adds no noise; sifu or scratch would hide it",
        )
    else:
        yield "the current model", "it is released; the noise of the requests covers everyone forgotten"
    groups = reader.group_models()
    kept = [row for row in reader.models().values() if row.kept and row.node != reader.tip and row.node not in groups]
    of_groups = sum(1 for node in reader.models() if node in groups)
    if of_groups:
        yield f"{of_groups} models of groups", "no forgotten client was ever in them; later requests merge them"
    depth_of = view.path.depth_of
    clean = [
        row
        for row in kept
        if row.node not in depth_of  # the fresh model of groups
        or not any(exposure.psi_to_hide(depth_of[row.node]) > 0.0 for exposure in forgotten)
    ]
    if clean:
        yield (
            f"{len(clean)} kept models",
            "no forgotten client touched them, or noise covers it; kept for later requests",
        )
    if len(kept) > len(clean):
        yield (
            f"{len(kept) - len(clean)} kept models that hold an uncovered part",
            "retention paper keeps them for later requests; sifu purge erases them",
        )
    grams = reader.query("SELECT COUNT(*) FROM grams")[0][0]
    if grams:
        yield f"{grams} Gram matrices in run.db", "joint certificates are recomputed from them; they are the auditor's"
    statistics = len(reader.statistics())
    if statistics:
        yield f"{statistics} files of statistics", "no forgotten client is in any of them; the head is solved from them"
    if view.spec.model.kind == RIDGE:
        yield "numbers of samples and clients in run.db and certificates", "certificates are recomputed from them"
    elif why := why_figures_stay(reader):
        yield (
            "the auditor's record: drifts, smoothness, sample counts and Psi in run.db, certificates/*.auditor.json",
            f"{why}; with all other clients' data it can confirm a guess of a forgotten record, so it is confidential "
            "(docs/store.md, section 5c, lists it)",
        )
    else:
        yield (
            "numbers of samples, clients, rounds and kept models in run.db and certificates",
            "certificates are recomputed from them; a guess that would have led to other numbers can be ruled out",
        )
    measured = len(erased_by_next_purge(reader.events()))
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
    yield "clients' names in requests and certificates", "they say whose request was carried out"
    still = {*reader.models(), *reader.statistics()}
    payloads = reader.query("SELECT payload FROM events WHERE kind = 'backup made' ORDER BY seq")
    backups = [json.loads(payload) for (payload,) in payloads]
    # A run made before there were statistics recorded none.
    old = [backup for backup in backups if {*backup["held_models"], *backup.get("held_statistics", [])} - still]
    if old:
        yield (
            f"{len(old)} backups outside this folder that hold models or statistics erased since: "
            + ", ".join(backup["backup"] for backup in old[:5]),
            "sifu cannot reach them; destroy them or make new ones",
        )
    for copy in unfinished_copies(reader.folder):
        yield (
            f"{copy.path}, which an interrupted backup or restore may have left",
            "it holds the operator's key and models, and could not be reached; delete it yourself",
        )
    yield f"{KEY_FILE}", "it signs certificates and holds nothing of any client"


def _names(view: RunView, exposure: Exposure) -> list[str]:
    return [view.clients[index].name for index in exposure.subject.clients]


def check_purges(reader: RunReader) -> Iterator[str]:
    """What every purge had to erase must be what it erased."""
    for event, before in ReplayedLedger.of(reader).moments():
        if event.kind != PURGED:
            continue
        content = event.content
        subjects = {int(subject) for (subject,) in before.rows["subjects"]}
        stored = {str(file): int(row["node"]) for (file,), row in before.rows["updates"].items()}
        wanted = to_purge(RunView(reader, tip=before.tip), before.model_nodes, stored, subjects)
        purged = ToPurge(tuple(content.get("dropped_models", [])), tuple(content.get("dropped_updates", [])))
        if purged != wanted or content["subjects"] != sorted(subjects):
            yield f"purge at event {event.seq}: it erased {purged}, the rule says {wanted}"
        erased = content.get(FIGURES_ERASED, False)
        if erased != (not why_figures_stay(reader, before)) and "kept_rows" in content:
            yield f"purge at event {event.seq}: it says {erased} of erased figures, against the rule"
        if erased:
            forgotten = {client for row in before.rows["subjects"].values() for client in json.loads(row["clients"])}
            for figures in figures_that_came_back(reader, before.tip, content["kept_rows"]["last"], forgotten):
                yield f"purge at event {event.seq}: it erased the figures of {figures}, and they are there again"
