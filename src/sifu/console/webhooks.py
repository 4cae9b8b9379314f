"""Webhooks that notify a ticket system when a request was received, is due soon, is overdue, is done, or failed.

Each notification is delivered at least once: failed notifications are sent again with the same id, even after a
restart. The body holds the run's key, the request's id and times, but no client. If SIFU_WEBHOOK_SECRET is set in the
environment, the header X-Sifu-Signature is `sha256=` followed by the HMAC of the body.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sifu.console.service import ConsoleService
from sifu.core.ledger import read_json
from sifu.errors import InputError, SifuError
from sifu.requests.deadlines import POSTED, pending_requests
from sifu.store.files import write_atomically
from sifu.store.times import current_time

SECRET = "SIFU_WEBHOOK_SECRET"
DUE_SOON_DAYS = 3
LOOK_EVERY = 10.0
TIMEOUT = 10.0
SENT = "webhooks.json"
log = logging.getLogger("sifu.console")
Send = Callable[[str, bytes, dict[str, str]], None]
"""A function that sends a body with headers to an address, and raises an error if delivery fails."""


def check_address(address: str) -> str:
    """Return a webhook address; refuse anything but an http or https URL."""
    if not address.startswith(("https://", "http://")):
        raise InputError(f"a webhook must be an http or https URL, found {address[:80]!r}")
    return address


def post(address: str, body: bytes, headers: dict[str, str]) -> None:
    """Send a body by HTTP; raise an error for any answer other than success."""
    request = urllib.request.Request(address, data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT):
        pass


class Webhooks:
    """Watcher of all runs that sends the notifications."""

    def __init__(self, service: ConsoleService, addresses: Sequence[str], send: Send = post) -> None:
        self._service, self._send = service, send
        self._addresses = [check_address(address) for address in addresses]
        self._path = service.state / SENT
        self._stop = threading.Event()
        self._sent: set[str] = set()
        try:
            self._sent = set(read_json(self._path.read_bytes()))
        except FileNotFoundError:
            # At the first start, skip notifications of past events, except for due and overdue requests.
            old = ("received", "done")
            self._sent = {key for _, key, body in self._happened() if body["event"] in old}
        except (OSError, ValueError, TypeError):
            log.warning("the record of webhooks cannot be read: all notifications are sent again")

    def start(self) -> None:
        """Watch in the background until `stop`."""
        if self._addresses:
            threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY):
            try:
                self.tell()
            except (SifuError, OSError) as error:
                log.warning("webhooks: %s", type(error).__name__)

    def tell(self) -> int:
        """Send all notifications not yet delivered, and return how many were delivered."""
        taken = 0
        for address, key, body in self._happened():
            if key in self._sent:
                continue
            content = json.dumps(body | {"id": key}, sort_keys=True).encode()
            headers = {"Content-Type": "application/json"}
            secret = os.environ.get(SECRET)
            if secret:
                signature = hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()
                headers["X-Sifu-Signature"] = f"sha256={signature}"
            try:
                self._send(address, content, headers)
            except (OSError, ValueError) as error:
                log.warning("a webhook was not accepted (%s); it will be sent again", type(error).__name__)
                continue
            self._sent.add(key)
            taken += 1
            write_atomically(self._path, json.dumps(sorted(self._sent)).encode())
        return taken

    def _happened(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the address, key and body of every notification."""
        for body in self._events():
            for address in self._addresses:
                # Inbox and ledger record different times of reception, so the time is not part of this key.
                when = "" if body["event"] == "received" else body["time"]
                parts = "\0".join((address, body["run"], body["request"], body["event"], when))
                yield address, hashlib.sha256(parts.encode()).hexdigest()[:32], body

    def _events(self) -> Iterator[dict[str, Any]]:
        now = current_time()
        for run in self._service.every_run().values():
            try:
                with run.run.reader() as reader, reader.snapshot():
                    rows, pending = reader.requests(), pending_requests(reader, now)
            except SifuError as error:  # an unreadable run must not stop notifications of other runs
                log.warning("webhooks: %s", type(error).__name__)
                continue
            common = {"run": run.key, "name": run.name}
            for row in rows:
                about = common | {"request": row.request}
                yield about | {"event": "received", "time": row.received}
                if row.status == "done":
                    yield about | {"event": "done", "time": row.finished, "level": row.level}
            for waiting in pending:
                when: dict[str, Any] = {"time": waiting.deadline, "days_left": waiting.days_left}
                deadline = common | when | {"request": waiting.request}
                if waiting.status == POSTED:
                    yield common | {"request": waiting.request, "event": "received", "time": waiting.received}
                if waiting.overdue:
                    yield deadline | {"event": "overdue"}
                elif waiting.days_left <= DUE_SOON_DAYS:
                    yield deadline | {"event": "due soon"}
        for job in list(self._service.jobs.failures):
            yield {"run": job.run, "request": job.request or "", "event": "failed", "time": f"{job.started:.0f}"}
