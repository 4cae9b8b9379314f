"""Operator's consent to run code that a spec names; neither a spec nor a run folder can give this consent.

A spec may come from anyone, and importing a file that it names runs whatever code that file contains. The operator must
therefore first allow the function by its name: `sifu --allow-code backbone:make ...`, or
`sifu.allow_code("backbone:make")`.
"""

from __future__ import annotations

import os

from sifu.errors import InputError

ALLOWED_CODE = "SIFU_ALLOW_CODE"
"""Environment variable with the functions that may be imported and called, one per line: package.file:function."""


def allow_code(*names: str) -> None:
    """Allow this process to import and call functions of a user.

    Args:
        *names: The functions, each written as package.file:function.

    Raises:
        InputError: If a name is not written like that.
    """
    for name in names:
        package, _, function = name.partition(":")
        if not package or not function or any(character.isspace() for character in name):
            raise InputError(f"write code to allow as package.file:function, for example backbone:make; found {name!r}")
    os.environ[ALLOWED_CODE] = "\n".join(sorted({*allowed_code(), *names}))


def allowed_code() -> set[str]:
    """Return the names of the functions that the operator allowed, each as package.file:function."""
    return {line.strip() for line in os.environ.get(ALLOWED_CODE, "").splitlines() if line.strip()}


def demand_consent(name: str) -> None:
    """Refuse the function `name` if the operator did not allow it; call this before importing its file."""
    if name not in allowed_code():
        raise InputError(
            f"module {name!r} is code and was not run: read it first, then allow it with sifu --allow-code {name} "
            f"before the command, or sifu.allow_code({name!r}) in Python"
        )
