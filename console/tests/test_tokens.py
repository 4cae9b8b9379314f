"""Tokens: created and revoked by a command, stored as hashes, and read again when the file changes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from run_tools import Command
from sifu.errors import InputError, RunDamagedError
from sifu_console.runs import ServedRuns
from sifu_console.tokens import RIGHTS, ROLES, TokenFile, rights_of, state_folder


def test_a_token_is_made_listed_and_revoked_by_commands(tmp_path: Path, cli: Command) -> None:
    created = cli(
        "token", "create", tmp_path, "--name", "ann", "--role", "approver", "--days", "7", "--format", "json"
    ).json
    tokens = TokenFile(state_folder(tmp_path))
    owner = tokens.owner(created["token"])
    assert owner is not None
    assert (owner.name, owner.roles) == ("ann", ("approver",))
    stored = tokens.path.read_text()
    assert created["token"] not in stored
    assert tokens.path.stat().st_mode & 0o777 == 0o600
    assert tokens.path.parent.stat().st_mode & 0o777 == 0o700
    listed = cli("token", "list", tmp_path)
    assert "ann" in listed.out
    assert created["token"] not in listed.out + cli("token", "list", tmp_path, "--format", "json").out
    # a name belongs to one person, whatever its case
    assert cli("token", "create", tmp_path, "--name", "ANN", "--role", "auditor").code == 2
    assert cli("token", "revoke", tmp_path, "ann").code == 0
    assert tokens.owner(created["token"]) is None  # the same reader notices the change
    assert tokens.still_works(owner) is None
    assert cli("token", "revoke", tmp_path, "ann").code == 2
    assert cli("token", "create", tmp_path, "--name", "ann", "--role", "auditor").code == 0


@pytest.mark.parametrize("secret", ["", "sifu_", "sifu_" + "A" * 43, "\ud800", "x" * 100_000])
def test_what_is_not_a_token_opens_nothing(tmp_path: Path, secret: str) -> None:
    tokens = TokenFile(state_folder(tmp_path))
    tokens.create("ann", ["operator"])
    assert tokens.owner(secret) is None
    assert tokens.owner(tokens.all()[0].hash) is None  # the stored hash does not work as a token


def test_a_token_for_a_folder_that_is_not_there_creates_none(tmp_path: Path, cli: Command) -> None:
    answer = cli("token", "create", tmp_path / "runs", "--name", "ann", "--role", "auditor")
    assert answer.code == 2
    assert "there is no folder" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_token_works_on_its_last_day_and_not_after(tmp_path: Path) -> None:
    token, _ = TokenFile(tmp_path / "state").create("ann", ["auditor"], days=1)
    assert token.works(token.expires)
    assert not token.works(token.expires[:-1] + "~")


def test_bad_names_roles_and_days_are_refused(tmp_path: Path, cli: Command) -> None:
    tokens = TokenFile(tmp_path)
    for name, roles, days in (
        (" ", ["auditor"], None),
        ("a\nb", ["auditor"], None),
        ("x" * 200, ["auditor"], None),
        ("a", ["king"], None),
    ):
        with pytest.raises(InputError):
            tokens.create(name, roles, days)
    with pytest.raises(InputError, match="days"):
        tokens.create("a", ["auditor"], 0)
    with pytest.raises(InputError, match="role"):
        tokens.create("a", [])
    assert tokens.all() == []


def test_two_commands_at_once_lose_nothing(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=lambda k=k: TokenFile(tmp_path).create(f"person {k}", ["auditor"])) for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(TokenFile(tmp_path).all()) == 8


def test_a_damaged_file_is_a_sentence_and_lets_nobody_in(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path)
    _, secret = tokens.create("ann", ["operator"])
    tokens.path.write_text(json.dumps({"tokens": [{"name": "ann"}]}))
    with pytest.raises(RunDamagedError, match="create new tokens"):
        tokens.owner(secret)


def test_nobody_approves_what_they_execute_unless_they_have_both_roles() -> None:
    assert set(RIGHTS) == set(ROLES)
    for role in ROLES:
        assert not {"approve", "carry out"} <= rights_of([role])
    assert {"approve", "carry out"} <= rights_of(["approver", "operator"])
    assert "examine" not in rights_of(["requester", "approver"])


@pytest.mark.parametrize("content", ["[" * 60_000 + "]" * 60_000, "[[1]]", "7"])
def test_a_console_starts_beside_records_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    state = tmp_path / ".sifu-console"
    state.mkdir()
    (state / "verifications.json").write_text(content)
    runs = ServedRuns([tmp_path], state)
    assert runs.jobs.verifications() == {}


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"tokens": ' + "[" * 200_000, '{"tokens": [{"roles": [], "id": 7}]}']
)
def test_tokens_that_are_no_tokens(tmp_path: Path, cli: Command, content: str) -> None:
    state = tmp_path / ".sifu-console"
    state.mkdir()
    (state / "tokens.json").write_text(content)
    for arguments in (("list", tmp_path), ("create", tmp_path, "--name", "ann", "--role", "auditor")):
        answer = cli("token", *arguments)
        assert answer.code == 5
        assert "unexpected" not in answer.err
