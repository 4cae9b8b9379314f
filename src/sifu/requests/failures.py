"""Notes on errors that interrupt a request, with the command that continues it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from sifu.core.operator_words import OWN_FILES, way_to_execute
from sifu.core.spec import Spec
from sifu.errors import NotCertifiableError, RunDamagedError
from sifu.store.last_failure import last_failure, note_failure, remove_failure
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter


@contextmanager
def noting_failure(writer: RunWriter, row: RequestRow | None) -> Iterator[None]:
    """Record an error that interrupts a request, and add a note to the error on how to continue the request.

    For a waiting request that cannot be certified as requested, nothing is recorded: its plan states the reason.
    """
    if row is None:
        yield
        return
    remove_failure(writer.folder)
    try:
        yield
    except Exception as error:
        if not (row.waits and isinstance(error, NotCertifiableError)):
            damaged = isinstance(error, RunDamagedError)
            note_failure(writer.folder, row.request, error, damaged=damaged)
            error.add_note(_way_out(writer, row, damaged=damaged))
        raise


def failure_of(reader: RunReader, row: RequestRow) -> str:
    """Return the last error that interrupted an open request, and how to continue it, or "" if there is none."""
    if not row.is_open:
        return ""
    failure = last_failure(reader.folder, row.request)
    if failure is None:
        return ""
    stop = "" if failure.error.endswith(".") else "."
    return f"{failure.error}{stop} {_way_out(reader, row, damaged=failure.damaged)}"


def _way_out(reader: RunReader, row: RequestRow, *, damaged: bool) -> str:
    """Return advice on continuing a request after an error, and on ending a running request if the error persists."""
    folder, spec = shlex.quote(str(reader.folder)), Spec.from_mapping(reader.spec)
    command, begun = way_to_execute(spec, folder), row.status == "running"
    sentence = (
        f"Request {row.request} is unfinished, and other requests wait for it: {command} continues it"
        if begun
        else f"Request {row.request} waits: {command} executes it"
    )
    if damaged:
        return (
            f"{sentence} once the damaged files are back: sifu verify {folder} lists them, and sifu restore BACKUP "
            "NEW_FOLDER restores the run from a backup."
        )
    if not begun or spec.regime.solves:
        return f"{sentence} once the cause of the error is removed{_data_hint(spec)}."
    return (
        f"{sentence}; if the error stays, sifu decide {folder} {row.request} settle --reason TEXT ends it with the "
        "model it has reached."
    )


def _data_hint(spec: Spec) -> str:
    """Return a hint on where the clients' data files must be, or an empty string if the run reads no data files."""
    if spec.data.name in OWN_FILES:
        return " (a missing data file must be back at the path that the run was trained from)"
    return ""
