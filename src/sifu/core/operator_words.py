"""Phrases for the operator about clients, records and requests, shown by commands, the console and the report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sifu.core.spec import Spec

FLOWER: Final = "flower"
"""`data.name` of a run whose clients are Flower nodes, which keep their data."""
LOOP: Final = "server loop"
"""`data.name` of a run whose clients communicate with the operator's own program (`sifu.ServerLoop`)."""
PYTHON: Final = "python"
"""`data.name` of a run whose clients were given from Python."""
NPZ: Final = "npz"
TABLE: Final = "table"
OWN_FILES = (NPZ, TABLE)
"""`data.name` of runs on a user's own files."""
LAST_CLIENT = (
    "No model can be made without clients, so there is nothing to certify: to forget the last one, delete the run's "
    "folder and every copy of its models, and keep its certificates; or let another client join first (heads in "
    "closed form: sifu join; on Flower: sifu clients add)"
)
"""Reason why no request can forget the last client of a run, and what to do instead."""


def way_to_go_on(spec: Spec, phase: str) -> str:
    """Return the command, or the program, that continues a run interrupted in this phase."""
    if spec.data.name == FLOWER:
        return "flwr run"
    if spec.data.name == LOOP:
        return "the program with your sifu.ServerLoop"
    return "sifu train" if phase == "training" else "sifu forget"


def way_to_execute(spec: Spec, folder: str) -> str:
    """Return the command, the program, or the call from Python, that executes the requests of the run in `folder`."""
    if spec.data.name == PYTHON:
        return f"sifu.open_run({folder!r}, clients=...).forget()"
    command = way_to_go_on(spec, "ready")
    return f"{command} {folder}" if command == "sifu forget" else command


def unmasked_setting(data_name: str, what: str = "statistics") -> str:
    """Return the setting that turns masking off, so that the server sees each client's `what`: statistics or updates.

    >>> unmasked_setting(LOOP), unmasked_setting(FLOWER, "updates")
    ('masked_statistics=False', 'masked-updates = false')
    """
    return f"masked_{what}=False" if data_name == LOOP else f"masked-{what} = false"


def names_words(names: Sequence[str], most: int = 3) -> str:
    """Return at most `most` names and the number of others.

    >>> names_words(["a", "b", "c"], 1)
    'a and 2 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of text as lines of aligned columns; the columns numbered in `right` are aligned right.

    >>> aligned([("method", "rounds"), ("scratch", "9")], right=[1])
    ['method   rounds', 'scratch       9']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def forgotten_words(clients: Sequence[str], records: int | None) -> str:
    """Return the names of the clients that a request forgets, or the number of records and their client.

    >>> forgotten_words(["hospital-3"], 2), forgotten_words(["hospital-3", "hospital-4"], None)
    ('2 records of hospital-3', 'hospital-3, hospital-4')
    """
    names = ", ".join(clients)
    return names if records is None else f"{records} record{'s' if records > 1 else ''} of {names}"


def approvals_words(missing: int) -> str:
    """Return a phrase with the number of missing approvals of a request.

    >>> approvals_words(1), approvals_words(2)
    ('1 more approval', '2 more approvals')
    """
    return f"{missing} more approval{'s' if missing > 1 else ''}"


def rows_words(rows: Sequence[int], identities: Sequence[str] = ()) -> str:
    """Return the number of records that a request names, with their identities if they are given.

    >>> rows_words([3, 5]), rows_words([7], ["P007"]), rows_words([])
    ('2 records', '1 record: P007', "all of the client's data")
    """
    if not rows:
        return "all of the client's data"
    count = f"{len(rows)} record{'' if len(rows) == 1 else 's'}"
    return f"{count}: {', '.join(identities)}" if identities else count


def psi_words(status: str) -> str:
    """Return the meaning of Psi, given the status of its premises.

    >>> psi_words("met")
    'Psi bounds how far a client can have moved the current model'
    """
    bounds = "Psi bounds how far a client can have moved the current model"
    return f"If the assumptions in the certificates of this run hold, {bounds}" if status == "assumed" else bounds
