"""Figures of rounds that a purge erased, and what is left in their place.

Drifts and smoothness are functions of the data. With all other clients' data, a guess of a forgotten record could be
checked against them. A purge overwrites the figures of rounds that are in the history of no model any more, and of
forgotten clients: Psi is unbounded there from then on, and still 0 for clients that took no part.

A purge by the operator's choice (`sifu purge --figures`) also erases the figures that certificates by noise rest on,
and what events say of them. These certificates are then no longer recomputed. The record says that a request went on
from the last model before it, whose history has every round that its real source had: no Psi is too small.

Which runs allow either is decided in `sifu.requests.figures_policy`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from sifu.core.ledger import Event, canonical_json, read_json
from sifu.errors import InputError
from sifu.store.events_check import ReplayedLedger
from sifu.store.history_tables import NodeRow, ParticipationRows
from sifu.store.projection import Change, RequestRow, apply_change
from sifu.store.reader import RunReader
from sifu.store.sealed import ALL_FIGURES, PURGED
from sifu.theory.history import TAKEN_PART
from sifu.theory.regularity import RoundRegularity

FIGURES_ERASED = "figures_erased"
"""The key of a purge's payload that says whether it erased them."""


WITH_FIGURES = ("rounds", "evaluation", "rolled back", "request planned", "request done", "restored", PURGED)
"""Kinds of events that say something of the figures of requests."""
FIGURES = (
    "dropped_models", "dropped_updates", "remaining_models", "source_model", "certified_models", "bytes_kept",
    "source_node", "noise_std",
)  # fmt: skip
"""What their payloads say of them: which models a request could go back to, which it did, and the noise."""


def erasure_of_all(events: Sequence[Event]) -> Event | None:
    """The last purge that erased all figures by the operator's choice."""
    return next((event for event in reversed(events) if event.kind == PURGED and ALL_FIGURES in event.content), None)


def not_recomputed(reader: RunReader) -> dict[str, str]:
    """The requests whose certificates are not recomputed any more, each with the time of the purge that erased them."""
    purges = [event for event in reader.events() if event.kind == PURGED and ALL_FIGURES in event.content]
    return {
        str(request): event.time for event in reversed(purges) for request in event.content[ALL_FIGURES]["requests"]
    }


def no_certificate(reader: RunReader, request: str, form: str) -> InputError:
    """Why a certificate that is asked for is not there."""
    if erased := not_recomputed(reader).get(request):
        return InputError(
            f"the {form} certificate of request {request} was erased on {erased} by the operator's choice "
            "(sifu purge --figures); copies that were handed out before can be checked by their signature"
        )
    return InputError(f"request {request[:80]!r} has no {form} certificate: is it done? See sifu requests list")


def erased_certificates(requests: Collection[RequestRow]) -> dict[str, list[str]]:
    """The forms of certificates that go with all figures, by request.

    The auditor's holds them. The public one holds sigma, which follows from Psi unless the request named a number.
    """
    return {
        row.request: ["auditor"] if row.level == "exact" or row.terms.sigma != "auto" else ["auditor", "public"]
        for row in requests
        if row.status == "done"
    }


def without_figures(events: Sequence[Event], left: Collection[int]) -> Iterator[tuple[Event, bytes]]:
    """Every event with its payload as a purge of all figures leaves it, and of models those that are `left`.

    Which models were kept follows from Psi, and which files of updates a request wrote anew from its source.
    """
    tip: int | None = None
    for event in events:
        payload = read_json(event.payload)
        if event.kind in WITH_FIGURES:
            payload = {key: value for key, value in payload.items() if key not in FIGURES}
            if event.kind != "rounds":
                payload.pop("updates", None)
            if "models" in payload:
                first = payload.get("rows", {"first": math.inf})["first"]
                own = [row | {"kept": 1} for row in payload["models"] if row["node"] in left and row["node"] >= first]
                payload = {key: payload[key] for key in payload if key != "models"} | ({"models": own} if own else {})
        if event.kind == "rolled back" and payload["choice"]["source_node"] is not None:
            hidden = {"noise_std": None, "source_node": tip, "wanted_node": tip}
            payload |= {"choice": payload["choice"] | hidden, "charges": []}
        tip = int(payload.get("run", {}).get("tip", -1 if tip is None else tip))
        yield event, canonical_json(payload)


def digest_of_rest(events: Sequence[Event]) -> str:
    """SHA-256 over number and payload of every event whose nonce is gone: nothing else ties what is left of it."""
    digest = hashlib.sha256()
    for event in events:
        if not event.nonce:
            digest.update(b"%d\0%s\0" % (event.seq, event.payload))
    return digest.hexdigest()


