"""What the ledger keeps apart so that it can be erased: samples' digests by their salt, and the figures of rounds.

Whether the clients' samples are still those a run was made with: salted digests in the ledger, salts in a file. The
ledger keeps the digest of a client's samples for ever. It is salted, and the salt lies in the file `salts.json` alone:
once the client is forgotten its salt is erased, and then the digest cannot confirm that some samples were the client's.
A client whose records are being forgotten keeps it until it has joined again with the rest. Clients of Flower keep
their samples to themselves, and have neither.

Figures of rounds that lie in the history of no model any more, and of clients that were forgotten: drifts and
smoothness are functions of the data, so with all other clients' data a guess of a forgotten record could be held
against them. Where every request was exact and started afresh, no certificate is recomputed from the rounds that were
cut off, so a purge erases their figures: Psi is unbounded there from then on, and 0 for clients that took no part in
them, as before.

Certificates by noise do rest on the figures of rounds. They go only by the operator's choice, after a verification, and
so does what events say of them: these certificates are not recomputed any more. The record then says that a request
went on from the last model before it, whose history has every round that its real source had: no Psi is too small.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.ledger import NONCE_BYTES, SEALED, SEALED_KEYS, Event, canonical_json, read_json, seal_commitment
from sifu.core.spec import RIDGE
from sifu.errors import InputError
from sifu.store.events_check import ReplayedLedger, ReplayedTables
from sifu.store.files import SALT_BYTES, read_plain, write_atomically
from sifu.store.history_tables import NodeRow, ParticipationRows
from sifu.store.projection import Change, RequestRow, apply_change
from sifu.store.reader import JOINED, RunReader, remainder_to_join
from sifu.theory.history import TAKEN_PART
from sifu.theory.regularity import RoundRegularity

SALTS_FILE = "salts.json"
WITHOUT_SALTS = (
    "put the file back from a backup of the run. Where there is none, nothing more can be trained or forgotten here: "
    "train the clients that stay in a new folder, which never sees the others' data, and delete this one "
    "(docs/security.md, a lost salts.json)"
)
"""What an operator can do once salts are lost."""


def salted_sample_digest(salt: str, digest: str) -> str:
    """SHA-256 over the salt and the digest of the samples, all of them in hexadecimal digits.

    >>> salted_sample_digest("00" * 32, "11" * 32)[:8]
    '8878b15a'
    """
    return hashlib.sha256(bytes.fromhex(salt) + bytes.fromhex(digest)).hexdigest()


def add_salts(folder: Path, digests: Mapping[int, str]) -> dict[int, str]:
    """Write a new salt for each client, before the event that records the salted digests, which are returned."""
    new = {client: secrets.token_hex(SALT_BYTES) for client in digests}
    if new:
        _write(folder, read_salts(folder) | new)
    return {client: salted_sample_digest(new[client], digest) for client, digest in digests.items()}


def recorded_digests(reader: RunReader) -> dict[int, str]:
    """The salted digest of each client's samples by the client's number, of those that have one."""
    joined, count = reader.joined(), len(reader.clients())
    recorded: dict[int, str] = dict(enumerate(reader.payload(1).get("sample_digests", [])))
    for client, seq in enumerate(joined, start=count - len(joined)):
        payload = reader.payload(seq)
        if "sample_digest" in payload:
            recorded[client] = payload["sample_digest"]
    return recorded


def outlived(reader: RunReader) -> set[int]:
    """Clients whose salt is to be erased: everyone forgotten, but for whom is still to join again with less.

    Clients forgotten after a backup stay forgotten in a restoration, before their request is carried out again.
    """
    waiting = remainder_to_join(reader)
    forgotten = {client for subject in reader.subjects() for client in subject.clients}
    restored = reader.query("SELECT payload FROM events WHERE kind = 'restored'")
    again = {request for (payload,) in restored for request in json.loads(payload)["requests"]}
    names = {name for row in reader.requests() if row.request in again for name in row.clients}
    forgotten |= {client for client, profile in enumerate(reader.clients()) if profile.name in names}
    return forgotten - ({waiting.before} if waiting else set())


def erase_salts(reader: RunReader) -> None:
    """Erase the salts of everyone forgotten, and of clients that were never recorded."""
    salts = read_salts(reader.folder)
    gone = outlived(reader) if salts else set()
    stay = {client: salt for client, salt in salts.items() if client not in gone and client < len(reader.clients())}
    if stay != salts:
        _write(reader.folder, stay)


def read_salts(folder: Path) -> dict[int, str]:
    """Salts by the client's number; none where there is no file. A file that is not ours is refused."""
    path = folder / SALTS_FILE
    try:
        content: dict[str, Any] = json.loads(read_plain(path))
        salts = {int(client): str(salt) for client, salt in content.items()}
        if any(len(bytes.fromhex(salt)) != SALT_BYTES for salt in salts.values()):
            raise ValueError("a salt has another length")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}): {WITHOUT_SALTS}") from error
    return salts


