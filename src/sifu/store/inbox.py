"""Letters to a run that another process writes to: each a small file, whole or absent, taken in between rounds.

A process that cannot get the writer's lock posts a letter. The writer turns it into an event of the ledger and only
then deletes the file. A kill in between leaves the file, and taking it in again changes nothing, because what a letter
asks for has an id. So a letter is never lost and never counts twice, whichever process dies when. Only regular files
are letters: folders, links, pipes and devices are left alone, because opening or reading one may never end.
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
from sifu.errors import InputError
from sifu.store.files import TEMPORARY_PREFIX, private_folder, room_to_write, sync_folder, write_durably

INBOX = "inbox"
LARGEST_LETTER_BYTES = 1 << 20
LETTER_NAME = re.compile(r".*\..*\.json", re.DOTALL)
"""The kind, the id and an ending; both are looked at when the letter is opened."""


@dataclass(frozen=True)
class Letter:
    """What is asked for (`kind`, `content`) under which id; a file that holds no letter has no content."""

    kind: str
    id: str
    content: dict[str, Any] | None
    path: Path
    posted: float = 0.0
    """When it was posted, in seconds since 1970."""
    trouble: str = ""
    """Why its file cannot be opened (permissions, a failing disk); it stays until it can."""


def post(folder: Path, kind: str, id: str, content: dict[str, Any]) -> None:
    """Put a letter into the inbox, durable when this returns; the same one again changes nothing."""
    check_request_id(id)
    inbox = folder / INBOX
    private_folder(inbox)
    try:
        body = canonical_json(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{kind} {id} cannot be recorded: {error}") from error
    path = inbox / f"{kind}.{id}.json"
    temporary = inbox / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    with room_to_write(path):
        try:
            write_durably(temporary, body)
            # A link, unlike a rename, never replaces what is there.
            os.link(temporary, path)
        except FileExistsError:
            try:
                present = path.read_bytes()
            except FileNotFoundError:
                present = body  # it was taken in this instant; its reader compares the terms
            if present != body:
                raise InputError(f"{kind} {id} is already in the inbox with other terms: use another id") from None
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(inbox)
    sync_folder(folder)


def letters(folder: Path) -> list[Letter]:
    """The letters that wait, in the order they came."""
    waiting = []
    for entry in _entries(folder):
        try:
            posted = entry.stat(follow_symlinks=False).st_mtime_ns
            waiting.append((posted, entry.name, _read(Path(entry.path), posted / 1e9)))
        except FileNotFoundError:
            continue  # it was taken in this instant
    return [letter for _, _, letter in sorted(waiting, key=lambda entry: entry[:2])]


def any_letters(folder: Path) -> bool:
    """Whether there are letters; cheap enough to be checked between rounds."""
    return any(True for _ in _entries(folder))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The regular files of the inbox that are named like letters."""
    try:
        with os.scandir(folder / INBOX) as entries:
            for entry in entries:
                named = LETTER_NAME.fullmatch(entry.name) and not entry.name.startswith(TEMPORARY_PREFIX)
                if named and entry.is_file(follow_symlinks=False):
                    yield entry
    except (FileNotFoundError, NotADirectoryError):
        return


def discard(letter: Letter) -> None:
    """Delete a letter whose event is in the ledger."""
    letter.path.unlink(missing_ok=True)
    sync_folder(letter.path.parent)


def _read(path: Path, posted: float) -> Letter:
    kind, _, rest = _printable(path.name).partition(".")
    content, trouble = None, ""
    try:
        text = _first_bytes(path)
        content = read_json(text) if len(text) <= LARGEST_LETTER_BYTES else None
        canonical_json(content)  # what cannot be written into the ledger (NaN, half a character) was not read
    except FileNotFoundError:
        raise
    except OSError as error:
        trouble = error.strerror or type(error).__name__
    except (ValueError, RecursionError):
        content = None
    content = content if isinstance(content, dict) else None
    return Letter(kind, rest.removesuffix(".json"), content, path, posted, trouble)


def _first_bytes(path: Path) -> bytes:
    """As much of a letter as one may hold and a byte more; what took its file's place meanwhile is not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read(LARGEST_LETTER_BYTES + 1)


def _printable(name: str) -> str:
    """A file's name in a form that can be recorded and shown; if this changes it, it is not a usable id."""
    return "".join(character if character.isprintable() else "?" for character in name)
