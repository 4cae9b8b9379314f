"""Small runs of every kind for an adversary to change, and all changes tried on them.

Together they fill every table: sampling, momentum, new keys, restored backups, Gram matrices, refused
replies, scaled merges, rebuilt groups, statistics of closed-form heads, clients that join, forgotten records of clients
that stay, approvals, messages, incidents, requests filed without the key, a witness, and masked rounds if Flower is
installed. The changes are enumerated from the folder itself, so that a new column, field or file is tried
at once.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import runs
import sifu
from forged_runs import rebuild_chain
from mutations import CRASH, NAMES, Pristine, caught, changed, leaves, other_values, spread, with_leaf
from random_journeys import tables as table_clients
from run_tools import columns, connect, small_spec, tables
from scripted_job import kept_by_witness, witnesses_of
from sifu.api import verify_certificate
from sifu.data import ClientData
from sifu.errors import SifuError
from sifu.requests.messages import ingest
from sifu.store.checkpoints import UNSIGNED
from sifu.store.inbox import post
from sifu.store.kept_heads import WITNESSES
from sifu.store.keys import KEY_FILE
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter
from sifu_verifier import verify

TINY: dict[str, Any] = {
    "data": {"clients": 8, "samples_per_client": 6},
    "local": {"steps": 2, "rate": 0.05},
    "stop": {"target": 0.0, "max_rounds": 4},
}


# -- runs ------------------------------------------------------------------------------------------------------


def sampled(folder: Path) -> Path:
    """Make a run with sampling, momentum, decay, a new key, a withdrawn request, a restored backup."""
    spec = small_spec(**TINY | {"local": {"steps": 2, "rate": 0.01, "momentum": 0.5, "weight_decay": 0.01}},
                      server={"participation": "poisson(0.7)"})  # fmt: skip
    run = sifu.train(spec, run=folder)
    run.forget(["client-000"], "first", sigma=0.05)
    run.rotate_key()
    run.request(["client-001"], "not-any-more")
    run.decide("not-any-more", "withdrawn", "changed its mind", actor="desk")
    run.backup(folder.with_name("sampled.zip"))
    back = folder.with_name(f"{folder.name}-back")
    sifu.restore(folder.with_name("sampled.zip"), back)
    run = sifu.open_run(back)
    run.forget(["client-002", "client-003"], "second", sigma=1.0, retention="strict")
    run.forget(["client-004"], "third", method="scratch")
    run.purge()
    return back


def refused_replies(folder: Path) -> Path:
    """Make a run with updates beyond a bound, each left out of its round."""
    spec = small_spec(**TINY, server={"update_bound": 0.2, "rejected": "reply"})
    run = sifu.train(spec, run=folder)
    run.forget(["client-002"], "left", sigma=1.0)
    return folder


def grouped(folder: Path) -> Path:
    """Make a run with groups, two requests that merge the remaining ones, and one by noise."""
    run = sifu.train(small_spec(**TINY, groups={"count": 3, "rounds": 2}), run=folder)
    run.forget(["client-001"], "merged", method="groups")
    run.forget(["client-002"], "noised", sigma=1.0)
    run.forget(["client-003"], "merged-again", method="groups")
    return folder


def moved_groups(folder: Path) -> Path:
    """Make a run with merges scaled from the first model, and rebuilt groups."""
    spec = small_spec(**TINY, groups={"count": 3, "rounds": 2})
    run = sifu.train(spec, run=folder)
    run.forget(["client-001"], "merged", method="groups")
    run.update()
    run.forget(["client-003"], "merged-again", method="groups", retention="strict")
    return folder


def approved(folder: Path) -> Path:
    """Make a run with two approvals, messages (one refused), incidents, and a request filed without the key."""
    spec = small_spec(**TINY, requests={"approval": "two"})
    run = sifu.train(spec, run=folder)
    post(folder, "request", "strange", {"clients": "nobody"})
    with RunWriter.open(folder) as writer:
        run.request(["client-000"], "posted", actor="rita")  # a message, because another process is writing
        ingest(writer)
    run.request(["client-001"], "asked", actor="rita")
    run.decide("asked", "verified", actor="desk")
    for person in ("ann", "bob"):
        run.decide("asked", "approved", "it is theirs", actor=person)
    run.decide("posted", "approved", actor="ann")
    run.request(["client-002"], "refused", actor="rita")
    run.decide("refused", "refused", "not theirs", actor="ann")
    run.forget(sigma=1.0)
    with RunWriter.open(folder) as writer:
        incident = {"branch": 1, "round": 2, "client": "client-005", "what": "it did not answer"}
        writer.record(NewEvent("incidents", {"incidents": [incident]}))
    key = (folder / KEY_FILE).read_bytes()
    (folder / KEY_FILE).unlink()
    run.request(["client-004"], "without-the-key", actor="rita")
    (folder / KEY_FILE).write_bytes(key)
    run.decide("posted", "approved", actor="bob")
    run.forget(sigma=1.0)
    return folder


def with_records(folder: Path) -> Path:
    """Make a run with requests for records: each client leaves and joins again with its remaining records."""
    draw = np.random.default_rng(5)
    clients = [ClientData(f"client-{k:03d}", draw.normal(size=(6, 4)), draw.integers(0, 3, 6)) for k in range(6)]
    spec = {"data": {"preprocessing": "fixed"}, "model": {"kind": "softmax", "outputs": 3},
            "local": {"rate": 0.05, "steps": 2}, "stop": {"max_rounds": 3, "target": 0.0}}  # fmt: skip
    run = sifu.train(spec, run=folder, clients=clients)
    run.forget(["client-003"], "rows", records=[2, 0], sigma=1.0)
    run.forget(["client-003"], "more-rows", records=[1], sigma=1.0)
    run.forget(["client-001"], "whole", sigma=1.0)
    return folder


def witnessed(folder: Path) -> Path:
    """Make a run with a witness of every event."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, {WITNESSES: str(kept_by_witness(folder))}):
        run = sifu.train(small_spec(**TINY), run=folder)
        run.forget(["client-001"], "first", sigma=1.0)
        run.forget(["client-002"], "second", sigma=1.0)
        run.request(["client-003"], "waits")
    return folder


