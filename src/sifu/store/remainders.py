"""Clients that joined again with what they had left after some of their records were forgotten.

Such a client is a new row of `clients` with a new name; its event `client joined` names the request. The rows
that went stand in the requests alone, so that an engine that reads the client's data again can drop them again. They
keep the numbers that they had when the client first joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sifu.errors import InputError
from sifu.store.reader import RunReader

SEPARATOR = "~"
"""Between a client's first name and the number of its turn: hospital-3, hospital-3~2, hospital-3~3."""


@dataclass(frozen=True)
class Remainder:
    """A client that joined, or is to join, in the place of `before` after a request for records.

    It is number `client` and has what `first`, the client as it first joined, had without `removed`.
    """

    request: str
    client: int
    name: str
    before: int
    first: int
    removed: tuple[int, ...]


def joined_remainders(reader: RunReader) -> list[Remainder]:
    """Every client that joined again, in the order of joining."""
    remainders: list[Remainder] = reader.remembered("remainders", lambda: _find(reader))
    return list(remainders)


def chain_of(reader: RunReader, client: int) -> tuple[int, ...]:
    """Every number that a client has had up to `client`, first one first: it gets a new one when records are forgotten.

    A request is about all of them: what the client did under an earlier number is in the model as long as nothing
    took it out.
    """
    before, chain = reader.remembered("before", lambda: {item.client: item.before for item in _find(reader)}), [client]
    while before.get(chain[-1], client) < chain[-1]:  # numbers fall, whatever a forged record says
        chain.append(before[chain[-1]])
    return tuple(reversed(chain))


def plain_name(reader: RunReader, client: int) -> str:
    """The name that a client first joined under, which is the one people know it by."""
    return reader.clients()[chain_of(reader, client)[0]].name


def plain_names(reader: RunReader, names: Iterable[str]) -> tuple[str, ...]:
    """The names that people know clients by, each once; a name that no client has is left as it is."""
    plain = reader.remembered(
        "plain names", lambda: {item.name: plain_name(reader, item.client) for item in joined_remainders(reader)}
    )
    return tuple(dict.fromkeys(plain.get(name, name) for name in names))


def clients_now(reader: RunReader) -> list[int]:
    """The number that every client has now, in the order in which they first joined: people count these."""
    numbers: list[int] = reader.remembered("clients now", lambda: _last_of_each(reader))
    return list(numbers)


def _last_of_each(reader: RunReader) -> list[int]:
    last = {item.first: item.client for item in joined_remainders(reader)}
    again = {item.client for item in joined_remainders(reader)}
    return [last.get(client, client) for client in range(len(reader.clients())) if client not in again]


def _find(reader: RunReader) -> list[Remainder]:
    requests = {row.request: row for row in reader.requests() if row.records}
    if not requests:
        return []
    clients, joined = reader.clients(), reader.joined()
    number = {profile.name: index for index, profile in enumerate(clients)}
    by_client: dict[int, Remainder] = {}
    for client, seq in enumerate(joined, start=len(clients) - len(joined)):
        request = requests.get(reader.payload(seq).get("request", ""))
        if request is not None:
            before = number[request.clients[0]]
            by_client[client] = _next(by_client, request.request, client, clients[client].name, before, request.records)
    return list(by_client.values())


def _next(
    earlier: dict[int, Remainder], request: str, client: int, name: str, before: int, rows: tuple[int, ...]
) -> Remainder:
    first, removed = (earlier[before].first, earlier[before].removed) if before in earlier else (before, ())
    return Remainder(request, client, name, before, first, tuple(sorted({*removed, *rows})))


def remainder_to_join(reader: RunReader) -> Remainder | None:
    """The client of a request that was rolled back and is to join again; None where there is none."""
    there = {remainder.request for remainder in joined_remainders(reader)}
    for row in reader.requests():
        if row.status == "running" and row.records and row.request not in there:
            return remainder_after(reader, row.clients[0], row.records, row.request)
    return None


def remainder_after(reader: RunReader, name: str, rows: tuple[int, ...], request: str = "") -> Remainder:
    """The client that would join next, in the place of client `name` once these rows of it are forgotten."""
    earlier = {remainder.client: remainder for remainder in joined_remainders(reader)}
    names = [profile.name for profile in reader.clients()]
    return _next(earlier, request, len(names), next_name(name, names), names.index(name), rows)


def next_name(name: str, taken: list[str]) -> str:
    """The name under which a client joins again.

    >>> next_name("hospital-3", ["hospital-3"]), next_name("hospital-3~2", ["hospital-3", "hospital-3~2"])
    ('hospital-3~2', 'hospital-3~3')
    """
    first, number = _first_and_turn(name)
    while (again := f"{first}{SEPARATOR}{number + 1}") in taken:
        number += 1
    return again


def _first_and_turn(name: str) -> tuple[str, int]:
    first, _, turn = name.rpartition(SEPARATOR)
    return (first, int(turn)) if first and turn.isdecimal() and turn.isascii() else (name, 1)


def names_now(reader: RunReader) -> dict[str, str]:
    """Of every client that joined again, the name it has now, by each of its earlier names.

    While its request is running the client goes by the name it asked under: the same command again continues it.
    """
    clients, now = reader.clients(), dict[str, str]()
    running = {row.request for row in reader.requests() if row.status == "running"}
    for remainder in reversed(joined_remainders(reader)):
        if remainder.request not in running:
            now[clients[remainder.before].name] = now.get(remainder.name, remainder.name)
    return now


def check_rows(reader: RunReader, client: int, rows: tuple[int, ...]) -> None:
    """Refuse rows that the client does not have, that went before, and all that it has left."""
    clients, earlier = reader.clients(), {item.client: item for item in joined_remainders(reader)}
    first, removed = (earlier[client].first, earlier[client].removed) if client in earlier else (client, ())
    name, samples = clients[first].name, clients[first].samples
    if max(rows) >= samples:
        raise InputError(f"client {name} joined with rows 0 to {samples - 1}, there is no row {max(rows)}")
    gone = sorted(set(rows) & set(removed))
    if gone:
        raise InputError(f"row {gone[0]} of client {name} was forgotten already; leave it out")
    if len(rows) + len(removed) == samples:
        raise InputError(
            f"these are all the records that client {name} has left: forget the client instead, without naming records"
        )