def rest_of(events: Sequence[Event], left: Collection[int]) -> list[Event]:
    """The events without figures, and where there were any without the nonce that could confirm a guess of them."""
    return [
        event if payload == event.payload else replace(event, payload=payload, nonce=b"")
        for event, payload in without_figures(events, left)
    ]


def erase_payloads(connection: sqlite3.Connection, events: Sequence[Event], left: Collection[int]) -> str:
    """Take the figures out of the payloads, and the rows that came of them; returns the digest of what is left."""
    rest = rest_of(events, left)
    connection.executemany(
        "UPDATE events SET payload = ?, nonce = ? WHERE seq = ?",
        [(event.payload.decode(), event.nonce, event.seq) for event in rest if not event.nonce],
    )
    connection.execute("DELETE FROM updates")
    connection.execute("DELETE FROM models")
    for (node,), values in ReplayedLedger(rest).tables["models"].items():
        if node in left:
            apply_change(connection, Change("models", (node,), values))
    return digest_of_rest(rest)


def check_rest(events: Sequence[Event]) -> Iterator[str]:
    """Events without a nonce are what a purge of all figures left, and before it no event holds figures."""
    purge = erasure_of_all(events)
    if purge is None:
        return
    before = events[: purge.seq - 1]
    if digest_of_rest(before) != purge.content[ALL_FIGURES]["events"]:
        yield f"ledger: what is left of earlier events is not what the purge at event {purge.seq} left of them"
    for event, payload in without_figures(before, purge.content[ALL_FIGURES]["models"]):
        if payload != event.payload or (not event.nonce and event.kind not in WITH_FIGURES):
            yield f"ledger: event {purge.seq} erased the figures of event {event.seq}, and they are there again"


def kept_nodes(reader: RunReader, tip: int, *, by_choice: bool) -> set[int]:
    """The nodes whose figures a purge leaves: those of the path of `tip`.

    By the operator's choice they stay only if the last request started the path afresh: then no one forgotten is in it.
    """
    path = [row.node for row in reader.path(tip)]
    last = max(row.node.order for row in reader.node_rows(0, tip))
    return {node.node for node in path} if not by_choice or path[0].order == last else set()


def erase_figures(connection: sqlite3.Connection, path: Collection[int], forgotten: Collection[int]) -> None:
    """Overwrite the figures of all rounds that are not on `path`, and of the clients that were forgotten.

    Where requests went on from a trained model, also what they went back to, their noise, and what it cost.
    """
    kept, gone = canonical_json(sorted(path)).decode(), canonical_json(sorted(forgotten)).decode()
    off_path = "node NOT IN (SELECT value FROM json_each(?))"
    trained = "source_node IS NOT NULL AND noise_node IN (SELECT node FROM nodes WHERE kind = 'noise')"
    trained += f" AND noise_{off_path}"
    for statement in (
        "UPDATE nodes SET factor_sum = samples, factor_max = 1, averagedness_sum = 0, averagedness_max = 0, "
        f"mean_shift = 9e999, rounding = 9e999 WHERE kind IN ('round', 'merge') AND {off_path}",
        f"UPDATE nodes SET distance = 0 WHERE {off_path}",
        f"UPDATE nodes SET parent = node - 1, noise_std = 9e999, rounding = 9e999 WHERE kind = 'noise' AND {off_path}",
        f"DELETE FROM charges WHERE noise_node IN (SELECT noise_node FROM requests WHERE {trained})",
        "UPDATE requests SET noise_std = NULL, source_node = noise_node - 1, wanted_node = noise_node - 1 "
        f"WHERE {trained}",
        f"UPDATE participation SET drift = 9e999 WHERE {off_path}",
    ):
        connection.execute(statement, (kept,))
    connection.execute(
        "UPDATE clients SET smoothness = NULL, curvature = NULL WHERE client IN (SELECT value FROM json_each(?))",
        (gone,),
    )


def is_erased(row: NodeRow, part: ParticipationRows) -> bool:
    """Whether all figures of a round or merge are as a purge leaves them; `part` are those who took part in it."""
    node, samples = row.node, row.node.regularity.total_samples
    overwritten = RoundRegularity(samples, float(samples), factor_max=1.0, averagedness_sum=0.0, averagedness_max=0.0)
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


def figures_that_came_back(
    reader: RunReader, path: Collection[int], last: int, forgotten: Collection[int]
) -> Iterator[str]:
    """Figures of rounds up to node `last` that are not on the `path` kept, and of clients, that a purge had erased."""
    off_path = [row for row in reader.node_rows(0, last) if row.node.node not in path]
    cut_off = [row for row in off_path if row.node.kind in TAKEN_PART]
    if noised := [
        row.node.node
        for row in off_path
        if row.node.kind == "noise"
        and (row.node.parent, row.node.noise_std, row.node.rounding) != (row.node.node - 1, math.inf, math.inf)
    ]:
        yield f"noise of nodes {noised[:5]}"
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
