"""Clients of a run on Flower: the list of admitted clients, their nodes, and the profiles that they report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sifu.api.start_run import check_same_spec, create_run, open_run
from sifu.core.client_names import plain
from sifu.core.operator_words import FLOWER
from sifu.core.premises import MeasuredRegularity
from sifu.core.spec import Spec
from sifu.engines.flower.exchange import ClaimedRoster, Exchange, KeyRoster, Patience, Roster
from sifu.engines.flower.flower_engine import FlowerFederation
from sifu.engines.flower.statistics_engine import make_federation
from sifu.engines.flower.wire import profile_message, read_profile, read_profile_or_samples
from sifu.engines.plans import WireProfile
from sifu.engines.ready import plan_of
from sifu.engines.remote import Blueprint
from sifu.errors import InputError, NoClientResponseError
from sifu.requests.client_list import ADMITTED, joining, listed_clients, recorded_clients
from sifu.requests.worker import Tell
from sifu.run.clients_and_engine import preprocessing_of
from sifu.run.run_view import RunView
from sifu.server.flower_settings import MakeBlueprint, OwnServer, Settings
from sifu.server.server_loop import check_keeps_sum
from sifu.store.database import CLIENTS_FILE
from sifu.store.projection import NewEvent
from sifu.store.reader import JOINED, RunReader
from sifu.store.writer import RunWriter
from sifu.theory.facts import AUTHENTICATED, CLAIMED, MASKED_STATISTICS

if TYPE_CHECKING:
    from flwr.serverapp import Grid

LOOK_FOR_NEWCOMERS = 10.0
"""Polling interval for new clients, in seconds."""
NODE = "node-"
"""Prefix of the names given to clients that report no name."""
REPORTED = "reported"
"""Key of the run table under which the clients' reported profiles are stored."""