def closed_form(folder: Path) -> Path:
    """Make a run with statistics, two requests and a client that joined."""
    clients = table_clients(np.random.default_rng(3), 7, 0, 3, (4,))
    spec = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 3}, "features": {"norm": 8.0}}
    sifu.train(spec, run=folder, clients=clients[:6]).forget(["client-001"], "first")
    sifu.open_run(folder, clients=clients).join()
    run = sifu.open_run(folder, clients=clients)
    run.forget(["client-003", "client-004"], "second")
    run.forget(["client-005"], "records", records=[1])
    return folder


def noisy_release(folder: Path) -> Path:
    """Make a run whose releases carry noise."""
    data = {"clients": 6, "samples_per_client": 12, "preprocessing": "fixed"}
    spec = {"data": data, "model": {"kind": "ridge"}, "ridge": {"regularisation": 0.05}, "release": {"noise": 0.5}}
    run = sifu.train(spec, run=folder)
    run.forget(["client-001"], "first")
    run.forget(["client-003"], "second")
    return folder


def with_many_requests(folder: Path) -> Path:
    """Make the run that other tests also tamper with."""
    return runs.own("requests", folder)


def masked(folder: Path) -> Path:
    """Make a run with masked rounds on Flower's messages, and a request filed while the server ran."""
    sys.path.insert(0, str(Path(__file__).parent / "engines" / "flower"))
    from flower_federation import small_spec as flower_spec
    from served_runs import Federation

    folder.parent.mkdir(parents=True, exist_ok=True)
    spec = flower_spec(stop={"max_rounds": 4, "target": 0.0})
    federation = Federation(folder, spec, masked_updates=True)
    federation.serve()
    sifu.open_run(federation.run_folder).request([federation.data[2].name], "masked", sigma=5.0)
    federation.serve(level="none")
    return federation.run_folder


RUNS: dict[str, Callable[[Path], Path]] = {
    "many requests": with_many_requests,
    "sampled": sampled,
    "refused replies": refused_replies,
    "groups": grouped,
    "moved groups": moved_groups,
    "closed form": closed_form,
    "noisy release": noisy_release,
    "records": with_records,
    "approved": approved,
    "witnessed": witnessed,
}
if importlib.util.find_spec("flwr") is not None:
    RUNS["masked"] = masked


