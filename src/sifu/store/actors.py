"""Names of the people who act on a run."""

from __future__ import annotations

import getpass
import os

from sifu.core.client_names import as_seen
from sifu.errors import InputError

ACTOR = "SIFU_ACTOR"
LONGEST_ACTOR = 120


def actor_name(given: str | None = None) -> str:
    """Return the name of the acting person: `given`, else the environment's `SIFU_ACTOR`, else the login name.

    Raises:
        InputError: If the name is too long, blank, or not printable.
    """
    name = given or os.environ.get(ACTOR)
    if not name:
        try:
            name = getpass.getuser()
        except (OSError, KeyError):  # a container may have no user database
            name = "unknown"
    if len(name) > LONGEST_ACTOR or not name.isprintable() or not name.strip():
        raise InputError(f"an actor's name must be printable, not blank, and at most {LONGEST_ACTOR} characters long")
    return name


def same_person(actor: str) -> str:
    """Return a normal form of a name; spellings that differ only in case, spaces or Unicode forms give the same one.

    >>> same_person(" Ann  LEE") == same_person("\uff21nn Lee"), same_person("Rene\u0301") == same_person("Ren\u00e9")
    (True, True)
    """
    return as_seen(as_seen(actor).casefold())


def same_address(first: str, second: str) -> bool:
    """Return whether two addresses are equal, ignoring the case of ASCII letters.

    >>> same_address("Ann@x.org", "ann@X.org"), same_address("strau\u00df@x.org", "strauss@x.org")
    (True, False)
    """
    return first.encode("utf-8", "surrogatepass").lower() == second.encode("utf-8", "surrogatepass").lower()
