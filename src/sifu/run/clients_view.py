"""Clients of a run at one instant: active, waiting and forgotten clients, and the indices of each client."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from sifu.errors import InputError
from sifu.store.given_approvals import approved_requests
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, chain_of, names_now, plain_names
from sifu.theory.facts import ClientProfile
from sifu.theory.participation import ClientIndices


class ClientsView:
    """Clients of a run, by index and by name. This base class of `RunView` needs no history."""

    reader: RunReader
    clients: tuple[ClientProfile, ...]
    requests: list[RequestRow]

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Index of each client by name."""
        indices: dict[str, int] = self.reader.constant(
            ("index of", len(self.clients)), lambda: {client.name: index for index, client in enumerate(self.clients)}
        )
        return indices

    @cached_property
    def forgotten(self) -> set[int]:
        """Clients whose request was executed, or is being executed."""
        return {client for subject in self.reader.subjects() for client in subject.clients}

    @cached_property
    def asking(self) -> set[int]:
        """Clients that a waiting request asks to forget entirely, approved or not."""
        return self._named(row for row in self.requests if row.waits and not row.records)

    @cached_property
    def left_out(self) -> set[int]:
        """Clients that take part in no round because an approved request to forget them entirely waits.

        A request for records does not exclude its client; the worker executes it before the next release
        (`Worker.execute_records`).
        """
        return self._named(row for row in approved_requests(self.reader) if not row.records)

    def _named(self, requests: Iterable[RequestRow]) -> set[int]:
        return {self.index_of[name] for request in requests for name in request.clients}

    @property
    def active(self) -> ClientIndices:
        """Clients that may take part in a round."""
        stays = np.ones(len(self.clients), dtype=bool)
        stays[list(self.forgotten | self.left_out)] = False
        return np.flatnonzero(stays)

    def names_now(self, names: Sequence[str]) -> list[str]:
        """Return the clients' current names; a client gets a new name when some of its records are forgotten."""
        now = names_now(self.reader)
        return [now.get(name, name) if isinstance(name, str) else name for name in names]

    def indices(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the client indices of `names`.

        Raises:
            InputError: If a name is unknown, or its client already forgotten.
        """
        self._refuse_unknown(names)
        indices = tuple(self.index_of[name] for name in names)
        gone = [name for name, index in zip(names, indices, strict=True) if index in self.forgotten]
        if gone:
            names = plain_names(self.reader, gone)
            raise InputError(f"already forgotten: {', '.join(names)}; leave {'them' if len(names) > 1 else 'it'} out")
        return indices

    def _refuse_unknown(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if name not in self.index_of]
        if unknown:
            everyone = plain_names(self.reader, self.index_of)
            some = ", ".join(everyone[:3]) + (f", ... ({len(everyone)} in all)" if len(everyone) > 3 else "")
            near = difflib.get_close_matches(unknown[0], everyone, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"unknown client {', '.join(unknown)}: this run knows {some}{hint}")

    def chains(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """Return each client's indices, oldest first; forgetting some of its records gives a client a new index."""
        self._refuse_unknown(names)
        return [chain_of(self.reader, self.index_of[name]) for name in names]

    def leaving(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return all indices that a request for `names` concerns: every index that these clients have had."""
        return tuple(client for chain in self.chains(names) for client in chain)
