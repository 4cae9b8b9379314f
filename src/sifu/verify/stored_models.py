"""Checks of stored models and updates: they match the ledger, and no update of a forgotten client is left."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sifu.core.method_info import method_info
from sifu.errors import RunDamagedError
from sifu.methods.base import RecordedReplay
from sifu.methods.registry import method_named
from sifu.requests.certification import RecordedRequest
from sifu.requests.files_to_erase import UpdatesErased
from sifu.run.run_view import RunView
from sifu.store.files import is_locked, read_plain, stored_path
from sifu.store.projection import ENDED, WAITING
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables
from sifu.store.statistics_files import read_updates

TOLERANCE = 1e-9
"""Relative tolerance of recomputed figures: another processor or library may differ in the last digits."""


def agree(recorded: Any, recomputed: Any) -> bool:
    """Return whether two values are equal, or are numbers within the tolerance; `True` does not equal 1."""
    if isinstance(recorded, bool) or isinstance(recomputed, bool):
        return recorded is recomputed
    if isinstance(recorded, int | float) and isinstance(recomputed, int | float):
        if recorded == recomputed or not (math.isfinite(recorded) and math.isfinite(recomputed)):
            return recorded == recomputed  # infinity equals only itself
        return abs(recorded - recomputed) <= TOLERANCE * max(abs(recorded), abs(recomputed))
    return bool(type(recorded) is type(recomputed) and recorded == recomputed)


ABSENT = object()
"""Marker for a missing field, as opposed to a field that is null."""


def differing(stated: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each field in which two JSON values differ, as its name, the value found and the value expected."""
    if isinstance(stated, dict) and isinstance(expected, dict):
        for key in sorted(stated.keys() | expected.keys()):
            inner = f"{name}.{key}" if name else str(key)
            yield from differing(stated.get(key, ABSENT), expected.get(key, ABSENT), inner)
    elif isinstance(stated, list) and isinstance(expected, list) and len(stated) == len(expected):
        for index, (item, expected_item) in enumerate(zip(stated, expected, strict=True)):
            yield from differing(item, expected_item, f"{name}[{index}]")
    elif isinstance(stated, dict | list) or isinstance(expected, dict | list) or not agree(stated, expected):
        yield name, stated, expected


def said(value: Any) -> str:
    """Return the value of a field, shortened to fit a line."""
    return "nothing" if value is ABSENT else repr(value)[:200]


