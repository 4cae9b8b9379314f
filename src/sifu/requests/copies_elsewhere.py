"""Copies that no request and no purge reaches: features that were kept, exported models, what a console left.

They are named, not erased: they lie outside the run folder, where other programs or people may need them.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path

from sifu.core.ledger import canonical_json
from sifu.store.files import append_line
from sifu.store.reader import RunReader
from sifu.store.regular_files import read_plain

EXPORTS_FILE = "exports.jsonl"
"""Where exported models went, a line each: `node`, `path`, `time`. For information; no certificate depends on it."""
CONSOLE_STATE = ".sifu-console"
"""The folder of a console's own files, inside a folder of runs that it serves."""
_FOLDERS_UP = 3
"""How far above a run its console may have been started."""


def note_export(folder: Path, node: int, path: Path) -> None:
    """Remember where a model was exported to; nothing is noted in a folder that cannot be written to."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    line = canonical_json({"node": node, "path": str(path.resolve()), "time": now})
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
    """What may still hold something of the forgotten outside the run's own record: (what, why)."""
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
    """The same as notes of a verification."""
    return [f"outside the record: {what}: {why}" for what, why in copies_elsewhere(reader)]


def _exports(folder: Path) -> list[tuple[int, str]]:
    """Node and path of every export; lines that cannot be read are passed over."""
    try:
        lines = read_plain(folder / EXPORTS_FILE).splitlines()
    except OSError:
        return []
    exports = []
    for line in lines:
        try:
            content = json.loads(line)
            exports.append((int(content["node"]), str(content["path"])))
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(set(exports))


def _console_outputs(folder: Path) -> list[Path]:
    """What jobs of a console printed; a console deletes it when the job has ended."""
    run = folder.resolve()
    states = [run.with_name(f"{run.name}.console"), *(place / CONSOLE_STATE for place in run.parents[:_FOLDERS_UP])]
    return sorted(path for state in states for path in (state / "jobs").glob("*.out"))
