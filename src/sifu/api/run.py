"""A run from Python: train, plan, request, forget, verify, export and maintain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sifu.api.evaluation import Evaluated, evaluate
from sifu.api.history import HistoryRow, history_of
from sifu.api.progress import Progress, progress_of
from sifu.api.request_calls import RequestCalls
from sifu.api.run_requests import Updated, bring_up_to_date
from sifu.api.safekeeping import back_up, rotate_key
from sifu.api.status import RunStatus, status_of
from sifu.checking.integrity import check_integrity
from sifu.checking.verification import Verification, verify_run
from sifu.choices import MeasuredOn
from sifu.core.ledger import Event
from sifu.data.table import reading_once
from sifu.errors import InputError
from sifu.export.exported_models import export_model, released_module
from sifu.requests.erasure import Purge, purge
from sifu.requests.worker import Worker
from sifu.run.joining import let_join
from sifu.run.recorded_data import OWNER, clients_of_file, not_there_yet
from sifu.run.training import ProgressCallback
from sifu.store import keys
from sifu.store.keys import keys_of
from sifu.store.seen_heads import check_seen

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NamedKey:
    """A public key of the operator, and the event that introduced it."""

    key: str
    since: int


@dataclass(frozen=True)
class OperatorKeys:
    """The operator's public keys in order of introduction, and whether the private key is encrypted at rest."""

    public_keys: tuple[NamedKey, ...]
    encrypted: bool

    def to_mapping(self) -> dict[str, Any]:
        """Return the keys as plain values, ready for JSON."""
        return asdict(self)


