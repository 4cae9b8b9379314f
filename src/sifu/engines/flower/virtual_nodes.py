"""Engine over the nodes of a Flower grid that a user's own program runs (requires the extra `flower`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sifu.core.engine import Engine
from sifu.core.spec import Spec
from sifu.engines.flower.client import client_app
from sifu.engines.flower.exchange import ClaimedRoster, Exchange, Patience
from sifu.engines.flower.statistics_engine import make_federation
from sifu.engines.flower.wire import profile_message, read_profile
from sifu.engines.ready import ReadyClient, blueprint, plan_of
from sifu.errors import NoClientResponseError
from sifu.theory.facts import IN_PROCESS

if TYPE_CHECKING:
    from flwr.serverapp import Grid

__all__ = ["Patience", "ReadyClient", "client_app", "engine_of_nodes"]


def engine_of_nodes(grid: Grid, spec: Spec, names: Sequence[str], preprocessing: str, patience: Patience) -> Engine:
    """Return an engine for the nodes that hold the data of these clients.

    The names that nodes report are trusted, which is justified only if this program started all nodes.

    Args:
        grid: Flower's grid.
        spec: Spec of the run.
        names: Names of the clients, in the order of the engine.
        preprocessing: Description of the preprocessing of samples.
        patience: Waiting times.

    Raises:
        NoClientResponseError: If a client's node does not reply.
    """
    plan = plan_of(spec, spec.model.outputs).to_text()
    exchange = Exchange(grid, patience.poll)
    nodes = sorted(int(node) for node in grid.get_node_ids())
    messages = {node: profile_message(node, plan, patience.timeout) for node in nodes}
    profiles, _ = exchange.ask(messages, patience.timeout, read_profile)
    by_name = {profile.name: profile for profile in profiles.values()}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise NoClientResponseError(f"{len(missing)} of {len(names)} virtual nodes did not answer ({missing[0]})")
    training, _ = blueprint(spec, [by_name[name] for name in names], identity=IN_PROCESS, preprocessing=preprocessing)
    roster = ClaimedRoster(grid, {node: profile.name for node, profile in profiles.items()})
    return make_federation(grid, roster, training, patience)
