"""Read access to a run, at any time, even while another process writes to it.

A client that had some of its records forgotten joins again with the remaining records. It becomes a new row of
`clients` with a new name, and its event `client joined` names the request. Only the requests hold the numbers of the
removed rows; engines drop these rows whenever they load the client's data again. Row numbers always count the rows of
the data that the client first joined with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.core.layout import ModelLayout, Vector
from sifu.core.ledger import Event
from sifu.core.round import NormalSource
from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.history_tables import HistoryReader
from sifu.store.projection import (
    KEYS,
    PARSED,
    ROWS,
    ChargeRow,
    EvaluationRow,
    GroupModelRow,
    MergeRow,
    ModelRow,
    RejectionRow,
    RequestRow,
    SubjectRow,
    read_row,
)
from sifu.store.statistics_files import StatisticsRow
from sifu.theory.facts import ClientProfile

JOINED = "client joined"
RESTORED = "restored"
"""Kind of the event that records a restoration from a backup."""
PURGED = "purged"
"""Kind of the event that records a purge."""
RELEASED = "released"
"""Kind of the event that records a release with noise (`sifu.store.release_files`)."""
NOISE_GIVEN = "noise"
"""Key of the table `run` whose value is "given" if the caller gave a noise source when the run was made."""
GROUP_KEY = "group_key"
"""Key of the run table: the key of the hash that assigns clients to groups."""


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raise errors from unreadable records as `RunDamagedError`, which has its own exit code."""
    try:
        yield
    except (
        ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError, InputError,
    ) as error:  # fmt: skip
        what = f"{type(error).__name__}: {error}"[:200]
        raise RunDamagedError(
            f"{folder} is damaged: its records cannot be read ({what}). "
            "Check it with sifu verify, or restore it from a backup"
        ) from error


