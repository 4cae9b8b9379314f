"""Shared state of an audit: the run with its engine and data, the options, and what could not be tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sifu.api.run import Run
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.operator_words import PYTHON
from sifu.core.round import NormalSource, SystemNormals, keyed_generator
from sifu.core.spec import Spec
from sifu.errors import SifuError
from sifu.run.clients_and_engine import clients_from_spec
from sifu.run.held_out import held_out_rows
from sifu.run.recorded_data import arranged_clients
from sifu.run.releases import with_noise
from sifu.run.run_view import RunView
from sifu.store.reader import RunReader
from sifu.store.release_files import released_model, released_node

AuditProgress = Callable[[str, int, int], None]
"""Callback with the name of the current step, the work done, and the total work."""


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit.

    Attributes:
        subjects: Maximum number of forgotten subjects to replay.
        replays: Number of replays of a release, with and without the client.
        mistake: Probability that any of the bounds on epsilon is wrong.
        attacks: True to attack the released model, and to compare two releases.
        request: Id of the request whose release is attacked, or None for the last one.
        seed: Seed of the audit's own draws; None draws from the operating system, as certified noise does.
        public: File of public samples for the comparison of two releases, or None for the run's held-out rows.
        trials: Number of deletions that the audit makes itself and compares.
        only_before_after: True to run the comparison of two releases only.
    """

    subjects: int = 16
    replays: int = 100_000
    mistake: float = 0.001
    attacks: bool = True
    request: str | None = None
    seed: int | None = None
    public: str | Path | None = None
    trials: int = 50
    only_before_after: bool = False


@dataclass(eq=False)
class Audited:
    """Shared state of an audit.

    `notes` lists what could not be tested.
    """

    run: Run
    reader: RunReader
    engine: Engine
    options: AuditOptions
    progress: AuditProgress
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed = self.options.seed
        self.spec, self.view = Spec.from_mapping(self.reader.spec), RunView(self.reader)
        self.normals: NormalSource = SystemNormals() if seed is None else keyed_generator(seed, "audit")

    def data(self) -> Any:
        """Return the clients' data in the order of the run's clients, or None if they are not available."""
        if self.spec.data.name == PYTHON:
            return None
        read = clients_from_spec(self.spec, tested=False)
        return arranged_clients(self.reader, read).complete()

    def held_out(self) -> tuple[Any, Any] | None:
        """Return the held-out samples, or None if there are none.

        If their file cannot be read, add a note and return None.
        """
        try:
            rows = held_out_rows(self.spec)
        except SifuError as error:
            note = f"attacks that need held-out rows were left out: {error}"
            self.notes += [] if note in self.notes else [note]
            return None
        return None if rows is None else (rows.x, rows.y)

    def as_released(self, model: Vector, node: int | None = None, normals: NormalSource | None = None) -> Vector:
        """Return the released form of a model.

        Without `release.noise`, the model is released unchanged. With it, the stored release is returned if `node` is
        the released node, and otherwise a copy with new noise.

        Args:
            model: Model stored in the run folder.
            node: Node of the model, or None if the run has no such node.
            normals: Source of fresh noise, by default the audit's source.
        """
        noise_std = self.spec.release.noise
        if noise_std == 0.0:
            return model
        if node is not None and node == released_node(self.reader):
            return released_model(self.reader)
        return with_noise(model, noise_std, normals or self.normals)
