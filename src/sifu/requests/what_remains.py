"""Information about forgotten clients that is left after a purge: in the run folder, and in copies elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sifu.core.ledger import canonical_json, read_json
from sifu.core.spec.regime import Regime
from sifu.requests import figures_policy
from sifu.requests.files_to_erase import everyone_forgotten, influenced
from sifu.run.run_view import RunView
from sifu.store import erased_figures, sealed
from sifu.store.files import append_line, linked_files, read_plain
from sifu.store.keys import KEY_FILE
from sifu.store.reader import RunReader
from sifu.store.times import utc_now
from sifu.store.unfinished import unfinished_copies

EXPORTS_FILE = "exports.jsonl"
"""Log of exported models, one per line: `node`, `path`, `time`. No certificate depends on it."""
AUDIT = "audit"
"""Default folder of `sifu audit`."""
CONSOLE_STATE = ".sifu-console"
"""Folder of a console's own files, inside the folder of runs that it serves."""
_FOLDERS_UP = 3
"""Number of folders above a run that are searched for the state of a console."""


def note_export(folder: Path, node: int, path: Path) -> None:
    """Log the path of an exported model; do nothing if the log cannot be written."""
    line = canonical_json({"node": node, "path": str(path.resolve()), "time": utc_now()})
    file = folder / EXPORTS_FILE
    try:
        if file.is_symlink():
            return
        if not file.exists():
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        append_line(file, line)
    except OSError:
        return


def copies_elsewhere(reader: RunReader) -> Iterator[tuple[str, str]]:
    """Yield each copy outside the run's record that may hold data about forgotten clients, with advice."""
    for name, links in linked_files(reader.folder):
        yield (
            f"{links} hard {'link' if links == 1 else 'links'} to {name} elsewhere",
            "erasing it here leaves its content there; find it with find -samefile, and delete it",
        )
    forgotten_at = [row.noise_node for row in reader.requests() if row.noise_node is not None]
    if not forgotten_at:
        return
    cache = reader.spec.get("features", {}).get("cache", "")
    if cache and Path(cache).is_dir() and any(Path(cache).glob("*.npy")):
        yield (
            f"{cache} (features.cache), with features of everyone's samples",
            "it belongs to the clients' side, and sifu does not erase it; delete it, it is made again where needed",
        )
    for node, path in _exports(reader.folder):
        if node < max(forgotten_at) and node != reader.tip:
            where = path if Path(path).exists() else f"{path} (not there now)"
            yield (
                f"{where}, the model of node {node} as it was exported",
                "clients forgotten since may be in it; delete it and every copy made of it",
            )
    for output in _console_outputs(reader.folder):
        yield (
            f"{output}, which a console that was killed left",
            "it may hold what a command printed about the forgotten; delete it",
        )


def copy_notes(reader: RunReader) -> list[str]:
    """Return the copies outside the record, as notes of a verification."""
    return [f"outside the record: {what}: {why}" for what, why in copies_elsewhere(reader)]


def _exports(folder: Path) -> list[tuple[int, str]]:
    """Return node and path of every export; unreadable lines are skipped."""
    try:
        lines = read_plain(folder / EXPORTS_FILE).splitlines()
    except OSError:
        return []
    exports = []
    for line in lines:
        try:
            content = read_json(line)
            exports.append((int(content["node"]), str(content["path"])))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return sorted(set(exports))


def _console_outputs(folder: Path) -> list[Path]:
    """Return the output files that console jobs left; a console normally deletes them when the job ends."""
    run = folder.resolve()
    states = [run.with_name(f"{run.name}.console"), *(place / CONSOLE_STATE for place in run.parents[:_FOLDERS_UP])]
    return sorted(path for state in states for path in (state / "jobs").glob("*.out"))


@dataclass(frozen=True)
class KeptFigure:
    """Recorded figure against which a guess of the forgotten data can still be tested.

    `place` is table.column, or events.KIND and the path of a key in the payload (`*` stands for any kind). `what` is
    the meaning of the figure, `why` the reason why it is kept.
    """

    place: str
    what: str
    why: str


