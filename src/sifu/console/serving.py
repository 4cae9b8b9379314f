"""The console's web server, which listens on loopback unless TLS or an option allows more, and drops slow clients."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from sifu.console.security import is_host
from sifu.console.tokens import TokenFile
from sifu.errors import InputError

if TYPE_CHECKING:
    from uvicorn import Server

HEAD_SECONDS = 10.0
"""Maximum seconds from the connection, or from the first byte of a later request, to the end of the headers."""
READ_SECONDS = 60.0
"""Seconds within which a client must accept pending output."""
WAITING_SHARE = 0.5
"""Share of the allowed connections that may wait for headers; beyond it, the oldest one is closed."""


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits, which uvicorn lacks, on headers and on accepting output."""

    _limit: asyncio.TimerHandle | None = None
    _reader_limit: asyncio.TimerHandle | None = None
    _waiting: ClassVar[dict[ImpatientProtocol, None]] = {}
    """Connections that wait for headers, oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Start the time limit if headers are incomplete, and end it if they are complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all time limits."""
        self._end_limit()
        self._end_reader_limit()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time limit for accepting pending output."""
        super().pause_writing()
        self._end_reader_limit()
        self._reader_limit = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the time limit for accepting output."""
        self._end_reader_limit()
        super().resume_writing()

    def _end_reader_limit(self) -> None:
        if self._reader_limit is not None:
            self._reader_limit.cancel()
            self._reader_limit = None

    def _watch(self) -> None:
        if not self._awaits_head():
            self._end_limit()
        elif self._limit is None:
            self._limit = self.loop.call_later(HEAD_SECONDS, self._close)
            self._waiting[self] = None
            if self.limit_concurrency and len(self._waiting) > WAITING_SHARE * self.limit_concurrency:
                next(iter(self._waiting))._close()

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _end_limit(self) -> None:
        self._waiting.pop(self, None)
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._end_limit()
        if self._awaits_head() and not self.transport.is_closing():
            self.transport.close()


MOST_CONNECTIONS = 4000


@dataclass(frozen=True)
class Binding:
    """Address that the console listens on, and settings that protect its connections."""

    host: str = "127.0.0.1"
    port: int = 8765
    certificate: Path | None = None
    key: Path | None = None
    without_tls: bool = False
    names: Sequence[str] = ()
    proxies: Sequence[str] = ()
    """Addresses or networks of proxies that are trusted to forward a visitor's address (X-Forwarded-For)."""

    @property
    def encrypted(self) -> bool:
        """True if browsers reach the console by https, so that its cookies must be sent over https only."""
        return self.tls or self.without_tls or bool(self.proxies)

    @property
    def tls(self) -> bool:
        """True if the console itself terminates TLS."""
        return self.certificate is not None


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(binding: Binding) -> None:
    """Refuse settings that would send tokens and names over an unprotected network.

    Raises:
        InputError: If the settings are incomplete, invalid or unprotected.
    """
    if (binding.certificate is None) != (binding.key is None):
        raise InputError("TLS needs both --tls-cert FILE and --tls-key FILE")
    for path in (binding.certificate, binding.key):
        if path is not None and not path.is_file():
            raise InputError(f"{path} is not a file: give a certificate and its key in PEM")
    if not 0 <= binding.port <= 65535:
        raise InputError(f"a port must be a number up to 65535, found {binding.port}")
    for name in binding.names:
        if not is_host(name):
            raise InputError(f"--name {name} is not a host name: give one without a scheme, user or port")
    for proxy in binding.proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise InputError(
                f"--proxy {proxy} is not an address or a network, such as 10.0.0.7 or 10.0.0.0/8"
            ) from error
    if not is_loopback(binding.host) and not binding.tls and not binding.without_tls:
        raise InputError(
            f"{binding.host} can be reached from other machines, and tokens would be sent in the clear: give "
            "--tls-cert and --tls-key, or --without-tls if a proxy in front of the console encrypts"
        )


def check_tokens_exist(tokens: TokenFile, folder: Path) -> None:
    """Refuse to start a console without a token to log in with."""
    if not tokens.all():
        raise InputError(
            f"there is no token to log in with: create one with sifu token create {folder} --name NAME --role operator"
        )


def listen(binding: Binding) -> socket.socket:
    """Return the socket that the console listens on; refuse a port in use before anything else starts."""
    family = socket.AF_INET6 if ":" in binding.host else socket.AF_INET
    try:
        return socket.create_server((binding.host, binding.port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(
            f"cannot listen on {binding.host}, port {binding.port} ({error.strerror}): choose another --port, or stop "
            "the program that uses it"
        ) from error


def server(app: object, binding: Binding, limit: int = MOST_CONNECTIONS) -> Server:
    """Return the server, not yet started; its logs contain neither addresses nor names.

    Only the proxies of the binding are trusted to forward a visitor's address.
    """
    from uvicorn import Config, Server

    config = Config(
        app,  # type: ignore[arg-type]
        ssl_certfile=binding.certificate,
        ssl_keyfile=str(binding.key) if binding.key else None,
        http=ImpatientProtocol,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=bool(binding.proxies),
        forwarded_allow_ips=list(binding.proxies),
        timeout_graceful_shutdown=3,
        limit_concurrency=limit,
    )
    return Server(config)


def serve(app: object, binding: Binding, listening: socket.socket) -> None:
    """Answer requests until the process ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    server(app, binding).run(sockets=[listening])
