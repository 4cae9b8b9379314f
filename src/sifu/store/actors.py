"""Names of the people who act on a run."""

from __future__ import annotations

import getpass
import os
import unicodedata

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
    if len(name) > LONGEST_ACTOR or not name.isprintable() or not name.strip():
        raise InputError(f"an actor's name is printable, not blank, and has at most {LONGEST_ACTOR} characters")
    return name


def same_person(actor: str) -> str:
    """A name without what makes two spellings of one name: case, spaces, and characters that only look different.

    >>> same_person(" Ann  LEE") == same_person("\uff21nn Lee"), same_person("Rene\u0301") == same_person("Ren\u00e9")
    (True, True)
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", actor).casefold())
    return " ".join(folded.split())