def check_models(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each stored model that is missing or changed, and for a current model without a file."""
    yield from _check_files(reader, "models", RunReader.models)
    if reader.tip not in reader.models():
        yield f"models: the current model (node {reader.tip}) is not there"


def check_moved(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each model whose distance from its predecessor contradicts the record; both must be stored.

    Noise N(0, sigma^2 I) in d dimensions has a norm of sigma (sqrt(d) + t) with |t| > 8 less than once in 10^13 draws.
    A round moves the model by g ||mean - theta||, and `mean_shift` is an upper bound on ||mean - theta||.
    """
    if is_locked(reader.folder):
        return  # a writer may erase a model that is about to be read
    available, view = reader.models(), RunView(reader)
    # A method without guarantee may continue from any model it makes.
    free = {
        request.noise_node
        for request in view.requests
        if request.noise_node is not None and method_info(request.method).protection == "nothing"
    }
    for node in reader.nodes():
        if node.kind not in ("round", "noise") or node.node in free or node.parent is None:
            continue
        if not {node.node, node.parent} <= available.keys() or math.isinf(node.noise_std):  # a purge erased sigma
            continue
        model, start = (reader.load_model(number).astype(np.float64) for number in (node.node, node.parent))
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


def _check_files(
    reader: RunReader, kind: Literal["models", "updates"], rows_of: Callable[[RunReader], Mapping[Any, Any]]
) -> Iterator[str]:
    """Yield a problem for each file that differs from its row, unless a writer has changed both since the snapshot."""
    rows, folder = rows_of(reader), reader.folder
    problems = {key: problem for key in rows if (problem := _file_problem(folder, kind, key, rows[key]))}
    if problems:
        with RunReader(folder) as later:
            now = rows_of(later)
        yield from (problems[key] for key in problems if key in now and _file_problem(folder, kind, key, now[key]))


def _file_problem(folder: Path, kind: str, key: int | str, row: Any) -> str:
    """Return the problem of a row's file, or an empty string."""
    name = f"{kind}: the file {f'of node {key}' if kind == 'models' else key}"
    try:
        content = read_plain(stored_path(folder, kind, key))
        if hashlib.sha256(content).hexdigest() != row.digest or len(content) != row.bytes:
            return f"{name} was changed"
        if kind == "updates":
            read_updates(folder, row)
    except OSError:
        return f"{name} is missing"
    except RunDamagedError as error:
        return f"{kind}: {error}"
    return ""


def check_updates(reader: RunReader) -> Iterator[str]:
    """Yield a problem for updates that are missing, changed, or of a forgotten client or a discarded round."""
    yield from _check_files(reader, "updates", RunReader.updates)
    view = RunView(reader)
    for row in reader.updates().values():
        if row.node not in view.path.depth_of:
            yield f"updates: {row.file} is of node {row.node}, which was cut off the history"
        for client in sorted(set(row.clients) & view.forgotten):
            yield f"updates: {row.file} holds an update of {view.clients[client].name}, which was forgotten"
    yield from _check_recorded_updates(reader, view)
    yield from _check_replayed_model(reader, view)


def _check_replayed_model(reader: RunReader, view: RunView) -> Iterator[str]:
    """Yield a problem if a model replayed from stored updates cannot be reproduced, unless some updates were erased."""
    depth = view.path.unbounded_from
    if depth > view.path.tip or view.path.nodes[depth].node not in reader.models():
        return
    node = view.path.nodes[depth].node
    parts = [row for row in view.stored_updates if row.node == node]
    written = {row["file"] for row in ReplayedLedger.of(reader).recorded("updates") if row["node"] == node}
    if {row.file for row in parts} != written:
        return  # a later request continued from this model, and the updates of its clients were erased
    for request in view.requests:
        if request.noise_node == node:
            yield from method_named(request.method).check_replayed_model(view, node, parts)


def _check_recorded_updates(reader: RunReader, view: RunView) -> Iterator[str]:
    """Yield a problem for updates that are missing, unexpected, or different from the first record of their round."""
    every, nodes = view.spec.round_extras.updates_every, reader.nodes_by_number()
    everyone = reader.everyone()
    digests: dict[tuple[int, int], dict[str, str]] = {}
    kept: set[int] = set()
    for row in ReplayedLedger.of(reader).recorded("updates"):
        file, part, node = row["file"], int(row["part"]), nodes[int(row["node"])]
        first = digests.setdefault((node.node, part), row["clients"])
        if any(first.get(client) != digest for client, digest in row["clients"].items()):
            yield f"updates: {file} differs from the first record of its round"
        if node.kind == "round":
            kept.add(node.node)
            who = {str(client) for client in everyone.between(node.node, node.node).clients}
            if set(first) != who or part != 0 or every == 0 or (node.position - 1) % every:
                yield f"updates: {file} does not belong to participants of a round whose updates are kept"
        elif node.kind != "heuristic":
            yield f"updates: {file} is of node {node.node}, which is not a round"
    for node in nodes.values():
        due = node.kind == "round" and every > 0 and (node.position - 1) % every == 0
        if due and node.node not in kept and everyone.between(node.node, node.node).nodes.size:
            yield f"updates: no updates of node {node.node} were recorded"


def check_updates_erased(
    view: RunView, recorded: RecordedRequest, gone: UpdatesErased, before: ReplayedTables, content: dict[str, Any]
) -> Iterator[str]:
    """Yield a problem unless a rollback erased the updates in `gone` and stored exactly the updates that must remain.

    View and tables are those just before the rollback, whose payload is `content`.
    """
    stored = before.read("updates")
    if set(content.get("dropped_updates", [])) != set(gone.dropped):
        yield "the erased updates are not exactly those of forgotten clients and of rounds cut off"
    by_file = {row.file: row for row in stored}
    wanted = {(by_file[file].node, by_file[file].part): set(stay) for file, stay in gone.shortened.items()}
    rounds = 0
    if recorded.replayed:
        # Clients of earlier requests no longer take part, nor do clients that approved requests leave out.
        ended = (*ENDED, *WAITING)
        own = recorded.request.request
        rows = [row for row in before.read("requests") if row.status not in ended or row.request == own]
        asking = {view.index_of[name] for row in rows for name in row.clients}
        asking |= set(content["left_out"])
        on_path = sorted(stored, key=lambda row: (view.path.depth_of[row.node], row.part))
        replay = recorded.method.expected_replay(
            RecordedReplay(view, on_path, asking, recorded.terms, recorded.order, content.get("updates", []))
        )
        yield from replay.problems
        node, rounds = recorded.view.path.nodes[-1].node, replay.rounds
        wanted |= {(node, part): set(clients) for part, clients in enumerate(replay.parts, start=1)}
    written = {
        (row["node"], row["part"]): {int(client) for client in row["clients"]} for row in content.get("updates", [])
    }
    if written != wanted:
        yield "the updates that stay are not those of the remaining clients"
    if (content["extra"]["rounds"], recorded.view.path.nodes[-1].position) != (rounds, rounds):
        yield f"{content['extra']['rounds']} rounds were counted before retraining, {rounds} were replayed"
