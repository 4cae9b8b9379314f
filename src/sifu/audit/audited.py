"""Shared state of an audit: the run with its engine and data, the options, and the findings so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sifu.api.run import Run
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.operator_words import PYTHON
from sifu.core.round import NormalSource, SystemNormals, keyed_generator
from sifu.errors import InputError, SifuError
from sifu.requests.outcome import node_before
from sifu.run.clients_and_engine import clients_from_spec
from sifu.run.held_out import held_out_rows
from sifu.run.recorded_data import arranged_clients
from sifu.run.releases import with_noise
from sifu.run.run_view import RunView
from sifu.store.reader import joined_remainders, plain_names
from sifu.store.release_files import released_model, released_node

AuditProgress = Callable[[str, int, int], None]
"""Callback with the name of the current step, the work done, and the total work."""


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit.

    Attributes:
        subjects: Maximum number of forgotten subjects to replay.
        replays: Number of replays of a release, with and without the client.
        attacks: True to attack the released model, and to compare two releases.
        request: Id of the request whose release is attacked, or None for the last one.
        seed: Seed of the audit's own draws; None draws from the operating system, as certified noise does.
        public: File of public samples for the comparison of two releases, or None for the run's held-out rows.
        trials: Number of deletions that the audit makes itself and compares.
        only_before_after: True to run the comparison of two releases only.
    """

    subjects: int = 16
    replays: int = 100_000
    attacks: bool = True
    request: str | None = None
    seed: int | None = None
    public: str | Path | None = None
    trials: int = 50
    only_before_after: bool = False


@dataclass(eq=False)
class Audited:
    """Shared state of an audit.

    `attacked` is the request whose release is attacked, if any, `before` the node released before it, and `remainder`
    the client that joined again after it. `contradictions` lists certified claims that are false, `observations`
    uncertified statements that are false, and `notes` what could not be tested.
    """

    run: Run
    view: RunView
    engine: Engine
    options: AuditOptions
    progress: AuditProgress
    models: dict[int, Vector] = field(default_factory=dict)
    """Replayed models of the nodes that the attacks need."""
    contradictions: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader, self.spec = self.view.reader, self.view.spec
        seed, wanted = self.options.seed, self.options.request
        self.normals: NormalSource = SystemNormals() if seed is None else keyed_generator(seed, "audit")
        done = {row.request: row for row in self.view.requests if row.status == "done"}
        if wanted is not None and wanted not in done:
            raise InputError(f"there is no finished request {wanted!r} in this run; it has {', '.join(done) or 'none'}")
        last = max(done.values(), key=lambda row: row.request_order or 0, default=None)
        self.attacked = None if not self.options.attacks else last if wanted is None else done[wanted]
        row, joined = self.attacked, joined_remainders(self.reader)
        self.before = None if row is None else node_before(self.reader, row)
        self.remainder = next((item for item in joined if row is not None and item.request == row.request), None)

    def say(self, certified: bool, sentence: str) -> None:
        """Add a statement that is false."""
        (self.contradictions if certified else self.observations).append(sentence)

    def names(self, clients: Sequence[str]) -> tuple[str, ...]:
        """Return the names under which people know these clients."""
        return plain_names(self.reader, clients)

    @cached_property
    def data(self) -> Any:
        """The clients' data in the order of the run's clients, or None if they are not available."""
        if self.spec.data.name == PYTHON:
            return None
        return arranged_clients(self.reader, clients_from_spec(self.spec, tested=False)).complete()

    @cached_property
    def held_out(self) -> tuple[Any, Any] | None:
        """The held-out samples, or None if there are none; a note says so if their file cannot be read."""
        try:
            rows = held_out_rows(self.spec)
        except SifuError as error:
            self.notes.append(f"attacks that need held-out rows were left out: {error}")
            return None
        return None if rows is None else (rows.x, rows.y)

    def model_of(self, node: int | None) -> Vector | None:
        """Return the model of a node, replayed or from disk, or None if it is gone."""
        if node in self.models:
            return self.models[node]
        return self.reader.load_model(node) if node is not None and node in self.reader.models() else None

    def as_released(self, model: Vector, node: int | None = None, normals: NormalSource | None = None) -> Vector:
        """Return the released form of a model.

        Without `release.noise`, the model is released unchanged. With it, the stored release is returned if `node` is
        the released node, and otherwise a copy with noise from `normals`, by default the audit's source.
        """
        noise_std = self.spec.release.noise
        if noise_std == 0.0:
            return model
        if node is not None and node == released_node(self.reader):
            return released_model(self.reader)
        return with_noise(model, noise_std, normals or self.normals)