class RunReader(HistoryReader):
    """Reader of the recorded facts of a run. Verification starts from a new reader with an empty cache."""

    noise: NormalSource | None = None
    """Source of noise that the caller gave, instead of the operating system."""

    @property
    def spec(self) -> dict[str, Any]:
        """The merged spec the run was created with."""
        result: dict[str, Any] = json.loads(self.value("spec"))
        return result

    @property
    def asked(self) -> dict[str, Any]:
        """The spec as the user gave it, before `auto` was resolved."""
        result: dict[str, Any] = json.loads(self.value("asked"))
        return result

    @property
    def layout(self) -> ModelLayout:
        """Names, shapes and type of the model's parameters."""
        content = json.loads(self.value("layout"))
        shapes = tuple(tuple(shape) for shape in content["shapes"])
        return ModelLayout(tuple(content["names"]), shapes, content["dtype"])

    @property
    def facts(self) -> dict[str, Any]:
        """The training facts as recorded when the run was created."""
        result: dict[str, Any] = json.loads(self.value("facts"))
        return result

    @property
    def phase(self) -> str:
        """Phase of the run: `training`, `ready`, or `retraining`."""
        return self.value("phase")

    def clients(self) -> tuple[ClientProfile, ...]:
        """Return all clients of the run, by index. The result is cached until the clients change."""
        clients: tuple[ClientProfile, ...] = self.constant("clients", self.read_clients)
        return clients

    def read_clients(self) -> tuple[ClientProfile, ...]:
        """Read all clients of the run, by index, from the table without the cache."""
        rows = self.query("SELECT name, samples, local_steps, expansion FROM clients ORDER BY client")
        return tuple(ClientProfile(*row) for row in rows)

    def joined(self) -> list[int]:
        """Return the numbers of the events by which clients joined later, in the order of the clients' indices."""
        return [int(row[0]) for row in self.query("SELECT seq FROM events WHERE kind = ? ORDER BY seq", (JOINED,))]

    def models(self) -> dict[int, ModelRow]:
        """Return the existing model files, by node."""
        return {row.node: row for row in self._rows("models")}

    def load_model(self, node: int) -> Vector:
        """Return the model of a node, checked against its recorded digest."""
        row = self.models().get(node)
        if row is None:
            raise RunDamagedError(f"the model of node {node} is not stored")
        return files.read_model(files.stored_path(self.folder, "models", node), self.layout, row.digest)

    def model_content(self, node: int) -> bytes:
        """Return the content of a node's model file, checked against its recorded digest."""
        row, path = self.models()[node], files.stored_path(self.folder, "models", node)
        content = files.read_content(path, f"the model file {path.name}", row.digest)
        files.read_model(path, self.layout)
        return content

    def group_models(self) -> dict[int, GroupModelRow]:
        """Return all models that groups ever had, by node."""
        return {row.node: row for row in self._rows("group_models")}

    def merges(self) -> list[MergeRow]:
        """Return the group models that each merged model was made from, ordered by node and group."""
        return self._rows("merges")

    def statistics(self) -> dict[str, StatisticsRow]:
        """Return the existing files of clients' statistics, by name."""
        return {row.file: row for row in self._rows("statistics", "node, file")}

    def stored_files(self) -> set[Path]:
        """Return the paths of the models and statistics that the tables name."""
        return {
            files.stored_path(self.folder, kind, key)
            for kind in files.STORED
            for (key,) in self.query(f"SELECT {KEYS[kind][0]} FROM {kind}")
        }

    def requests(self) -> list[RequestRow]:
        """Return all requests, in the order in which they were received."""
        return list(self.remembered("requests", self._read_requests))

    def _read_requests(self) -> list[RequestRow]:
        steps = self.steps()
        rows = self._read_rows("requests", "request")
        return sorted(rows, key=lambda row: steps.get(("request received", row.request), 0))

    def steps(self) -> dict[tuple[str, str], int]:
        """Return the number of the event that received, rolled back or completed a request, by (kind, request).

        Each event is read once, because events are only added.
        """
        steps: dict[tuple[str, str], int] = self.memory.answer("steps", self.state(), self._with_new_steps)
        return steps

    def _with_new_steps(self, earlier: dict[tuple[str, str], int] | None) -> dict[tuple[str, str], int]:
        steps = earlier or {}
        rows = self.query(
            "SELECT seq, kind, payload FROM events WHERE seq > ? AND kind IN "
            "('request received', 'rolled back', 'request done') ORDER BY seq",
            (max(steps.values(), default=0),),
        )
        for seq, kind, payload in rows:
            request = json.loads(payload)["request"]
            steps.setdefault((kind, request["request"] if kind == "request received" else request), seq)
        return steps

    def payload(self, seq: int) -> dict[str, Any]:
        """Return the payload of an event."""
        rows = self.query("SELECT payload FROM events WHERE seq = ?", (seq,))
        if not rows:
            raise RunDamagedError(f"{self.folder} is damaged: its ledger has no event {seq}")
        content: dict[str, Any] = json.loads(rows[0][0])
        return content

    def last_event(self) -> tuple[int, str]:
        """Return the number and hash of the last event."""
        seq, digest = self.query("SELECT seq, lower(hex(hash)) FROM events ORDER BY seq DESC LIMIT 1")[0]
        return int(seq), str(digest)

    def hashes(self) -> dict[int, str]:
        """Return the hash of each event, by its number."""
        return dict(self.query("SELECT seq, lower(hex(hash)) FROM events"))

    def subjects(self) -> list[SubjectRow]:
        """Return all subjects forgotten so far, in order."""
        return self._rows("subjects")

    def charges(self) -> list[ChargeRow]:
        """Return the budget that each addition of noise charged to each subject."""
        return self._rows("charges")

    def evaluations(self) -> list[EvaluationRow]:
        """Return all evaluations, ordered by node."""
        return self._rows("evaluations")

    def rejections(self) -> list[RejectionRow]:
        """Return the rejected replies, ordered by the position of their round."""
        return self._rows("rejections")

    def _rows(self, table: str, order: str = "") -> list[Any]:
        """Return the rows of a small table, ordered by its key or by `order`, cached until something is written."""
        return list(self.remembered(table, lambda: self._read_rows(table, order or ", ".join(KEYS[table]))))

    def _read_rows(self, table: str, order: str) -> list[Any]:
        columns = ROWS[table].__dataclass_fields__
        rows = self.query(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}")
        if not PARSED[table]:
            return [ROWS[table](*row) for row in rows]
        return [read_row(table, dict(zip(columns, row, strict=True))) for row in rows]

    def latest_events(self, kinds: Sequence[str], most: int) -> list[tuple[str, str, dict[str, Any]]]:
        """Return time, kind and payload of at most `most` of the latest events of these kinds, oldest first."""
        marks = ", ".join("?" * len(kinds))
        rows = self.query(
            f"SELECT time, kind, payload FROM events WHERE kind IN ({marks}) ORDER BY seq DESC LIMIT ?", (*kinds, most)
        )
        return [(str(a), str(b), json.loads(c)) for a, b, c in reversed(list(rows))]

    def certificates(self, request: str | None = None) -> dict[tuple[str, str], str]:
        """Return the signed certificates of one request or of all, as JSON, by (request, form)."""
        where, values = ("", ()) if request is None else (" WHERE request = ?", (request,))
        rows = self.query(f"SELECT request, form, content FROM certificates{where}", values)
        return {(a, b): c for a, b, c in rows}

    def events(self) -> list[Event]:
        """Return the ledger, in order."""
        return list(self.remembered("events", self._read_events))

    def _read_events(self) -> list[Event]:
        """Read all events; reuse the objects of equal events in the shared cache, with their parsed content."""
        rows = self.query(
            "SELECT seq, time, kind, payload, nonce, commitment, hash, signature FROM events ORDER BY seq"
        )
        events = [
            Event(seq, time, kind, payload.encode(), nonce, commitment, digest, signature)
            for seq, time, kind, payload, nonce, commitment, digest, signature in rows
        ]
        for place, (event, before) in enumerate(zip(events, self.shared.earlier("events") or (), strict=False)):
            if event == before:
                events[place] = before
        self.shared.answer("events", object(), lambda _: events)
        return events


