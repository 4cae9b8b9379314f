"""Helpers for the pages and the JSON API: read input, identify the visitor, and map errors to HTTP statuses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import Depends, Request

from sifu.errors import (
    IdInUseError,
    InputError,
    NoSpaceError,
    NotCertifiableError,
    RunBusyError,
    SifuError,
    VerificationError,
)
from sifu_console.bodies import DEADLINE_DAYS, MOST_CLIENTS, SEPARATORS
from sifu_console.runs import ServedRun, ServedRuns, UnknownError
from sifu_console.security import RateLimit
from sifu_console.tokens import NotAllowedError, Sessions, Token, TokenFile, Visitor

MOST_FIELDS = 100


@dataclass
class Console:
    """The objects that every handler needs."""

    runs: ServedRuns
    tokens: TokenFile
    sessions: Sessions
    secure_cookie: bool
    logins: RateLimit
    sign_in: Any = None
    """The `sign_in.SignIn` of the provider, or None if there is no provider."""


class NotKnownError(SifuError):
    """Error for a visit without a valid login."""


class ForgedError(SifuError):
    """Error for a change that was not sent from one of the console's own pages."""


def console_of(request: Request) -> Console:
    """Return the console that answers a request."""
    console: Console = request.app.state.console
    return console


def answer_to(request: Request, error: SifuError) -> tuple[Visitor | None, str]:
    """Return the visitor of a failed request, and the error message that they may read.

    An error of a run or of the disk may name folders and clients. Only people who may see the run get its message.
    """
    try:
        visitor = console_of(request).sessions.visitor(request)
    except SifuError:  # the file of tokens cannot be read
        visitor = None
    about_the_run = status_code(error) == 500 or isinstance(error, NoSpaceError)
    if about_the_run and not (visitor is not None and visitor.token.may("see")):
        return visitor, "this cannot be done at the moment: tell an operator of this console"
    return visitor, str(error)


@dataclass
class Visit:
    """A request to the console by somebody it knows, with the fields of a form."""

    request: Request
    visitor: Visitor
    fields: dict[str, str]

    @property
    def who(self) -> Token:
        """Token of the visitor."""
        return self.visitor.token

    @property
    def runs(self) -> ServedRuns:
        """The runs of the console."""
        return console_of(self.request).runs

    def text(self, name: str) -> str:
        """Return a field of the form, or an empty string."""
        return self.fields.get(name, "")

    def note(self, sentence: str, tone: str = "good") -> None:
        """Add a message to the visitor's next page."""
        if self.visitor.session:
            self.visitor.session.notes.append((tone, sentence))


async def visiting(request: Request) -> Visit:
    """Return the visit of a person or program; a browser proves that a change comes from one of the console's pages.

    Raises:
        NotKnownError: If they are not logged in.
        ForgedError: If the change was not sent from a page of this session.
    """
    visitor = console_of(request).sessions.visitor(request)
    if visitor is None:
        raise NotKnownError("log in first, or send a valid token")
    fields: dict[str, str] = {}
    if request.method == "POST":
        by_form = not request.url.path.startswith("/api/")
        fields = await read_form(request) if by_form else {}
        if not visitor.csrf_holds(fields.get("csrf", "") if by_form else request.headers.get("x-csrf-token", "")):
            raise ForgedError("this is too old or was not sent from here: load the page again, or send X-CSRF-Token")
    return Visit(request, visitor, fields)


Visiting = Annotated[Visit, Depends(visiting)]


def run_of(visit: Visiting, run: str) -> ServedRun:
    """Return the run that the URL names."""
    return visit.runs.find(visit.who, run)


RunOf = Annotated[ServedRun, Depends(run_of)]


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form."""
    try:
        text = (await request.body()).decode("ascii")
        read = parse_qs(text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise InputError(f"the form is not UTF-8, or has more than {MOST_FIELDS} fields") from error
    return {name: values[-1] for name, values in read.items()}


def client_names(text: str, known: Collection[str] = ()) -> list[str]:
    """Return client names from text with the usual separators.

    Names may contain a comma or a space, so a `known` name is not split further.
    """
    names: list[str] = []
    for line in map(str.strip, text.splitlines()):
        for part in [line] if line in known else map(str.strip, SEPARATORS.split(line)):
            words = part.split()
            names += [part] if part in known or not set(words) <= set(known) else words
    cleaned = list(dict.fromkeys(name for name in names if name))
    if not cleaned or len(cleaned) > MOST_CLIENTS:
        raise InputError(f"name 1 to {MOST_CLIENTS} clients, found {len(cleaned)}")
    return cleaned


def days(text: str) -> int:
    """Return a deadline in days; the default if the field is empty."""
    try:
        return int(text or DEADLINE_DAYS)
    except ValueError as error:
        raise InputError(f"the deadline must be a whole number of days, found {text[:40]!r}") from error


def status_code(error: SifuError) -> int:
    """Return the HTTP status of an error."""
    codes: tuple[tuple[type[SifuError], int], ...] = (
        (NotKnownError, 401),
        (NotAllowedError, 403),
        (ForgedError, 403),
        (UnknownError, 404),
        (RunBusyError, 409),
        (IdInUseError, 409),
        (NotCertifiableError, 409),
        (VerificationError, 409),
        (InputError, 400),
    )
    return next((code for kind, code in codes if isinstance(error, kind)), 500)
