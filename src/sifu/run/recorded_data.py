"""Data of a run's clients in the order of the record.

The order is: founders, clients that joined later, and clients that rejoined with fewer records. Every command that
needs a run's data reads them again. Clients that joined from a file are read from that file. A client that rejoined
after some of its records were forgotten is read from its original source. If the source still holds the forgotten rows,
they are dropped here; if its owner removed them, the source is used unchanged.

Data of clients that left may be missing. An engine uses the client indices of the record, so it gets a stand-in for
each client without data: the same number of samples, all zeros. A stand-in is used neither for training nor for
measurements (`Engine.absent`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.client_names import as_seen
from sifu.core.operator_words import TABLE
from sifu.core.spec import Spec
from sifu.data.client_data import ClientData
from sifu.errors import InputError, SifuWarning
from sifu.run.clients_and_engine import clients_from_spec, takes_rows
from sifu.run.features import FeatureData, with_features, with_samples
from sifu.run.run_view import RunView
from sifu.store.reader import Remainder, RunReader, chain_of, joined_remainders, names_now, remainder_to_join
from sifu.theory.facts import ClientProfile

OWNER = "owner"
"""Key in the event `client joined`; its value keys the draw of held-out rows from a file that names no clients."""


class MissingDataError(InputError):
    """Error for a client's data that are missing or must not be used."""


@dataclass(frozen=True)
class Arranged:
    """Clients in the order of the record, followed by clients that are not in it yet.

    `absent` maps the index of each client with a stand-in to the reason why its data are missing.
    """

    clients: tuple[Any, ...]
    absent: dict[int, str]

    def complete(self) -> tuple[Any, ...]:
        """Return the clients, after checking that no data are missing."""
        for reason in self.absent.values():
            raise InputError(reason)
        return self.clients


def arranged_clients(
    reader: RunReader,
    clients: Sequence[Any],
    newcomers: Sequence[Any] = (),
    expected: Remainder | None = None,
    changed: Mapping[int, str] | None = None,
) -> Arranged:
    """Return the clients in the order of the record, followed by clients that are not in it yet.

    Args:
        reader: Reader of the run.
        clients: Clients as they were given; clients that joined from files are read from these files.
        newcomers: Clients that may join.
        expected: Client that would rejoin after a request that is not executed yet.
        changed: Clients whose data changed and are not used, with the reason.
    """
    joined, waiting = joined_remainders(reader), expected or remainder_to_join(reader)
    remainders = {item.client: item for item in (*joined, *([waiting] if waiting else ()))}
    given, recorded = {client.name: client for client in clients}, reader.clients()
    absent: dict[int, str] = {}
    unread: dict[str, str] = {}
    given |= _clients_of_files(reader, given, unread)
    arranged = []
    for client in range(max(len(recorded), 1 + max(remainders, default=-1))):
        try:
            if changed and client in changed:
                raise MissingDataError(changed[client])
            if client in remainders:
                arranged.append(_reduced(remainders[client], list(remainders.values()), recorded, given))
            elif (name := recorded[client].name) in given:
                arranged.append(given[name])
            else:
                raise MissingDataError(unread.get(name) or missing(name))
        except MissingDataError as error:
            if not given:
                raise
            absent[client] = str(error)
            arranged.append(_stand_in(reader, client, remainders.get(client), next(iter(given.values()))))
    names = {profile.name for profile in recorded}
    return Arranged((*arranged, *(client for client in clients if client.name not in names), *newcomers), absent)


def missing(name: str) -> str:
    """Return the error message for missing data of a client that stays."""
    return f"the data of client {name!r} are missing: provide the data of every client that stays"


def _stand_in(reader: RunReader, client: int, remainder: Remainder | None, like: Any) -> Any:
    """Return a stand-in: as many zero samples as the client had, of the shape of another client's samples."""
    recorded = reader.clients()
    name = recorded[client].name if remainder is None else remainder.name
    samples = recorded[client].samples if client < len(recorded) else 1
    x, y = np.asarray(like.x), np.asarray(like.y)
    label = y[:1]
    if y.ndim == 1 and y.dtype.kind in "iu":  # outputs may be counted from labels, so include the largest class
        label = np.maximum(label, min(reader.layout.shapes[-1][-1] - 1, np.iinfo(y.dtype).max))
    rows = np.broadcast_to(np.zeros_like(x[:1]), (samples, *x.shape[1:]))
    labels = np.broadcast_to(label, (samples, *y.shape[1:]))
    if isinstance(like, FeatureData):
        return replace(like, name=name, x=rows, y=labels, mapped_from=None, ids=None)
    return ClientData(name, rows, labels)


