"""A run folder: its tables, and the results of replaying its ledger."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from sifu_verifier.canonical import Row, canonical, same
from sifu_verifier.regularity import expansion


def with_terms(request: Row) -> Row:
    """Return a row of `requests` with its terms as further keys, lists as canonical JSON (section 4)."""
    terms = json.loads(request["terms"])
    lists = {name: canonical(terms[name]) for name in ("clients", "records")}
    return terms | lists | {"asked_method": terms["method"], "asked_level": terms["level"]} | request


class RunFolder:
    """The tables of a run folder, the results of the replay, and the problems found so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        wal = folder / "run.db-wal"
        # Without a log to read, immutable=1 keeps SQLite from leaving -wal and -shm files behind.
        mode = "mode=ro" if wal.exists() and wal.stat().st_size else "mode=ro&immutable=1"
        db = sqlite3.connect(f"{(folder / 'run.db').resolve().as_uri()}?{mode}", uri=True)
        db.row_factory = sqlite3.Row
        self.agree("application_id", db.execute("PRAGMA application_id").fetchone()[0], 20976)
        self.agree("user_version", db.execute("PRAGMA user_version").fetchone()[0], 1)
        others = db.execute("SELECT type, name FROM sqlite_schema WHERE sql IS NOT NULL AND type != 'table'")
        self.agree("views, triggers and indices", [tuple(row) for row in others], [("view", "weights")])
        names = [row["name"] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        self.tables = {t: [dict(r) for r in db.execute(f"SELECT * FROM {t} ORDER BY 1, 2")] for t in names}
        db.close()
        self.entries = {row["key"]: row["value"] for row in self.tables["run"]}
        self.spec, self.facts = json.loads(self.entries["spec"]), json.loads(self.entries["facts"])
        self.noise_source = "given" if self.entries.get("noise") else "system"
        self.nodes = {row["node"]: row for row in self.tables["nodes"]}
        self.clients = {row["client"]: row for row in self.tables["clients"]}
        self.rounds: dict[int, dict[int, Row]] = {node: {} for node in self.nodes}
        for row in self.tables["participation"]:
            self.rounds.setdefault(row["node"], {})[row["client"]] = row
        self.requests = {row["request"]: with_terms(row) for row in self.tables["requests"]}
        self.subjects = {row["subject"]: json.loads(row["clients"]) for row in self.tables["subjects"]}
        self.regular = {c: expansion(row, self.spec) for c, row in self.clients.items()}
        self.owner = {row["subject"]: self.requests[row["request"]] for row in self.tables["subjects"]}
        self.rolled: dict[str, Row] = {}  # each request's event 'rolled back', with the tip and models before it
        self.done: dict[str, Row] = {}  # each request's event 'request done'
        self.filed: dict[str, str] = {}  # digest of each request's id and terms
        self.committed: dict[str, list[str]] = {}  # commitments to the identities of each request's records
        self.approved: dict[str, list[str]] = {}  # the person who filed each request, then its approvers
        self.steps: dict[str, int] = {}  # number of each request's last step
        self.keys: list[tuple[int, str]] = []  # the operator's keys, each after the number of the event that named it
        self.restored: list[Row] = []  # events 'restored', each with the state before it
        self.purges: list[Row] = []  # events 'purged', each with the state before it
        self.solves: dict[int, Row] = {}  # record of the solve of each solved node
        self.solvers: dict[int, tuple[int, set[str]]] = {}  # by solved node: number of clients, excluded clients
        self.groups = {
            row["node"]: row | {"members": json.loads(row["members"])} for row in self.tables["group_models"]
        }
        self.merged: list[Row] = []  # events that may merge groups, each with the state before it
        self.releases: list[Row] = []  # events 'released'
        self.rejoins: str | None = None  # request whose client has to rejoin next
        self.rejoined: dict[str, int] = {}  # index of the client that rejoined for each request for records
        self.unused: set[str] = set()  # names under which clients rejoined for a request that was undone
        self.separate: list[Row] = []  # events 'group rounds', each with the state before it

    def files_in(self, folder: str) -> list[str]:
        """Return the sorted names in a folder of the run; a missing folder, as in a backup, is empty."""
        return sorted(path.name for path in (self.folder / folder).glob("*"))

    def check(self, good: Any, message: str) -> bool:
        """Add a problem with this message unless `good` is true; return whether it is."""
        if not good:
            self.problems.append(message)
        return bool(good)

    def agree(self, what: str, recorded: Any, computed: Any) -> None:
        """Add a problem unless the recorded value equals the computed one."""
        self.check(same(recorded, computed), f"{what}: recorded {recorded!r}, computed {computed!r}")
