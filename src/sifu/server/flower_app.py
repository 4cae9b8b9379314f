"""A Flower ServerApp that trains, forgets and certifies: an app's server file needs only `app = server_app()`.

All persistent state is in the run folder. After any interruption, a new `flwr run` of the same app continues, with the
same active and forgotten clients.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.api.start_run import check_same_spec, create_run, load_spec, open_run
from sifu.choices import Level
from sifu.core.engine import Position
from sifu.core.identity import Admitted, plain
from sifu.core.operator_words import FLOWER
from sifu.core.replies import Wait
from sifu.core.spec import Spec
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import ClaimedRoster, Exchange, KeyRoster, Patience, Roster
from sifu.engines.flower.exchanged import EvaluationSample, Reporter
from sifu.engines.flower.flower_engine import FlowerFederation
from sifu.engines.flower.statistics_engine import make_federation
from sifu.engines.flower.wire import (
    PROFILE_WANTED,
    TRAIN,
    model_message,
    profile_message,
    read_profile,
    read_profile_or_samples,
)
from sifu.engines.own_models import fresh_model, own_blueprint
from sifu.engines.plans import Instruction, WireProfile
from sifu.engines.ready import blueprint, plan_of
from sifu.engines.remote import Blueprint, MetricNames
from sifu.errors import InputError, NoClientResponseError
from sifu.requests.client_list import ADMITTED, joining, listed_clients, recorded_clients
from sifu.requests.worker import Tell
from sifu.run.clients_and_engine import preprocessing_of
from sifu.run.regularities import Regularities
from sifu.run.run_view import RunView
from sifu.run.training import Progress
from sifu.server.server_loop import check_keeps_sum, serve
from sifu.store.database import CLIENTS_FILE, DATABASE
from sifu.store.projection import NewEvent
from sifu.store.reader import JOINED, RunReader
from sifu.store.release_files import released_model
from sifu.store.writer import RunWriter
from sifu.theory.facts import AUTHENTICATED, CLAIMED, MASKED_STATISTICS

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord
    from flwr.serverapp import Grid, ServerApp

log = logging.getLogger(__name__)

LONGEST_ABSENCE = 120.0
"""Maximum number of seconds that a round waits for a client without a connected node."""
LOOK_FOR_NEWCOMERS = 10.0
"""Polling interval for new clients, in seconds."""
NODE = "node-"
"""Prefix of the names of clients that report none."""
REPORTED = "reported"
"""Key of the run table under which the clients' reported profiles are stored."""
MakeBlueprint = Callable[..., tuple[Blueprint, Spec]]


@dataclass(frozen=True)
class Settings:
    """The run config of the app: `[tool.flwr.app.config]` with the overrides of `--run-config`.

    `run` and `spec` are absolute paths on the server's machine. With `insecure_identity` the server trusts the names
    that nodes report and waits for `clients` nodes; certificates are then `conditional` at best. `wait` is the time to
    wait for clients before the run is created, `linger` the time to wait for requests after training, both in seconds.
    With `masked_updates` the server learns only the mean of a round's updates; with `masked_statistics` it learns only
    the sum of the statistics of a head in closed form. `preprocessing = "fixed"` declares the same as
    `data.preprocessing` of a spec.
    """

    run: str
    spec: str = ""
    insecure_identity: bool = False
    clients: int = 0
    wait: float = 300.0
    linger: float = 0.0
    timeout: float = 600.0
    min_replies: int = 1
    masked_updates: bool = False
    masked_statistics: bool = True
    preprocessing: str = ""

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """Return the settings in a run config, whose keys are written with dashes."""
        names = {field.name.replace("_", "-"): field.name for field in fields(Settings)}
        given = {names[key]: value for key, value in config.items() if key in names}
        if "run" not in given:
            raise InputError(
                "the app's config needs run (the run folder), and usually spec (a TOML file, see sifu init)"
            )
        for key in ("run", "spec"):
            if key in given and not Path(str(given[key])).is_absolute():
                raise InputError(f"{key} must be an absolute path on the server's machine, found {given[key]!r}")
        if given.get("preprocessing", "") not in ("", "fixed", "unknown"):
            raise InputError(f'preprocessing must be "fixed" or "unknown", found {given["preprocessing"]!r}')
        return Settings(**given)

    def declared(self, spec: Spec) -> Spec:
        """Return the spec with the preprocessing that the config declares."""
        declared, in_spec = self.preprocessing, spec.data.preprocessing
        if not declared or declared == in_spec:
            return spec
        if self.spec and declared == "unknown":
            raise InputError(
                f'the config says preprocessing = "unknown", and {self.spec} says "{in_spec}": set it in one place'
            )
        return replace(spec, data=replace(spec.data, preprocessing="fixed"))

    @property
    def patience(self) -> Patience:
        """Time limits of the engine."""
        timeout = float(self.timeout)
        return Patience(timeout=timeout, min_replies=int(self.min_replies), absence=min(timeout, LONGEST_ABSENCE))