def _joined_from(reader: RunReader) -> dict[str, tuple[str, str]]:
    """Return, for every client that joined from a file, the file and the name that keys its held-out rows."""
    payloads = (reader.payload(seq) for seq in reader.joined())
    return {
        payload["client"]: (payload["file"], payload.get(OWNER, Path(payload["file"]).stem))
        for payload in payloads
        if "file" in payload
    }


def clients_of_file(spec: Spec, file: Path, name: str | None, owner: str = "") -> tuple[Any, ...]:
    """Return the clients in a file of the format that the run was trained from.

    `name` is that of the file's only client, or None if the file names its clients; `owner`, by default `name`, keys
    the held-out rows of the only client.
    """
    from sifu.data import from_dataset, given_clients

    dataset = _joining_data(spec, file, owner or name or file.stem)
    given = dataset.client_train
    if (given is None) == (name is None):
        where = f"column {spec.data.client!r}" if spec.data.client else "array client"
        raise InputError(
            f"{file} has no {where}: name the client with --name NAME"
            if given is None
            else f"{file} names its clients itself, in the {where}: leave --name out"
        )
    if given is None:
        names: tuple[str, ...] = (str(name),)
        rows: Any = [np.arange(len(dataset.y_train))]
    else:
        names, rows = given_clients(given)
    clients = from_dataset(dataset, rows, spec.model.array_dtype, takes_rows(spec), spec.data.normalise, names=names)
    return with_features(spec, clients)


def _joining_data(spec: Spec, file: Path, owner: str) -> Any:
    """Return a newcomer file's data set, coded like the run's data; without a client column, all rows are `owner`'s."""
    from sifu.data import load
    from sifu.data.table import ENDINGS, column_names, read_table
    from sifu.data.table_coding import TableCoding
    from sifu.data.table_keys import split_names

    if spec.data.name != TABLE:
        if file.suffix.lower() in ENDINGS:
            raise InputError(
                f"{file} is a table, but this run was not trained from one: give an .npz file with x and y"
            )
        return load(file)
    if file.suffix.lower() not in ENDINGS:
        raise InputError(f"{file} is not a table: this run was trained from one, give a {', '.join(ENDINGS)} file")
    coding = TableCoding.from_spec(spec.data, spec.features, regression=not spec.regime.has_accuracy)
    names_clients = coding.client != "" and coding.client in column_names(file, coding)
    coding = coding if names_clients else replace(coding, client="")
    testing: dict[str, Any] = {"held_out": spec.data.held_out, "seed": spec.seed}
    columns = split_names(spec.data.columns, "data.columns")
    dataset = read_table(file, coding, owner="" if names_clients else owner, columns=columns, **testing)
    return dataset if names_clients else replace(dataset, client_train=None)


def clients_again(spec: Spec, device: str = "cpu") -> tuple[Any, ...]:
    """Return the clients of a run, without repeating warnings about their data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SifuWarning)
        return clients_from_spec(spec, device=device, tested=False)


def rows_of_identities(reader: RunReader, client: str, identities: Sequence[str], given: Sequence[Any]) -> list[int]:
    """Return the rows that these identities name, counted from 0 in the data that the client first joined with.

    Args:
        reader: Reader of the run.
        client: Name of the client.
        identities: Identities of the records.
        given: Clients that the run was opened with. If empty, the client's data are read. The data may lack rows that
            were forgotten already.
    """
    spec, (first, rows, ids) = Spec.from_mapping(reader.spec), _identified(reader, client, given)
    chosen, unnamed = [], {as_seen(str(name)): str(name) for name in ids if str(name) not in identities}
    for identity in identities:
        named = [int(row) for row, name in zip(rows, ids, strict=True) if str(name) == identity]
        if not named:
            raise InputError(
                f"client {first.name!r} has no record {identity!r} that it trained on"
                + (f": no row has it in column {spec.data.id!r}" if spec.data.id else ", counted from 0 among its rows")
                + (", or the row is kept for testing (data.held_out)" if spec.data.held_out else "")
            )
        if twin := unnamed.get(as_seen(identity)):
            raise InputError(
                f"client {first.name!r} has records {identity!a} and {twin!a}, which look the same: name both if they "
                "belong to one person, or write them differently in the data"
            )
        chosen += named
    return sorted(set(chosen))


def identities_of_rows(reader: RunReader, client: str, chosen: Sequence[int], given: Sequence[Any]) -> list[str]:
    """Return the identities of the `chosen` rows, each once, in the order of the rows (see `rows_of_identities`)."""
    _, rows, ids = _identified(reader, client, given)
    identity_of = {int(row): str(name) for row, name in zip(rows, ids, strict=True)}
    return list(dict.fromkeys(identity_of[row] for row in chosen if row in identity_of))


def _identified(reader: RunReader, client: str, given: Sequence[Any]) -> tuple[ClientProfile, Any, Any]:
    """Return a client's first profile, the row numbers that it still has, and the identity of each row of its data."""
    spec, files = Spec.from_mapping(reader.spec), _joined_from(reader)
    recorded, client = reader.clients(), names_now(reader).get(client, client)
    position = next((number for number, profile in enumerate(recorded) if profile.name == client), None)
    if position is None:
        raise InputError(f"there is no client {client!r} in this run")
    first = recorded[chain_of(reader, position)[0]]
    clients = given if given or first.name in files or spec.data.name != TABLE else clients_again(spec)
    by_name = {item.name: item for item in clients}
    by_name |= _clients_of_files(reader, by_name, {}) if first.name in files else {}
    source = by_name.get(first.name)
    ids = getattr(source, "ids", None)
    if source is None or ids is None:
        raise InputError(
            f"records of {first.name!r} are named by identities, but its data have none here: give row numbers, or "
            "train from a table whose spec names the column of identities (data.id)"
        )
    return first, _rows_there(first, len(ids), joined_remainders(reader)), ids


