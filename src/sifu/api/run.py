"""A run from Python: train, plan, request, forget, verify, export, and look after it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.api.backups import back_up
from sifu.api.engine_check import as_model
from sifu.api.exported_models import describe, description_path, networks_bytes, networks_path
from sifu.api.key_rotation import rotate_key, vouch
from sifu.api.onnx_graph import ONNX_ENDING, onnx_bytes
from sifu.api.run_requests import RunRequests
from sifu.api.status import RunStatus, status_of
from sifu.core.identity import check_names
from sifu.core.spec import RIDGE
from sifu.errors import InputError, RunDamagedError, SifuWarning
from sifu.requests.erasure import Purge, purge
from sifu.requests.what_remains import note_export
from sifu.requests.worker import Worker
from sifu.run.clients_and_engine import PYTHON, way_to_go_on
from sifu.run.closed_form_round import RecordedSolve
from sifu.run.recorded_data import clients_of_file, files_of_joined
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback
from sifu.store import keys
from sifu.store.checkpoints import keys_of
from sifu.store.clock import AUTHORITY, check_authority, fetch_timestamps, timestamp_authority
from sifu.store.files import write_atomically
from sifu.store.new_event import NewEvent
from sifu.store.reader import JOINED, RunReader
from sifu.store.remainders import names_now, plain_name
from sifu.theory.facts import BATCH_NORMALISATION, ClientProfile
from sifu.verify.integrity import blaming_damage, check_integrity
from sifu.verify.outside_record import anchor_of
from sifu.verify.verification import Verification, verify_run

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NamedKey:
    """A public key of the operator, and the event that named it."""

    key: str
    since: int


@dataclass(frozen=True)
class OperatorKeys:
    """The operator's public keys in the order they were named, and whether the private one is encrypted at rest."""

    public_keys: tuple[NamedKey, ...]
    encrypted: bool

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)


