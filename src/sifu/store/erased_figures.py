"""Erasure of figures by a purge, and the values that replace the erased figures.

Drifts and smoothness are functions of the data. Somebody who has all other clients' data could use these figures to
check a guess of a forgotten record. A purge overwrites the figures of forgotten clients, and of rounds that are not in
the history of the current model. From then on, Psi is unbounded for the participants of these rounds. Psi is still 0
for clients that took no part.

If the operator chooses (`sifu purge --figures`), a purge also erases the figures behind certificates with noise, and
the parts of events that state these figures. Verification no longer recomputes these certificates. The record then
names the last model before each request as the request's source. The history of that model contains every round of the
true source, so no Psi is too small.

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
from sifu.store.history_tables import ParticipationRows
from sifu.store.projection import Change, RequestRow, apply_change
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.store.sealed import ALL_FIGURES, PURGED
from sifu.theory.history import KINDS_WITH_CLIENTS, PathNode
from sifu.theory.regularity import RoundRegularity

FIGURES_ERASED = "figures_erased"
"""Payload key whose value is true if a purge erased figures."""
WITH_FIGURES = ("rounds", "evaluation", "rolled back", "request planned", "request done", "restored", PURGED)
"""Kinds of events whose payload may hold figures of requests."""
FIGURES = (
    "dropped_models", "dropped_updates", "remaining_models", "source_model", "certified_models", "bytes_kept",
    "source_node", "noise_std",
)  # fmt: skip
"""Payload keys of the figures of requests: the possible source models, the chosen source, and the noise."""


def erasure_of_all(events: Sequence[Event]) -> Event | None:
    """Return the last purge that erased all figures (`sifu purge --figures`), or None."""
    return next((event for event in reversed(events) if event.kind == PURGED and ALL_FIGURES in event.content), None)


def not_recomputed(reader: RunReader) -> dict[str, str]:
    """Return the requests whose certificates are not recomputed, each with the time of the purge of its figures."""
    purges = [event for event in reader.events() if event.kind == PURGED and ALL_FIGURES in event.content]
    return {
        str(request): event.time for event in reversed(purges) for request in event.content[ALL_FIGURES]["requests"]
    }


def no_certificate(reader: RunReader, request: str, form: str) -> InputError:
    """Return the error that explains why a request has no certificate of this form (`auditor` or `public`)."""
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


def without_figures(events: Sequence[Event], left: Collection[int]) -> Iterator[Event]:
    """Yield each event as a purge of all figures leaves it.

    An event that held figures also loses its nonce, which could confirm a guess of the figures. The list of kept models
    is removed because it depends on Psi, and the list of rewritten files of updates because it depends on the source of
    a request. Models of the nodes in `left` remain.
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
        stripped = canonical_json(payload)
        yield event if stripped == event.payload else replace(event, payload=stripped, nonce=b"")


def digest_of_rest(events: Sequence[Event]) -> str:
    """Return the SHA-256 of the numbers and payloads of all events without a nonce.

    The commitment of such an event can no longer be checked, so this digest alone protects its remaining payload.
    """
    digest = hashlib.sha256()
    for event in events:
        if not event.nonce:
            digest.update(b"%d\0%s\0" % (event.seq, event.payload))
    return digest.hexdigest()


def erase_payloads(connection: sqlite3.Connection, events: Sequence[Event], left: Collection[int]) -> str:
    """Remove the figures from the payloads of all events, and delete the rows derived from these figures.

    Models of the nodes in `left` remain. Return the digest of the remaining payloads (`digest_of_rest`).
    """
    rest = list(without_figures(events, left))
    connection.executemany(
        "UPDATE events SET payload = ?, nonce = ? WHERE seq = ?",
        [(event.payload.decode(), event.nonce, event.seq) for event in rest if not event.nonce],
    )
    connection.execute("DELETE FROM updates")
    connection.execute("DELETE FROM models")
    for (node,), values in ReplayedLedger(rest).tables.rows["models"].items():
        if node in left:
            apply_change(connection, Change("models", (node,), values))
    return digest_of_rest(rest)


def check_rest(events: Sequence[Event]) -> Iterator[str]:
    """Yield a problem for each event before a purge of all figures that holds figures or has changed since then."""
    purge = erasure_of_all(events)
    if purge is None:
        return
    before = events[: purge.seq - 1]
    if digest_of_rest(before) != purge.content[ALL_FIGURES]["events"]:
        yield f"ledger: earlier events are not in the state in which the purge at event {purge.seq} left them"
    for event, expected in zip(before, without_figures(before, purge.content[ALL_FIGURES]["models"]), strict=True):
        if expected.payload != event.payload or (not event.nonce and event.kind not in WITH_FIGURES):
            yield f"ledger: event {purge.seq} erased the figures of event {event.seq}, and they are present again"


def kept_nodes(reader: RunReader, tip: int, *, by_choice: bool) -> set[int]:
    """Return the nodes whose figures a purge keeps: the nodes on the path to the current model, `tip`.

    A purge of all figures (`by_choice`) keeps these figures only if the last request started this path from a fresh
    model: no forgotten client took part in its rounds. Otherwise such a purge keeps none.
    """
    path = reader.path(tip)
    last = max(node.order for node in reader.nodes(0, tip))
    return {node.node for node in path} if not by_choice or path[0].order == last else set()


def erase_figures(connection: sqlite3.Connection, path: Collection[int], forgotten: Collection[int]) -> None:
    """Overwrite the figures of forgotten clients, and of all rounds whose nodes are not on `path`.

    For each request that added noise to a trained model and whose noised model is not on `path`, also overwrite the
    source and the noise, and delete the charges.
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


def is_erased(node: PathNode, part: ParticipationRows) -> bool:
    """Return whether all figures of a round or merge, and of its participants, have the values a purge leaves."""
    samples = node.regularity.total_samples
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
    """Yield a description of each kind of figures that a purge erased and that are present again.

    The purge kept the figures of the nodes on `path`, and covered the nodes up to `last` and the `forgotten` clients.
    """
    off_path = [node for node in reader.nodes(0, last) if node.node not in path]
    cut_off = [node for node in off_path if node.kind in KINDS_WITH_CLIENTS]
    if noised := [
        node.node
        for node in off_path
        if node.kind == "noise" and (node.parent, node.noise_std, node.rounding) != (node.node - 1, math.inf, math.inf)
    ]:
        yield f"noise of nodes {noised[:5]}"
    taking_part = reader.everyone()
    if rounds := [
        node.node
        for node in cut_off
        if node.distance != 0.0 or not is_erased(node, taking_part.between(node.node, node.node))
    ]:
        yield f"rounds of nodes {rounds[:5]}"
    if len(rates := sorted(begins for begins in reader.local_rates if begins <= last)) > 1:
        yield f"local rates of nodes {rates[:-1]}"
    clients = reader.read_clients()
    if restored := [client for client in sorted(forgotten) if clients[client].smoothness is not None]:
        yield f"clients {restored[:5]}"
