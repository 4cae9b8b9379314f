"""Ports for the services that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a free port below those that the system hands out: no other program gets it before it is used."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