# -- verdicts ----------------------------------------------------------------------------------------------------------

WORDS = {"event": "sign", "field": "certificates: ", "older": "state was put back"}
"""Words that a finding must contain: without the key, the signature reveals a changed event in any case. Findings of
changed values and rows name the table.
"""


def uncaught(
    pristine: Pristine, mutations: list[Mutation], second_every: int = 1
) -> tuple[collections.Counter[str], list[str]]:
    """Return the number of mutations of each kind, and a list of those missed by a verifier or ending in a traceback.

    The second verifier, which shares no code with sifu, checks one in `second_every`. It accepts no witnesses.
    """
    tried: collections.Counter[str] = collections.Counter()
    wrong = []
    against = held_against(pristine.folder)
    for number, mutation in enumerate(mutations):
        if mutation.apply(pristine.folder):
            tried[mutation.kind] += 1
            if mutation.kind == "field":
                path = pristine.folder / "certificates" / mutation.name.partition(": ")[0]
                if not alone(path):
                    wrong.append(f"not caught alone: {mutation.name}")
            # A certificate file is compared with the ledger's copy, so a sample of its fields suffices there.
            if mutation.kind != "field" or number % 5 == 0:
                table = mutation.name.partition(":")[0].partition(".")[0]
                word = WORDS.get(mutation.kind, NAMES.get(table, table) if mutation.kind in ("value", "row") else "")
                findings = caught(pristine.folder, **against)
                if not re.search(word, "\n".join(findings)) or not findings or CRASH in findings[0]:
                    wrong.append(f"{mutation.kind} not caught: {mutation.name}: {findings[:2]}")
            if number % second_every == 0 and mutation.kind != "older" and not verify(pristine.folder):
                wrong.append(f"{mutation.kind} not caught by the second verifier: {mutation.name}")
        pristine.restore()
    return tried, wrong


def alone(path: Path) -> list[str]:
    """Return the problems found in a certificate by itself."""
    try:
        return verify_certificate(path).problems
    except SifuError as error:
        return [str(error)]


# -- changes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """One change to a folder; `apply` returns False if the database refuses the change."""

    kind: str
    name: str
    apply: Callable[[Path], bool]


HARMLESS_FILES = ("operator.key", "lock", "standing.json", "salts.json", "run.db-wal", "run.db-shm")
"""Files that no claim depends on: their content cannot change what the record states. (With other salts the run refuses
its own data: tests/requests/test_same_data.py.)
"""
MOST_ROWS = 3
"""Largest number of rows tried per column of a large table; in small tables every row is tried."""


def every_mutation(folder: Path) -> list[Mutation]:
    """Return all changes that are tried on a folder, in a fixed order."""
    return [
        *_of_values(folder),
        *_of_rows(folder),
        *_of_certificates(folder),
        *_of_files(folder),
        *_of_events_without_the_key(folder),
        *_of_older_states(folder),
    ]


def held_against(folder: Path) -> dict[str, Any]:
    """Return a run's witness as arguments for verification."""
    return {"heads": witnesses_of(folder)}


def _statement(sql: str, values: tuple[Any, ...]) -> Callable[[Path], bool]:
    def apply(folder: Path) -> bool:
        connection = connect(folder)
        try:
            connection.execute(sql, values)
        except sqlite3.IntegrityError:
            return False  # that key exists already
        finally:
            connection.close()
        return True

    return apply


def _of_values(folder: Path) -> Iterator[Mutation]:
    connection = connect(folder)
    for table in tables(connection):
        described = columns(connection, table)
        keys = [column.name for column in described if column.key]
        where = " AND ".join(f"{key} = ?" for key in keys)
        rows = connection.execute(f"SELECT * FROM {table} ORDER BY {', '.join(keys)}").fetchall()
        for place, column in enumerate(described):
            for row in rows if table == "run" else spread(rows, place, MOST_ROWS) if rows else []:
                key = tuple(row[[entry.name for entry in described].index(name)] for name in keys)
                for new in other_values(row[place], column):
                    if new is None and column.name == "signature" and _kinds_since(rows, row) <= set(UNSIGNED):
                        continue  # whoever may write to the folder may file, decide and restore after the last one
                    name = f"{table}.{column.name} of {key}: {row[place]!r} -> {new!r}"[:300]
                    sql = f"UPDATE {table} SET {column.name} = ? WHERE {where}"
                    yield Mutation("value", name, _statement(sql, (new, *key)))
    connection.close()


