"""A ServerApp that trains, forgets and certifies: `app = server_app()` in an app's server file is all there is to it.

Everything that must survive is in the run folder: a new `flwr run` of the same app continues where the last one ended,
with the same active and forgotten clients, whatever was killed.
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
from sifu.core.replies import Wait
from sifu.core.spec import Spec
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import ClaimedRoster, Exchange, KeyRoster, Patience, Roster
from sifu.engines.flower.exchanged import EvaluationSample, Reporter
from sifu.engines.flower.flower_engine import FlowerFederation
from sifu.engines.flower.ready import blueprint, plan_of
from sifu.engines.flower.statistics_engine import make_federation
from sifu.engines.flower.wire import (
    PROFILE_WANTED,
    TRAIN,
    Instruction,
    WireProfile,
    model_message,
    profile_message,
    read_profile,
    read_profile_or_samples,
)
from sifu.engines.own_models import fresh_model, own_blueprint
from sifu.engines.remote import Blueprint, MetricNames
from sifu.errors import InputError, NoClientResponseError
from sifu.requests.client_list import ADMITTED, joining, listed_clients, recorded_clients
from sifu.requests.worker import Tell
from sifu.run.clients_and_engine import FLOWER, preprocessing_of
from sifu.run.run_view import Regularities, RunView
from sifu.run.training import Progress
from sifu.server.server_loop import serve
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
"""Seconds that a round waits for a node where there is none."""
LOOK_FOR_NEWCOMERS = 10.0
"""Seconds between two looks whether a client that may join is online."""
NODE = "node-"
"""Begins the names of clients that give none."""
REPORTED = "reported"
"""The key of the run table that holds the clients' profiles as they reported them."""
MakeBlueprint = Callable[..., tuple[Blueprint, Spec]]


@dataclass(frozen=True)
class Settings:
    """The run config of the app: what `[tool.flwr.app.config]` holds and `--run-config` overrides.

    `run` and `spec` are absolute paths on the server's machine. `insecure_identity` trusts the names that nodes
    report and caps every certificate; then `clients` of them are waited for. `wait` seconds are waited for clients
    before the run is made, `linger` for requests after training is done. With `masked_updates` the server learns the
    mean of a round's updates and no single one; with `masked_statistics` it learns only the sum of the statistics of a
    head in closed form. `preprocessing = "fixed"` declares what `data.preprocessing` of a spec does.
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
        """From a run config, whose keys have dashes."""
        names = {field.name.replace("_", "-"): field.name for field in fields(Settings)}
        given = {names[key]: value for key, value in config.items() if key in names}
        if "run" not in given:
            raise InputError("the app's config needs run (the run folder) and mostly spec (a TOML file, see sifu init)")
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
                f'the config says preprocessing = "unknown", and {self.spec} says "{in_spec}": say it in one place'
            )
        return replace(spec, data=replace(spec.data, preprocessing="fixed"))

    @property
    def patience(self) -> Patience:
        """What the engine needs of them."""
        timeout = float(self.timeout)
        return Patience(timeout=timeout, min_replies=int(self.min_replies), absence=min(timeout, LONGEST_ABSENCE))


@dataclass(frozen=True)
class OwnServer:
    """A model of your own, for ClientApps that were written for Flower's FedAvg and know nothing of us.

    `initial` makes a fresh model: a torch module, or named numpy arrays; it may take the number of the branch. `config`
    is what FedAvg calls `train_config`. `loss` and `accuracy` name the metrics of an evaluation where they are not
    called as usual; `evaluates = False` is for apps without any. Evaluations get `evaluate_config` instead of `config`
    if it is given, and `evaluation_sample` says how many clients evaluate. `reporter` hears of every round's messages
    and replies. `evaluate_fn` is called with the number of rounds and
    the model after each, and what it returns is shown; it decides nothing. `save_model` gets the model when the server
    ends.
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
        """The training of clients with these profiles."""
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
        """Return a training whose result is thrown away: an app that knows nothing of us says its samples only then."""
        from flwr.app import Array, ArrayRecord

        fresh, config = fresh_model(self.initial, 0, spec.seed), {**self.config, PROFILE_WANTED: True}
        arrays = ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in fresh.items()})
        return model_message(arrays, Instruction(Position(0, 0), 0, 1), node, TRAIN, timeout, config)

    def after_round(self, tell: Tell, position: Position, model: ArrayRecord) -> None:
        """Show what the central evaluation says of a round's model."""
        metrics = self.evaluate_fn(position.round + 1, model) if self.evaluate_fn else None
        if metrics is not None:
            tell(f"central evaluation after {position.round + 1} rounds: {dict(metrics)}")


def own_server_app(initial: Callable[..., Any], **options: Any) -> ServerApp:
    """The ServerApp of a model of your own (`OwnServer`), for example `own_server_app(Net, config={"lr": 0.01})`."""
    return server_app(OwnServer(initial, **options))