@dataclass(frozen=True)
class OwnServer:
    """Server for a user-defined model, with ClientApps written for Flower's FedAvg.

    Attributes:
        initial: Function that makes a fresh model, a torch module or named numpy arrays; it may take the branch number.
        config: Config of training messages, FedAvg's `train_config`.
        loss: Name of the loss among the metrics, if unusual.
        accuracy: Name of the accuracy among the metrics, if unusual.
        evaluates: False for apps without evaluation.
        evaluate_config: Config of evaluation messages; `config` if not given.
        evaluation_sample: Fraction and minimum number of the clients that evaluate.
        reporter: Listener that receives every round's messages and replies.
        evaluate_fn: Callback that receives the number of rounds and the model after each round; its result is only
            displayed.
        save_model: Callback that receives the model when the server ends.
    """

    initial: Callable[..., Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    loss: str = ""
    accuracy: str = ""
    evaluates: bool = True
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None
    save_model: Callable[[ArrayRecord], None] | None = None
    evaluate_config: Mapping[str, Any] | None = None
    evaluation_sample: EvaluationSample = EvaluationSample()
    reporter: Reporter | None = None

    def __call__(self, spec: Spec, profiles: Sequence[WireProfile], **known: str) -> tuple[Blueprint, Spec]:
        """Return the training plan for clients with these profiles, and the resolved spec."""
        return own_blueprint(
            self.initial,
            spec,
            profiles,
            config=self.config,
            evaluate_config=self.evaluate_config,
            metrics=MetricNames(self.loss, self.accuracy),
            evaluates=self.evaluates,
            **known,
        )

    def first_message(self, spec: Spec, node: int, timeout: float) -> Message:
        """Return a training message whose result is discarded: the app reports its samples only with a result."""
        from flwr.app import Array, ArrayRecord

        fresh, config = fresh_model(self.initial, 0, spec.seed), {**self.config, PROFILE_WANTED: True}
        arrays = ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in fresh.items()})
        return model_message(arrays, Instruction(Position(0, 0), 0, 1), node, TRAIN, timeout, config)

    def after_round(self, tell: Tell, position: Position, model: ArrayRecord) -> None:
        """Display the result of the central evaluation of a round's model."""
        metrics = self.evaluate_fn(position.round + 1, model) if self.evaluate_fn else None
        if metrics is not None:
            tell(f"central evaluation after {position.round + 1} rounds: {dict(metrics)}")


