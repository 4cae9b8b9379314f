"""Figures of rounds that a purge erased, and the values that replace them.

Drifts and smoothness are functions of the data. Somebody who has all other clients' data could use them to check a
guess of a forgotten record. A purge overwrites the figures of forgotten clients, and of rounds that are not in the
history of the current model. From then on, Psi is unbounded for the participants of these rounds; it is still 0 for
clients that took no part.

If the operator chooses (`sifu purge --figures`), a purge also erases the figures behind certificates with noise, and
the parts of events that state them. These certificates are no longer recomputed. The record then names, as the source
of each request, the last model before that request. The history of that model contains every round of the true source,
so no Psi is too small.

`sifu.requests.figures_policy` decides which runs allow either kind of purge.
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
"""Payload key of a purge: whether it erased figures."""


WITH_FIGURES = ("rounds", "evaluation", "rolled back", "request planned", "request done", "restored", PURGED)
"""Kinds of events whose payload may hold figures of requests."""
FIGURES = (
    "dropped_models", "dropped_updates", "remaining_models", "source_model", "certified_models", "bytes_kept",
    "source_node", "noise_std",
)  # fmt: skip
"""Payload keys of these figures: the models that a request could resume from, its choice, and the noise."""


def erasure_of_all(events: Sequence[Event]) -> Event | None:
    """Return the last purge that erased all figures (`sifu purge --figures`), or None."""
    return next((event for event in reversed(events) if event.kind == PURGED and ALL_FIGURES in event.content), None)


def not_recomputed(reader: RunReader) -> dict[str, str]:
    """Return the requests whose certificates are no longer recomputed, with the time of the purge that erased them."""
    purges = [event for event in reader.events() if event.kind == PURGED and ALL_FIGURES in event.content]
    return {
        str(request): event.time for event in reversed(purges) for request in event.content[ALL_FIGURES]["requests"]
    }


def no_certificate(reader: RunReader, request: str, form: str) -> InputError:
    """Return the error that explains why a certificate does not exist.

    Args:
        reader: Reader of the run.
        request: Id of the request.
        form: Form of the certificate, `auditor` or `public`.
    """
    if erased := not_recomputed(reader).get(request):
        return InputError(
            f"the {form} certificate of request {request} was erased on {erased} by the operator's choice (sifu purge "
            "--figures); copies handed out earlier can still be checked by their signature"
        )
    return InputError(
        f"request {request[:80]!r} has no {form} certificate; only finished requests have one: see sifu requests list"
    )


def erased_certificates(requests: Collection[RequestRow]) -> dict[str, list[str]]:
    """Return the forms of certificates that a purge of all figures erases, by request.

    The auditor's form contains the figures. The public form contains sigma, which reveals Psi unless the request gave
    sigma as a number.
    """
    return {
        row.request: ["auditor"] if row.level == "exact" or row.terms.sigma != "auto" else ["auditor", "public"]
        for row in requests
        if row.status == "done"
    }


def without_figures(events: Sequence[Event], left: Collection[int]) -> Iterator[tuple[Event, bytes]]:
    """Yield each event with its payload after a purge of all figures.

    The lists of kept models and of rewritten files of updates are removed as well: the former depends on Psi, the
    latter on the source of a request.

    Args:
        events: The ledger, in order.
        left: Nodes of the models that remain.
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
    """Return the SHA-256 over number and payload of every event without a nonce.

    The commitment of such an event can no longer be checked, so this digest alone protects its remaining payload.
    """
    digest = hashlib.sha256()
    for event in events:
        if not event.nonce:
            digest.update(b"%d\0%s\0" % (event.seq, event.payload))
    return digest.hexdigest()


def rest_of(events: Sequence[Event], left: Collection[int]) -> list[Event]:
    """Return the events without figures.

    An event that held figures also loses its nonce, which could confirm a guess of them.
    """
    return [
        event if payload == event.payload else replace(event, payload=payload, nonce=b"")
        for event, payload in without_figures(events, left)
    ]


def erase_payloads(connection: sqlite3.Connection, events: Sequence[Event], left: Collection[int]) -> str:
    """Remove the figures from the payloads, and the rows derived from them.

    Args:
        connection: Database of the run.
        events: The ledger, in order.
        left: Nodes of the models that remain.

    Returns:
        Digest of the remaining payloads (`digest_of_rest`).
    """
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
    """Yield a problem if an event before a purge of all figures holds figures, or is not as the purge left it."""
    purge = erasure_of_all(events)
    if purge is None:
        return
    before = events[: purge.seq - 1]
    if digest_of_rest(before) != purge.content[ALL_FIGURES]["events"]:
        yield f"ledger: earlier events are not in the state in which the purge at event {purge.seq} left them"
    for event, payload in without_figures(before, purge.content[ALL_FIGURES]["models"]):
        if payload != event.payload or (not event.nonce and event.kind not in WITH_FIGURES):
            yield f"ledger: event {purge.seq} erased the figures of event {event.seq}, and they are present again"


def kept_nodes(reader: RunReader, tip: int, *, by_choice: bool) -> set[int]:
    """Return the nodes whose figures a purge keeps: the nodes on the path to `tip`.

    A purge of all figures keeps them only if the last request started this path from a fresh model, because no
    forgotten client took part on such a path. Otherwise it keeps none.

    Args:
        reader: Reader of the run.
        tip: Node of the current model.
        by_choice: True if the purge also erases the figures behind certificates with noise.
    """
    path = [row.node for row in reader.path(tip)]
    last = max(row.node.order for row in reader.node_rows(0, tip))
    return {node.node for node in path} if not by_choice or path[0].order == last else set()


def erase_figures(connection: sqlite3.Connection, path: Collection[int], forgotten: Collection[int]) -> None:
    """Overwrite the figures of forgotten clients, and of all rounds that are not on `path`.

    For requests off `path` that added noise to a trained model, also overwrite the source and the noise, and delete the
    charges.

    Args:
        connection: Database of the run.
        path: Nodes whose figures stay.
        forgotten: Indices of the forgotten clients.
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
    """Return whether all figures of a round or merge have the values a purge leaves.

    Args:
        row: Node of the round or merge.
        part: Participation of the clients in it.
    """
    node, samples = row.node, row.node.regularity.total_samples
    overwritten = RoundRegularity(samples, float(samples), factor_max=1.0, averagedness_sum=0.0, averagedness_max=0.0)
    unbounded = math.isinf(node.rounding) and math.isinf(node.mean_shift) and bool(np.all(np.isinf(part.drifts)))
    return unbounded and node.regularity == overwritten


def last_erased(reader: RunReader) -> tuple[int, set[int]]:
    """Return the last node that the latest purge of figures covered (-1 if none), and the clients it covered."""
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
    """Yield the figures that a purge had erased and that are present again.

    Args:
        reader: Reader of the run.
        path: Nodes whose figures the purge kept.
        last: Last node that the purge covered.
        forgotten: Clients whose figures the purge erased.
    """
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
