"""Sign-in through OpenID Connect: the provider identifies people, and `tokens.json` defines what they may do.

People are identified by the e-mail address that their provider verified, and by the account (issuer and subject) that
first signed in under it. The state between the two visits to the console is kept in memory under a separate cookie,
because browsers do not send the session cookie when another site redirects back.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from authlib.integrations.base_client import OAuthError
from authlib.integrations.starlette_client import OAuth
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from httpx import HTTPError
from joserfc.errors import JoseError

from sifu.errors import InputError
from sifu_console.asking import console_of
from sifu_console.pages import enter, show
from sifu_console.serving import is_loopback

router = APIRouter()
COOKIE = "sifu_sign_in"
MOST_SECONDS, MOST_UNDER_WAY = 600.0, 1000


@dataclass
class SignIn:
    """Identity provider with its pending sign-ins; `under_way` maps a browser's cookie to a start time and a state."""

    issuer: str
    client: str
    secret: str
    under_way: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        address = urlsplit(self.issuer)
        if address.scheme != "https" and not (address.scheme == "http" and is_loopback(address.hostname or "")):
            raise InputError(
                f"--sign-in {self.issuer} is not an https address, so names would be sent unencrypted: give an https "
                "address"
            )
        self.provider = OAuth().register(
            "provider",
            client_id=self.client,
            client_secret=self.secret,
            server_metadata_url=f"{self.issuer.rstrip('/')}/.well-known/openid-configuration",
            client_kwargs={"scope": "openid email", "code_challenge_method": "S256", "timeout": 20.0},
        )

    async def check_issuer(self) -> str:
        """Return the issuer that the provider's discovery document names; it must be the configured one."""
        document = await self.provider.load_server_metadata()
        named = document.get("issuer")
        if not isinstance(named, str) or named.rstrip("/") != self.issuer.rstrip("/"):
            raise ValueError(f"the discovery document is of the issuer {str(named)[:80]!r}")
        return named

    def begin(self, browser: str) -> dict[str, Any]:
        """Return an empty state for the sign-in of one browser."""
        now = time.monotonic()
        self.under_way = {key: entry for key, entry in self.under_way.items() if now - entry[0] < MOST_SECONDS}
        while len(self.under_way) >= MOST_UNDER_WAY:
            del self.under_way[next(iter(self.under_way))]
        self.under_way[browser] = (now, {})
        return self.under_way[browser][1]

    def agreed(self, browser: str) -> dict[str, Any]:
        """Return and remove the state of a browser's sign-in, because it may be used only once."""
        since, agreed = self.under_way.pop(browser, (0.0, {}))
        return agreed if time.monotonic() - since < MOST_SECONDS else {}


@router.get("/sign-in")
async def begin(request: Request) -> Response:
    """Redirect a browser to the provider."""
    console = console_of(request)
    sign_in: SignIn = console.sign_in
    browser = secrets.token_urlsafe(32)
    request.scope["session"] = sign_in.begin(browser)
    back = f"{'https' if console.secure_cookie else 'http'}://{request.headers['host']}/sign-in/back"
    try:
        await sign_in.check_issuer()
        response: Response = await sign_in.provider.authorize_redirect(request, back)
    except (OAuthError, HTTPError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the sign-in provider does not answer as an OpenID Connect provider ({type(error).__name__})"
        ) from error
    options: dict[str, Any] = {"httponly": True, "samesite": "lax", "secure": console.secure_cookie}
    response.set_cookie(COOKIE, browser, max_age=int(MOST_SECONDS), path="/sign-in", **options)
    return response


@router.get("/sign-in/back")
async def come_back(request: Request) -> Response:
    """Begin a session for the person the provider identifies, if they have a role here."""
    console = console_of(request)
    sign_in: SignIn = console.sign_in
    request.scope["session"] = sign_in.agreed(request.cookies.get(COOKIE, ""))
    try:
        issuer = await sign_in.check_issuer()
        meant = {"iss": {"values": [issuer]}, "aud": {"values": [sign_in.client]}}
        answer = await sign_in.provider.authorize_access_token(request, claims_options=meant)
    except (OAuthError, JoseError, HTTPError, ValueError, RuntimeError) as error:
        sentence = f"the sign-in did not work ({type(error).__name__}): begin again"
        return show("error.html", None, 401, sentence=sentence)
    claims = answer.get("userinfo") or {}
    email, subject, token = claims.get("email"), claims.get("sub"), None
    verified = claims.get("email_verified") is True and claims.get("iss") == issuer
    if verified and isinstance(email, str) and isinstance(subject, str) and subject:
        token = await run_in_threadpool(console.tokens.signed_in, email, issuer, subject)
    if token is None:
        sentence = (
            "your provider knows you, but your account and verified e-mail address may do nothing here. If the address "
            "had another account before, an operator revokes its entry and makes a new one"
        )
        return show("error.html", None, 403, sentence=sentence)
    # Show a page that leads to the console instead of redirecting: browsers do not send the session cookie on a
    # redirect that began at another site.
    return enter(console, console.sessions.begin_for(token), show("signed_in.html", None))
