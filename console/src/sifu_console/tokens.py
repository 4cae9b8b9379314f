"""Tokens, roles and sessions, which define who may use the console and what each person may do.

A visitor sends a token in the header `Authorization`, or has a browser session that a token began. Sessions are
kept in memory, so people log in again after a restart of the console. A session ends with its token.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fastapi import Request

from sifu.errors import InputError, RunDamagedError, SifuError
from sifu.store.actors import actor_name, same_address, same_person
from sifu.store.files import private_folder, write_atomically
from sifu.store.times import current_time, utc_now

Role = Literal["requester", "approver", "auditor", "operator"]
"""Roles: requesters file requests and see their own; approvers decide; auditors read everything; operators execute."""
Right = Literal[
    "see", "see own", "file", "approve", "refuse", "withdraw own", "withdraw", "set terms", "carry out", "examine"
]
"""Rights of a person.

`see` covers runs, clients, requests, plans and public certificates. `examine` covers confidential content:
verification, the audit trail, the report and bundles. `set terms` covers every term of a request; without
it, people may set `TERMS_OF_REQUESTERS` only.
"""

RIGHTS: dict[Role, frozenset[Right]] = {
    "requester": frozenset(("see own", "file", "withdraw own")),
    "approver": frozenset(("see", "see own", "approve", "refuse")),
    "auditor": frozenset(("see", "see own", "examine")),
    "operator": frozenset(
        ("see", "see own", "file", "refuse", "withdraw own", "withdraw", "set terms", "carry out", "examine")
    ),
}
"""Rights of each role. The role operator cannot approve; a person may have several roles."""
TERMS_OF_REQUESTERS = ("records", "epsilon", "delta", "level")
"""Terms that requesters may set: the data to forget, and stronger protection than the run's spec gives."""
ROLES: tuple[Role, ...] = get_args(Role)


def rights_of(roles: Collection[Role]) -> frozenset[Right]:
    """Return all rights of these roles.

    >>> "approve" in rights_of(["operator"]), "approve" in rights_of(["operator", "approver"])
    (False, True)
    """
    return frozenset().union(*(RIGHTS[role] for role in roles))


class NotAllowedError(SifuError):
    """Error for an action that the visitor's roles do not allow."""


TOKENS_FILE = "tokens.json"
PREFIX = "sifu_"
"""Prefix of every token; it lets secret scanners find tokens that leaked into a repository."""
LONGEST_DAYS = 3650
SIGN_IN = "sign-in:"
"""Prefix of `Token.hash` for people who sign in through a provider and have no secret; no SHA-256 begins with it."""


@dataclass(frozen=True)
class Token:
    """A token with its owner, roles and validity.

    `hash` is the SHA-256 of the secret. `expires` is the last valid day, or empty for a token that never expires.
    `issuer` and `subject` identify the provider's account that first signed in under this name, if any.
    """

    id: str
    name: str
    roles: tuple[Role, ...]
    hash: str
    created: str
    expires: str = ""
    revoked: str = ""
    issuer: str = ""
    subject: str = ""

    def works(self, today: str) -> bool:
        """Return whether the token is valid on this day; its last day counts."""
        return not self.revoked and (not self.expires or today <= self.expires)

    def may(self, right: Right) -> bool:
        """Return whether the owner has this right."""
        return right in rights_of(self.roles)

    def demand(self, right: Right) -> None:
        """Raise `NotAllowedError` unless the owner has this right."""
        if not self.may(right):
            raise NotAllowedError(f"your roles ({', '.join(self.roles)}) do not allow that")


def state_folder(folder: Path) -> Path:
    """Return the folder of the console's own files: inside a folder of runs, or next to a single run."""
    return folder.with_name(f"{folder.name}.console") if (folder / "run.db").exists() else folder / ".sifu-console"