class Run(RequestCalls):
    """A run folder and, if training is needed, its engine; `train` and `open_run` return one.

    Args:
        folder: The run folder.
        make_engine: Function that builds the engine, or None for a run that is only read.
        noise: Source of noise; only for a run that was made with one.

    Raises:
        InputError: If the folder holds no run.
    """

    def train(self, progress: ProgressCallback | None = None) -> Run:
        """Continue the first training until its stop rule holds; do nothing if it already does.

        Args:
            progress: Callback invoked after each round.

        Returns:
            This object, so that calls can be chained.
        """
        engine = self.engine()
        with self.writer() as writer:
            if writer.phase == "training":
                check_integrity(writer)
                worker = Worker(writer, engine, progress, engines=self._engines)
                worker.inbox.ingest()
                worker.train()
                worker.execute_records()
                self.measure_held_out(writer)
        return self

    def evaluate(self, on: MeasuredOn | None = None) -> Evaluated:
        """Evaluate the current model and record its figures, which `status` then shows.

        Training evaluates its model itself. A request does not if a network computes the features of its head, because
        computing them would take far longer than the request.

        Args:
            on: "held-out" for held-out rows, or "training" for the active clients' training data. The default is
                held-out rows if there are any.

        Raises:
            InputError: If there are no such rows, or they cannot be used.
        """
        with self._checked_writer("evaluate its model") as writer:
            return evaluate(writer, self._engines, on)

    def update(self, progress: ProgressCallback | None = None) -> Updated:
        """Do what the run owes: bring the released model up to date, and rebuild the groups that requests erased.

        The model contains all clients except forgotten clients and clients that a waiting, approved request names.
        Approved requests for records are executed first. A closed-form head is solved again if other clients should be
        in it. Requests to forget clients are not executed; use `forget`.

        Args:
            progress: Callback invoked after each round.
        """
        with self._checked_writer("update its model") as writer:
            return bring_up_to_date(writer, self._engines, progress)

    @reading_once()
    def join(
        self, progress: ProgressCallback | None = None, *, file: str | Path | None = None, name: str | None = None
    ) -> list[str]:
        """Add clients to a run with a closed-form head, and solve the head again with them.

        Open the run with all clients, `sifu.open_run(folder, clients=[*known, *new]).join()`, or give a `file`. Each
        newcomer sends its statistics once. After an interruption, the same call continues.

        Args:
            progress: Callback that receives the progress of the solve.
            file: File in the format of the run's training data: a CSV or Parquet table with the same columns in any
                order, or an .npz file with x and y. The run stores its path.
            name: Name of the client, unless a column or array of the file names it.

        Returns:
            The names of the new clients.
        """
        spec = self.spec
        spec.regime.check_joining()
        source = {} if file is None else {"file": str(Path(file).resolve())} | ({OWNER: name} if name else {})
        if file is not None:
            with self.reader() as reader:
                newcomers = not_there_yet(reader, clients_of_file(spec, Path(file), name), source["file"])
            self._engines.expect(newcomers)
        engine = self.engine(newcomers=True)
        with self._checked_writer("let clients join") as writer:
            try:
                names = let_join(writer, engine, self._engines.digest_of, source, progress)
            except InputError:
                self._engines.expect(())
                raise
            self._engines.newcomers = ()
            Worker(writer, engine, progress, engines=self._engines).execute_records()
            self.measure_held_out(writer)
        return names

    def history(self) -> list[HistoryRow]:
        """Return accuracy and loss on training data of every evaluation, in order."""
        with self.snapshot() as reader:
            return history_of(reader)

    def status(self) -> RunStatus:
        """Return clients, rounds, Psi, kept models and requests."""
        with self.view() as view:
            return status_of(view)

    def progress(self) -> Progress:
        """Return the progress of the current work and the number of waiting requests; faster than `status`."""
        with self.snapshot() as reader:
            check_seen(reader)
            return progress_of(reader)

    def trail(self, kind: str = "", most: int = 100) -> tuple[list[Event], int]:
        """Return the latest events of the record, the last one first, and the number of all events of these kinds.

        Args:
            kind: Prefix of the event kinds to include, such as "request", or all if empty.
            most: Maximum number of events.
        """
        with self.snapshot() as reader:
            events = [event for event in reversed(reader.events()) if event.kind.startswith(kind)]
        return events[:most], len(events)

    def verify(
        self,
        public_key: str | None = None,
        heads: Sequence[str | Path] = (),
    ) -> Verification:
        """Recompute the claims of the run from its record and its stored models, offline.

        Args:
            public_key: The operator's public key (hex) that the ledger must be signed with, if it is known.
            heads: Files of signed heads kept by witnesses, or certificates; each head must be in the chain.
        """
        return verify_run(self.folder, public_key, heads)

    def export(self, path: str | Path) -> Path:
        """Write the current released model as safetensors, and its description to a second file with .json added.

        Args:
            path: File to write. If its name ends in .onnx, it becomes an ONNX file, which holds the same description.
        """
        with self.reader() as reader:
            return export_model(reader, Path(path), self._engines)

    def model(self) -> nn.Module:
        """Return the current released model as a torch module: `model(x)` returns the scores of raw samples.

        A built-in model is returned as a `LoadedModel`. Your own module is made by the factory passed
        to `open_run(..., model=...)`.
        """
        with self.reader() as reader:
            return released_module(reader, self._engines.model)

    def keys(self) -> OperatorKeys:
        """Return the operator's public keys with their events, and whether the private key is encrypted."""
        with self.reader() as reader:
            named = tuple(NamedKey(key, seq) for seq, key in keys_of(reader))
        return OperatorKeys(named, keys.is_encrypted(self.folder))

    def rotate_key(self, brought: str | Path | None = None) -> str:
        """Replace the operator's key by a new one, or by the key in the PEM file `brought`; return its public key."""
        with self.writer() as writer:
            return rotate_key(writer, None if brought is None else Path(brought))

    def backup(self, file: str | Path) -> str:
        """Write the whole run into one `file`; return `SEQ:HASH` of the last event in it."""
        with self._checked_writer() as writer:
            return back_up(writer, Path(file))

    def purge(self) -> Purge:
        """Permanently erase models that forgotten clients still influence; return what remains and why."""
        with self._checked_writer() as writer:
            return purge(writer)
