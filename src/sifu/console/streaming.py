"""Live pages: server-sent events, one reader a run however many watch it.

The first who watches a run starts its reader, the last who leaves ends it. What is sent is made once and shared, so two
hundred viewers cost little more than one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sifu.console.asking import Console, Visit, console_of, visitor_of
from sifu.console.desk import RunAtDesk
from sifu.console.json_api import answering, catching
from sifu.console.pages import live_values
from sifu.console.tokens import Token
from sifu.core.ledger import plain_values
from sifu.errors import SifuError

EVERY = 1.0
"""Seconds between two looks at a run that is being watched."""
STILL_HERE = 15.0
"""Seconds after which a line is sent even if nothing happened, so that a dead connection is noticed."""
MOST_VIEWERS = 2000


class Broadcast:
    """Tells everybody who watches a run what changed."""

    def __init__(self) -> None:
        self._latest: dict[str, bytes] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._watching: dict[str, int] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}

    @property
    def viewers(self) -> int:
        """How many watch now."""
        return sum(self._watching.values())

    async def watch(self, console: Console, who: Token, run: RunAtDesk, first: bytes) -> AsyncIterator[bytes]:
        """Messages until the viewer leaves, or their token ends."""
        key = run.key
        self._watching[key] = self._watching.get(key, 0) + 1
        self._changed.setdefault(key, asyncio.Event())
        if key not in self._readers:
            self._readers[key] = asyncio.create_task(self._read(run, who))
        sent = first
        try:
            yield sent
            while console.tokens.still_works(who):
                if self._latest.get(key, sent) != sent:  # also what changed while this viewer was slow
                    sent = self._latest[key]
                    yield sent
                    continue
                try:
                    await asyncio.wait_for(self._changed[key].wait(), STILL_HERE)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._watching[key] -= 1
            if self._watching[key] == 0:
                self._latest.pop(key, None)
                reader = self._readers.pop(key, None)
                if reader is not None:
                    reader.cancel()

    async def _read(self, run: RunAtDesk, who: Token) -> None:
        key = run.key
        while True:
            await asyncio.sleep(EVERY)
            try:
                message = as_message(await run_in_threadpool(live_values, run, who))
            except (SifuError, OSError):
                continue  # the run is being moved or made; the next look may find it
            if message != self._latest.get(key):
                self._latest[key] = message
                waiting, self._changed[key] = self._changed[key], asyncio.Event()
                waiting.set()


def as_message(values: dict[str, Any]) -> bytes:
    """Values as one server-sent event."""
    return b"data: " + json.dumps(plain_values(values), separators=(",", ":")).encode() + b"\n\n"


def show_live(visit: Visit) -> dict[str, Any]:
    """What a run does now, once."""
    return live_values(visit.run, visit.who)


@catching
async def stream(request: Request) -> Response:
    """Stream what a run does until the browser disconnects."""
    broadcast: Broadcast = request.app.state.broadcast
    console, who = console_of(request), visitor_of(request).token
    run = await run_in_threadpool(console.desk.find, who, request.path_params["run"])
    if broadcast.viewers >= MOST_VIEWERS:
        return JSONResponse({"error": "too many watch already"}, 503)
    first = as_message(await run_in_threadpool(live_values, run, who))
    return StreamingResponse(broadcast.watch(console, who, run, first), media_type="text/event-stream")


ROUTES = [Route("/runs/{run}/live", answering(show_live)), Route("/runs/{run}/stream", stream)]