def _write(folder: Path, salts: Mapping[int, str]) -> None:
    write_atomically(folder / SALTS_FILE, canonical_json({str(client): salt for client, salt in sorted(salts.items())}))


PURGED = "purged"
"""The kind of a purge's event."""
ALL_FIGURES = "all_figures"
"""The key of its payload where it erased the figures that certificates by noise rested on, by the operator's choice."""
OF_THE_FORGOTTEN = ("request done", "comparison", JOINED, PURGED)
"""Events that may tell of the data of clients that were forgotten before: by what was measured, or by a digest that
covers them."""


def set_apart(payload: dict[str, Any]) -> tuple[bytes, bytes] | None:
    """Take what is to be sealed out of a payload, which then commits to it; returns salt and content."""
    private = {key: payload.pop(key) for key in SEALED_KEYS if key in payload}
    if not private:
        return None
    salt, content = secrets.token_bytes(NONCE_BYTES), canonical_json(private)
    payload[SEALED] = seal_commitment(salt, content)
    return salt, content


def erased_by_purges(events: Iterable[Event]) -> dict[int, int]:
    """The events whose sealed part a purge erased, each with the event of the first such purge.

    A purge erases everything that was measured before the last request was rolled back, when a forgotten client was
    still among the clients, and what was measured on the data of the forgotten since; one of all figures erases all.
    """
    erased: dict[int, int] = {}
    before: list[Event] = []
    rolled_back = 0
    for event in events:
        if event.kind == PURGED and rolled_back:
            whole = ALL_FIGURES in event.content
            for earlier in before:
                if whole or earlier.seq <= rolled_back or earlier.kind in OF_THE_FORGOTTEN:
                    erased.setdefault(earlier.seq, event.seq)
        if event.kind == "rolled back":
            rolled_back = event.seq
        before.append(event)
    return {
        event.seq: erased[event.seq] for event in before if event.seq in erased and SEALED in read_json(event.payload)
    }


def erased_by_next_purge(events: Sequence[Event]) -> list[Event]:
    """The events whose sealed part a purge would erase now, other than the last purge itself."""
    next_purge = replace(events[-1], seq=events[-1].seq + 1, kind=PURGED)
    erased, before = erased_by_purges([*events, next_purge]), erased_by_purges(events)
    return [event for event in events if event.seq in erased.keys() - before.keys() and event.kind != PURGED]


