"""Figures of rounds that lie in the history of no model any more, and of clients that were forgotten.

Drifts and smoothness are functions of the data: with all other clients' data, a guess of a forgotten record could be
held against them. Where every request was exact and started afresh, no certificate is recomputed from the rounds that
were cut off, so a purge erases their figures: Psi is unbounded there from then on, and 0 for clients that took no part
in them, as before.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sifu.core.ledger import SEALED, canonical_json
from sifu.store.events_check import ReplayedTables
from sifu.store.history_tables import NodeRow, ParticipationRows
from sifu.store.reader import RunReader
from sifu.store.sealed import PURGED
from sifu.theory.history import TAKEN_PART

STARTS_AFRESH = ("scratch", "groups", "closed_form")
"""Methods whose certificates hold no bound of anyone's part: what they start from never had any."""
FIGURES_ERASED = "figures_erased"
"""The key of a purge's payload that says whether it erased them."""


def keeps_figures(first: Mapping[str, Any], requests: Collection[Mapping[str, Any]], run: Collection[str]) -> str:
    """Why a purge leaves the figures of rounds where they are, as the end of a sentence; empty: it erases them.

    `first` is the payload of the first event, `run` the keys of that table, `requests` the rows of those carried out.
    """
    spec = first["run"]["spec"]
    if SEALED not in first:
        return "the run was made when digests of rounds had no salt"
    if spec["privacy"]["noise"] == "seeded":
        return "the salts of erased models follow from the seed (privacy.noise = seeded)"
    if first["run"]["asked"].get("local", {}).get("rate", "auto") == "auto" != spec["local"]["rate"]:
        return "the run was made when automatic local rates, found from everyone's data, were recorded in the open"
    if spec["keep"]["gram_clients"]:
        return "the run keeps Gram matrices (keep.gram_clients)"
    if "reported" in run:
        return "the list of clients has what each reported of its data"
    if not requests:
        return "no client was forgotten yet"
    if any(request.get("level") != "exact" or request["method"] not in STARTS_AFRESH for request in requests):
        return "certificates of requests that are not exact, or that started from a trained model, rest on them"
    return ""


def why_figures_stay(reader: RunReader, tables: ReplayedTables | None = None) -> str:
    """`keeps_figures` of a run, now or when its small tables were `tables`."""
    first = json.loads(reader.query("SELECT payload FROM events WHERE seq = 1")[0][0])
    if tables is None:
        run = [str(key) for (key,) in reader.query("SELECT key FROM run")]
        carried_out = [row for row in reader.requests() if row.noise_node is not None]
        requests = [{"level": row.level, "method": row.method} for row in carried_out]
    else:
        run = [str(key) for (key,) in tables.rows["run"]]
        requests = [row for row in tables.rows["requests"].values() if row.get("noise_node") is not None]
    return keeps_figures(first, requests, run)


def erase_figures(connection: sqlite3.Connection, path: Collection[int], forgotten: Collection[int]) -> None:
    """Overwrite the figures of all rounds that are not on `path`, and of the clients that were forgotten."""
    kept, gone = canonical_json(sorted(path)).decode(), canonical_json(sorted(forgotten)).decode()
    off_path = "node NOT IN (SELECT value FROM json_each(?))"
    connection.execute(
        "UPDATE nodes SET factor_sum = samples, factor_max = 1, averagedness_sum = 0, averagedness_max = 0, "
        f"mean_shift = 9e999, rounding = 9e999 WHERE kind IN ('round', 'merge') AND {off_path}",
        (kept,),
    )
    connection.execute(f"UPDATE nodes SET distance = 0 WHERE {off_path}", (kept,))
    connection.execute(f"UPDATE participation SET drift = 9e999 WHERE {off_path}", (kept,))
    connection.execute(
        "UPDATE clients SET smoothness = NULL, curvature = NULL WHERE client IN (SELECT value FROM json_each(?))",
        (gone,),
    )


def is_erased(row: NodeRow, part: ParticipationRows) -> bool:
    """Whether all figures of a round or merge are as a purge leaves them; `part` are those who took part in it."""
    node = row.node
    overwritten = replace(node.regularity, factor_max=1.0, averagedness_sum=0.0, averagedness_max=0.0)
    overwritten = replace(overwritten, factor_sum=float(node.regularity.total_samples))
    unbounded = math.isinf(node.rounding) and math.isinf(node.mean_shift) and bool(np.all(np.isinf(part.drifts)))
    return unbounded and node.regularity == overwritten


def last_erased(reader: RunReader) -> tuple[int, set[int]]:
    """The last node that a purge which erased figures knew (-1: there was none), and the clients it erased them of."""
    for (text,) in reader.query("SELECT payload FROM events WHERE kind = ? ORDER BY seq DESC", (PURGED,)):
        payload = json.loads(text)
        if payload.get(FIGURES_ERASED):
            clients = {row.subject: row.clients for row in reader.subjects()}
            gone = {client for subject in payload["subjects"] for client in clients.get(subject, ())}
            return int(payload["kept_rows"]["last"]), gone
    return -1, set()


def figures_that_came_back(reader: RunReader, tip: int, last: int, forgotten: Collection[int]) -> Iterator[str]:
    """Figures of rounds up to node `last` off the path of `tip`, and of clients, that a purge had erased."""
    path = {row.node.node for row in reader.path(tip)}
    cut_off = [row for row in reader.node_rows(0, last) if row.node.kind in TAKEN_PART and row.node.node not in path]
    taking_part = reader.everyone()
    if rounds := [
        row.node.node
        for row in cut_off
        if row.distance != 0.0 or not is_erased(row, taking_part.between(row.node.node, row.node.node))
    ]:
        yield f"rounds of nodes {rounds[:5]}"
    if len(rates := sorted(begins for begins in reader.local_rates if begins <= last)) > 1:
        yield f"local rates of nodes {rates[:-1]}"
    clients = reader.read_clients()
    if restored := [client for client in sorted(forgotten) if clients[client].smoothness is not None]:
        yield f"clients {restored[:5]}"
