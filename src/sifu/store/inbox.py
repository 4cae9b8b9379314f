"""Letters to a run that another process writes to: each a small file, whole or absent, taken in between rounds.

Whoever cannot have the writer's lock posts a letter; the writer turns it into an event of the ledger and only then
takes the file away. A kill in between leaves the file, and taking it in again changes nothing: what a letter
asks for has an id. So a letter is never lost and never counts twice, whoever dies when.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.core.errors import InputError
from sifu.core.ledger import canonical_json
from sifu.core.terms import check_request_id
from sifu.store.files import TEMPORARY_PREFIX, room_to_write, sync_folder, write_durably
from sifu.store.plain import private_folder, read_plain

INBOX = "inbox"
LARGEST_LETTER_BYTES = 1 << 20


@dataclass(frozen=True)
class Letter:
    """What is asked for (`kind`, `content`) under which id; a file that cannot be read has no content."""

    kind: str
    id: str
    content: dict[str, Any] | None
    path: Path
    posted: float = 0.0
    """When it was posted, in seconds since 1970."""


def post(folder: Path, kind: str, id: str, content: dict[str, Any]) -> None:
    """Put a letter into the inbox, durable when this returns; the same one again changes nothing."""
    check_request_id(id)
    inbox = folder / INBOX
    private_folder(inbox)
    try:
        body = canonical_json(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{kind} {id} cannot be written down: {error}") from error
    path = inbox / f"{kind}.{id}.json"
    temporary = inbox / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    with room_to_write(path):
        try:
            write_durably(temporary, body)
            # A link, unlike a rename, never replaces what is there.
            os.link(temporary, path)
        except FileExistsError:
            try:
                found = path.read_bytes()
            except FileNotFoundError:
                found = body  # it was taken in this instant; whoever took it in compares the terms
            if found != body:
                raise InputError(f"{kind} {id} is already in the inbox with other terms: use another id") from None
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(inbox)
    sync_folder(folder)


def letters(folder: Path) -> list[Letter]:
    """The letters that wait, in the order they came."""
    inbox = folder / INBOX
    found = []
    for path in inbox.iterdir() if inbox.is_dir() else ():
        if not _is_letter(path.name):
            continue
        try:
            found.append((path.lstat().st_mtime_ns, path.name, path))
        except FileNotFoundError:
            continue
    return [_read(path, posted / 1e9) for posted, _, path in sorted(found)]


def any_letters(folder: Path) -> bool:
    """Whether somebody wrote; cheap enough to be asked between rounds."""
    try:
        with os.scandir(folder / INBOX) as entries:
            return any(_is_letter(one.name) for one in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_letter(name: str) -> bool:
    """Whether a file has the name KIND.ID.json."""
    return name.endswith(".json") and name.count(".") > 1 and not name.startswith(TEMPORARY_PREFIX)


def discard(letter: Letter) -> None:
    """Take away a letter whose event is in the ledger, whatever it is."""
    if letter.path.is_dir() and not letter.path.is_symlink():
        shutil.rmtree(letter.path)
    letter.path.unlink(missing_ok=True)
    sync_folder(letter.path.parent)


def _read(path: Path, posted: float) -> Letter:
    kind, _, rest = _printable(path.name).partition(".")
    try:
        text = read_plain(path) if path.lstat().st_size <= LARGEST_LETTER_BYTES else b""
        content = json.loads(text)
        canonical_json(content)  # what cannot be written into the ledger (NaN, half a character) was not read
    except (OSError, ValueError, RecursionError):
        content = None
    return Letter(kind, rest.removesuffix(".json"), content if isinstance(content, dict) else None, path, posted)


def _printable(name: str) -> str:
    """A file's name as it can be written down and shown; one that is changed by this is no usable id."""
    return "".join(one if one.isprintable() else "?" for one in name)
