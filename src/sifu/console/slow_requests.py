"""Connections that send the head of a request too slowly are closed, so that half-sent requests do not block others."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""From the connection, or from the first byte of a further request, to the end of its headers."""


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, with a time limit on headers, which uvicorn lacks."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time for the first request begins."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes came: a whole head ends the limit, a part of one begins it."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to wait for."""
        self._end_limit()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if not self._awaits_head():
            self._end_limit()
        elif self._limit is None:
            self._limit = self.loop.call_later(HEAD_SECONDS, self._close)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._limit = None
        if self._awaits_head() and not self.transport.is_closing():
            self.transport.close()
