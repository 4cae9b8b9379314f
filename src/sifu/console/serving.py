"""Starting the console: on this machine alone, unless TLS or an explicit word says otherwise."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sifu.console.tokens import TokenFile
from sifu.errors import InputError


@dataclass(frozen=True)
class Binding:
    """Where the console listens, and how what is sent is protected."""

    host: str = "127.0.0.1"
    port: int = 8765
    certificate: Path | None = None
    key: Path | None = None
    without_tls: bool = False
    names: Sequence[str] = ()

    @property
    def tls(self) -> bool:
        """Whether this console encrypts by itself."""
        return self.certificate is not None


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address.

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
    """Refuse to send tokens and names over a network that anybody can read."""
    if (binding.certificate is None) != (binding.key is None):
        raise InputError("TLS needs both: --tls-cert FILE and --tls-key FILE")
    for path in (binding.certificate, binding.key):
        if path is not None and not path.is_file():
            raise InputError(f"{path} is not a file: give a certificate and its key in PEM")
    if not 0 <= binding.port <= 65535:
        raise InputError(f"a port is a number up to 65535, found {binding.port}")
    if not is_loopback(binding.host) and not binding.tls and not binding.without_tls:
        raise InputError(
            f"{binding.host} can be reached from other machines, and tokens would be sent in the clear: give "
            "--tls-cert and --tls-key, or say --without-tls if something in front of the console encrypts"
        )


def check_somebody_may_enter(tokens: TokenFile, folder: Path) -> None:
    """A console that nobody can log in to is of no use."""
    if not tokens.all():
        raise InputError(
            f"nobody could log in yet: make a token first, sifu token create {folder} --name NAME --role operator"
        )


def serve(app: object, binding: Binding) -> None:
    """Answer until the process is ended; addresses and names are in no log."""
    import uvicorn

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    uvicorn.run(
        app,  # type: ignore[arg-type]
        host=binding.host,
        port=binding.port,
        ssl_certfile=binding.certificate,
        ssl_keyfile=str(binding.key) if binding.key else None,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        limit_concurrency=4000,
    )