def _clients_of_files(reader: RunReader, given: dict[str, Any], unread: dict[str, str]) -> dict[str, Any]:
    """Return the clients that joined from files and were not given, by name; add reasons of failures to `unread`."""
    spec, joined = Spec.from_mapping(reader.spec), _joined_from(reader)
    clients: dict[str, Any] = {}
    for file in sorted({file for name, (file, _) in joined.items() if name not in given}):
        owners = {name: owner for name, (of, owner) in joined.items() if of == file}
        try:
            read = clients_of_file(spec, Path(file), None)
        except InputError:  # a file without names holds the rows of one client
            try:
                read = tuple(one for name in owners for one in clients_of_file(spec, Path(file), name, owners[name]))
            except InputError as error:
                unread |= {name: f"the data of client {name!r} are missing: {error}" for name in owners}
                continue
        clients |= {client.name: client for client in read if client.name in owners}
    return clients


def _reduced(
    remainder: Remainder, everyone: list[Remainder], recorded: Sequence[ClientProfile], given: dict[str, Any]
) -> Any:
    """Return the client's original data without the rows forgotten by now, under its current name."""
    if remainder.name in given:
        return given[remainder.name]
    first = recorded[remainder.first]
    if first.name not in given:
        raise MissingDataError(missing(first.name))
    source = given[first.name]
    rows = _rows_there(first, len(source.x), [item for item in everyone if item.first == remainder.first])
    return with_samples(source, ~np.isin(rows, remainder.removed), remainder.name)


def _rows_there(first: ClientProfile, samples: int, remainders: Sequence[Remainder]) -> Any:
    """Return the numbers of the client's original rows that a source with `samples` samples still has."""
    # Each request left a different number of rows, so the number tells which requests the source reflects.
    turns = [(), *(item.removed for item in remainders)]
    gone = next((turn for turn in turns if first.samples - len(turn) == samples), None)
    if gone is None:
        forgotten = max((len(item.removed) for item in remainders), default=0)
        raise InputError(
            f"client {first.name!r} has {samples} samples; it joined with {first.samples}, of which {forgotten} are "
            "forgotten: give all of them, or all but the forgotten ones"
        )
    return np.setdiff1d(np.arange(first.samples), gone)


def not_there_yet(reader: RunReader, clients: Sequence[Any], file: str) -> tuple[Any, ...]:
    """Return the clients of a file that have not joined from it yet.

    Raises:
        InputError: If a client was forgotten or asks to be, or joined from elsewhere.
    """
    view, joined, now = RunView(reader), _joined_from(reader), names_now(reader)
    newcomers = []
    for client in clients:
        index = view.index_of.get(now.get(client.name, client.name))
        if index is not None and index in view.forgotten | view.asking:
            raise InputError(
                f"{client.name} asked to be forgotten: readmitting it would void its certificate. Samples that it "
                "never had in this run may join under another name"
            )
        if index is None:
            newcomers.append(client)
        elif client.name not in joined or joined[client.name][0] != file:  # repeating a command is allowed
            raise InputError(
                f"{client.name} already sent its statistics: join additional records under another name, and remove "
                "records with sifu forget --client NAME --records FILE"
            )
    return tuple(newcomers)
