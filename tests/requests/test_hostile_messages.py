"""Hostile inbox messages: refused and recorded; they never stop their reader, and no fault loses a valid one.

A message that ended the writer with an unexplained error would remain and end every later writer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import query
from sifu.api import verify_run
from sifu.api.status import InboxMessage
from sifu.errors import DiskError, InputError, NoSpaceError, RunDamagedError
from sifu.requests.messages import ingest
from sifu.store import writer as writer_module
from sifu.store.database import transaction
from sifu.store.inbox import LARGEST_MESSAGE_BYTES, any_messages, messages, post
from sifu.store.writer import RunWriter

TERMS: dict[str, Any] = {
    "clients": ["client-000"], "epsilon": 10.0, "delta": 0.01, "sigma": "auto",
    "retention": "paper", "method": "sifu", "records": [], "level": None, "before_after": None,
}  # fmt: skip


def terms(**other: Any) -> str:
    return json.dumps(TERMS | other)


HOSTILE: dict[str, tuple[str, str]] = {
    "an infinite epsilon": ("request.a.json", terms(epsilon=float("inf"))),
    "an endless sigma": ("request.a.json", terms(sigma=10**400)),
    "an endless epsilon": ("request.a.json", terms(epsilon=10**400)),
    "a method that is a list": ("request.a.json", terms(method=[])),
    "a method that is an object": ("request.a.json", terms(method={"a": 1})),
    "no method": ("request.a.json", terms(method=None)),
    "half a character as a client": ("request.a.json", terms(clients=["\ud800"])),
    "half a character as an actor": ("request.a.json", terms(actor="\ud800")),
    "half a character as a key": ("request.a.json", '{"\\udfff": 1}'),
    "half a character, signed": ("signed.a.json", '{"body": {"request": "a", "do": "\\ud800"}, "key": "\\ud800"}'),
    "half a character in a list": ("clients.c-1.json", '{"do": "add", "name": {"a": "\\ud800"}, "key": "k"}'),
    "a list of lists": ("clients.c-1.json", '{"do": [], "name": []}'),
    "such a name on the list": (
        "clients.c-1.json",
        '{"do": "add", "name": "\\u001b[2J", "key": "k"}',
    ),
    "nested too deeply": ("request.a.json", '{"a":' * 20000 + "1" + "}" * 20000),
    "a name that is no text": (os.fsdecode(b"request.\xff.json"), terms()),
    "a name that clears the screen": ("re\x1b[2Jquest.a.json", terms()),
    "an id of another kind": ("request.a b.json", terms()),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_refused_and_recorded(own_trained: Path, name: str) -> None:
    file, content = HOSTILE[name]
    inbox = own_trained / "inbox"
    inbox.mkdir(exist_ok=True)
    (inbox / file).write_text(content)
    writer = RunWriter.open(own_trained)
    try:
        (refusal,) = ingest(writer)
    finally:
        writer.close()
    assert refusal.isprintable()
    assert list(inbox.iterdir()) == []
    assert query(own_trained, "SELECT kind FROM events ORDER BY seq DESC LIMIT 1") == [("letter refused",)]
    assert query(own_trained, "SELECT COUNT(*) FROM requests") == [(0,)]
    assert verify_run(own_trained).problems == []


def test_what_is_no_plain_file_is_left_alone(own_trained: Path) -> None:
    """A pipe, a link to /dev/zero and a folder in the inbox are ignored."""
    inbox = own_trained / "inbox"
    inbox.mkdir(exist_ok=True)
    (inbox / "request.folder.json").mkdir()
    (inbox / "request.endless.json").symlink_to("/dev/zero")
    os.mkfifo(inbox / "request.pipe.json")
    strange = sorted(path.name for path in inbox.iterdir())
    assert messages(own_trained) == []
    assert not any_messages(own_trained)
    post(own_trained, "request", "a", TERMS)
    assert any_messages(own_trained)
    writer = RunWriter.open(own_trained)
    try:
        assert ingest(writer) == []
    finally:
        writer.close()
    assert query(own_trained, "SELECT request, status FROM requests") == [("a", "received")]
    assert sorted(path.name for path in inbox.iterdir()) == strange
    assert verify_run(own_trained).problems == []


def test_a_link_in_place_of_a_message_is_not_followed(own_trained: Path) -> None:
    """A link that replaces a message between the check and the opening of the file is not followed."""
    from sifu.store import inbox as inbox_module

    (own_trained / "request.a.json").symlink_to("/dev/zero")
    message = inbox_module._read(own_trained / "request.a.json", 0.0)
    assert (message.content, bool(message.trouble)) == (None, True)


def test_a_message_that_is_too_long_is_refused(own_trained: Path) -> None:
    inbox = own_trained / "inbox"
    inbox.mkdir(exist_ok=True)
    (inbox / "request.a.json").write_text(terms() + " " * LARGEST_MESSAGE_BYTES)
    writer = RunWriter.open(own_trained)
    try:
        assert ingest(writer) == ["request a: the inbox message cannot be read"]
    finally:
        writer.close()


def test_a_message_that_cannot_be_opened_now_is_not_lost(own_trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that cannot be opened now, here because of too many open files, is ingested later."""
    from sifu.store import inbox as inbox_module

    post(own_trained, "request", "a", TERMS)
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("request.a.json"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, mode)

    writer = RunWriter.open(own_trained)
    try:
        monkeypatch.setattr(inbox_module.os, "open", refusing)
        assert ingest(writer) == []
        assert sifu.open_run(own_trained).status().inbox == (InboxMessage("request", "a", "Too many open files"),)
        monkeypatch.undo()
        assert ingest(writer) == []
    finally:
        writer.close()
    assert query(own_trained, "SELECT request, status FROM requests") == [("a", "received")]
    assert query(own_trained, "SELECT COUNT(*) FROM events WHERE kind = 'letter refused'") == [(0,)]


