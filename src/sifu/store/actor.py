"""Who does something to a run, for the ledger."""

from __future__ import annotations

import getpass
import os

from sifu.errors import InputError

ACTOR = "SIFU_ACTOR"
LONGEST_ACTOR = 120


def actor_name(given: str | None = None) -> str:
    """The name given, or of the environment, or of the user of this machine."""
    name = given or os.environ.get(ACTOR)
    if not name:
        try:
            name = getpass.getuser()
        except (OSError, KeyError):  # a container without a user database
            name = "unknown"
    if len(name) > LONGEST_ACTOR or not name.isprintable():
        raise InputError(f"an actor's name is printable and has at most {LONGEST_ACTOR} characters")
    return name