def _kinds_since(events: list[tuple[Any, ...]], event: tuple[Any, ...]) -> set[str]:
    """Return the kinds of an event and all later ones."""
    return {row[2] for row in events if row[0] >= event[0]}


def _of_rows(folder: Path) -> Iterator[Mutation]:
    connection = connect(folder)
    for table in tables(connection):
        described = columns(connection, table)
        keys = [column.name for column in described if column.key]
        places = [[column.name for column in described].index(key) for key in keys]
        where = " AND ".join(f"{key} = ?" for key in keys)
        rows = connection.execute(f"SELECT * FROM {table} ORDER BY {', '.join(keys)}").fetchall()
        for row in spread(rows, 1, 3) if rows else []:
            key = tuple(row[place] for place in places)
            yield Mutation("row", f"{table}: row {key} dropped", _statement(f"DELETE FROM {table} WHERE {where}", key))
            again = list(row)
            again[places[-1]] = key[-1] + 1000 if isinstance(key[-1], int) else f"{key[-1]}-again"
            insert = f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})"
            yield Mutation("row", f"{table}: row {key} repeated", _statement(insert, tuple(again)))
        if rows:
            yield Mutation("row", f"{table}: all rows dropped", _statement(f"DELETE FROM {table}", ()))
        if len(rows) > 1:
            yield Mutation("row", f"{table}: first and last swapped", _swapped(table, where, places, rows))
    connection.close()


def _swapped(table: str, where: str, places: list[int], rows: list[tuple[Any, ...]]) -> Callable[[Path], bool]:
    """Return a change that gives the first row the key of the last one, and the last one that of the first."""

    def with_key(row: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(other[place] if place in places else value for place, value in enumerate(row))

    def apply(folder: Path) -> bool:
        connection = connect(folder)
        for row in (rows[0], rows[-1]):
            connection.execute(f"DELETE FROM {table} WHERE {where}", [row[place] for place in places])
        changed = [with_key(rows[0], rows[-1]), with_key(rows[-1], rows[0])]
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", changed)
        connection.close()
        return set(changed) != {rows[0], rows[-1]}

    return apply


def _of_certificates(folder: Path) -> Iterator[Mutation]:
    for path in sorted((folder / "certificates").iterdir()):
        content = json.loads(path.read_text(encoding="utf-8"))
        name = path.name
        for place, value in leaves(content):
            for new in changed(value):
                text = json.dumps(with_leaf(content, place, new), indent=1, sort_keys=True)
                yield Mutation("field", f"{name}: {place}: {value!r} -> {new!r}"[:300], _writing(name, text.encode()))
        for key in content["body"]:
            body = {other: value for other, value in content["body"].items() if other != key}
            text = json.dumps(content | {"body": body}, indent=1, sort_keys=True)
            yield Mutation("field", f"{name}: {key} left out", _writing(name, text.encode()))
        others: list[dict[str, Any]] = [{key: content[key].upper()} for key in ("public_key", "signature")]
        others += [{"body": content["body"] | {"note": "added"}}, {"remark": "level: exact"}]
        texts = [json.dumps(content | other, indent=1, sort_keys=True) for other in others]
        texts.append('{"body": {"level": "exact"}, ' + path.read_text(encoding="utf-8").strip()[1:])
        for number, text in enumerate(texts):
            yield Mutation("field", f"{name}: in another form {number}", _writing(name, text.encode()))


def _writing(name: str, content: bytes) -> Callable[[Path], bool]:
    return _file(Path("certificates") / name, lambda _: content)


def _file(name: Path, change: Callable[[bytes], bytes | None]) -> Callable[[Path], bool]:
    def apply(folder: Path) -> bool:
        path = folder / name
        before = path.read_bytes()
        after = change(before)
        if after is None:
            path.unlink()
        else:
            path.write_bytes(after)
        return after != before

    return apply


def _flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        index = int(place * (len(content) - 1))
        return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :] if content else b"\1"

    return flip


