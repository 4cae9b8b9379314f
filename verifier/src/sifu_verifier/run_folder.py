"""A run folder: its tables, and what replaying the ledger finds out about them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from sifu_verifier.canonical import Row, canonical, same
from sifu_verifier.regularity import regularity


def with_terms(request: Row) -> Row:
    """A row of `requests` with its terms as further keys, lists as canonical JSON (section 4)."""
    terms = json.loads(request["terms"])
    lists = {name: canonical(terms[name]) for name in ("clients", "records")}
    return terms | lists | {"asked_method": terms["method"], "asked_level": terms["level"]} | request


class RunFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        wal = folder / "run.db-wal"
        # Without a log to read, immutable=1 keeps SQLite from leaving -wal and -shm files behind.
        mode = "mode=ro" if wal.exists() and wal.stat().st_size else "mode=ro&immutable=1"
        db = sqlite3.connect(f"{(folder / 'run.db').resolve().as_uri()}?{mode}", uri=True)
        db.row_factory = sqlite3.Row
        self.agree("application_id", db.execute("PRAGMA application_id").fetchone()[0], 20976)
        self.agree("user_version", db.execute("PRAGMA user_version").fetchone()[0], 10)
        others = db.execute("SELECT type, name FROM sqlite_schema WHERE sql IS NOT NULL AND type != 'table'")
        self.agree("views, triggers and indices", [tuple(row) for row in others], [("view", "weights")])
        names = [row["name"] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        self.tables = {t: [dict(r) for r in db.execute(f"SELECT * FROM {t} ORDER BY 1, 2")] for t in names}
        db.close()
        self.entries = {row["key"]: row["value"] for row in self.tables["run"]}
        self.sealed = {row["seq"]: row for row in self.tables["sealed"]}
        self.spec, self.facts = json.loads(self.entries["spec"]), json.loads(self.entries["facts"])
        self.nodes = {row["node"]: row for row in self.tables["nodes"]}
        self.clients = {row["client"]: row for row in self.tables["clients"]}
        self.rounds: dict[int, dict[int, Row]] = {node: {} for node in self.nodes}
        for row in self.tables["participation"]:
            self.rounds.setdefault(row["node"], {})[row["client"]] = row
        self.grams = {row["node"]: np.frombuffer(row["matrix"], "<f8") for row in self.tables["grams"]}
        self.rates = {int(node): rate for node, rate in json.loads(self.entries.get("local_rates", "{}")).items()}
        self.requests = {row["request"]: with_terms(row) for row in self.tables["requests"]}
        self.subjects = {row["subject"]: json.loads(row["clients"]) for row in self.tables["subjects"]}
        purges = [json.loads(row["payload"]) for row in self.tables["events"] if row["kind"] == "purged"]
        erasing = [payload for payload in purges if payload.get("figures_erased")]  # section 6d
        self.erased_up_to = erasing[-1]["kept_rows"]["last"] if erasing else -1
        self.erased = {c for i in (erasing[-1]["subjects"] if erasing else []) for c in self.subjects.get(i, [])}
        by_choice = [event for event in self.tables["events"] if event["kind"] == "purged"
                   and "all_figures" in json.loads(event["payload"])]  # fmt: skip
        self.wish = by_choice[-1]["seq"] if by_choice else 0  # section 6e: the last purge of all figures
        self.wished: Row = json.loads(by_choice[-1]["payload"])["all_figures"] if by_choice else {"requests": []}
        self.not_recomputed = {
            name: event["time"]
            for event in reversed(by_choice)
            for name in json.loads(event["payload"])["all_figures"]["requests"]
        }
        assumed = self.spec["regularity"]["kind"] == "assumed"
        self.regular = {
            first: {
                c: (1.0, 0.0)
                if c in self.erased and not assumed
                else regularity(row, self.facts | {"local_rate": rate}, self.spec)
                for c, row in self.clients.items()
            }
            for first, rate in {0: self.facts["local_rate"], **self.rates}.items()
        }
        self.owner = {row["subject"]: self.requests[row["request"]] for row in self.tables["subjects"]}
        self.rolled: dict[str, Row] = {}  # of each request: its event 'rolled back', and tip and models just before
        self.done: dict[str, Row] = {}  # of each request: its event 'request done'
        self.filed: dict[str, str] = {}  # of each request: the digest of its id and terms
        self.committed: dict[str, list[str]] = {}  # of each request for records: commitments to their identities
        self.approved: dict[str, list[str]] = {}  # of each request: who filed it, then who approved it
        self.steps: dict[str, int] = {}  # of each request: how far it got
        self.keys: list[tuple[int, str]] = []  # the operator's keys with the event that named each
        self.restored: list[Row] = []  # each event 'restored' with what there was just before
        self.purges: list[Row] = []  # each event 'purged' with what there was just before
        self.written: list[Row] = []  # every file of updates that was ever recorded
        self.solves: dict[int, Row] = {}  # of each node that is the head of a sum: what was recorded of its solve
        self.solvers: dict[
            int, tuple[int, set[str]]
        ] = {}  # of each: how many clients then, the names of those left out
        self.at_solve: dict[int, tuple[list[int], list[int]]] = {}  # models there were, clients forgotten
        self.groups = {
            row["node"]: row | {"members": json.loads(row["members"])} for row in self.tables["group_models"]
        }
        self.merged: list[Row] = []  # each event that may merge groups with what there was just before
        self.releases: list[Row] = []  # each event 'released', what it sealed included
        self.rejoins: str | None = None  # the request whose client is to join again next
        self.rejoined: dict[str, int] = {}  # of each request for records: the client that joined again
        self.apart: list[Row] = []  # each event 'group rounds' with what there was just before

    def check(self, good: Any, message: str) -> bool:
        if not good:
            self.problems.append(message)
        return bool(good)

    def agree(self, what: str, recorded: Any, computed: Any) -> None:
        self.check(same(recorded, computed), f"{what}: recorded {recorded!r}, computed {computed!r}")