def server_app(make_blueprint: MakeBlueprint = blueprint) -> ServerApp:
    """The ServerApp; for models of your own see `OwnServer`."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = Settings.of(context.run_config)
        serve_on_flower(grid, settings, make_blueprint, progress=_tell_round, tell=_tell)

    return app


def _tell(line: str) -> None:
    """A line in the stream of `flwr run`."""
    print(line, flush=True)


def _tell_round(progress: Progress) -> None:
    """A line for each round; what went wrong in it is logged there, too."""
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
    """Create the run or continue it until all is done; returns the requests that were carried out.

    `spec` is used instead of the file that the settings name.
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
    run.engine()  # refuses clients or a model that are not those of the run
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
    """A run that certifies identifies its clients by their keys, over authenticated connections."""
    if settings.insecure_identity:
        return
    way = "or set insecure-identity = true for a demo, which caps every certificate at conditional"
    if not listed:
        raise InputError(
            f"no client is on the list of {settings.run}: add each with sifu clients add {settings.run} --name NAME "
            f"--key NODE.pub, and give that key to its SuperNode (--auth-supernode-private-key), {way}"
        )
    # Flower tells the app in no other way whether SuperLink speaks TLS.
    if getattr(grid, "_insecure", False):
        raise InputError(
            "SuperLink runs with --insecure: anyone who listens can speak for a node. Give it --ssl-certfile, "
            f"--ssl-keyfile and --enable-supernode-auth, {way}"
        )


class _ClientRegistry:
    """Knows who the clients are: from the list, from their profiles, from the ledger."""

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
        """A new run of the clients on the list, or of those that are there."""
        profiles = self._collect()
        engine, given_spec, resolved = self._make_engine(profiles, len(profiles))
        with create_run(folder, given_spec, resolved, engine) as writer:
            self._admit(writer, profiles)
        return engine

    def continue_run(self, folder: Path) -> FlowerFederation:
        """The run as it was begun; its clients need not be online yet."""
        with RunReader(folder) as reader:
            reported, facts, joined = reader.value(REPORTED, ""), reader.facts, len(reader.joined())
        identity = facts["identity"]
        if (identity == AUTHENTICATED) != self._authenticated:
            raise InputError(
                f"{folder} was begun with clients known by {identity}: continue in the same way "
                f"(insecure-identity = {str(identity != AUTHENTICATED).lower()})"
            )
        if reported:
            profiles = [WireProfile.of_mapping(values) for values in json.loads(reported)]
            if self.own is not None:  # counted before: no client trains again to be counted
                numbers = {profile.name.removeprefix(NODE): profile for profile in profiles}
                self._check_nodes(folder, set(numbers))
                self._counted |= {int(number): profile for number, profile in numbers.items() if number.isdecimal()}
        else:  # it was killed between its first event and its second
            profiles = self._collect()
            with RunWriter.open(folder) as writer:
                self._admit(writer, profiles)
        (folder / CLIENTS_FILE).unlink(missing_ok=True)
        engine, given_spec, _ = self._make_engine(profiles, len(profiles) - joined, facts["local_rate"])
        check_same_spec(open_run(folder, engine=engine), given_spec)
        # Certificates rest on what was recorded. Statistics may be checked one by one where they were masked before.
        begun, now = list(facts["outside"]), list(engine.facts.outside)
        if now not in (begun, [what for what in begun if what != MASKED_STATISTICS]):
            raise InputError(
                f"{folder} was begun with other rules (outside the theorem: {begun or 'nothing'}; now "
                f"{now or 'nothing'}): continue with the same min-replies, masked-updates and masked-statistics"
            )
        return engine

    def _check_nodes(self, folder: Path, numbers: set[str]) -> None:
        """Refuse nodes none of which can be a client that is known by the number of its node."""
        online = {str(node) for node in self._grid.get_node_ids()}
        known_by_number = not self._authenticated and all(number.isdecimal() for number in numbers)
        if online and known_by_number and not online & numbers:
            raise InputError(
                f"no client of {folder} is here: its clients have no names but the numbers of their nodes, and a "
                "simulation numbers its nodes anew each time. Name them with sifu.flower.add_profile, for example by "
                "their partition-id, in a new run; or set linger, and file requests while the simulation runs"
            )

    def update_keys(self, writer: RunWriter) -> None:
        """The list may have changed: new keys take effect, blocked ones were left out already, newcomers join."""
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
        """Whether a client that may join is connected; checked a few times a minute."""
        now = time.monotonic()
        if not self._newcomers or now - self._looked < LOOK_FOR_NEWCOMERS:
            return False
        self._looked = now
        return bool(self._roster.nodes(self._newcomers))

    def _join(self, writer: RunWriter, profile: WireProfile) -> None:
        """One event makes a client of it; one that would lower what is proven for the others is refused."""
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
        """The engine, the spec as it was asked for, and with what was found filled in.

        An automatic `rate` was found among the founders, and stays what it was when others have joined.
        """
        data = replace(self._spec.data, name=FLOWER, clients=max(2, founders), samples_per_client=0)
        given_spec = replace(self._spec, data=data)
        spec, local = given_spec, given_spec.local
        if rate is not None and local.rate == "auto":
            spec = replace(spec, local=replace(local, rate=rate))
        design, resolved = self._blueprint(spec, profiles)
        if self._settings.masked_updates and (self._spec.keep.gram_clients or self._spec.round_extras.updates_every):
            raise InputError("with masked-updates the spec's keep.gram_clients must be 0, and no updates can be stored")
        if design.head and self._settings.masked_statistics and resolved.keep.statistics == "clients":
            raise InputError(
                'keep.statistics = "clients" keeps what a server with masked statistics never sees: write "sum", or '
                "set masked-statistics = false"
            )
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
        """Every client's profile; all of them are needed once, so they are waited for."""
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
                    f"after {self._settings.wait:g} s clients are still missing ({'; '.join(missing[:5])}): see that "
                    "their SuperNodes run and log no error, then start the run again; nothing was created"
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
