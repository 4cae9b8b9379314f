"""The folder of a run that is being created: what may lie there, what is cleared away, and what is recorded first.

The database appears under its name only when it is whole; until then the folder is not a run.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sifu.core.layout import ModelLayout, Vector
from sifu.core.ledger import LOCAL_RATES
from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.checkpoints import HEAD_FILE
from sifu.store.clock import TIMESTAMPS
from sifu.store.database import CLIENTS_FILE, DATABASE, rest_of_a_run
from sifu.store.files import CERTIFICATES
from sifu.store.history_tables import clients_digest
from sifu.store.keys import KEY_FILE
from sifu.store.lock import LOCK_FILE
from sifu.store.reader import GROUP_KEY, TUNED_LAYOUT
from sifu.store.sealed import SALTS_FILE
from sifu.store.statistics_files import STATISTICS, UPDATES
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.merging import KEY_BYTES

STAGING = ".new"
CREATING = ".creating"
FOLDERS = ("models", CERTIFICATES, UPDATES, STATISTICS, TIMESTAMPS)
_OWN_FILES = {LOCK_FILE, *FOLDERS, KEY_FILE, HEAD_FILE, SALTS_FILE, STAGING, CREATING} | {
    files.TEMPORARY_PREFIX + name for name in (KEY_FILE, HEAD_FILE, SALTS_FILE)
}


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything but the rest of a creation that was cut short."""
    # Only what a creation of ours left behind may be cleared away: its marker was written first.
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    allowed = {CLIENTS_FILE} | (_OWN_FILES if CREATING in present else {LOCK_FILE})
    if rest_of_a_run(folder):
        raise RunDamagedError(
            f"{folder} holds the rest of a run whose {DATABASE} is gone: put it back from a backup (sifu restore), "
            "or choose another folder. Nothing was changed"
        )
    if (folder.exists() and not folder.is_dir()) or present - allowed:
        raise InputError(f"{folder} exists and is not empty: choose another folder for the run")


def clear_unfinished(folder: Path) -> None:
    """Remove what an interrupted creation left; a folder without a database is not a run yet."""
    for name in _OWN_FILES - {LOCK_FILE, CREATING}:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finish_creation(folder: Path) -> None:
    """Take away what a creation needs only until the database has its name."""
    if (folder / CREATING).exists() or (folder / STAGING).exists():
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        files.sync_folder(folder)
        (folder / CREATING).unlink(missing_ok=True)
        files.sync_folder(folder)


@dataclass(frozen=True)
class NewRun:
    """What a run begins with.

    `sample_digests` are those of each client's samples where they are available (`store.sealed`); `tuned_layout` is
    that of the models of groups, where they tune a network.
    """

    given_spec: Mapping[str, Any]
    spec: Mapping[str, Any]
    layout: ModelLayout
    clients: Sequence[ClientProfile]
    facts: TrainingFacts
    versions: Mapping[str, str]
    initial_model: Vector
    sample_digests: Sequence[str] = ()
    tuned_layout: ModelLayout | None = None

    def values(self, public_key: str, salt: str) -> dict[str, Any]:
        """What the first event says of the run; `salt` is that of the digest of clients."""
        facts, spec = self.facts, dict(self.spec)
        recorded_facts = asdict(facts) | {"participation": str(facts.participation), "outside": list(facts.outside)}
        if self.sealed_rate():
            recorded_facts["local_rate"], spec["local"] = 0.0, {**spec["local"], "rate": "auto"}
        values = {
            "run": secrets.token_hex(8),
            "asked": dict(self.given_spec),
            "spec": spec,
            "layout": _described(self.layout),
            "facts": recorded_facts,
            "versions": dict(self.versions),
            "public_key": public_key,
            "client_count": str(len(self.clients)),
            "clients_digest": clients_digest(self.clients, salt),
            "tip": "0",
            "phase": "training",
        }
        if spec["groups"]["count"]:
            values[GROUP_KEY] = _group_key(spec).hex()
        if self.tuned_layout is not None:
            values[TUNED_LAYOUT] = _described(self.tuned_layout)
        return values

    def sealed_rate(self) -> dict[str, Any]:
        """An automatic local rate, under its key; it follows from everyone's data, so it is sealed, not in the open."""
        automatic = self.given_spec["local"]["rate"] == "auto" and self.facts.local_rate > 0.0
        return {LOCAL_RATES: {"0": self.facts.local_rate}} if automatic else {}


def _described(layout: ModelLayout) -> dict[str, Any]:
    return {
        "names": list(layout.names),
        "shapes": [list(shape) for shape in layout.shapes],
        "dtype": layout.dtype,
    }


def _group_key(spec: Mapping[str, Any]) -> bytes:
    """The key of the hash that puts clients into groups: of the seed where noise is too, for experiments."""
    if spec["privacy"]["noise"] == "seeded":
        return hashlib.sha256(f"{spec['seed']}:groups".encode()).digest()
    return secrets.token_bytes(KEY_BYTES)
