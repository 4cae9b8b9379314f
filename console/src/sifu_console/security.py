"""Protection of every page: checks of host, origin, size and rate, response headers, and errors without details.

| header | why |
|---|---|
| Content-Security-Policy | scripts, styles and images load from the console only, and no inline script runs |
| X-Frame-Options, frame-ancestors | other sites cannot embed these pages |
| Cross-Origin-*, Referrer-Policy | other sites learn nothing from these pages |
| Cache-Control: no-store | confidential content is never cached |
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Collection

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # no-referrer would also hide the origin of our own forms
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
LARGEST_BODY = 256 << 10
"""Maximum size of a request body in bytes; the largest bodies are lists of clients."""
PROBES = ("/healthz", "/readyz")
"""Paths for health checks, answered under any host name; they reveal nothing about any run."""
LONGEST_PATH = 1000
"""Maximum length of a path; no page of the console has a longer one."""
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
log = logging.getLogger("sifu_console")


class RateLimit:
    """Limit on the requests from one address, given as an average rate and a burst size."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._rate, self._burst = per_second, float(burst)
        self._left: dict[str, tuple[float, float]] = {}

    def allows(self, who: str) -> bool:
        """Return whether one more request is allowed now, and count it."""
        now = time.monotonic()
        left, last = self._left.get(who, (self._burst, now))
        left = min(self._burst, left + (now - last) * self._rate)
        if len(self._left) > 10_000:  # drop visitors whose bucket is full again
            self._left = {key: entry for key, entry in self._left.items() if now - entry[1] < self._burst / self._rate}
        self._left[who] = (left - 1.0 if left >= 1.0 else left, now)
        return left >= 1.0


class Guard:
    """Middleware that checks the host, origin, size and rate of each request, and adds `HEADERS` to each response."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], per_second: float = 200.0, burst: int = 600) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._requests = RateLimit(per_second, burst)
        self._changes = RateLimit(per_second / 20, max(1, burst // 10))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    present.setdefault(name, value)
                if scope["path"].startswith("/static/"):  # the same for everybody
                    present["cache-control"] = "max-age=300"
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LARGEST_BODY:
                raise HTTPException(413, "that is too large")
            return message

        try:
            await self._app(scope, receive_limited, send_guarded)
        except Exception as error:  # the visitor has been told already
            # An error's message may contain names of clients; its type does not.
            log.error("%s failed: %s", scope["method"], type(error).__name__)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["path"] in PROBES:
            return None
        if len(scope["path"]) > LONGEST_PATH:
            return refused(414, "that address is too long")
        host = headers.get("host", "").lower()
        if _name_of(host) not in self._hosts:
            return refused(400, "this console does not answer to that host name")
        address = origin_of(scope)
        if not self._requests.allows(address):
            return refused(429, "too many requests: wait a moment")
        if scope["method"] in SAFE_METHODS:
            return None
        if not self._changes.allows(address):
            return refused(429, "too many changes: wait a moment")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            return refused(403, "this came from another site")
        if origin is not None and origin.lower().partition("://")[2] != host:
            return refused(403, "this came from another site")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            return refused(413, "that is too large")
        return None


def origin_of(scope: Scope) -> str:
    """Return the key by which limits count a visitor: the address or, for IPv6, its /64 network.

    >>> origin_of({"client": ("2001:db8::7:1", 9)}), origin_of({"client": ("::ffff:10.0.0.7", 9)}), origin_of({})
    ('2001:db8::/64', '10.0.0.7', 'unknown')
    """
    address = scope["client"][0] if scope.get("client") else "unknown"
    try:
        read = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(read.ipv4_mapped or ipaddress.IPv6Network((read, 64), strict=False))


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")


def _name_of(host: str) -> str | None:
    """Return a host without its port, or None if it is not a host, for example with a user name before an @.

    >>> _name_of("localhost:8765"), _name_of("[::1]:8765"), _name_of("localhost:x@evil.example")
    ('localhost', '::1', None)
    """
    read = _HOST.fullmatch(host)
    return (read[1] or read[2]) if read else None


def is_host(name: str) -> bool:
    """Return whether a console can answer to this name: a host without a port.

    >>> is_host("desk.example.org"), is_host("::1"), is_host("a@desk.example.org"), is_host("desk.example.org:443")
    (True, True, False, False)
    """
    host = f"[{name.lower()}]" if name.count(":") > 1 else name.lower()
    return _name_of(host) == name.lower()


def refused(status: int, sentence: str) -> Response:
    """Return a JSON response that refuses the request with a reason."""
    return JSONResponse({"error": sentence}, status)
