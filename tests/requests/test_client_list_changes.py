"""The operator's list of clients: no change is lost, despite other writers and killed processes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from sifu.errors import InputError, RunBusyError
from sifu.requests.client_list import ask_for_change, listed_clients
from sifu.store.database import CLIENTS_FILE
from sifu.store.files import LOCK_FILE, WriterLock


def add(folder: Path, name: str, key: str) -> bool:
    return ask_for_change(folder, {"do": "add", "name": name, "key": hashlib.sha256(key.encode()).hexdigest()})


def test_two_changes_at_once_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """A change while another process holds the lock is refused as a whole, and can be repeated later."""
    add(tmp_path / "run", "a", "key of a")
    with WriterLock(tmp_path / "run" / LOCK_FILE), pytest.raises(RunBusyError):
        add(tmp_path / "run", "b", "key of b")
    assert [client.name for client in listed_clients(tmp_path / "run")] == ["a"]
    add(tmp_path / "run", "b", "key of b")
    assert [client.name for client in listed_clients(tmp_path / "run")] == ["a", "b"]


def test_a_change_between_the_first_event_of_a_run_and_its_list_keeps_the_others(own_trained: Path) -> None:
    """A server killed there left the list only in its file; a change must start from that list."""
    entries = [{"name": f"client-00{k}", "key": f"key {k}", "status": "allowed"} for k in range(3)]
    (own_trained / CLIENTS_FILE).write_text(json.dumps(entries))
    assert ask_for_change(own_trained, {"do": "block", "name": "client-001"})
    listed = [(client.name, client.status) for client in listed_clients(own_trained)]
    assert listed == [("client-000", "allowed"), ("client-001", "blocked"), ("client-002", "allowed")]


@pytest.mark.parametrize("name", ["", " a", "a,b", "\x1b[2J", "a\nb", "\ud800", "x" * 201])
def test_a_name_that_cannot_be_shown_is_not_listed(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be used"):
        add(tmp_path / "run", name, "key")
    assert not (tmp_path / "run" / CLIENTS_FILE).exists()


@pytest.mark.parametrize("key", ["", "zz", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_what_is_no_fingerprint_is_not_listed(tmp_path: Path, key: str) -> None:
    """A message may contain any text, but no node can have such a key."""
    with pytest.raises(InputError, match="64 hexadecimal digits"):
        ask_for_change(tmp_path / "run", {"do": "add", "name": "a", "key": key})
    assert listed_clients(tmp_path / "run") == ()
