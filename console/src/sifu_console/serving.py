"""The console's web server, which listens on loopback unless TLS or an option allows more."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sifu.errors import InputError
from sifu_console.security import is_host
from sifu_console.tokens import TokenFile

if TYPE_CHECKING:
    from uvicorn import Server

MOST_CONNECTIONS, IDLE_SECONDS, LARGEST_HEAD = 4000, 5, 16 << 10


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
        http="h11",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=bool(binding.proxies),
        forwarded_allow_ips=list(binding.proxies),
        timeout_graceful_shutdown=3,
        limit_concurrency=limit,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=LARGEST_HEAD,
    )
    return Server(config)


def serve(app: object, binding: Binding, listening: socket.socket) -> None:
    """Answer requests until the process ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    server(app, binding).run(sockets=[listening])