SEPARATOR = "~"
"""Separator between a client's first name and the count of its names: hospital-3, hospital-3~2, hospital-3~3."""


@dataclass(frozen=True)
class Remainder:
    """A client that joined, or will join, in place of client `before` after a request to forget records.

    Its index is `client`. It has the rows of `first`, the client as it first joined, without the rows `removed`.
    """

    request: str
    client: int
    name: str
    before: int
    first: int
    removed: tuple[int, ...]


def joined_remainders(reader: RunReader) -> list[Remainder]:
    """Return all clients that joined again after records were forgotten, in the order of joining."""
    remainders: list[Remainder] = reader.remembered("remainders", lambda: _find(reader))
    return list(remainders)


def chain_of(reader: RunReader, client: int) -> tuple[int, ...]:
    """Return all indices of a client up to `client`, oldest first.

    A client gets a new index when some of its records are forgotten. A request concerns all of its indices:
    contributions under an earlier index stay in the model until a request removes them.
    """
    before, chain = reader.remembered("before", lambda: {item.client: item.before for item in _find(reader)}), [client]
    while before.get(chain[-1], client) < chain[-1]:  # indices decrease even in a forged record, so the loop ends
        chain.append(before[chain[-1]])
    return tuple(reversed(chain))


def plain_name(reader: RunReader, client: int) -> str:
    """Return the name under which a client first joined; people know the client by this name."""
    return reader.clients()[chain_of(reader, client)[0]].name


def plain_names(reader: RunReader, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names under which people know these clients, each once; unknown names are returned unchanged."""
    plain = reader.remembered(
        "plain names", lambda: {item.name: plain_name(reader, item.client) for item in joined_remainders(reader)}
    )
    return tuple(dict.fromkeys(plain.get(name, name) for name in names))


def clients_now(reader: RunReader) -> list[int]:
    """Return the current index of each client, in the order in which the clients first joined."""
    last = {item.first: item.client for item in joined_remainders(reader)}
    again = {item.client for item in joined_remainders(reader)}
    return [last.get(client, client) for client in range(len(reader.clients())) if client not in again]


def _find(reader: RunReader) -> list[Remainder]:
    requests = {row.request: row for row in reader.requests() if row.records and not row.was_ended}
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
    """Return the client that has yet to join again for a running request to forget records, or None."""
    there = {remainder.request for remainder in joined_remainders(reader)}
    for row in reader.requests():
        if row.status == "running" and row.records and row.request not in there:
            return remainder_after(reader, row.clients[0], row.records, row.request)
    return None


def remainder_after(reader: RunReader, name: str, rows: tuple[int, ...], request: str = "") -> Remainder:
    """Return the client that would replace client `name` once these rows are forgotten.

    The id of the `request` is empty if there is no request yet.
    """
    earlier = {remainder.client: remainder for remainder in joined_remainders(reader)}
    names = [profile.name for profile in reader.clients()]
    return _next(earlier, request, len(names), next_name(name, names), names.index(name), rows)


def next_name(name: str, taken: list[str]) -> str:
    """Return the name under which a client joins again.

    >>> next_name("hospital-3", ["hospital-3"]), next_name("hospital-3~2", ["hospital-3", "hospital-3~2"])
    ('hospital-3~2', 'hospital-3~3')
    """
    first, _, turn = name.rpartition(SEPARATOR)
    first, number = (first, int(turn)) if first and turn.isdecimal() and turn.isascii() else (name, 1)
    while (again := f"{first}{SEPARATOR}{number + 1}") in taken:
        number += 1
    return again


def names_now(reader: RunReader) -> dict[str, str]:
    """Return the current name of every client that joined again, by each of its earlier names.

    While its request is running, a client keeps the name used in the request, so that repeating the command continues
    the request.
    """
    clients, now = reader.clients(), dict[str, str]()
    running = {row.request for row in reader.requests() if row.status == "running"}
    for remainder in reversed(joined_remainders(reader)):
        if remainder.request not in running:
            now[clients[remainder.before].name] = now.get(remainder.name, remainder.name)
    return now


def check_rows(reader: RunReader, client: int, rows: tuple[int, ...]) -> None:
    """Check that a client has these rows, which will be forgotten, and keeps at least one other row.

    Raises:
        InputError: If a row does not exist or was forgotten before, or if no row would be left.
    """
    clients, earlier = reader.clients(), {item.client: item for item in joined_remainders(reader)}
    first, removed = (earlier[client].first, earlier[client].removed) if client in earlier else (client, ())
    name, samples = clients[first].name, clients[first].samples
    if max(rows) >= samples:
        raise InputError(f"client {name} joined with rows 0 to {samples - 1} and has no row {max(rows)}")
    gone = sorted(set(rows) & set(removed))
    if gone:
        raise InputError(f"row {gone[0]} of client {name} was already forgotten; leave it out")
    if len(rows) + len(removed) == samples:
        raise InputError(
            f"these are all remaining records of client {name}: forget the client instead, without naming records"
        )
