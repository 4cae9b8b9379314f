"""Requests that a restoration files again because their certificates were issued after the backup.

A certificate for clients is satisfied if the restored run forgets each of these clients, by any request. A matching
request id proves nothing, because a run that was restored before may have given the id to another request. A
certificate for records does not name the records, so only the request that it was issued for satisfies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sifu.core.operator_words import forgotten_words
from sifu.core.request_terms import TERMS, RequestTerms
from sifu.errors import InputError
from sifu.run.run_view import RunView
from sifu.store.actors import actor_name
from sifu.store.given_approvals import restored_requests
from sifu.store.projection import NewEvent, RequestRow
from sifu.store.reader import RunReader, names_now, plain_names
from sifu.store.writer import RunWriter

Body = Mapping[str, Any]
"""Body of a certificate."""


def unnamed_records(reader: RunReader, bodies: Sequence[Body]) -> list[Body]:
    """Return the certificates for records whose request the run lacks, unless the whole client is forgotten."""
    entire = {name for body in bodies if not body["records"] for name in body["clients"]}
    gone = _forgotten(reader) | set(_known(reader, sorted(entire)))
    return [
        body
        for body in bodies
        if body["records"]
        and _issued_for(reader, body) is None
        and not gone.issuperset(_known(reader, body["clients"]))
    ]


def file_again(writer: RunWriter, bodies: Sequence[Body]) -> list[str]:
    """File the requests of certificates again, unless the run forgets their clients or records anyway.

    Args:
        writer: Writer of the restored run.
        bodies: Bodies of the certificates.

    Returns:
        The ids of the requests that must not be refused or withdrawn: the new requests, and open requests that
        satisfy a certificate.

    Raises:
        InputError: If an open request names the client of a certificate, and cannot be combined with it.
    """
    leaving, needed, covered = dict[str, Body](), set[str](), _forgotten(writer)
    for body in bodies:
        row = _issued_for(writer, body) if body["records"] else None
        if row is None:
            leaving = dict.fromkeys(_known(writer, body["clients"]), body) | leaving
        elif row.waits or row.awaits_head(writer.tip):
            needed.add(row.request)
    restored = restored_requests(writer)
    for row in writer.requests():
        named = leaving.keys() & set(row.clients)
        if not named or not row.is_open:
            continue
        if row.records and row.waits and row.request not in restored:
            reason = f"all of {', '.join(plain_names(writer, row.clients))} is forgotten again after a restore"
            writer.record(
                NewEvent("request withdrawn", {"request": row.request, "actor": actor_name(), "reason": reason})
            )
            needed.discard(row.request)
        elif row.records or (row.waits and row.request not in restored and named != set(row.clients)):
            raise InputError(_why_not_both(writer, row, leaving[min(named)]))
        else:
            covered |= named
            if row.waits or row.awaits_head(writer.tip):
                needed.add(row.request)
    for body in bodies:
        names = [name for name, of in leaving.items() if of is body and name not in covered]
        if names:
            needed.add(_file(writer, body, names))
    return sorted(needed)


def _forgotten(reader: RunReader) -> set[str]:
    """Return the names of the clients that are entirely forgotten; clients that rejoin do not count."""
    view = RunView(reader)
    rejoining = {name for row in view.requests if row.records and row.status == "running" for name in row.clients}
    return {view.clients[client].name for client in view.forgotten} - rejoining


def _known(reader: RunReader, names: Sequence[str]) -> list[str]:
    """Return the current names of clients, without clients that joined after the backup."""
    now, known = names_now(reader), {client.name for client in reader.clients()}
    return [now.get(name, name) for name in names if name in known]


def _issued_for(reader: RunReader, body: Body) -> RequestRow | None:
    """Return the request that a certificate for records was issued for, unless it was refused or withdrawn here."""
    for row in reader.requests():
        facts = (row.request, row.received, len(row.records), list(plain_names(reader, row.clients)))
        if not row.was_ended and facts == (body["request"], body["received"], body["records"], body["clients"]):
            return row
    return None


def _why_not_both(reader: RunReader, row: RequestRow, body: Body) -> str:
    """Return why a certificate cannot be combined with an open request, and what the operator should do."""
    whom = forgotten_words(list(plain_names(reader, row.clients)), len(row.records) or None)
    client = ",".join(body["clients"])
    end = "finish it" if row.status == "running" or row.request in restored_requests(reader) else "withdraw it"
    return (
        f"certificate {body['request']} is about {client}, and the backup has the open request {row.request} for "
        f"{whom}: restore without this certificate, {end} and then at once forget everything that both name (sifu "
        f"forget DIR --clients {client})"
    )


def _file(writer: RunWriter, body: Body, names: Sequence[str]) -> str:
    """File the request of a certificate again for these clients, as a whole, and return its id.

    The id is that of the certificate, or a longer one if the run has given this id to another request.
    """
    taken = {row.request for row in writer.requests()}
    longer = (f"{body['request'][:56]}-{number}" for number in itertools.count(2))
    request: str = next(name for name in itertools.chain([body["request"]], longer) if name not in taken)
    stated = {name: body[name] for name in TERMS if name in body and name not in ("records", "level")}
    if body["level"] == "none":  # certificates omit the demanded level; the request must have accepted `none`
        stated["level"] = "none"
    terms = RequestTerms.from_mapping(stated | {"sigma": body["sigma"] or "auto", "clients": list(names)})
    content = terms.to_mapping() | {"request": request, "deadline_days": 0}
    writer.record(NewEvent("request received", {"request": content, "actor": actor_name()}))
    return request
