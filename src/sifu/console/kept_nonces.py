"""Contents of open requests and their nonces, kept so that a requester who lost the answer can get them again.

A nonce opens one commitment of the public certificate (`core/record_commitments.py`). Nonces are not stored in the run.
The console keeps the nonces of a request in a private file until the request is settled. This reveals nothing new,
because the ledger entry of an open request names the rows. The console returns the nonces again only if the same person
files the same request, with the same clients and terms.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json, read_json
from sifu.core.record_commitments import new_nonces
from sifu.store.files import write_atomically


class KeptNonces:
    """The file of nonces of one console.

    Args:
        state: Private folder of the console.
    """

    def __init__(self, state: Path) -> None:
        self._path, self._lock = state / "nonces.json", threading.Lock()
        self._entries: dict[str, dict[str, Any]] = {}
        try:
            content = read_json(self._path.read_bytes())
            self._entries = content if isinstance(content, dict) else {}
        except (OSError, ValueError):
            pass  # losing nonces is harmless, because a new request gets new nonces

    def make(
        self, run: str, request: str, person: str, clients: Sequence[str], terms: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return nonces for the records of a new request; they are on disk before the run commits to them.

        Args:
            run: Key of the run.
            request: Id of the request.
            person: Name of the person who files it.
            clients: Client names as given in the request.
            terms: Terms of the request that were given explicitly.
        """
        nonces = new_nonces(terms.get("records") or ())
        with self._lock:
            entry = {"asked": _digest(clients, terms), "nonces": nonces}
            self._write(self._entries | {_key(run, request, person): entry})
        return nonces

    def again(
        self, run: str, request: str, person: str, clients: Sequence[str], terms: Mapping[str, Any]
    ) -> dict[str, str] | None:
        """Return the nonces of an open request if the same person files the same request again, otherwise None."""
        entry = self._entries.get(_key(run, request, person), {})
        return dict(entry["nonces"]) if entry.get("asked") == _digest(clients, terms) else None

    def drop(self, run: str, settled: Iterable[tuple[str, str]]) -> None:
        """Delete the nonces of settled requests, each given by its id and the person who filed it."""
        names = {_key(run, *one) for one in settled}
        if names.isdisjoint(self._entries):
            return
        with self._lock:
            self._write({name: entry for name, entry in self._entries.items() if name not in names})

    def _write(self, entries: dict[str, dict[str, Any]]) -> None:
        write_atomically(self._path, canonical_json(entries))
        self._entries = entries


def _key(run: str, request: str, person: str) -> str:
    return json.dumps([run, request, person])


def _digest(clients: Sequence[str], terms: Mapping[str, Any]) -> str:
    """Return a digest of the clients and terms of a request."""
    return hashlib.sha256(canonical_json({"clients": list(clients), "terms": dict(terms)})).hexdigest()
