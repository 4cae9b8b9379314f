"""Inbox messages to a run that another process is writing: small atomic files that the writer ingests between rounds.

A process that cannot get the writer's lock posts a message. The writer records it as an event of the ledger and only
then deletes the file. If the writer is killed before the deletion, the file remains; ingesting it again changes
nothing, because every message has an id. So no message is lost or counted twice, no matter when a process dies. Only
regular files are messages. Folders, links, pipes and devices are ignored, because reading one may block forever.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json, read_json
from sifu.core.request_terms import check_request_id
from sifu.errors import IdInUseError, InputError
from sifu.store.files import TEMPORARY_PREFIX, private_folder, read_plain, room_to_write, sync_folder, write_durably

INBOX = "inbox"
LARGEST_MESSAGE_BYTES = 1 << 20
SUBMITTED = "submitted"
"""Kind of a message that waits until a person has examined it; a writer does not ingest it."""
MESSAGE_NAME = re.compile(r".*\..*\.json", re.DOTALL)
"""Pattern KIND.ID.json of message files; kind and id are checked when the message is ingested."""


@dataclass(frozen=True)
class Message:
    """Inbox message. `content` is None if the file is not a valid message or cannot be opened."""

    kind: str
    id: str
    content: dict[str, Any] | None
    path: Path
    posted: float = 0.0
    """Time of posting, in seconds since 1970."""
    trouble: str = ""
    """Reason why the file cannot be opened (permissions, a failing disk); the file stays until it can be opened."""

    @property
    def request(self) -> str:
        """Id of the request that a submission states, or the message's id for other messages."""
        return str((self.content or {}).get("request", self.id)) if self.kind == SUBMITTED else self.id


def post(folder: Path, kind: str, id: str, content: dict[str, Any]) -> None:
    """Write a message to the inbox durably; posting the same message again changes nothing.

    Raises:
        InputError: If the id is invalid, the content cannot be written as JSON, or the id is in use with other content.
    """
    check_request_id(id)
    inbox = folder / INBOX
    private_folder(inbox)
    try:
        body = canonical_json(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{kind} {id} cannot be written to the inbox: {error}") from error
    path = inbox / f"{kind}.{id}.json"
    temporary = inbox / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    with room_to_write(path):
        try:
            write_durably(temporary, body)
            # Unlike a rename, a link never replaces an existing file.
            os.link(temporary, path)
        except FileExistsError:
            try:
                present = path.read_bytes()
            except FileNotFoundError:
                present = body  # the writer has just ingested the file and compares the terms
            if present != body:
                raise IdInUseError(f"{kind} {id} is already in the inbox with other terms: use another id") from None
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(inbox)
    sync_folder(folder)


def messages(folder: Path) -> list[Message]:
    """Return the waiting messages, in the order of arrival."""
    waiting = []
    for entry in _entries(folder):
        try:
            posted = entry.stat(follow_symlinks=False).st_mtime_ns
            waiting.append((posted, entry.name, _read(Path(entry.path), posted / 1e9)))
        except FileNotFoundError:
            continue  # the writer has just ingested it
    return [message for _, _, message in sorted(waiting, key=lambda entry: entry[:2])]


def any_messages(folder: Path) -> bool:
    """Return whether messages wait for a writer; cheap enough to be called between rounds."""
    return any(not entry.name.startswith(f"{SUBMITTED}.") for entry in _entries(folder))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the regular files of the inbox with names of messages."""
    try:
        with os.scandir(folder / INBOX) as entries:
            for entry in entries:
                named = MESSAGE_NAME.fullmatch(entry.name) and not entry.name.startswith(TEMPORARY_PREFIX)
                if named and entry.is_file(follow_symlinks=False):
                    yield entry
    except (FileNotFoundError, NotADirectoryError):
        return


def discard(message: Message) -> None:
    """Delete a message whose event is in the ledger."""
    message.path.unlink(missing_ok=True)
    sync_folder(message.path.parent)


def _read(path: Path, posted: float) -> Message:
    # A name with unprintable characters is not a usable id.
    name = "".join(character if character.isprintable() else "?" for character in path.name)
    kind, _, rest = name.partition(".")
    content, trouble = None, ""
    try:
        text = read_plain(path, most=LARGEST_MESSAGE_BYTES + 1)
        content = read_json(text) if len(text) <= LARGEST_MESSAGE_BYTES else None
        canonical_json(content)  # reject content that the ledger cannot hold (NaN, lone surrogates)
    except FileNotFoundError:
        raise
    except OSError as error:
        trouble = error.strerror or type(error).__name__
    except (ValueError, RecursionError):
        content = None
    content = content if isinstance(content, dict) else None
    return Message(kind, rest.removesuffix(".json"), content, path, posted, trouble)