def _of_files(folder: Path) -> Iterator[Mutation]:
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name.name not in HARMLESS_FILES and name.parts[0] != "inbox"]
    last = _certificates_of_the_last_event(folder)
    changes: dict[str, Callable[[bytes], bytes | None]] = {
        "flipped at the start": _flipped(0.0),
        "flipped in the middle": _flipped(0.5),
        "flipped at the end": _flipped(1.0),
        "cut short": lambda content: content[:-1],
        "one byte longer": lambda content: content + b"\0",
        "emptied": lambda _: b"",
        "other line ends": lambda content: content.replace(b"\n", b"\r\n"),
        "deleted": lambda _: None,
    }
    for name in names:
        for what, change in changes.items():
            if name.name == "run.db" and what != "emptied":
                continue  # bytes of free pages mean nothing; tests/faults/test_fuzz.py changes others
            if what == "deleted" and name.name in last:
                continue  # an interrupted command leaves it missing, and the next one writes it
            if what == "other line ends" and name.suffix != ".json":
                continue
            yield Mutation("file", f"{name} {what}", _file(name, change))
        others = [other for other in names if other.parent == name.parent and other != name and len(other.parts) > 1]
        for other in others[:2]:
            content = (folder / other).read_bytes()
            yield Mutation("file", f"{name} replaced by {other}", _file(name, lambda _, content=content: content))
            yield Mutation("file", f"{name} copied to {name}.bak", _copy(name, Path(f"{name}.bak")))


def _copy(name: Path, target: Path) -> Callable[[Path], bool]:
    def apply(folder: Path) -> bool:
        shutil.copyfile(folder / name, folder / target)
        return True

    return apply


def _certificates_of_the_last_event(folder: Path) -> set[str]:
    connection = connect(folder)
    (payload,) = connection.execute("SELECT payload FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    connection.close()
    content = json.loads(payload)
    return {f"{content['request']}.{form}.json" for form in content.get("certificates", {})}


def _of_events_without_the_key(folder: Path) -> Iterator[Mutation]:
    """Yield changes of payload values, with all hashes and tables rebuilt but without the key for signatures."""
    connection = connect(folder)
    rows = connection.execute("SELECT seq, kind, payload FROM events ORDER BY seq").fetchall()
    connection.close()
    while rows[-1][1] in UNSIGNED and not witnesses_of(folder):
        rows.pop()  # whoever may write to the folder may file, decide and restore after the last signature
    for seq, _, payload in rows:
        content = json.loads(payload)
        for place, value in spread(list(leaves(content)), seq, 12):
            for new in changed(value)[:1]:
                yield Mutation("event", f"event {seq}: {place}: {value!r} -> {new!r}"[:300], _forging(seq, place, new))


def _forging(seq: int, place: tuple[Any, ...], new: Any) -> Callable[[Path], bool]:
    def apply(folder: Path) -> bool:
        numbers = iter(range(1, 10**6))

        def edit(kind: str, content: dict[str, Any]) -> None:
            if next(numbers) == seq:
                forged = with_leaf(content, place, new)
                content.clear()
                content.update(forged)

        rebuild_chain(folder, edit, with_key=False)
        return True

    return apply


def _of_older_states(folder: Path) -> Iterator[Mutation]:
    """Yield records without their last events, with valid signatures: only a witness can reveal this."""
    if not witnesses_of(folder):
        return
    connection = connect(folder)
    (last,) = connection.execute("SELECT MAX(seq) FROM events").fetchone()
    connection.close()
    for seq in range(1, last):
        yield Mutation("older", f"the record cut off after event {seq}", _cut_off(seq))


def _cut_off(seq: int) -> Callable[[Path], bool]:
    def apply(folder: Path) -> bool:
        connection = connect(folder)
        connection.execute("DELETE FROM events WHERE seq > ?", (seq,))
        (digest,) = connection.execute("SELECT hash FROM events WHERE seq = ?", (seq,)).fetchone()
        connection.execute("UPDATE run SET value = ? WHERE key = 'head'", (f"{seq}:{digest.hex()}",))
        connection.close()
        return True

    return apply