_PSI = "certificates recompute Psi from it"
_LEVEL = "certificates recompute levels from it"
_PLANS = "later plans use it"
_TIES = "it ties tables to the ledger"
AFTER_ALL = (
    KeptFigure("requests.level", "what a request promises; exact if Psi led back to the initial model", "it is signed"),
    KeptFigure("file standing.json", "held-out figures of the current model", "status shows them"),
)
"""Figures left in runs trained in rounds after `sifu purge --figures`.

Except for the level, they follow from the current model and the remaining clients. If noise hides the forgotten clients
in that model, it hides them in these figures as well.
"""
KEPT_FIGURES = (
    KeptFigure("participation.drift", "how far each client's model was from the mean, round by round", _PSI),
    KeptFigure("nodes.mean_shift", "how far a round moved the model", _PSI),
    KeptFigure("nodes.factor_sum", "the sum of the clients' contraction factors", _PSI),
    KeptFigure("nodes.factor_max", "the largest contraction factor", _PSI),
    KeptFigure("nodes.averagedness_sum", "the sum of the clients' averagedness", _PSI),
    KeptFigure("nodes.averagedness_max", "the largest averagedness", _PSI),
    KeptFigure("nodes.rounding", "a bound of rounding errors, by the size of the model", _PSI),
    KeptFigure("nodes.noise_std", "sigma, chosen by Psi", _PSI),
    KeptFigure("nodes.distance", "how far the model was from the initial one", _PLANS),
    KeptFigure("clients.smoothness", "the largest curvature of a client's loss", _LEVEL),
    KeptFigure("clients.curvature", "the smallest curvature of a client's loss", _LEVEL),
    KeptFigure("run.local_rates", "the local rates, where the spec leaves them to sifu", "rounds are replayed with it"),
    KeptFigure("sealed.content.local_rates", "the same", _TIES),
    KeptFigure("run.facts", "the first of them, in runs made before they were sealed", "rounds are replayed with it"),
    KeptFigure("run.spec", "the same in the merged spec", "rounds are replayed with it"),
    KeptFigure("requests.noise_std", "sigma, chosen by Psi", _PSI),
    KeptFigure("requests.source_node", "the node a request went back to, chosen by Psi", _PSI),
    KeptFigure("requests.wanted_node", "the same, had every model been kept", _PSI),
    KeptFigure("charges.psi", "what the noise had to hide", _PSI),
    KeptFigure("charges.charge", "what that cost", _PSI),
    KeptFigure("certificates.content.body", "Psi, sigma, charges, budgets and nodes", "they are signed"),
    KeptFigure("events.*.run", "the local rates, in such runs", _TIES),
    KeptFigure("events.rolled back.choice", "as the columns of requests", _TIES),
    KeptFigure("events.rolled back.charges", "as charges", _TIES),
    KeptFigure("events.request planned", "source node and sigma of a plan", "it is the history of the request"),
    KeptFigure("nodes.parent", "the node a request went back to, chosen by Psi", _PSI),
    KeptFigure("events.*.source_model.node", "the same", _TIES),
    KeptFigure("events.*.certified_models.source.node", "the same", _TIES),
    KeptFigure("events.*.digest", "digests of models and updates, if their salts follow from the seed", _TIES),
    KeptFigure("run.reported", "what each client reported of its data, on Flower", "the server continues with it"),
    KeptFigure("evaluations", "accuracy and loss of models since the last request, unless it was exact", _PLANS),
    KeptFigure("models.psi_max", "the largest Psi of those who stay, of the same models", _PLANS),
    KeptFigure("sealed.content.evaluations", "as evaluations", _TIES),
    KeptFigure("sealed.content.psi_max", "as models", _TIES),
    *AFTER_ALL,
)
"""Figures left in runs trained in rounds."""
COUNTS = (
    KeptFigure("samples", "how many samples each client had, in tables and payloads", "weights follow from it"),
    KeptFigure("rounds", "how many rounds training took", "the history is made of them"),
    KeptFigure(
        "models",
        "which rounds' models were kept, and by which method a request was executed",
        "erased files are told by them",
    ),
    KeptFigure("requests.terms", "row numbers of forgotten records", "they leave the rows out of data read again"),
)
"""Counts and row numbers left in every run."""
OF_RELEASES = (
    KeptFigure(
        "sealed.content.release_distances",
        "how far released heads were from those without each client, and without one of its records",
        "certificates compose it over all releases",
    ),
    KeptFigure("certificates.content.body.before_after", "an epsilon that follows from it, rounded up", "it is signed"),
)
"""Figures left in runs of closed-form heads with noise on releases."""


def kept_figures(
    regime: Regime, erased: Literal["nothing", "all", "exact"], *, noisy_releases: bool = False
) -> tuple[KeptFigure, ...]:
    """Return the figures left after a purge.

    Args:
        regime: Kind of training of the run.
        erased: Figures that were erased: none, all (`sifu purge --figures`), or the figures of exact requests.
        noisy_releases: True if noise is added to releases, so that their distances are left as well.
    """
    if noisy_releases:
        return (*OF_RELEASES, *COUNTS)
    if erased == "exact" or not regime.records_figures:
        return COUNTS
    return (*(AFTER_ALL if erased == "all" else KEPT_FIGURES), *COUNTS)


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
        if row.node not in depth_of  # this is the fresh model that groups start from
        or not influenced(forgotten, depth_of[row.node])
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
    statistics = len(reader.statistics())
    if statistics:
        yield (
            f"files of statistics ({statistics})",
            "no forgotten client is in any of them; the head is solved from them",
        )
    if not view.regime.records_figures:
        yield "numbers of samples and clients in run.db and certificates", "certificates are recomputed from them"
    elif why := figures_policy.why_figures_stay(reader):
        stays = figures_policy.why_figures_stay(reader, by_choice=True)
        by_choice = "" if stays else "; sifu purge --figures erases it if you choose"
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
            "expected rounds follow from it; sifu purge erases it",
        )
    yield from copies_elsewhere(reader)
    if (reader.folder / AUDIT).exists():
        yield (
            f"the folder {AUDIT}, with what sifu audit measured of the forgotten",
            "it is evidence, and belongs to the auditor's record; delete it if it is no longer needed",
        )
    yield (
        "clients' names, and ids, reasons and actors of requests, in run.db and certificates",
        "they say whose request was executed, and who decided it",
    )
    if any(row.records for row in reader.requests()):
        yield (
            "row numbers of the records that requests name, in run.db",
            "they leave the forgotten rows out when data are read again",
        )
    still = {*reader.models(), *reader.statistics()}
    payloads = reader.query("SELECT seq, payload FROM events WHERE kind = 'backup made' ORDER BY seq")
    erased = erased_figures.erasure_of_all(reader.events())
    old = [
        backup
        for seq, backup in ((seq, json.loads(payload)) for seq, payload in payloads)
        # Runs created before statistics existed have no `held_statistics`.
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
    yield KEY_FILE, "it signs certificates and holds nothing of any client"