def erase_sealed(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    """Delete what the last purge erases, and the rows that came of it; inside the transaction of its event."""
    erased = erased_by_purges(events)
    gone, stays = set[tuple[int, str]](), set[tuple[int, str]]()
    models: dict[str, float] = {}
    for seq, text in connection.execute("SELECT seq, content FROM sealed ORDER BY seq").fetchall():
        content = read_json(text)
        rows = {(row["node"], row["subset"]) for row in content.get("evaluations", [])}
        (gone if seq in erased else stays).update(rows)
        psi_max = content.get("psi_max", {})
        models |= dict.fromkeys(psi_max, 0.0) if seq in erased else psi_max
    connection.executemany("DELETE FROM sealed WHERE seq = ?", [(seq,) for seq in erased])
    connection.executemany(
        "UPDATE models SET psi_max = ? WHERE node = ?", [(psi, int(node)) for node, psi in models.items()]
    )
    connection.executemany("DELETE FROM evaluations WHERE node = ? AND subset = ?", sorted(gone - stays))
    if erased:
        connection.execute("UPDATE comparisons SET forgotten_accuracy = NULL")


def check_sealed(reader: RunReader) -> Iterator[str]:
    """Every sealed part is the one its event commits to, or was erased by a purge."""
    stored = {seq: (salt, content) for seq, salt, content in reader.query("SELECT seq, salt, content FROM sealed")}
    events = reader.events()
    erased = erased_by_purges(events)
    for event in events:
        payload = read_json(event.payload)
        wrong = sorted(set(payload) & set(SEALED_KEYS))
        if wrong:
            yield f"ledger: event {event.seq} holds {', '.join(wrong)} in the open, which would outlive a purge"
        part = stored.pop(event.seq, None)
        if part is None:
            if SEALED in payload and event.seq not in erased:
                yield f"ledger: the sealed part of event {event.seq} ({event.kind[:40]}) is missing (no such seq)"
            continue
        salt, content = part
        if event.seq in erased:
            yield (
                f"ledger: event {erased[event.seq]} erased what event {event.seq} measured, and it is there again: "
                "find out where it comes from"
            )
        if len(salt) != NONCE_BYTES or seal_commitment(salt, content.encode()) != payload.get(SEALED):
            yield (
                f"ledger: salt and content of the sealed part of event {event.seq} ({event.kind[:40]}) are not what it "
                "commits to"
            )
        elif not set(read_json(content)) <= set(SEALED_KEYS) or canonical_json(read_json(content)) != content.encode():
            yield f"ledger: the sealed part of event {event.seq} holds other things than figures of its kind"
    for seq in sorted(stored):
        yield f"ledger: there is a sealed part with seq {seq}, an event that does not exist"


def erased_notes(reader: RunReader) -> list[str]:
    """What can no longer be recomputed because a purge erased it."""
    erased = erased_by_purges(reader.events())
    if not erased:
        return []
    return [
        f"what {len(erased)} events up to event {max(erased)} measured on clients' data was erased by the purge at "
        f"event {max(erased.values())}: losses and accuracies of that time can neither be shown nor compared"
    ]


STARTS_AFRESH = ("scratch", "groups", "closed_form")
"""Methods whose certificates hold no bound of anyone's part: what they start from never had any."""
FIGURES_ERASED = "figures_erased"
"""The key of a purge's payload that says whether it erased them."""


ERASABLE = ("sifu", "last", "scratch")
"""Methods whose figures can go by the operator's choice."""
WITH_FIGURES = ("rounds", "evaluation", "rolled back", "request planned", "request done", "restored", PURGED)
"""Kinds of events that say something of the figures of requests."""
FIGURES = (
    "dropped_models", "dropped_updates", "remaining_models", "source_model", "certified_models", "bytes_kept",
    "source_node", "noise_std",
)  # fmt: skip
"""What their payloads say of them: which models a request could go back to, which it did, and the noise."""


def _tied(first: Mapping[str, Any], run: Collection[str]) -> str:
    """Why no figures of the run can go, as the end of a sentence, whatever its requests were; empty if they can."""
    spec = first["run"]["spec"]
    if SEALED not in first:
        return "the run was made when digests of rounds had no salt"
    if spec["privacy"]["noise"] == "seeded":
        return "the salts of erased models follow from the seed (privacy.noise = seeded)"
    if first["run"]["asked"].get("local", {}).get("rate", "auto") == "auto" != spec["local"]["rate"]:
        return "the run was made when automatic local rates, found from everyone's data, were recorded in the open"
    if spec["keep"]["gram_clients"]:
        return "the run keeps Gram matrices (keep.gram_clients)"
    return "the list of clients has what each reported of its data" if "reported" in run else ""


def keeps_figures(
    first: Mapping[str, Any],
    requests: Collection[Mapping[str, Any]],
    run: Collection[str],
    *,
    by_choice: bool = False,
) -> str:
    """Why a purge leaves the figures of rounds where they are, as the end of a sentence; empty: it erases them.

    `first` is the payload of the first event, `run` the keys of that table, `requests` the rows of those carried out
    whose figures are there. `by_choice`: the operator gives up that certificates by noise are recomputed.
    """
    if why := _tied(first, run):
        return why
    if not requests:
        return "no client was forgotten yet"
    if by_choice:
        spec = first["run"]["spec"]
        if spec["model"]["kind"] == RIDGE or spec.get("groups", {}).get("count", 0):
            return "it has a head in closed form or groups, whose models and sums are told by them"
        if any(request.get("level") in (None, "none") or request["method"] not in ERASABLE for request in requests):
            return f"a request was carried out without a promise, or by another method than {', '.join(ERASABLE)}"
    elif any(request.get("level") != "exact" or request["method"] not in STARTS_AFRESH for request in requests):
        return "certificates of requests that are not exact, or that started from a trained model, rest on them"
    return ""


def why_figures_stay(reader: RunReader, tables: ReplayedTables | None = None, *, by_choice: bool = False) -> str:
    """`keeps_figures` of a run, now or when its small tables were `tables`."""
    first = json.loads(reader.query("SELECT payload FROM events WHERE seq = 1")[0][0])
    rows = ReplayedLedger.of(reader).tables if tables is None else tables.rows
    run = [str(key) for (key,) in rows["run"]]
    requests = {str(key): row for (key,), row in rows["requests"].items() if row.get("noise_node") is not None}
    erased = not_recomputed(reader)
    left = [row for request, row in requests.items() if request not in erased]
    if requests and not left:
        return _tied(first, run)
    return keeps_figures(first, left, run, by_choice=by_choice)


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