def test_a_message_with_many_names_is_read_in_a_moment(own_trained: Path) -> None:
    """Checking the names of a message takes few comparisons."""
    counted = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal counted
            counted += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    from sifu.core.request_terms import Terms

    Terms(tuple(Name(k) for k in range(2000)), 10.0, 0.01)
    assert counted < 20_000


def test_what_cannot_be_written_down_is_not_posted(own_trained: Path) -> None:
    with pytest.raises(InputError, match="cannot be written to the inbox"):
        post(own_trained, "signed", "a", {"body": "\ud800"})
    assert not list((own_trained / "inbox").iterdir())


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [("database or disk is full", NoSpaceError), ("disk I/O error", DiskError)],
)
def test_disk_errors_do_not_refuse_a_message(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, expected: type[Exception]
) -> None:
    """If the first write fails and the next would succeed, the request is not refused or lost."""
    post(own_trained, "request", "a", TERMS)
    calls = 0

    @contextlib.contextmanager
    def failing_once(connection: sqlite3.Connection, mode: str | None = "IMMEDIATE") -> Iterator[None]:
        nonlocal calls
        with transaction(connection, mode):
            calls += 1
            if calls == 1:
                raise sqlite3.OperationalError(trouble)
            yield

    writer = RunWriter.open(own_trained)
    monkeypatch.setattr(writer_module, "transaction", failing_once)
    try:
        with pytest.raises(expected):
            ingest(writer)
        assert [message.id for message in messages(own_trained)] == ["a"]
        assert ingest(writer) == []
    finally:
        writer.close()
    assert query(own_trained, "SELECT request, status FROM requests") == [("a", "received")]


def test_a_commit_that_fails_and_is_there_all_the_same_has_its_files(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the sync of a commit fails, the event may or may not survive a crash, so its files must remain."""

    @contextlib.contextmanager
    def failing_after(connection: sqlite3.Connection, mode: str | None = "IMMEDIATE") -> Iterator[None]:
        with transaction(connection, mode):
            yield
        rolled = connection.execute("SELECT kind FROM events ORDER BY seq DESC LIMIT 1").fetchone()[0] == "rolled back"
        if mode == "IMMEDIATE" and rolled:
            raise RunDamagedError("the run's database cannot be used: disk I/O error")

    monkeypatch.setattr(writer_module, "transaction", failing_after)
    with pytest.raises(RunDamagedError, match="disk I/O error"):
        sifu.open_run(own_trained).forget(["client-000"], "a", sigma=0.05)
    monkeypatch.undo()
    run = sifu.open_run(own_trained)
    run.forget()
    assert [request.status for request in run.status().requests] == ["done"]
    assert verify_run(own_trained).problems == []
