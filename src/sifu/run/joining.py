"""Clients that join a run with a closed-form head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sifu.core.client_names import check_lookalikes, check_names
from sifu.core.engine import Engine
from sifu.errors import InputError
from sifu.run.closed_form_round import RecordedSolve
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback
from sifu.store.projection import NewEvent
from sifu.store.reader import JOINED, plain_name
from sifu.store.writer import RunWriter
from sifu.theory.facts import ClientProfile

DigestOf = Callable[[int], str | None]
"""Function that returns the digest of a client's samples, or None if the engine does not expose it."""


def let_join(
    writer: RunWriter, engine: Engine, digest_of: DigestOf, source: dict[str, str], progress: ProgressCallback | None
) -> list[str]:
    """Record the clients of an engine that the run does not know yet, and solve with them.

    Returns:
        The names of the new clients.
    """
    count = len(writer.clients())
    new = engine.clients[count:]
    check_names([profile.name for profile in new])
    if new:
        check_lookalikes(profile.name for profile in engine.clients)
    _refuse_forgotten_samples(RunView(writer), digest_of, new)
    held = RecordedSolve(engine, writer, RunView(writer)).check_newcomers()
    for client, profile in enumerate(new, start=count):
        payload = {"client": profile.name} | source
        writer.record(NewEvent(JOINED, payload, joined=profile, joined_digest=digest_of(client)))
    solve = RecordedSolve(engine, writer, RunView(writer))
    solve.held = held
    if solve.missing():  # `missing` excludes clients that wait to be forgotten
        solve.run("joining", progress)
    return [profile.name for profile in new]


def _refuse_forgotten_samples(view: RunView, digest_of: DigestOf, new: Sequence[ClientProfile]) -> None:
    """Refuse a newcomer with exactly the samples of a forgotten client.

    The run keeps no digest of forgotten samples, so the check is possible only if the source still has them. A
    newcomer with only some of these samples is not recognised; certificates state this limitation.
    """
    names = {digest_of(client): plain_name(view.reader, client) for client in sorted(view.forgotten)}
    names.pop(None, None)
    for client, profile in enumerate(new, start=len(view.clients)):
        forgotten = names.get(digest_of(client))
        if forgotten is not None:
            raise InputError(
                f"{profile.name} has the samples of {forgotten}, which was forgotten: joining would restore the old "
                "model and void the certificate. Nothing was changed"
            )