class Run(RunRequests):
    """A run folder and, where training is needed, the engine that goes with it."""

    def train(self, progress: ProgressCallback | None = None) -> Run:
        """Continue the first training until its stop rule holds; nothing to do if it already does.

        `progress` is called after every round, here and in `rebuild` and `join`.
        """
        engine = self.engine()
        with self.writer() as writer:
            if writer.phase == "training":
                check_integrity(writer)
                worker = Worker(writer, engine, progress)
                worker.inbox.take_in()
                worker.train()
                self.measure_held_out(writer)
        return self

    def rebuild(self, progress: ProgressCallback | None = None) -> int:
        """Build groups again whose models requests erased; returns how many there were. For `progress` see `train`."""
        engine = self.engine()
        with self.writer() as writer:
            check_integrity(writer)
            if writer.phase != "ready":
                raise InputError(f"the run is still {writer.phase}: finish it first, then rebuild its groups")
            return Worker(writer, engine, progress).rebuild_groups()

    def join(
        self, progress: ProgressCallback | None = None, *, file: str | Path | None = None, name: str | None = None
    ) -> list[str]:
        """Let clients join; a head in closed form is solved again with them.

        Open the run with everyone: `sifu.open_run(folder, clients=[*known, *new]).join()`, or give a .npz `file` with x
        and y, and the client's `name` unless an array client in it names several. The run remembers where the file
        lies. Each newcomer sends its statistics once. Returns their names; after an interruption the same call
        continues. For `progress` see `train`.
        """
        spec = self.spec
        if spec.model.kind != RIDGE:
            raise InputError(
                f"clients join a head in closed form (model.kind = {RIDGE!r}) this way; this run has "
                f"{spec.model.kind!r}. On Flower clients join while the server runs"
            )
        source = {} if file is None else {"file": str(Path(file).resolve())}
        if file is not None:
            with self.reader() as reader:
                self._newcomers = not_there_yet(reader, clients_of_file(spec, Path(file), name), source["file"])
            self._engine = None
        engine = self.engine(newcomers=True)
        with self.writer() as writer:
            check_integrity(writer)
            if writer.phase != "ready":
                raise InputError(f"the run is still {writer.phase}: finish it first, then let clients join")
            count = len(writer.clients())
            new = engine.clients[count:]
            check_names([profile.name for profile in new])
            try:
                self._refuse_forgotten_samples(RunView(writer), new)
                held = RecordedSolve(engine, writer, RunView(writer)).check_newcomers()
            except InputError:
                self._engine, self._newcomers = None, ()
                raise
            for client, profile in enumerate(new, start=count):
                payload, digest = {"client": profile.name} | source, self._sample_digest_of(client)
                writer.record(NewEvent(JOINED, payload, joined=profile, joined_digest=digest))
            self._newcomers = ()
            solve = RecordedSolve(engine, writer, RunView(writer))
            solve.held = held
            if solve.missing():  # not for those who asked to be forgotten: their request solves without them
                solve.run("joining", progress)
                solve.note_standing()
                self.measure_held_out(writer)
        return [profile.name for profile in new]

    def _refuse_forgotten_samples(self, view: RunView, new: Sequence[ClientProfile]) -> None:
        """Refuse newcomers that bring the samples of a client that was forgotten.

        Of the forgotten the run keeps nothing to compare with. Where the source of the data still has what they had, it
        is compared whole: some of their samples among others are not recognised, and certificates say so.
        """
        names = {self._sample_digest_of(client): plain_name(view.reader, client) for client in sorted(view.forgotten)}
        names.pop(None, None)
        for client, profile in enumerate(new, start=len(view.clients)):
            forgotten = names.get(self._sample_digest_of(client))
            if forgotten is not None:
                raise InputError(
                    f"{profile.name} brings the samples of {forgotten}, which was forgotten: the model would be the "
                    "old one again, and the certificate would be worth nothing. Nothing was changed"
                )

    def status(self) -> RunStatus:
        """Clients, rounds, Psi, kept models and requests."""
        with self.view() as view:
            return status_of(view)

    def verify(
        self,
        public_key: str | None = None,
        anchor: str | None = None,
        witnesses: Sequence[str | Path] = (),
        authority: str | Path | None = None,
    ) -> Verification:
        """Recompute every claim of the run from its recorded scalars, offline.

        The ledger must be signed with `public_key` where one is given. An `anchor`, and the checkpoints in files that
        `witnesses` kept, must be in the chain; timestamps must be signed by the `authority` whose certificates a PEM
        file holds.
        """
        return verify_run(self.folder, public_key, anchor, witnesses, authority)

    def timestamp(self, authority: str | None = None) -> list[str]:
        """Fetch the RFC 3161 timestamps that are missing; returns what they are of.

        From the `authority` at this address, or from the one that SIFU_TIMESTAMP names.
        """
        address = check_authority(authority) if authority else timestamp_authority()
        if address is None:
            raise InputError(f"name a timestamp authority: sifu --timestamp URL timestamp DIR, or set {AUTHORITY}")
        with self.writer() as writer:
            check_integrity(writer)
            came, missing, reason = fetch_timestamps(writer, address)
        if missing:
            raise InputError(f"{address} gave no timestamp ({reason}): nothing was lost, try again later")
        return came

    def export(self, path: str | Path) -> Path:
        """Write the current released model as safetensors, and its description to a second file with .json added.

        A path that ends in .onnx becomes an ONNX file, which holds the same description. Where groups tune the network,
        what they tuned is in a third file, with .networks added.
        """
        target = Path(path)
        if target.is_dir():
            raise InputError(
                f"{target} is a folder: name the file to write, for example {target / 'model.safetensors'}"
            )
        with self.reader() as reader:
            content = self._released(reader)
            if not target.parent.is_dir():
                raise InputError(f"there is no folder {target.parent} to write {target.name} into")
            with blaming_damage(reader):
                networks = networks_bytes(reader) if self.spec.is_tuned else None
            description = describe(reader, content, networks, self._shape_given())
            self._warn_of_batches(reader)
            if target.suffix.lower() == ONNX_ENDING:
                own = as_model(self._own_model) if self.spec.model.kind == PYTHON else None
                write_atomically(target, onnx_bytes(description, content, networks, own))
            else:
                write_atomically(target, content)
                if networks is not None:
                    write_atomically(networks_path(target), networks)
                write_atomically(description_path(target), json.dumps(description, indent=1).encode() + b"\n")
            note_export(self.folder, reader.tip, target)
        return target

    def model(self) -> nn.Module:
        """The current released model as a torch module: `model(x)` are the scores of raw samples.

        A named kind is a `LoadedModel`. A module of your own is made by the factory that `open_run(..., model=...)` was
        given, and computes as the recorded accuracy was: batch normalisation takes the statistics of the current batch.
        """
        from safetensors.numpy import load

        with self.reader() as reader:
            content = self._released(reader)
            description = describe(reader, content)
            if description["model"] != PYTHON:
                from sifu.api.loaded_model import LoadedModel

                networks = load(networks_bytes(reader)) if self.spec.is_tuned else None
                return LoadedModel(load(content), description, networks)
            own = as_model(self._own_model)
            if own is None:
                raise InputError(
                    "this run was made from Python with its own model: open it with the function that makes it, "
                    "sifu.open_run(folder, model=...)"
                )
            from sifu.engines.sim.models import evaluated_module

            return evaluated_module(own, reader.layout, load(content))

    def _released(self, reader: RunReader) -> bytes:
        """The safetensors bytes of the current model, which must be a released one."""
        if reader.phase not in ("training", "retraining", "ready"):
            raise RunDamagedError(f"{self.folder} is damaged: its phase is {reader.phase!r}")
        if reader.phase != "ready":
            way = way_to_go_on(self.spec, reader.phase)
            raise InputError(
                f"the run is still {reader.phase}: its current model is not a released one. Finish it first ({way})"
            )
        with blaming_damage(reader):
            return reader.model_content(reader.tip)

    def _shape_given(self) -> tuple[int, ...] | None:
        """The shape of one sample where a program handed the clients over; none of bytes, which feature maps divide."""
        if self._own_clients is None or self.spec.data.columns:
            return None
        samples = np.asarray(self._own_clients()[0].x)
        return None if samples.dtype == np.uint8 and self.spec.features.kind != "none" else samples.shape[1:]

    def _warn_of_batches(self, reader: RunReader) -> None:
        """Batch normalisation makes the scores of a sample depend on those it is predicted with."""
        if self.spec.model.kind == PYTHON and BATCH_NORMALISATION in reader.facts["outside"]:
            warnings.warn(
                "the module has batch normalisation, whose running statistics no round trains: what is exported takes "
                "the statistics of the batch, as the recorded accuracy does. Predict many samples at once, and load "
                "the parameters with sifu.load_model(..., module=...), not into a module in eval mode",
                SifuWarning,
                stacklevel=3,
            )

    def anchor(self) -> str:
        """`SEQ:HASH` of the last event, to be published or kept elsewhere."""
        with self.reader() as reader:
            return anchor_of(reader)

    def keys(self) -> OperatorKeys:
        """The operator's public keys with the event each was named by, and whether the private one is encrypted."""
        with self.reader() as reader:
            named = tuple(NamedKey(key, seq) for seq, key in keys_of(reader))
        return OperatorKeys(named, keys.is_encrypted(self.folder))

    def rotate_key(self, brought: str | Path | None = None) -> str:
        """Replace the operator's key by a new one or the one `brought` in a PEM file; returns the new public key."""
        with self.writer() as writer:
            return rotate_key(writer, None if brought is None else Path(brought))

    def sign(self, *, clock: bool = False) -> tuple[int, int] | None:
        """Vouch for events that were written without the operator's key, and for a run whose file `head` is gone.

        With `clock`, say that the clock is right now although it contradicts the last event.
        """
        with self.writer(vouching=True) as writer:
            check_integrity(writer)
            return vouch(writer, clock=clock)

    def backup(self, file: str | Path) -> str:
        """Write the whole run into one file; returns the anchor of that state, to be kept elsewhere."""
        with self.writer() as writer:
            check_integrity(writer)
            return back_up(writer, Path(file))

    def purge(self) -> Purge:
        """Permanently erase what still holds an uncovered part of anyone forgotten; says what remains and why."""
        with self.writer() as writer:
            check_integrity(writer)
            return purge(writer)


def not_there_yet(reader: RunReader, clients: Sequence[Any], file: str) -> tuple[Any, ...]:
    """Those of a file's clients that have not joined from it yet; forgotten clients cannot rejoin."""
    view, files, now = RunView(reader), files_of_joined(reader), names_now(reader)
    newcomers = []
    for client in clients:
        index = view.index_of.get(now.get(client.name, client.name))
        if index is not None and index in view.forgotten | view.waiting:
            raise InputError(
                f"{client.name} asked to be forgotten: taking it back would void its certificate. Samples that it "
                "never had in this run may join under another name"
            )
        if index is None:
            newcomers.append(client)
        elif files.get(client.name) != file:  # the same command again after an interruption
            raise InputError(
                f"{client.name} sent its statistics already: records that it gained join under another name, and "
                "records that it lost go with sifu forget --client NAME --records FILE"
            )
    return tuple(newcomers)
