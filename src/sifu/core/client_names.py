"""Names that the operator gives to clients, and public keys of the clients' nodes.

A key is recorded as the SHA-256 of its decoded PEM body (DER), so every program computes the same fingerprint.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sifu.errors import InputError

LONGEST_NAME = 200


def key_fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of the DER bytes of a public key given in PEM (SubjectPublicKeyInfo), in hexadecimal.

    The input must be one key and nothing else. With a second block or a header, a program that checks a signature might
    read a key other than the hashed one and accept a stranger as a client.

    Raises:
        InputError: If the input is not exactly one public key in the standard form.
    """
    match = re.fullmatch(rb"\s*-----BEGIN PUBLIC KEY-----([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*", pem)
    if not match:
        raise InputError(f"this is not a single public key in PEM form: it begins with {pem[:30]!r}")
    written = b"".join(match[1].split())
    try:
        key = base64.b64decode(written, validate=True)
    except binascii.Error as error:
        raise InputError(f"the public key cannot be decoded: {error}") from error
    if base64.b64encode(key) != written:
        raise InputError(f"the public key is not in the standard form: it begins with {written[:30]!r}")
    return hashlib.sha256(key).hexdigest()


@dataclass(frozen=True)
class Admitted:
    """One entry of the allow-list: a client's name, the fingerprint of its key, and whether it may take part."""

    name: str
    key: str
    status: Literal["allowed", "blocked"] = "allowed"


def admitted_of(values: Iterable[Mapping[str, Any]]) -> tuple[Admitted, ...]:
    """Parse the allow-list from plain values."""
    try:
        return tuple(Admitted(str(entry["name"]), str(entry["key"]), entry["status"]) for entry in values)
    except (KeyError, TypeError) as error:
        raise InputError(f"the list of clients cannot be read ({error})") from error


def plain(entries: Iterable[Admitted]) -> list[dict[str, str]]:
    """Return the allow-list as plain values."""
    return [asdict(entry) for entry in entries]


def check_names(names: Sequence[str]) -> None:
    """Refuse names that are unsuitable for a command line or the record."""
    for name in names:
        if not name or "," in name or name != name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
            raise InputError(
                f"the client name {name[:80]!r} cannot be used: remove commas, leading and trailing blanks and "
                f"unprintable characters, and keep it below {LONGEST_NAME} characters"
            )


_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that are usually not shown; Python counts some of them as printable."""


def as_seen(text: str) -> str:
    """Return a normal form, equal for strings that differ only in Unicode forms, invisible characters or spaces.

    >>> as_seen("Rene\u0301\u034f  Roy") == as_seen("Ren\u00e9\u00a0Roy"), as_seen("ann") == as_seen("Ann")
    (True, False)
    """
    return " ".join(unicodedata.normalize("NFKC", _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))).split())


def check_lookalikes(names: Iterable[str]) -> None:
    """Refuse different names that look the same: forgetting one client would seem to forget the other."""
    seen: dict[str, str] = {}
    for name in names:
        twin = seen.setdefault(as_seen(name), name)
        if twin != name:
            raise InputError(
                f"the client names {twin[:80]!a} and {name[:80]!a} look the same: write both alike if they are one "
                "client, or rename one"
            )


def check_key(key: str) -> str:
    """Return `key` if it is a fingerprint as returned by `key_fingerprint`; refuse any other string."""
    if not re.fullmatch(r"[0-9a-f]{64}", key):
        raise InputError(f"a key must be given by its SHA-256, 64 hexadecimal digits; found {key[:80]!r}")
    return key