def server_app(make_blueprint: MakeBlueprint = blueprint) -> ServerApp:
    """Return the ServerApp; for user-defined models see `OwnServer`."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = Settings.of(context.run_config)
        serve_on_flower(grid, settings, make_blueprint, progress=_tell_round, tell=_tell)

    return app


def _tell(line: str) -> None:
    """Print a line to the output of `flwr run`."""
    print(line, flush=True)


def _tell_round(progress: Progress) -> None:
    """Print a line for each round."""
    accuracy = "" if math.isnan(progress.accuracy) else f", accuracy {progress.accuracy:.1%}"
    _tell(f"{progress.phase}: {progress.rounds} rounds{accuracy}")


def serve_on_flower(
    grid: Grid,
    settings: Settings,
    make_blueprint: MakeBlueprint = blueprint,
    patience: Patience | None = None,
    progress: Callable[[Progress], None] | None = None,
    level: Level | None = None,
    tell: Tell = log.info,
    spec: Spec | None = None,
) -> list[str]:
    """Create or continue the run until all work is done.

    Args:
        grid: Flower's connection to the nodes.
        settings: The run config of the app.
        make_blueprint: Function that makes the training plan from the spec and the clients' profiles.
        patience: Time limits; by default the limits of the settings.
        progress: Callback invoked after each round.
        level: Minimum level of the certificates; by default the level of each request.
        tell: Callback that receives messages for the operator.
        spec: Spec to use instead of the file that the settings name.

    Returns:
        The ids of the executed requests.
    """
    folder = Path(settings.run)
    if spec is None:
        if not settings.spec:
            raise InputError("the app's config names no spec (a TOML file, see sifu init)")
        spec = load_spec(settings.spec)
    spec = settings.declared(spec)
    patience = replace(patience or settings.patience, wait=Wait.parse(spec.server.wait))
    listed = listed_clients(folder)
    check_identity(grid, settings, listed)
    app = Path(settings.spec).parent
    if settings.spec and (app / "pyproject.toml").exists() and folder.is_relative_to(app):
        log.warning(
            "the run folder %s lies in the app, and flwr run sends certificates and other files of it to every node: "
            "move it out of the app, and name the new place in the app's config",
            folder,
        )
    registry = _ClientRegistry(grid, settings, patience, spec, listed, make_blueprint, tell)
    own = registry.own
    if (folder / DATABASE).exists():
        engine = registry.continue_run(folder)
    else:
        engine = registry.begin_run(folder)
    engine.show_checkpoints(ShownCheckpoint(folder))
    run = open_run(folder, engine=engine)
    run.engine()  # raises an error if the clients or the model differ from the run's
    if own is not None:
        engine.after_round = partial(own.after_round, tell) if own.evaluate_fn is not None else None
        engine.reporter, engine.evaluation_sample = own.reporter, own.evaluation_sample
    done = serve(
        run,
        engine,
        linger=settings.linger,
        lock_wait=settings.wait,
        level=level,
        progress=progress,
        tell=tell,
        after_mail=registry.update_keys,
        more_mail=registry.newcomer_waits,
    )
    if own is not None and own.save_model is not None:
        with run.reader() as reader:
            own.save_model(engine.record(released_model(reader)))
    return done


def check_identity(grid: Grid, settings: Settings, listed: Sequence[Admitted]) -> None:
    """Check that clients are identified by keys over authenticated connections, unless the settings allow otherwise."""
    if settings.insecure_identity:
        return
    way = "or set insecure-identity = true for a demo, which caps every certificate at conditional"
    if not listed:
        raise InputError(
            f"no client is on the list of {settings.run}: add each with sifu clients add {settings.run} --name NAME "
            f"--key NODE.pub, and give that key to its SuperNode (--auth-supernode-private-key), {way}"
        )
    # Flower gives an app no other way to find out whether SuperLink uses TLS.
    if getattr(grid, "_insecure", False):
        raise InputError(
            "SuperLink runs with --insecure, so anyone on the network can pose as a node. Give it --ssl-certfile, "
            f"--ssl-keyfile and --enable-supernode-auth, {way}"
        )


class _ClientRegistry:
    """Registry of the clients: from the list, from their profiles, and from the ledger."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        patience: Patience,
        spec: Spec,
        listed: Sequence[Admitted],
        make_blueprint: MakeBlueprint,
        tell: Tell,
    ) -> None:
        self._tell, self.own = tell, make_blueprint if isinstance(make_blueprint, OwnServer) else None
        self._counted: dict[int, WireProfile] = {}
        self._grid, self._settings, self._patience, self._spec = grid, settings, patience, spec
        self._listed, self._make_blueprint = listed, make_blueprint
        self._engine: FlowerFederation
        self._newcomers: list[str] = []
        self._looked = -LOOK_FOR_NEWCOMERS
        self._failed: dict[int, str] = {}
        self._exchange = Exchange(grid, patience.poll)
        self._authenticated = not settings.insecure_identity
        self._roster: Roster
        if self._authenticated:
            self._roster = KeyRoster(grid, {entry.name: entry.key for entry in listed})
        else:
            self._roster = ClaimedRoster(grid, {}, self._ask_names)

    def begin_run(self, folder: Path) -> FlowerFederation:
        """Create a run of the listed clients or, without authentication, of the connected nodes."""
        profiles = self._collect()
        engine, given_spec, resolved = self._make_engine(profiles, len(profiles))
        with create_run(folder, given_spec, resolved, engine) as writer:
            self._admit(writer, profiles)
        return engine

    def continue_run(self, folder: Path) -> FlowerFederation:
        """Return the engine of an existing run; its clients need not be online yet."""
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
            if self.own is not None:  # samples are known already, so no client has to train to report them
                numbers = {profile.name.removeprefix(NODE): profile for profile in profiles}
                self._check_nodes(folder, set(numbers))
                self._counted |= {int(number): profile for number, profile in numbers.items() if number.isdecimal()}
        else:  # the server was killed between its first two events
            profiles = self._collect()
            with RunWriter.open(folder) as writer:
                self._admit(writer, profiles)
        (folder / CLIENTS_FILE).unlink(missing_ok=True)
        engine, given_spec, _ = self._make_engine(profiles, len(profiles) - joined, facts["local_rate"])
        check_same_spec(open_run(folder, engine=engine), given_spec)
        # Certificates rely on the recorded facts. Statistics that were masked before may be checked one by one now.
        begun, now = list(facts["outside"]), list(engine.facts.outside)
        if now not in (begun, [what for what in begun if what != MASKED_STATISTICS]):
            raise InputError(
                f"{folder} was started with other rules (outside the theorem: {begun or 'nothing'}; now "
                f"{now or 'nothing'}): continue with the same min-replies, masked-updates and masked-statistics"
            )
        return engine

    def _check_nodes(self, folder: Path, numbers: set[str]) -> None:
        """Refuse to continue if clients are known by node number and none of the connected nodes is one of them."""
        online = {str(node) for node in self._grid.get_node_ids()}
        known_by_number = not self._authenticated and all(number.isdecimal() for number in numbers)
        if online and known_by_number and not online & numbers:
            raise InputError(
                f"no client of {folder} is connected: its clients are known only by the numbers of their nodes, which "
                "every simulation assigns again. Name them with sifu.flower.add_profile, for example by their "
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
        """Return whether a client that may join is connected; polled every `LOOK_FOR_NEWCOMERS` seconds."""
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
            before = view.regularities.measured.kind
            after = Regularities.of(design.clients, view.facts, view.spec).measured.kind
            if after != before:
                raise InputError(f"with its smoothness {profile.smoothness} the run would be {after}, not {before}")
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

    def _make_engine(
        self, profiles: Sequence[WireProfile], founders: int, rate: float | None = None
    ) -> tuple[FlowerFederation, Spec, Spec]:
        """Return the engine, the given spec, and the spec with automatic values resolved.

        An automatic `rate` is determined by the founders and does not change when others join.
        """
        data = replace(self._spec.data, name=FLOWER, clients=max(2, founders), samples_per_client=0)
        given_spec = replace(self._spec, data=data)
        spec, local = given_spec, given_spec.local
        if rate is not None and local.rate == "auto":
            spec = replace(spec, local=replace(local, rate=rate))
        design, resolved = self._blueprint(spec, profiles)
        if self._settings.masked_updates and (self._spec.keep.gram_clients or self._spec.round_extras.updates_every):
            raise InputError("with masked-updates the spec's keep.gram_clients must be 0, and no updates can be stored")
        if design.head and self._settings.masked_statistics:
            check_keeps_sum(resolved)
        self._engine = make_federation(
            self._grid,
            self._roster,
            design,
            self._patience,
            masked_updates=self._settings.masked_updates,
            masked_statistics=self._settings.masked_statistics,
        )
        return self._engine, given_spec, resolved

    def _collect(self) -> list[WireProfile]:
        """Return every client's profile; wait until all have reported."""
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