class ClientRegistry:
    """Clients of a run: listed by the operator, described by their profiles, and recorded in the ledger."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        patience: Patience,
        spec: Spec,
        make_blueprint: MakeBlueprint,
        tell: Tell,
    ) -> None:
        self.own = make_blueprint if isinstance(make_blueprint, OwnServer) else None
        self._grid, self._settings, self._patience, self._spec = grid, settings, patience, spec
        self._make_blueprint, self._tell, self._folder = make_blueprint, tell, Path(settings.run)
        self._listed, self._authenticated = listed_clients(self._folder), not settings.insecure_identity
        self._check_identity()
        self._engine: FlowerFederation
        self._counted: dict[int, WireProfile] = {}
        self._failed: dict[int, str] = {}
        self._newcomers: list[str] = []
        self._looked = -LOOK_FOR_NEWCOMERS
        self._exchange = Exchange(grid, patience.poll)
        self._roster: Roster = ClaimedRoster(grid, {}, self._ask_names)
        if self._authenticated:
            self._roster = KeyRoster(grid, {entry.name: entry.key for entry in self._listed})

    def _check_identity(self) -> None:
        """Check that clients are identified by keys over TLS, unless the settings allow otherwise."""
        if not self._authenticated:
            return
        way = "or set insecure-identity = true for a demo, which caps every certificate at conditional"
        if not self._listed:
            raise InputError(
                f"no client is on the list of {self._settings.run}: add each with sifu clients add "
                f"{self._settings.run} --name NAME --node-key NODE.pub, and give that key to its SuperNode "
                f"(--auth-supernode-private-key), {way}"
            )
        # Flower gives an app no other way to find out whether SuperLink uses TLS.
        if getattr(self._grid, "_insecure", False):
            raise InputError(
                "SuperLink runs with --insecure, so anyone on the network can pose as a node. Give it --ssl-certfile, "
                f"--ssl-keyfile and --enable-supernode-auth, {way}"
            )

    def begin_run(self) -> FlowerFederation:
        """Create a run of the listed clients or, without authentication, of the connected nodes."""
        profiles = self._collect()
        given_spec, resolved = self._make_engine(profiles, len(profiles))
        with create_run(self._folder, given_spec, resolved, self._engine) as writer:
            self._admit(writer, profiles)
        return self._engine

    def continue_run(self) -> FlowerFederation:
        """Return the engine of an existing run; its clients need not be online yet."""
        folder = self._folder
        with RunReader(folder) as reader:
            reported, facts, joined = reader.value(REPORTED, ""), reader.facts, len(reader.joined())
        identity = facts["identity"]
        if (identity == AUTHENTICATED) != self._authenticated:
            raise InputError(
                f"{folder} was started with clients identified by {identity}: continue in the same way "
                f"(insecure-identity = {str(identity != AUTHENTICATED).lower()})"
            )
        if reported:
            profiles = [WireProfile.of_mapping(values) for values in json.loads(reported)]
            if self.own is not None:  # sample numbers are recorded, so no client has to train to report them
                numbers = {profile.name.removeprefix(NODE): profile for profile in profiles}
                self._check_nodes(set(numbers))
                self._counted |= {int(number): profile for number, profile in numbers.items() if number.isdecimal()}
        else:  # the server was killed between its first two events
            profiles = self._collect()
            with RunWriter.open(folder) as writer:
                self._admit(writer, profiles)
        (folder / CLIENTS_FILE).unlink(missing_ok=True)
        given_spec, _ = self._make_engine(profiles, len(profiles) - joined)
        check_same_spec(open_run(folder, engine=self._engine), given_spec)
        # Certificates rely on the recorded facts, so these must not change, except that statistics may now be unmasked.
        begun, now = list(facts["outside"]), list(self._engine.facts.outside)
        if now not in (begun, [what for what in begun if what != MASKED_STATISTICS]):
            raise InputError(
                f"{folder} was started with other rules (outside the theorem: {begun or 'nothing'}; now "
                f"{now or 'nothing'}): continue with the same min-replies, masked-updates and masked-statistics"
            )
        return self._engine

    def _check_nodes(self, numbers: set[str]) -> None:
        """Refuse to continue if clients are known only by node number and only other nodes are connected."""
        online = {str(node) for node in self._grid.get_node_ids()}
        known_by_number = not self._authenticated and all(number.isdecimal() for number in numbers)
        if online and known_by_number and not online & numbers:
            raise InputError(
                f"no client of {self._folder} is connected: its clients are known only by the numbers of their nodes, "
                "which every simulation assigns again. Name them with sifu.flower.add_profile, for example by their "
                "partition-id, in a new run; or set linger, and file requests while the simulation runs"
            )

    def update_keys(self, writer: RunWriter) -> None:
        """Apply changes of the client list: use new keys, and let new clients join."""
        if isinstance(self._roster, KeyRoster):
            self._roster.names = {
                entry.key: entry.name for entry in recorded_clients(writer) if entry.status == "allowed"
            }
            self._newcomers = [newcomer.name for newcomer in joining(writer)]
            for name, node in self._roster.nodes(self._newcomers).items():
                profile = self._ask([node]).get(node)
                if profile is not None:
                    self._join(writer, replace(profile, name=name))
                else:
                    self._tell(f"{name} cannot join yet: {self._why_missing(node)}")
            self._newcomers = [newcomer.name for newcomer in joining(writer)]

    def newcomer_waits(self) -> bool:
        """Return whether a client that may join is connected; check at most every `LOOK_FOR_NEWCOMERS` seconds."""
        now = time.monotonic()
        if not self._newcomers or now - self._looked < LOOK_FOR_NEWCOMERS:
            return False
        self._looked = now
        return bool(self._roster.nodes(self._newcomers))

    def _join(self, writer: RunWriter, profile: WireProfile) -> None:
        """Record a new client in one event; refuse it if the guarantees for the others would become weaker."""
        view = RunView(writer)
        profiles = [WireProfile.of_mapping(values) for values in json.loads(writer.value(REPORTED))]
        try:
            design, _ = self._blueprint(view.spec, [*profiles, profile])
            MeasuredRegularity.of(design.clients, view.facts, view.spec)  # fail if Psi can no longer be tracked
            self._engine.renew(design)
        except InputError as error:
            rest = [entry for entry in recorded_clients(writer) if entry.name != profile.name]
            content = {"run": {ADMITTED: plain(rest)}, "client": profile.name, "reason": str(error)}
            writer.record(NewEvent("client refused", content))
            self._tell(f"{profile.name} cannot join and is off the list: {error}")
            return
        reported = [client.to_mapping() for client in [*profiles, profile]]
        writer.record(NewEvent(JOINED, {"run": {REPORTED: reported}, "client": profile.name}, joined=profile.client))
        self._tell(f"{profile.name} joined: it takes part from the next round on")

    def _admit(self, writer: RunWriter, profiles: Sequence[WireProfile]) -> None:
        values = {ADMITTED: plain(self._listed), REPORTED: [client.to_mapping() for client in profiles]}
        writer.record(NewEvent("clients admitted", {"run": values}))
        (writer.folder / CLIENTS_FILE).unlink(missing_ok=True)

    def _blueprint(self, spec: Spec, profiles: Sequence[WireProfile]) -> tuple[Blueprint, Spec]:
        identity = AUTHENTICATED if self._authenticated else CLAIMED
        return self._make_blueprint(spec, profiles, identity=identity, preprocessing=preprocessing_of(spec))

    def _make_engine(self, profiles: Sequence[WireProfile], founders: int) -> tuple[Spec, Spec]:
        """Make the engine; return the given spec, and the spec with automatic values resolved."""
        settings = self._settings
        data = replace(self._spec.data, name=FLOWER, clients=max(2, founders), samples_per_client=0)
        spec = given_spec = replace(self._spec, data=data)
        design, resolved = self._blueprint(spec, profiles)
        if design.head and settings.masked_statistics:
            check_keeps_sum(resolved)
        self._engine = make_federation(
            self._grid,
            self._roster,
            design,
            self._patience,
            masked_updates=settings.masked_updates,
            masked_statistics=settings.masked_statistics,
        )
        return given_spec, resolved

    def _collect(self) -> list[WireProfile]:
        """Return every client's profile; wait until all have reported, but at most `settings.wait` seconds."""
        wanted = [entry.name for entry in self._listed if entry.status == "allowed"]
        end = time.monotonic() + self._settings.wait
        present: dict[str, WireProfile] = {}
        told: list[str] = []
        while True:
            if self._authenticated:
                nodes = self._roster.nodes([name for name in wanted if name not in present])
                replies = self._ask(list(nodes.values()))
                present |= {name: replace(replies[node], name=name) for name, node in nodes.items() if node in replies}
                missing = [f"{name}, {self._why_missing(nodes.get(name))}" for name in wanted if name not in present]
            else:
                replies = self._ask([int(node) for node in self._grid.get_node_ids()])
                present = {profile.name: profile for profile in replies.values()}
                if len(present) < len(replies):
                    raise InputError("two nodes claim the same name: every client needs a different one")
                missing = ["more nodes"] * max(0, max(2, int(self._settings.clients)) - len(present))
                missing += [f"node {node}, {why}" for node, why in self._failed.items()] if missing else []
            if not missing:
                order = wanted if self._authenticated else sorted(present)
                return [present[name] for name in order]
            if time.monotonic() >= end:
                raise NoClientResponseError(
                    f"after {self._settings.wait:g} s clients are still missing ({'; '.join(missing[:5])}): check that "
                    "their SuperNodes run without errors, then start the run again; nothing was created"
                )
            if missing != told:
                self._tell(f"waiting for {'; '.join(missing[:5])}")
                told = missing
            time.sleep(min(self._patience.pause, 2.0))

    def _why_missing(self, node: int | None) -> str:
        return "its node is not there" if node is None else self._failed.get(node, "it was not asked yet")

    def _ask(self, nodes: list[int]) -> dict[int, WireProfile]:
        if self.own is not None:
            timeout, new = self._patience.timeout, [node for node in nodes if node not in self._counted]
            first = {node: self.own.first_message(self._spec, node, timeout) for node in new}
            replies, self._failed = self._exchange.ask(first, timeout, read_profile_or_samples)
            for node, reply in replies.items():
                self._counted[node] = WireProfile(f"{NODE}{node}", reply, 1) if isinstance(reply, int) else reply
            return {node: self._counted[node] for node in nodes if node in self._counted}
        plan = plan_of(self._spec, self._spec.model.outputs).to_text() if self._spec.model.kind != "python" else ""
        timeout = min(self._patience.timeout, 120.0)
        messages = {node: profile_message(node, plan, timeout) for node in nodes}
        answers, self._failed = self._exchange.ask(messages, timeout, read_profile)
        return answers

    def _ask_names(self, nodes: list[int]) -> dict[int, str]:
        return {node: profile.name for node, profile in self._ask(nodes).items()}
