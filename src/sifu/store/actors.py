"""Names of the people who act on a run."""

from __future__ import annotations

import getpass
import os
import unicodedata

from sifu.errors import InputError

ACTOR = "SIFU_ACTOR"
LONGEST_ACTOR = 120


def actor_name(given: str | None = None) -> str:
    """Return the given name, or else the name in the environment, or else the login name of this process.

    Raises:
        InputError: If the name is too long, blank, or not printable.
    """
    name = given or os.environ.get(ACTOR)
    if not name:
        try:
            name = getpass.getuser()
        except (OSError, KeyError):  # a container without a user database
            name = "unknown"
    if len(name) > LONGEST_ACTOR or not name.isprintable() or not name.strip():
        raise InputError(f"an actor's name must be printable, not blank, and at most {LONGEST_ACTOR} characters long")
    return name


def same_person(actor: str) -> str:
    """Return a normal form of a name, equal for spellings that differ in case, spaces or Unicode compatibility forms.

    >>> same_person(" Ann  LEE") == same_person("\uff21nn Lee"), same_person("Rene\u0301") == same_person("Ren\u00e9")
    (True, True)
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", actor).casefold())
    return " ".join(folded.split())


def same_address(first: str, second: str) -> bool:
    """Return whether two addresses are equal, ignoring the case of ASCII letters.

    >>> same_address("Ann@x.org", "ann@X.org"), same_address("strau\u00df@x.org", "strauss@x.org")
    (True, False)
    """
    return first.encode("utf-8", "surrogatepass").lower() == second.encode("utf-8", "surrogatepass").lower()
