"""Information about forgotten clients that is left after a purge: in the run folder, and in copies elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from sifu.core.ledger import canonical_json, read_json
from sifu.requests.files_to_erase import everyone_forgotten, influenced
from sifu.run.run_view import RunView
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
    if view.regime.solves:
        yield (
            "numbers of samples, and accuracies and losses of earlier heads, in run.db and certificates",
            "certificates are recomputed from them; with all other clients' data they can confirm a guess of a "
            "forgotten record, so delete the folder when its certificates are no longer needed",
        )
    else:
        yield (
            "drifts, Psi, budgets and accuracies, also of forgotten clients, in run.db and auditor's certificates",
            "certificates are recomputed from them; with all other clients' data they can confirm a guess of a "
            "forgotten record, so delete the folder when its certificates are no longer needed",
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
    payloads = reader.query("SELECT payload FROM events WHERE kind = 'backup made' ORDER BY seq")
    backups = [json.loads(payload) for (payload,) in payloads]
    old = [backup for backup in backups if {*backup["held_models"], *backup["held_statistics"]} - still]
    if old:
        yield (
            f"backups outside this folder that hold models or statistics erased since ({len(old)}): "
            + ", ".join(backup["backup"] for backup in old[:5]),
            "sifu cannot reach them; destroy them or make new ones",
        )
    for copy in unfinished_copies(reader.folder):
        yield (
            f"{copy.path}, which an interrupted backup or restore may have left",
            "it holds the operator's key and models, and could not be reached; delete it yourself",
        )
    yield KEY_FILE, "it signs certificates and holds nothing of any client"
