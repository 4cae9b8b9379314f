"""Who asks: a token in the header `Authorization`, or a session that a token began in the browser.

Sessions are kept in memory: when the console is started again, people log in again. A session ends with its token.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from sifu.console.tokens import Token, TokenFile

COOKIE = "sifu_session"
LONGEST_SECONDS = 12 * 3600.0
MOST_SESSIONS = 10_000


@dataclass
class Session:
    """A logged-in browser; `csrf` must come back with every form."""

    id: str
    token: Token
    csrf: str
    since: float = field(default_factory=time.monotonic)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """What the next page says, each with its tone: good or bad."""

    def take_notes(self) -> list[tuple[str, str]]:
        """What is to be said, once."""
        notes, self.notes = self.notes, []
        return notes


@dataclass(frozen=True)
class Visitor:
    """The token a request is made with, and its session if it comes from a browser."""

    token: Token
    session: Session | None = None

    def csrf_holds(self, given: str) -> bool:
        """Whether a change comes from one of our own pages; a program with a token has no pages."""
        return self.session is None or hmac.compare_digest(given.encode(), self.session.csrf.encode())


class Sessions:
    """The sessions of this process."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def begin(self, secret: str) -> Session | None:
        """A new session for the owner of a token."""
        token = self._tokens.owner(secret.strip())
        return None if token is None else self.begin_for(token)

    def begin_for(self, token: Token) -> Session:
        """A new session for a person who showed who they are."""
        session = Session(secrets.token_urlsafe(32), token, secrets.token_urlsafe(32))
        with self._lock:
            now = time.monotonic()
            self._sessions = {key: old for key, old in self._sessions.items() if now - old.since < LONGEST_SECONDS}
            while len(self._sessions) >= MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[session.id] = session
        return session

    def end(self, session: Session) -> None:
        """Log out."""
        with self._lock:
            self._sessions.pop(session.id, None)

    def visitor(self, request: Request) -> Visitor | None:
        """Who asks, if they may."""
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
        return Visitor(token, session)
