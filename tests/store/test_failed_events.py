"""Events that cannot be recorded: the run stays unchanged, and so do files of other events."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sifu.checking.stored_models import check_models
from sifu.store import writer as writing
from sifu.store.database import transaction
from sifu.store.files import FOLDERS, stored_path
from sifu.store.projection import NewEvent, NewModel
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter


def contents(folder: Path) -> dict[Path, bytes]:
    """Return every file in the folders of a run."""
    return {path: path.read_bytes() for name in FOLDERS for path in (folder / name).iterdir()}


@contextmanager
def never_committed(connection: sqlite3.Connection) -> Iterator[None]:
    """Open a transaction that executes its block but cannot be committed."""
    with transaction(connection):
        yield
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("committing", [False, True])
def test_an_event_that_fails_takes_away_its_own_files_alone(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, committing: bool
) -> None:
    """A failed event removes its own files, unless the commit failed: a crash may still bring that event back."""
    with RunWriter.open(own_trained) as writer:
        tip, node = writer.tip, 1 + max(writer.nodes_by_number())
        model, statistics = writer.load_model(tip), f"{node}.sum.statistics"
        own = {stored_path(own_trained, "models", node), stored_path(own_trained, "statistics", statistics)}
        for kind, key in (
            ("models", node + 1),
            ("statistics", f"{node + 1}.sum.statistics"),
        ):
            stored_path(own_trained, kind, key).write_bytes(b"of the next event")
        before, events = contents(own_trained), writer.last_event()
        stored_path(own_trained, "statistics", statistics).write_bytes(b"of this event")
        row: dict[str, Any] = {"file": statistics, "node": node, "clients": [0], "samples": 1, "bytes": 13}
        event = NewEvent(
            "rounds",
            {},
            # The current model is recorded again, which writes nothing: its file belongs to an earlier event.
            models=[NewModel(node, model, kept=True), NewModel(tip, model, kept=True)],
            statistics=[row | {"digest": "0" * 64}],
        )
        written: list[set[Path]] = []

        def fails(*arguments: Any) -> None:
            written.append(contents(own_trained).keys() - before.keys())
            if not committing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(writing.Signer, "sign", fails)
        if committing:
            monkeypatch.setattr(writing, "transaction", never_committed)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            writer.record(event)
        assert written == [own]
        assert contents(own_trained).keys() - before.keys() == (own if committing else set())
        assert {path: content for path, content in contents(own_trained).items() if path in before} == before
        assert writer.last_event() == events


def test_a_file_that_was_dropped_since_is_not_missing(own_trained: Path) -> None:
    """A verification reads one state of the run; files that a writer has dropped since then do not count as missing."""
    with RunReader(own_trained) as reader, reader.snapshot():
        assert not [*check_models(reader)]
        with RunWriter.open(own_trained) as writer:
            gone = next(node for node, row in reversed(writer.models().items()) if row.kept and node != writer.tip)
            writer.record(NewEvent("rounds", {}, dropped_models=[gone]))
        path = stored_path(own_trained, "models", gone)
        assert gone in reader.models()
        assert not path.exists()
        assert not list(check_models(reader))
        stored_path(own_trained, "models", reader.tip).unlink()
        assert list(check_models(reader)) == [f"models: the file of node {reader.tip} is missing"]