class TokenFile:
    """The tokens of a console, in a file that commands write and the server reads."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TOKENS_FILE
        self._read: tuple[Any, dict[str, Token]] = (None, {})

    def all(self) -> list[Token]:
        """Return every token ever created, in order of creation."""
        return list(self._by_hash().values())

    def owner(self, secret: str) -> Token | None:
        """Return the token with this secret if it is valid now."""
        token = self._by_hash().get(hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest())
        return token if token is not None and token.works(utc_now()[:10]) else None

    def signed_in(self, name: str, issuer: str, subject: str) -> Token | None:
        """Return the token of a person who may sign in under this name, and bind the name to the person's account.

        Only the account of the first sign-in may use a name, because a provider may reassign an address to another
        person. An account may use one name only.
        """
        account, today = (issuer, subject), utc_now()[:10]

        def chosen(tokens: Iterable[Token]) -> Token | None:
            people = [token for token in tokens if token.hash.startswith(SIGN_IN) and token.works(today)]
            found = next((who for who in people if same_address(who.name, name)), None)
            taken = any(who != found and (who.issuer, who.subject) == account for who in people)
            known = found is not None and (found.issuer, found.subject) in (account, ("", ""))
            return found if known and not taken else None

        found = chosen(self._by_hash().values())
        if found is None or found.subject:
            return found
        with self._changing() as tokens:
            found = chosen(tokens)
            if found is not None:
                bound = replace(found, issuer=issuer, subject=subject)
                tokens[tokens.index(found)] = found = bound
        return found

    def still_works(self, token: Token) -> Token | None:
        """Return the current entry of this token if it is still valid."""
        now = self._by_hash().get(token.hash)
        return now if now is not None and now.works(utc_now()[:10]) else None

    def create(
        self, name: str, roles: Sequence[str], days: int | None = None, *, sign_in: bool = False
    ) -> tuple[Token, str]:
        """Create a token.

        Args:
            name: Owner of the token.
            roles: Roles of the owner.
            days: Days until the token expires, or None for never.
            sign_in: True if the owner signs in through a provider and needs no secret.

        Returns:
            The token and its secret, which is not stored; the secret is empty with `sign_in`.

        Raises:
            InputError: If a role or the number of days is not allowed, or the owner already has a valid token.
        """
        owner = actor_name(name).strip()
        unknown = [role for role in roles if role not in ROLES]
        if unknown or not roles:
            raise InputError(f"a role must be one of {', '.join(ROLES)}; found {', '.join(unknown) or 'none'}")
        if days is not None and not 1 <= days <= LONGEST_DAYS:
            raise InputError(f"a token must last 1 to {LONGEST_DAYS} days, found {days}")
        with self._changing() as tokens:
            # Two people with one name could not be distinguished as approvers.
            if any(same_person(token.name) == same_person(owner) and token.works(utc_now()[:10]) for token in tokens):
                raise InputError(f"{owner} already has a valid token: revoke it first, or choose another name")
            secret = PREFIX + secrets.token_urlsafe(32)
            expires = "" if days is None else (current_time().date() + datetime.timedelta(days=days)).isoformat()
            token = Token(
                id=secrets.token_hex(4),
                name=owner,
                roles=tuple(role for role in ROLES if role in roles),
                hash=SIGN_IN + secrets.token_hex(8) if sign_in else hashlib.sha256(secret.encode()).hexdigest(),
                created=utc_now(),
                expires=expires,
            )
            tokens.append(token)
        return token, "" if sign_in else secret

    def revoke(self, name_or_id: str) -> list[Token]:
        """Revoke the tokens with this id or owner, and return them.

        Raises:
            InputError: If there is no such token.
        """
        with self._changing() as tokens:
            chosen = [token for token in tokens if name_or_id in (token.id, token.name) and not token.revoked]
            if not chosen:
                raise InputError(f"there is no token of {name_or_id!r} to revoke: see sifu token list")
            revoked = [replace(token, revoked=utc_now()) for token in chosen]
            by_id = {token.id: token for token in revoked}
            tokens[:] = [by_id.get(token.id, token) for token in tokens]
        return revoked

    def _by_hash(self) -> dict[str, Token]:
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return {}
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._read[0] != stamp:
            self._read = (stamp, {token.hash: token for token in _parse(self.path)})
        return self._read[1]

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """Lock the token file, yield its tokens for changes, and write them back."""
        if not self.path.parent.parent.is_dir():
            raise InputError(f"there is no folder {self.path.parent.parent}: give a run, or a folder of runs")
        private_folder(self.path.parent)
        descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            tokens = _parse(self.path) if self.path.exists() else []
            yield tokens
            content = {"tokens": [asdict(token) for token in tokens]}
            write_atomically(self.path, json.dumps(content, indent=1).encode() + b"\n")
        finally:
            os.close(descriptor)


def _parse(path: Path) -> list[Token]:
    try:
        rows = json.loads(path.read_bytes())["tokens"]
        tokens = [Token(**row | {"roles": tuple(role for role in row["roles"] if role in ROLES)}) for row in rows]
        if not all(isinstance(value, str) for row in rows for name, value in row.items() if name != "roles"):
            raise ValueError("a field is not a text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunDamagedError(f"{path} is damaged ({type(error).__name__}): remove it and create new tokens") from error
    return tokens


COOKIE = "sifu_session"
LONGEST_SECONDS = 12 * 3600.0
MOST_SESSIONS = 10_000


@dataclass
class Session:
    """A logged-in browser; every form must send `csrf` back."""

    id: str
    token: Token
    csrf: str
    since: float = field(default_factory=time.monotonic)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Messages for the next page, each with its tone: good or bad."""

    def take_notes(self) -> list[tuple[str, str]]:
        """Return the messages, and clear them."""
        notes, self.notes = self.notes, []
        return notes


@dataclass(frozen=True)
class Visitor:
    """Token of a request and, if a browser sent it, the session; `refreshes` is True if an open page asks again."""

    token: Token
    session: Session | None = None
    refreshes: bool = False

    def csrf_holds(self, given: str) -> bool:
        """Return whether a change comes from one of the console's own pages, or from a program with a token."""
        return self.session is None or hmac.compare_digest(given.encode(), self.session.csrf.encode())


class Sessions:
    """The sessions of this process."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def begin(self, secret: str) -> Session | None:
        """Begin a session for the owner of a token; return None if the secret is not valid."""
        token = self._tokens.owner(secret.strip())
        return None if token is None else self.begin_for(token)

    def begin_for(self, token: Token) -> Session:
        """Begin a session for an authenticated person."""
        session = Session(secrets.token_urlsafe(32), token, secrets.token_urlsafe(32))
        with self._lock:
            now = time.monotonic()
            self._sessions = {key: old for key, old in self._sessions.items() if now - old.since < LONGEST_SECONDS}
            while len(self._sessions) >= MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[session.id] = session
        return session

    def end(self, session: Session) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(session.id, None)

    def visitor(self, request: Request) -> Visitor | None:
        """Return the visitor of a request, or None if they are not authenticated."""
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            token = self._tokens.owner(secret.strip())
            return None if token is None else Visitor(token)
        session = self._sessions.get(request.cookies.get(COOKIE, ""))
        if session is None or time.monotonic() - session.since > LONGEST_SECONDS:
            return None
        token = self._tokens.still_works(session.token)
        if token is None:
            self.end(session)
            return None
        session.token = token
        return Visitor(token, session, "x-refresh" in request.headers)
