"""Live updates of pages by server-sent events, with one reader per run.

The first viewer of a run starts its reader, and the last one to leave ends it. All viewers share each message.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sifu.console.asking import Console, Visit, console_of, visitor_of
from sifu.console.json_api import answering, catching
from sifu.console.rendering import charts, expected_words, measured_words
from sifu.console.security import refused
from sifu.console.served_run import ServedRun
from sifu.console.tokens import Token
from sifu.core.ledger import plain_values
from sifu.errors import SifuError

EVERY = 1.0
"""Interval between two reads of a watched run, in seconds."""
KEEP_ALIVE_SECONDS = 15.0
"""Interval of keep-alive lines, in seconds; they are sent if nothing changed, to detect dead connections."""
MOST_VIEWERS = 2000
MOST_PER_PERSON = 20
"""Maximum number of concurrent streams of one person, over all windows."""


class Broadcast:
    """Sender of a run's changes to all of its viewers."""

    def __init__(self) -> None:
        self._latest: dict[str, bytes] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._watching: dict[str, int] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._streams: Counter[str] = Counter()
        """Number of open or admitted streams, by the id of the person's token."""

    def admit(self, who: Token) -> str | None:
        """Increase the number of a person's streams by one; if a limit is reached, return a message instead."""
        if self._streams[who.id] >= MOST_PER_PERSON:
            return f"you watch in {MOST_PER_PERSON} windows already: close one"
        if self._streams.total() >= MOST_VIEWERS:
            return "too many watch already"
        self._streams[who.id] += 1
        return None

    def leave(self, who: Token) -> None:
        """Decrease the number of a person's streams by one."""
        self._streams[who.id] -= 1
        self._streams += Counter()  # adding an empty Counter drops counts that are not positive

    async def watch(self, console: Console, who: Token, run: ServedRun, first: bytes) -> AsyncIterator[bytes]:
        """Yield messages until the viewer disconnects or their token is no longer valid."""
        key = run.key
        self._watching[key] = self._watching.get(key, 0) + 1
        self._changed.setdefault(key, asyncio.Event())
        if key not in self._readers:
            self._readers[key] = asyncio.create_task(self._read(run, who))
        sent = first
        try:
            yield sent
            while console.tokens.still_works(who):
                if self._latest.get(key, sent) != sent:  # also true for changes that a slow viewer missed
                    sent = self._latest[key]
                    yield sent
                    continue
                try:
                    await asyncio.wait_for(self._changed[key].wait(), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._watching[key] -= 1
            if self._watching[key] == 0:
                self._latest.pop(key, None)
                reader = self._readers.pop(key, None)
                if reader is not None:
                    reader.cancel()

    async def _read(self, run: ServedRun, who: Token) -> None:
        key = run.key
        while True:
            await asyncio.sleep(EVERY)
            try:
                message = as_message(await run_in_threadpool(live_values, run, who))
            except (SifuError, OSError):
                continue  # the run is being moved or created, so try again at the next read
            if message != self._latest.get(key):
                self._latest[key] = message
                waiting, self._changed[key] = self._changed[key], asyncio.Event()
                waiting.set()


class CountedStream(StreamingResponse):
    """A stream that calls a function when it ends, even if its first message was never requested."""

    def __init__(self, messages: AsyncIterator[bytes], ended: Callable[[], None], **options: Any) -> None:
        super().__init__(messages, **options)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages, then report the end of the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def live_values(run: ServedRun, who: Token) -> dict[str, Any]:
    """Return the values that a live page updates; when `stamp` changes, the page reloads its other sections."""
    who.demand("see")
    live, jobs = run.live(), [asdict(job) for job in run.jobs.of_run(run.key)[:5]]
    states = "".join(f"{job['id']}{job['state']}" for job in jobs)
    stamp = f"{live.phase}|{live.request}|{live.last_step}|{live.waiting}|{live.overdue}|{live.at_work}|{states}"
    rendered = {"charts": str(charts(live)), "expected_words": expected_words(live)}
    rendered["measured_words"] = measured_words(live)
    return asdict(live) | {"jobs": jobs, "stamp": stamp} | rendered


def as_message(values: dict[str, Any]) -> bytes:
    """Return values as one server-sent event."""
    return b"data: " + json.dumps(plain_values(values), separators=(",", ":")).encode() + b"\n\n"


def show_live(visit: Visit) -> dict[str, Any]:
    """Return the current state of a run, once."""
    return live_values(visit.run, visit.who)


@catching
async def stream(request: Request) -> Response:
    """Stream the state of a run until the browser disconnects."""
    broadcast: Broadcast = request.app.state.broadcast
    console, who = console_of(request), visitor_of(request).token
    run = await run_in_threadpool(console.service.find, who, request.path_params["run"])
    first = as_message(await run_in_threadpool(live_values, run, who))
    full = broadcast.admit(who)
    if full:
        return refused(429, full)
    messages = broadcast.watch(console, who, run, first)
    return CountedStream(messages, lambda: broadcast.leave(who), media_type="text/event-stream")


ROUTES = [Route("/runs/{run}/live", answering(show_live)), Route("/runs/{run}/stream", stream)]
