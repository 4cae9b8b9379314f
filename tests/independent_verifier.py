"""A second opinion on a run folder, written from docs/store.md alone. It imports nothing of sifu.

verify(folder) returns a list of problems; an empty list says that the ledger, the tables, the files and the
certificates agree with each other and with what this program computes. It cannot say that the operator
wrote down the truth. On the command line: python independent_verifier.py FOLDER...
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import sqlite3
import struct
import sys
import unicodedata
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

Row = dict[str, Any]
EDGE = 1e-12  # a condition that holds by less counts as broken (section 3)
RELATIVE = 1e-9  # how far a recomputation in plain float64 may be off (section 3)
FLOOR = 1e-10  # no smaller delta is stated, but 0 where nothing is to be hidden (section 4)
KINDS = {"initial": 0, "round": 1, "noise": 2, "heuristic": 3, "group": 4, "merge": 5}
REPLAYING = ("fed_eraser", "fed_accum")
REPLAYED = {"run": ["key"], "models": ["node"], "evaluations": ["node", "subset"], "requests": ["request"], "subjects":
            ["subject"], "charges": ["noise_node", "subject"], "comparisons": ["request", "method"],
            "updates": ["file"], "statistics": ["file"], "rejections": ["branch", "round", "number"],
            "group_models": ["node"], "merges": ["node", "grp"]}  # fmt: skip
CONFIDENTIAL = {"psi", "psi_star", "subjects", "earlier_subjects", "models", "node", "noise_node", "final_node",
                "rounds", "erased_nodes", "remaining_nodes", "solve",
                "delta_reached"}  # fmt: skip
ERASABLE = {"sifu", "last", "scratch"}
PROTECTION = {"sifu": "noise", "last": "noise", "scratch": "noise", "noisy_scratch": "noise", "dp": "training noise",
              "closed_form": "noise", "groups": "noise", "fine_tuning": "nothing", "fed_eraser": "nothing",
              "fed_accum": "nothing"}  # fmt: skip
SEALED = {"evaluations", "forgotten_accuracy", "relative_penalty", "auto", "psi_max", "figures_salt", "local_rates"}
RATES_SET_BY = ("run created", "rolled back", "purged")
# Section 6e: what a purge of all figures takes out of the payloads of these kinds of events.
WITH_FIGURES = ("rounds", "evaluation", "rolled back", "request planned", "request done", "restored", "purged")
FIGURES = {"dropped_models", "dropped_updates", "remaining_models", "source_model", "certified_models", "bytes_kept",
           "source_node", "noise_std"}  # fmt: skip
DECIDED = ("request verified", "request planned", "request refused", "request withdrawn")
STEPS = {"request received": 1, "request verified": 2, "request planned": 3, "rolled back": 4, "request done": 5,
         "request refused": 6, "request withdrawn": 6}  # fmt: skip
COPIED = ("calibration", "carried_out", "delta", "epsilon", "final_node", "level", "method", "noise_node", "received",
          "request", "retention", "scope", "unit")  # fmt: skip


def canonical(value: Any) -> str:
    """RFC 8785, from its text."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in keys) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return json.dumps(value, ensure_ascii=False)


def number(value: float) -> str:
    """As ECMAScript writes it (ECMA-262, Number::toString); JSON has no integers beyond 2^53, only float64."""
    if abs(value) < 2**53 and value == int(value):
        return str(int(value))
    sign, digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()
    text, length = "".join(map(str, digits)), len(digits)
    point = length + int(exponent)
    if length <= point <= 21:
        text += "0" * (point - length)
    elif 0 < point <= 21:
        text = f"{text[:point]}.{text[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + text
    else:
        text = text[0] + (f".{text[1:]}" if length > 1 else "") + f"e{point - 1:+d}"
    return "-" * sign + text


def parsed(text: str) -> Any:
    """A payload as section 6 reads it: a whole number of 2^53 or more is a float64 whose digits end in zeros."""
    return json.loads(text, parse_int=lambda digits: int(digits) if abs(int(digits)) < 2**53 else float(digits))


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values; floats need only be near."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if {type(a), type(b)} == {float} or {type(a), type(b)} == {int, float}:
        return a == b or abs(a - b) <= RELATIVE * max(abs(a), abs(b))
    return type(a) is type(b) and a == b


def delta_of(s: float, epsilon: float) -> float:
    """The delta that noise of s times the sensitivity reaches at epsilon (Balle & Wang 2018)."""
    near, far = 1 / (2 * s) - epsilon * s, -1 / (2 * s) - epsilon * s
    return float(ndtr(near) - math.exp(epsilon + log_ndtr(far)))


def multiplier(request: Row) -> float:
    epsilon, delta = request["epsilon"], request["delta"]
    if request["calibration"] == "classical":
        return math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    return brentq(lambda s: math.log(max(delta_of(s, epsilon), 1e-300) / delta), 1e-4, 1e6, xtol=1e-15, rtol=1e-14)


def epsilon_of(mu: float, delta: float) -> float:
    """The epsilon at which a Gaussian mechanism of ratio mu reaches delta."""
    if mu == 0 or delta_of(1 / mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(1 / mu, high) > delta:
        high *= 2
    return brentq(lambda e: math.log(max(delta_of(1 / mu, e), 1e-300) / delta), 0.0, high, xtol=1e-14, rtol=1e-14)


def person(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold()).split())


def charge_of(psi: float, sigma: float) -> float:
    ratio = 0.0 if psi == 0 else psi / sigma if sigma else math.inf
    return ratio * ratio  # not **, which gives up where a product is infinite


def momentum_limit(steps: int, rho: float) -> float:
    """x_max(K, rho): up to this eta beta, heavy ball with K steps from rest does not expand."""
    i = np.arange(steps)
    c = (1 - rho ** (steps - i)) / (1 - rho)  # falls with i: of two, the one of the later step is the smaller
    gap = (1 - rho ** abs(i[:, None] - i)) / (1 - rho)
    matrix = np.minimum.outer(c, c) * (np.maximum.outer(c, c) - gap)
    return 2 / float(np.linalg.eigvalsh(matrix / np.sqrt(np.outer(c, c)))[-1])


def regularity(client: Row, facts: Row, spec: Row) -> tuple[float, float]:
    """P_i and alpha_i. Automatic rates meet the limits with equality, so these are compared with a tolerance."""
    steps, eta, rho = client["local_steps"], facts["local_rate"], facts["momentum"]
    if spec["regularity"]["kind"] == "assumed":
        return spec["regularity"]["factor"] ** steps, 1.0
    beta, mu = client["smoothness"], client["curvature"]
    if beta is None:  # undocumented, as is an unknown mu
        return math.inf, 1.0
    mu, x = -beta if mu is None else mu, eta * beta
    if rho == 0:
        within = x <= 2 * (1 + RELATIVE)
        bound = 1.0 if mu == 0 and within else max(abs(1 - eta * mu), abs(1 - x))
        return bound**steps, steps * (x / 2) / (1 + (steps - 1) * (x / 2)) if mu >= 0 and within else 1.0
    if mu >= 0 and not facts["nesterov"] and x <= momentum_limit(steps, rho) * (1 + RELATIVE):
        return 1.0, 1.0
    a, b = 1.0, 0.0
    for _ in range(steps):
        b = rho * b + beta * a
        a += eta * (beta * a + rho * b if facts["nesterov"] else b)
    return a, 1.0


def tensors_of(data: bytes, number: str) -> dict[str, Any]:
    """The flat tensors of a safetensors file, by name."""
    end = 8 + struct.unpack_from("<Q", data)[0]
    places = {name: entry["data_offsets"] for name, entry in json.loads(data[8:end]).items()
              if name not in ("salts", "__metadata__")}  # fmt: skip
    return {name: np.frombuffer(data[end + a : end + b], number).astype(float) for name, (a, b) in places.items()}


def with_terms(request: Row) -> Row:
    """A row of `requests` with its terms as further keys, lists as canonical JSON (section 4)."""
    terms = json.loads(request["terms"])
    lists = {name: canonical(terms[name]) for name in ("clients", "records")}
    return terms | lists | {"asked_method": terms["method"], "asked_level": terms["level"]} | request


class Verifier:
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
        self.run = {row["key"]: row["value"] for row in self.tables["run"]}
        self.sealed = {row["seq"]: row for row in self.tables["sealed"]}
        self.spec, self.facts = json.loads(self.run["spec"]), json.loads(self.run["facts"])
        self.nodes = {row["node"]: row for row in self.tables["nodes"]}
        self.clients = {row["client"]: row for row in self.tables["clients"]}
        self.rounds: dict[int, dict[int, Row]] = {node: {} for node in self.nodes}
        for row in self.tables["participation"]:
            self.rounds.setdefault(row["node"], {})[row["client"]] = row
        self.grams = {row["node"]: np.frombuffer(row["matrix"], "<f8") for row in self.tables["grams"]}
        self.rates = {int(node): rate for node, rate in json.loads(self.run.get("local_rates", "{}")).items()}
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
        self.rejoins: str | None = None  # the request whose client is to join again next
        self.rejoined: dict[str, int] = {}  # of each request for records: the client that joined again
        self.apart: list[Row] = []  # each event 'group rounds' with what there was just before

    def check(self, good: Any, message: str) -> bool:
        if not good:
            self.problems.append(message)
        return bool(good)

    def agree(self, what: str, recorded: Any, computed: Any) -> None:
        self.check(same(recorded, computed), f"{what}: recorded {recorded!r}, computed {computed!r}")

    def leaves_out(self, request: Row) -> bool:
        """Section 4d: an approved request for clients leaves them out while it waits; so does one that was restored."""
        needed = {"none": 0, "one": 1, "two": 2}[self.spec.get("requests", {}).get("approval", "none")]
        restored = any(request["request"] in moment["payload"]["requests"] for moment in self.restored)
        return not json.loads(request["records"]) and (restored or len(self.approved[request["request"]]) > needed)

    # ---- section 6: the ledger, and the tables that follow from it

    def check_ledger(self) -> None:
        previous, next_node, replayed, dropped = bytes(32), 0, {t: {} for t in REPLAYED}, set()

        def put(table: str, row: Row) -> None:
            key = tuple(row[k] for k in REPLAYED[table])
            replayed[table][key] = replayed[table].get(key, {}) | row

        for number, event in enumerate(self.tables["events"], 1):
            at, text, payload = f"event {event['seq']}", event["payload"], parsed(event["payload"])
            self.agree(f"{at}: number", event["seq"], number)
            self.agree(f"{at}: payload", text, canonical(payload))
            if event["nonce"] or event["seq"] > self.wish:  # section 6e: or it cannot be opened any more
                self.agree(f"{at}: length of the nonce", len(event["nonce"]), 32)
                self.agree(f"{at}: commitment", event["commitment"].hex(), sha256(event["nonce"], text.encode()))
            fields = [str(event["seq"]).encode(), event["time"].encode(), event["kind"].encode(), event["commitment"]]
            self.agree(f"{at}: hash", event["hash"].hex(), sha256(previous, b"\0".join(fields)))
            previous, models, name = event["hash"], replayed["models"], payload.get("request")
            payload = payload | self.unsealed(event, payload)
            moment = {"seq": event["seq"], "payload": payload, "models": {n: row for (n,), row in models.items()}}
            moment["tip"] = replayed["run"].get(("tip",), {}).get("value")
            moment["clients"] = int(replayed["run"].get(("client_count",), {"value": 0})["value"])
            moment["updates"] = dict(replayed["updates"])
            moment["statistics"] = dict(replayed["statistics"])
            moment["requests"] = {n: with_terms(row) for (n,), row in replayed["requests"].items()}
            asking = [row for row in moment["requests"].values() if row["status"] not in ("refused", "withdrawn")]
            if "left_out" in payload or "left_out" in payload.get("solve", {}):  # older events left out all who asked
                begun = [row for row in asking if row["status"] in ("running", "done") or row["request"] == name]
                waiting = [row for row in asking if row not in begun and self.leaves_out(row)]
                names = {client for row in waiting for client in json.loads(row["clients"])}
                numbers = sorted(row["client"] for row in self.clients.values() if row["name"] in names)
                self.agree(f"{at}: left out", payload.get("solve", payload)["left_out"], numbers)
                asking = begun + waiting
            moment["asked"] = [row["clients"] for row in asking]
            self.check_signature(event, payload)
            if "public_key" in payload.get("run", {}):
                self.take_key(event["seq"], payload)
            if event["kind"] == "restored":
                self.restored.append(moment)
            if event["kind"] == "purged":
                self.purges.append(moment | {"known": sorted(i for (i,) in replayed["subjects"])})
            said, recorded = payload.get("run", {}), payload.get("rows", {})
            fixed = {"facts", "spec", "asked", "layout", "tuned_layout", "versions", "run"} & said.keys()
            fixed -= set() if event["seq"] > 1 else said.keys()
            fixed |= {"local_rates"} & said.keys()
            if "local_rates" in payload:
                self.check(event["kind"] in RATES_SET_BY, f"{at}: sets local rates")
                put("run", {"key": "local_rates", "value": canonical(payload["local_rates"])})
            self.check(not fixed, f"{at}: changes {sorted(fixed)}")
            moves = recorded and event["kind"] != "group rounds"
            self.agree(f"{at}: current model", said.get("tip"), str(recorded["last"]) if moves else None)
            moment["kind"], moment["gone"] = event["kind"], [c for s in replayed["subjects"].values()
                                                             for c in json.loads(s["clients"])]  # fmt: skip
            moment["order"] = sum(row.get("request_order") is not None for row in replayed["requests"].values())
            moment["method"] = payload.get("choice", {}).get("method")
            if event["kind"] in ("merged", "rolled back"):
                self.merged.append(moment)
            if event["kind"] == "group rounds":
                self.apart.append(moment)
            if event["kind"] == "rolled back":
                order, noise_node = payload["choice"]["request_order"], payload["choice"]["noise_node"]
                self.agree(f"{at}: order and node", [order, noise_node], [len(self.rolled) + 1, recorded.get("last")])
            for row in payload.get("models", []):
                if row["node"] < recorded.get("first", next_node):
                    self.agree(f"{at}: model", row["digest"], models.get((row["node"],), {}).get("digest"))
            again = {row["node"] for row in payload.get("models", [])} & dropped
            self.check(not again, f"{at}: erased models {sorted(again)} are there again")
            dropped.update(payload.get("dropped_models", []))
            for key, value in said.items():
                put("run", {"key": key, "value": value if isinstance(value, str) else canonical(value)})
            for node in payload.get("dropped_models", []):
                self.check(models.pop((node,), None), f"{at}: drops model {node}, which is not there")
            for row in payload.get("group_models", []):
                put("group_models", row | {"members": canonical(row["members"])})
            for row in payload.get("models", []):
                put("models", {"psi_max": payload.get("psi_max", {}).get(str(row["node"]), 0.0)} | row)
            for table in ("evaluations", "rejections", "merges"):
                for row in payload.get(table, []):
                    put(table, row)
            for file in payload.get("dropped_updates", []):
                self.check(replayed["updates"].pop((file,), None), f"{at}: drops updates {file}, which are not there")
            for row in payload.get("updates", []):
                put("updates", row | {"clients": canonical(row["clients"])})
                self.written.append(row)
            for file in payload.get("dropped_statistics", []):
                there = replayed["statistics"].pop((file,), None)
                self.check(there, f"{at}: drops statistics {file}, which are not there")
            for row in payload.get("statistics", []):
                put("statistics", row | {name: canonical(row[name]) for name in ("clients", "trunks")})
            if "solve" in payload:
                self.agree(f"{at}: rounds of a solve", [event["kind"], recorded["first"]], ["rounds", recorded["last"]])
                self.solves[recorded["last"]] = payload["solve"] | {"relative_penalty": payload.get("relative_penalty")}
                self.at_solve[recorded["last"]] = (sorted(moment["models"]), moment["gone"])
                trunks = payload["solve"].get("trunks", [])
                parts = self.spec["features"].get("tune", "none") == "blocks"
                same_networks = all(
                    row["trunks"] == trunks
                    or (parts and not row["file"].endswith(".sum.statistics") and set(row["trunks"]) <= set(trunks))
                    for row in payload.get("statistics", [])
                )
                self.check(same_networks, f"{at}: statistics are through other networks than the head")
                left = {name for row in asking for name in json.loads(row["clients"])}
                left |= {row["client"] for row in payload.get("rejections", []) if row["left_out"]}
                self.solvers[recorded["last"]] = (int(replayed["run"][("client_count",)]["value"]), left)
            if event["kind"] == "request received" and "commitments" in payload:
                commitments = payload["commitments"]
                good = commitments == sorted(commitments) and all(re.fullmatch("[0-9a-f]{64}", c) for c in commitments)
                self.check(good and 0 < len(commitments) <= len(name["records"]), f"{at}: commitments to records")
                self.committed[name["request"]] = commitments
            if event["kind"] == "request received":
                self.approved[name["request"]] = [person(payload["actor"])]
                filed = {key: value for key, value in name.items() if key != "deadline_days"}
                self.filed[name["request"]] = sha256(canonical(filed).encode())
            elif event["kind"] == "request approved":
                people, actor = self.approved[name], person(payload["actor"])
                good = actor not in people and 0 < self.steps.get(name, 0) < 4
                self.agree(f"{at}: terms approved", payload.get("terms"), self.filed[name])
                self.check(good, f"{at}: {actor} cannot approve {name}")
                people.append(actor)
            elif event["kind"] == "rolled back":
                asked_for = self.spec.get("requests", {}).get("approval", "none")
                needed = {"none": 0, "one": 1, "two": 2}[asked_for]
                self.check(len(self.approved[name]) > needed, f"{at}: {name} ran without its {needed} approvals")
            self.take_rejoining(event, payload)
            if event["kind"] in STEPS:
                self.take_step(event, name["request"] if isinstance(name, dict) else name)
            if "rows" in payload:
                rows = payload["rows"]
                self.agree(f"{at}: first node", rows["first"], next_node)
                if not self.is_erased(event):
                    digest = self.rows_digest(next_node, rows["last"], payload.get("figures_salt", ""))
                    self.agree(f"{at}: digest of nodes", rows["digest"], digest)
                next_node = rows["last"] + 1
            if "kept_rows" in payload and not self.is_erased(event):
                digest = self.rows_digest(0, payload["kept_rows"]["last"], payload["figures_salt"])
                self.agree(f"{at}: digest of what is kept", payload["kept_rows"]["digest"], digest)
            if "clients_digest" in said and not self.is_erased(event):
                columns = ("client", "name", "samples", "local_steps", "smoothness", "curvature")
                rows = [canonical([row[c] for c in columns]).encode() for row in self.tables["clients"]]
                salt = bytes.fromhex(payload.get("figures_salt", ""))
                digest = sha256(salt, *rows[: int(said["client_count"])])
                self.agree(f"{at}: clients_digest", said["clients_digest"], digest)
            if event["kind"] == "request received":
                terms = {key: value for key, value in name.items() if key not in ("request", "deadline_days")}
                fresh = {"status": "received", "received": event["time"], "method": name["method"]}
                row = {key: name[key] for key in ("request", "deadline_days")} | {"terms": canonical(terms)}
                put("requests", row | fresh)
            elif event["kind"] == "rolled back":
                self.rolled[name], choice = moment, payload["choice"]
                put("requests", choice | {"request": name, "status": "running", "carried_out": event["time"]})
                for row in payload["subjects"]:
                    put("subjects", row | {"request": name, "clients": canonical(row["clients"])})
                for row in payload["charges"]:
                    put("charges", row | {"noise_node": choice["noise_node"]})
            elif event["kind"] == "request done":
                self.done[name], result = moment, {k: payload[k] for k in ("request", "final_node", "level")}
                put("requests", result | {"status": "done", "finished": event["time"]})
            elif event["kind"] in DECIDED:
                put("requests", {"request": name, "status": event["kind"].split()[1]})
            elif event["kind"] == "comparison":
                columns = ("request", "method", "rounds", "reached", "accuracy", "forgotten_accuracy")
                put("comparisons", {key: payload[key] for key in columns if key in payload})
        self.check_rest()
        put("run", {"key": "head", "value": f"{len(self.tables['events'])}:{previous.hex()}"})
        text = (self.folder / "head").read_bytes().decode() if (self.folder / "head").is_file() else ""
        here = f"{len(self.tables['events'])}:{previous.hex()}"
        whole = re.fullmatch(r"([0-9]+:[0-9a-f]{64}\n){1,2}", text) is not None
        self.check(whole and here in text.split(), f"file head: says {text[:160]!r}")
        for table, keys in REPLAYED.items():
            rows = {tuple(row[k] for k in keys): row for row in self.tables[table]}
            for key in rows.keys() | replayed[table].keys():
                both = (rows.get(key, {}), replayed[table].get(key, {}))
                here, there = ({k: v for k, v in row.items() if v is not None} for row in both)
                self.check(here == there, f"table {table}: {here} is not what the ledger says, {there}")
        self.agree("nodes", list(self.nodes), list(range(next_node)))
        self.check(self.rounds.keys() | self.grams.keys() == self.nodes.keys(), "there are rows of rounds that are not")
        self.agree("client_count", self.run["client_count"], str(len(self.clients)))

    def check_rest(self) -> None:
        """Section 6e: what a purge of all figures left of earlier events is tied by its digest, and holds none."""
        digest, tip = hashlib.sha256(), None
        for event in self.tables["events"][: max(self.wish - 1, 0)]:
            payload, at = parsed(event["payload"]), f"event {event['seq']}"
            if not event["nonce"]:
                digest.update(f"{event['seq']}\0{event['payload']}\0".encode())
                self.check(event["kind"] in WITH_FIGURES, f"{at}: no purge takes its nonce")
            held = FIGURES & payload.keys() if event["kind"] in WITH_FIGURES else set()
            if event["kind"] in WITH_FIGURES:
                first = payload.get("rows", {"first": math.inf})["first"]
                models = [[row["node"] in self.wished["models"], row["node"] >= first, row["kept"]]
                          for row in payload.get("models", [])]  # fmt: skip
                held |= {"models"} if any(model != [True, True, 1] for model in models) else set()
                held |= {"updates"} & payload.keys() if event["kind"] != "rounds" else set()
            choice = payload.get("choice", {"source_node": None})
            if choice["source_node"] is not None:
                hidden = [choice["noise_std"], choice["source_node"], choice["wanted_node"], payload["charges"]]
                held |= set() if hidden == [None, tip, tip, []] else {"choice"}
            self.check(not held, f"{at}: {sorted(held)} were erased and are there again")
            tip = int(payload.get("run", {}).get("tip", -1 if tip is None else tip))
        if self.wish:
            self.agree("what is left of earlier events", self.wished["events"], digest.hexdigest())

    def erased_forms(self, request: Row) -> list[str]:
        """Section 6e: which certificates of a request went with all figures."""
        if request["request"] not in self.not_recomputed:
            return []
        stays = request["level"] == "exact" or request["sigma"] != "auto"
        return ["auditor"] if stays else ["auditor", "public"]

    def check_rest_of_request(self, request: Row) -> None:
        """Section 6e: what is left of a request whose figures are erased."""
        name, noise = request["request"], self.nodes[request["noise_node"]]
        chains = [self.chain(client) for client in json.loads(request["clients"])]
        own = [clients for i, clients in self.subjects.items() if self.owner[i] is request]
        at, everyone = f"request {name}", [[client for chain in chains for client in chain]]
        self.agree(f"{at}: subjects", own, everyone if request["unit"] == "joint" else chains)
        self.agree(f"{at}: multiplier", request["multiplier"], multiplier(request))
        fresh = request["source_node"] is None
        expected = [request["source_node"], request["request_order"], 0.0 if fresh else math.inf]
        self.agree(f"{at}: noise node", [noise[k] for k in ("parent", "request_order", "noise_std")], expected)
        self.agree(f"{at}: sigma", request["noise_std"], 0.0 if fresh else None)
        charged = [row for row in self.tables["charges"] if row["noise_node"] == noise["node"] and not fresh]
        self.check(not charged, f"{at}: its charges are there again")
        stored = {row["form"]: row["content"] for row in self.tables["certificates"] if row["request"] == name}
        self.agree(f"{at}: certificates", sorted([*stored, *self.erased_forms(request)]), ["auditor", "public"])
        for form, text in stored.items():
            certificate, issued = json.loads(text), self.done[name]["payload"]["certificates"][form]
            self.agree(f"{at}: certificate in the ledger", issued, sha256(text.encode()))
            key = [key for seq, key in self.keys if seq < self.done[name]["seq"]][-1]
            try:
                public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
                public.verify(bytes.fromhex(certificate["signature"]), canonical(certificate["body"]).encode())
            except Exception:
                self.problems.append(f"{at}: the signature of its certificate does not verify")

    def check_wish(self, moment: Row) -> None:
        """Section 6e: a purge of all figures says what was verified and erased, and which models it left."""
        said, at, before = moment["payload"]["all_figures"], f"event {moment['seq']}", self.tables["events"]
        last = before[moment["seq"] - 2]
        served = [name for name, row in moment["requests"].items() if row.get("noise_node") is not None]
        self.agree(f"{at}: what was verified", said["verified"], f"{last['seq']}:{last['hash'].hex()}")
        self.agree(f"{at}: requests", said["requests"], served)
        forms = {name: self.erased_forms(self.requests[name]) for name in served}
        self.agree(f"{at}: certificates", said["certificates"], forms)
        self.check(before[moment["seq"] - 1]["signature"] is not None, f"{at}: it is not signed")
        methods = {self.requests[name]["method"] for name in served}
        promised = all(self.requests[name]["level"] not in (None, "none") for name in served)
        self.check(promised and methods <= ERASABLE, f"{at}: a request was of another kind")
        tied = self.spec["groups"]["count"] or self.spec["model"]["kind"] == "ridge"
        self.check(not tied, f"{at}: the figures of such a run stay")
        active = self.path(int(moment["tip"]))
        left = set(moment["models"]) - set(moment["payload"].get("dropped_models", []))
        may = set(self.kept_path(active)) | {active[0], active[-1]}
        good = sorted(left) == said["models"] and active[-1] in left and left <= may
        self.check(good, f"{at}: models {sorted(left)} are left")
        files = sorted(file for (file,) in moment["updates"])
        self.agree(f"{at}: updates purged", moment["payload"].get("dropped_updates", []), files)

    def kept_path(self, active: list[int]) -> list[int]:
        """Section 6e: the path whose figures stay, if the last request started it afresh."""
        orders = [row["request_order"] for node, row in self.nodes.items() if node <= active[-1]]
        return active if self.nodes[active[0]]["request_order"] == max(orders) else []

    def is_erased(self, event: Row) -> bool:
        """Section 6d: whether a purge erased the sealed part of an event."""
        if event["seq"] < self.wish:
            return True
        kinds = [(other["seq"], other["kind"]) for other in self.tables["events"]]
        purges = [seq for seq, kind in kinds if kind == "purged" and seq > event["seq"]]
        rolled = max((s for s, kind in kinds if kind == "rolled back" and purges and s < purges[-1]), default=0)
        later = ("request done", "comparison", "client joined", "purged")
        return event["seq"] <= rolled or bool(rolled and event["kind"] in later)

    def unsealed(self, event: Row, payload: Row) -> Row:
        """Section 6d: what an event measured, which a purge erases with its salt."""
        at, part, gone = f"event {event['seq']}", self.sealed.get(event["seq"]), self.is_erased(event)
        self.check(not SEALED & payload.keys(), f"{at}: what it measured lies in the open")
        self.agree(f"{at}: sealed part", part is not None, "sealed" in payload and not gone)
        if part is None:
            return {}
        self.agree(f"{at}: sealed", payload.get("sealed"), sha256(part["salt"], part["content"].encode()))
        self.agree(f"{at}: length of the salt", len(part["salt"]), 32)
        content = parsed(part["content"])
        self.agree(f"{at}: sealed content", part["content"], canonical(content))
        self.check(content.keys() <= SEALED, f"{at}: other things are sealed than what was measured")
        return {key: content[key] for key in SEALED & content.keys()}

    def check_salts(self) -> None:
        """Section 4c: a digest for each founder, and no salt of anyone forgotten."""
        events = [(event["kind"], json.loads(event["payload"])) for event in self.tables["events"]]
        joined = sum(kind == "client joined" for kind, _ in events)
        digests = events[0][1].get("sample_digests")
        self.check(digests is None or len(digests) == len(self.clients) - joined, "a digest of samples for each client")
        path = self.folder / "salts.json"
        salts = json.loads(path.read_text()) if path.exists() else {}
        forgotten = {str(c) for row in self.tables["subjects"] for c in json.loads(row["clients"])}
        settled = events[-1][0] not in ("rolled back", "client joined", "restored") and self.rejoins is None
        self.check(not settled or not forgotten & set(salts), "salts.json holds the salt of a forgotten client")

    def take_rejoining(self, event: Row, payload: Row) -> None:
        """Section 4b: whose records were forgotten joins again, after the rollback and before any round, once."""
        kind, at = event["kind"], f"event {event['seq']}"
        if kind == "client joined":
            client = int(payload["run"]["client_count"]) - 1
            if self.rejoins is not None or "request" in payload:
                self.agree(f"{at}: request of the client that joins again", payload.get("request"), self.rejoins)
                self.rejoined[payload["request"]] = client
            self.rejoins = None
        elif kind == "rolled back" and json.loads(self.requests[payload["request"]]["records"]):
            self.rejoins = payload["request"]
        elif kind in ("rounds", "request done"):
            self.check(self.rejoins is None, f"{at}: comes before the client of {self.rejoins} joined again")

    def check_records(self) -> None:
        """Section 4b: rows that the client had, and a client that joins again with what is left of them."""
        names, first = {row["name"]: client for client, row in self.clients.items()}, {}
        gone: dict[int, set[int]] = {}
        for name, client in self.rejoined.items():
            request, at = self.requests[name], f"request {name}"
            rows, (name_before,) = json.loads(request["records"]), json.loads(request["clients"])
            before = names[name_before]
            root, earlier = first.get(before, before), gone.get(before, set())
            self.check(rows == sorted(set(rows)) and not earlier & set(rows), f"{at}: rows {rows} are not new ones")
            self.check(rows[0] >= 0 and rows[-1] < self.clients[root]["samples"], f"{at}: rows {rows} do not exist")
            first[client], gone[client] = root, earlier | set(rows)
            left = self.clients[root]["samples"] - len(gone[client])
            self.agree(f"{at}: samples left", self.clients[client]["samples"], left)
            self.check(left > 0, f"{at}: nothing is left of the client")
            base, turn = name_before, 1
            if "~" in name_before and name_before.rpartition("~")[2].isdecimal():
                base, turn = name_before.rpartition("~")[0], int(name_before.rpartition("~")[2])
            turn += 1
            while any(row["name"] == f"{base}~{turn}" for c, row in self.clients.items() if c < client):
                turn += 1
            self.agree(f"{at}: name", self.clients[client]["name"], f"{base}~{turn}")
        for name in self.done:
            if json.loads(self.requests[name]["records"]):
                self.check(name in self.rejoined, f"request {name}: its client did not join again")

    def chain(self, name: str) -> list[int]:
        """Section 4b: the numbers that a client had until it had this name, first one first."""
        (client,) = (number for number, row in self.clients.items() if row["name"] == name)
        for request, number in self.rejoined.items():
            if number == client:
                return [*self.chain(json.loads(self.requests[request]["clients"])[0]), client]
        return [client]

    def names_of(self, request: Row) -> list[str]:
        """Every name that the clients of a request have had."""
        return [self.clients[c]["name"] for name in json.loads(request["clients"]) for c in self.chain(name)]

    def plain(self, name: str) -> str:
        """Section 4b: the name that a client first joined under, which is the one in certificates."""
        return str(self.clients[self.chain(name)[0]]["name"])

    def take_step(self, event: Row, request: str) -> None:
        """Section 4: received, then perhaps verified, planned, running, done; refused or withdrawn before it runs."""
        before, new = self.steps.get(request, 0), STEPS[event["kind"]]
        good = {
            1: before == 0,
            2: before == 1,
            3: before in (1, 2),
            4: before in (1, 2, 3),
            5: before == 4,
            6: 0 < before < 4,
        }
        self.check(good[new], f"event {event['seq']}: {event['kind']} of {request} is out of order")
        self.steps[request] = new

    def check_signature(self, event: Row, payload: Row) -> None:
        """Section 6a: every event is signed, or vouched for by the first signed event after it."""
        at, events = f"event {event['seq']}", self.tables["events"]
        before = events[event["seq"] - 2] if event["seq"] > 1 else event
        if event["kind"] == "clock set":
            self.check(payload.get("before") == before["time"], f"{at}: it sets the clock from another time")
        else:
            self.check(event["time"] >= before["time"], f"{at}: its time runs backwards")
            rest = datetime.fromisoformat(event["time"]) - datetime.fromisoformat(before["time"])
            self.check(rest <= timedelta(days=366), f"{at}: its time jumps without the operator's word")
        first = event["seq"]
        while first > 1 and events[first - 2]["signature"] is None:
            first -= 1
        gap = [first, event["seq"] - 1] if first < event["seq"] else None
        if event["signature"] is None:
            self.check(any(later["signature"] for later in events[event["seq"] :]), f"{at}: no signature covers it")
            return
        vouched = payload.get("unsigned") if event["kind"] == "checkpoint" else None
        self.agree(f"{at}: events without a signature", vouched, gap)
        key = self.keys[-1][1] if self.keys else payload["run"]["public_key"]
        body = {"format": "sifu-checkpoint-1", "run": self.run["run"], "seq": event["seq"],
                "head": event["hash"].hex(), "time": event["time"]}  # fmt: skip
        try:
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            public.verify(event["signature"], canonical(body).encode())
        except Exception:
            self.problems.append(f"{at}: its signature does not verify")

    def take_key(self, seq: int, payload: Row) -> None:
        """Section 6: a new key is signed by the old one and by the new one."""
        new = payload["run"]["public_key"]
        if self.keys:
            old = self.keys[-1][1]
            said = {
                "statement": "this key takes the place of the old one",
                "run": self.run["run"],
                "old": old,
                "new": new,
            }
            self.agree(f"event {seq}: old key", payload["old_key"], old)
            for key, name in ((old, "signature_by_old"), (new, "signature_by_new")):
                try:
                    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
                    public.verify(bytes.fromhex(payload[name]), canonical(said).encode())
                except Exception:
                    self.problems.append(f"event {seq}: {name} does not verify")
        self.keys.append((seq, new))

    def check_restored(self) -> None:
        hashes = {f"{event['seq']}:{event['hash'].hex()}" for event in self.tables["events"]}
        for moment in self.restored:
            said, at = moment["payload"], f"event {moment['seq']}"
            self.agree(f"{at}: branch", said["branch"], self.nodes[int(moment["tip"])]["branch"])
            self.check(said["backup_head"] in hashes, f"{at}: the chain does not hold the head it names")
            self.check(not said["complete"] or said["anchor"] == said["backup_head"], f"{at}: it is not complete")
            number = {row["name"]: n for n, row in self.clients.items()}
            gone = {number[name] for name, row in moment["requests"].items() if name in said["requests"]
                    for name in json.loads(row["clients"])}  # fmt: skip
            for what in ("updates", "statistics") if self.tables["events"][moment["seq"] - 1]["nonce"] else ():
                held = {file: {*map(int, json.loads(row["clients"]))} for (file,), row in moment[what].items()}
                hit = {n for n in said.get("dropped_models", []) if n in self.groups}
                through = {file: set(json.loads(row.get("trunks", "[]"))) for (file,), row in moment[what].items()}
                expected = sorted(file for file, clients in held.items() if clients & gone or through[file] & hit)
                self.agree(f"{at}: {what} erased", sorted(said.get(f"dropped_{what}", [])), expected)
            stored = {int(c) for row in said.get("updates", []) for c in row["clients"]}
            self.check(not stored & gone, f"{at}: updates of the forgotten are stored again")

    def check_timestamps(self) -> None:
        """Section 7: each is of a signed head or a public certificate; only the digest in it is looked at here."""
        key, contents = "", {}
        for event in self.tables["events"]:
            named = json.loads(event["payload"]).get("run", {}).get("public_key", key)
            key = key or named
            if event["signature"] is not None:
                said = {"format": "sifu-checkpoint-1", "run": self.run["run"], "seq": event["seq"],
                        "head": event["hash"].hex(), "time": event["time"], "public_key": key,
                        "signature": event["signature"].hex()}  # fmt: skip
                contents[f"{event['seq']}.checkpoint.json.tsr"] = canonical(said)
            key = named
        contents |= {f"{row['request']}.public.json.tsr": row["content"] for row in self.tables["certificates"]
                     if row["form"] == "public"}  # fmt: skip
        for path in sorted((self.folder / "timestamps").glob("*")):
            stamped = bytes.fromhex(sha256(contents.get(path.name, "").encode()))
            self.check(stamped in path.read_bytes(), f"timestamps/{path.name} is of something else")

    def restored_before(self, request: Row) -> bool:
        """Whether the run was restored from a backup before the request was certified."""
        return any(event["seq"] < self.done[request["request"]]["seq"] for event in self.restored)

    def rows_digest(self, first: int, last: int, salt: str) -> str:
        nodes = [n for n in range(first, last + 1) if n in self.nodes]
        counts = len(nodes), sum(len(self.rounds[n]) for n in nodes), sum(n in self.grams for n in nodes)
        parts = [bytes.fromhex(salt), struct.pack("<3q", *counts)]
        for row in (self.nodes[n] for n in nodes):
            head = row["node"], -1 if row["parent"] is None else row["parent"], KINDS[row["kind"]]
            parts.append(struct.pack("<7q8d", *head, *list(row.values())[3:]))  # columns stand in the order of the text
        for row in (p for n in nodes for p in self.rounds[n].values()):
            parts.append(struct.pack("<3qd", row["node"], row["client"], row["samples"], row["drift"]))
        parts += [struct.pack("<q", n) + self.grams[n].tobytes() for n in nodes if n in self.grams]
        return sha256(*parts)

    # ---- sections 1 and 5: the nodes and the files

    def check_nodes(self) -> None:
        gone: dict[int, int] = {}  # a client that joined again with less is in the subjects of later requests, too
        for i, clients in sorted(self.subjects.items()):
            gone |= {c: self.owner[i]["noise_node"] for c in clients if c not in gone}
        for node, row in self.nodes.items():
            parent, here, at = self.nodes.get(row["parent"]), self.rounds[node], f"node {node}"
            self.check((parent is None) == (row["kind"] == "initial"), f"{at}: kind and parent do not fit")
            if row["kind"] == "heuristic":
                self.agree(f"{at}: kind of the parent", parent["kind"], "initial")
            if row["kind"] not in ("round", "merge"):
                self.check(not here, f"{at}: clients took part, but it is no round")
                continue
            if row["kind"] == "round":
                earlier = [n for n, other in self.nodes.items() if n < node and other["kind"] != "group"]
                self.agree(f"{at}: parent", row["parent"], max(earlier, default=None))
                place = [parent["branch"], parent["position"] + 1]
                self.agree(f"{at}: branch and position", [row["branch"], row["position"]], place)
            regular = [(p["samples"], *self.regular[self.rate_since(node)][c]) for c, p in here.items()]
            self.agree(f"{at}: samples", row["samples"], sum(n for n, _, _ in regular))
            if self.figures_gone(node):
                regular = [(n, 1.0, 0.0) for n, _, _ in regular]
            self.agree(f"{at}: factor_sum", row["factor_sum"], math.fsum(n * p for n, p, _ in regular))
            self.agree(f"{at}: factor_max", row["factor_max"], max((p for _, p, _ in regular), default=1.0))
            self.agree(f"{at}: averagedness_sum", row["averagedness_sum"], math.fsum(n * a for n, _, a in regular))
            self.agree(f"{at}: averagedness_max", row["averagedness_max"], max((a for *_, a in regular), default=0.0))
            for client, p in here.items():
                self.agree(f"{at}: samples of client {client}", p["samples"], self.clients[client]["samples"])
                self.check(gone.get(client, node) >= node, f"{at}: client {client} took part after it was forgotten")

    def figures_gone(self, node: int) -> bool:
        """Section 6d: whether a purge erased the figures of a round or merge."""
        row, drifts = self.nodes[node], [p["drift"] for p in self.rounds[node].values()]
        return node <= self.erased_up_to and all(map(math.isinf, [row["rounding"], row["mean_shift"], *drifts]))

    def check_rejections(self) -> None:
        """Section 1a: a client that was left out of a round is not in it."""
        node_at = {(row["branch"], row["position"] - 1): n for n, row in self.nodes.items() if row["kind"] == "round"}
        names = {row["name"]: client for client, row in self.clients.items()}
        for row in self.tables["rejections"]:
            node = node_at.get((row["branch"], row["round"]))
            missing = node is not None and names.get(row["client"]) not in self.rounds[node]
            self.check(missing or not row["left_out"], f"node {node}: {row['client']} was left out, but is in it")

    def check_files(self) -> None:
        listed, vectors = {f"{row['node']}.safetensors": row for row in self.tables["models"]}, {}
        files = {path.name for path in (self.folder / "models").iterdir()}
        self.agree("files in models/", sorted(files), sorted(listed))
        expected = sorted(f"{name}.{form}.json" for name in self.done for form in ("auditor", "public")
                          if form not in self.erased_forms(self.requests[name]))  # fmt: skip
        self.agree("certificates/", sorted(p.name for p in (self.folder / "certificates").iterdir()), expected)
        self.agree("rows of certificates", len(self.tables["certificates"]), len(expected))
        number = {"float64": "<f8", "float32": "<f4"}[self.facts["dtype"]]
        for name in files & listed.keys():
            data, row = (self.folder / "models" / name).read_bytes(), listed[name]
            self.agree(f"models/{name}", [row["bytes"], row["digest"]], [len(data), sha256(data)])
            if row["node"] in self.groups and "tuned_layout" in self.run:  # section 5b
                layout = json.loads(self.run["tuned_layout"])
                tensors_of(data, {"float64": "<f8", "float32": "<f4"}[layout["dtype"]])
                continue
            tensors = tensors_of(data, number)
            vectors[row["node"]] = np.concatenate([tensors[n] for n in json.loads(self.run["layout"])["names"]])
        for node, vector in vectors.items():  # beyond the document: do the models look like what is said of them?
            row, start = self.nodes[node], vectors.get(self.nodes[node]["parent"])
            if row["kind"] == "merge":
                self.check_merged_model(node, vectors, number)
            elif start is not None and row["kind"] != "group":
                moved, slack = np.linalg.norm(vector - start), 8 * np.finfo(number).eps * np.linalg.norm(vector)
                low, high = 0.0, self.facts["server_rate"] * row["mean_shift"] * (1 + RELATIVE)
                if row["kind"] == "heuristic":  # the updates that were replayed are stored as its parts
                    now = {update["file"] for update in self.tables["updates"] if update["node"] == node}
                    if now != {row["file"] for row in self.written if row["node"] == node}:
                        continue  # those of clients that a later request forgot were erased
                    moved = float(np.linalg.norm(vector - start - self.replayed(node, number)))
                    low, high = 0.0, 1e-6 * float(np.linalg.norm(vector))
                elif math.isinf(row["noise_std"]):
                    continue  # section 6e: erased
                elif row["kind"] == "noise":
                    low, high = (row["noise_std"] * (math.sqrt(vector.size) + z) for z in (-6, 6))
                self.check(low - slack <= moved <= high + slack, f"node {node}: moved by {moved}, not {low} to {high}")

    def check_merged_model(self, node: int, vectors: dict[int, Any], number: str) -> None:
        """Section 1b: while the groups' models are there, the merge is their mean, moved on, to the last bit."""
        parts = sorted((row for row in self.tables["merges"] if row["node"] == node), key=lambda row: row["grp"])
        if all(part["source_node"] in vectors for part in parts):
            weights = [float(part["samples"]) for part in parts]
            weights = weights if any(weights) else [1.0] * len(parts)
            total = np.zeros_like(vectors[node])
            for part, weight in zip(parts, weights, strict=True):
                total = total + weight * vectors[part["source_node"]]
            mean = total / sum(weights)
            if (stretch := self.spec["groups"].get("stretch", 1.0)) != 1.0:
                if not self.check(0 in vectors, f"node {node}: the fresh model that it was moved on from is missing"):
                    return
                moved = vectors[0] + stretch * (mean - vectors[0])
                below = (moved < 0) & (mean >= 0) & (vectors[0] >= 0)
                mean = np.array([m if stays else v for m, v, stays in zip(mean, moved, below, strict=True)])
            mean = mean.astype(number).astype(float)
            self.check(np.array_equal(mean, vectors[node]), f"node {node}: it is not the merge of the groups' models")

    def check_groups(self) -> None:
        """Section 1b: who is in which group, and what every merge is made of."""
        rounds = self.spec["groups"]["rounds"]
        for moment in self.apart:
            for row in moment["payload"]["group_models"]:
                at, node, members = f"node {row['node']}", self.nodes[row["node"]], row["members"]
                for client in members:
                    digest = hmac.digest(
                        bytes.fromhex(self.run["group_key"]), self.clients[client]["name"].encode(), "sha256"
                    )
                    group = int.from_bytes(digest[:8], "big") % self.spec["groups"]["count"]
                    self.agree(f"{at}: group of client {client}", row["grp"], group)
                self.check(not set(members) & set(moment["gone"]), f"{at}: a forgotten client is in its group")
                self.agree(f"{at}: samples", row["samples"], sum(self.clients[c]["samples"] for c in members))
                before = self.groups.get(node["parent"], {"grp": row["grp"], "members": [], "rounds": 0})
                self.agree(f"{at}: group of its parent", before["grp"], row["grp"])
                self.check(set(before["members"]) <= set(members), f"{at}: members of its earlier rounds are missing")
                self.check(before["rounds"] < row["rounds"] <= rounds, f"{at}: it has {row['rounds']} rounds")
                branch = self.nodes[node["parent"]]["branch"] if node["parent"] else -moment["order"]
                self.agree(f"{at}: place", [node["branch"], node["position"]], [branch, row["rounds"]])
        for moment in self.merged:
            payload, at = moment["payload"], f"event {moment['seq']}"
            leaving = {c for subject in payload.get("subjects", []) for c in subject["clients"]}
            latest = {self.groups[n]["grp"]: self.groups[n] for n in sorted(moment["models"]) if n in self.groups}
            node, takes = payload["rows"]["last"], moment["kind"] == "merged" or moment["method"] == "groups"
            parts = [row for _, row in sorted(latest.items())
                     if takes and row["rounds"] == rounds and not leaving & set(row["members"])]  # fmt: skip
            stated = [[p["node"], p["grp"], p["source_node"], p["samples"]] for p in payload.get("merges", [])]
            self.agree(f"{at}: groups merged", stated, [[node, p["grp"], p["node"], p["samples"]] for p in parts])
            self.agree(f"{at}: it is a merge", self.nodes[node]["kind"] == "merge", bool(parts))
            if parts:
                self.agree(
                    f"{at}: members", sorted(self.rounds[node]), sorted({c for p in parts for c in p["members"]})
                )
                self.check(all(math.isinf(p["drift"]) for p in self.rounds[node].values()), f"{at}: a drift is known")
                self.agree(f"{at}: kind of the parent", self.nodes[self.nodes[node]["parent"]]["kind"], "initial")

    def replayed(self, node: int, number: str) -> Any:
        """g times the sum of the weighted means of the updates stored as parts of a heuristic node."""
        total: Any = 0.0
        for row in (row for row in self.tables["updates"] if row["node"] == node):
            updates = tensors_of((self.folder / "updates" / row["file"]).read_bytes(), number)
            samples = {c: self.clients[int(c)]["samples"] for c in updates}
            mean = sum(samples[c] * updates[c] for c in updates) / sum(samples.values())
            total = total + self.facts["server_rate"] * mean
        return total

    def check_updates(self) -> None:
        """Section 5: the updates that are kept, and that nothing of a forgotten client is among them."""
        active, forgotten = self.path(int(self.run["tip"])), {c for clients in self.subjects.values() for c in clients}
        every, first = self.spec["keep"].get("updates_every", 0), {}
        for row in self.written:
            node, at = self.nodes[row["node"]], f"updates {row['file']}"
            before = first.setdefault((row["node"], row["part"]), row["clients"])
            self.check(row["clients"].items() <= before.items(), f"{at}: other updates than were recorded first")
            if node["kind"] == "round":
                self.agree(f"{at}: clients", sorted(map(int, before)), sorted(self.rounds[row["node"]]))
                self.agree(f"{at}: part", row["part"], 0)
            else:
                self.agree(f"{at}: kind of the node", node["kind"], "heuristic")
        due = [n for n, row in self.nodes.items() if every and row["kind"] == "round" and self.rounds[n]
               and (row["position"] - 1) % every == 0]  # fmt: skip
        self.agree("rounds with updates", sorted(n for n, part in first if part == 0), due)
        listed = {row["file"]: row for row in self.tables["updates"]}
        self.agree("files in updates/", sorted(p.name for p in (self.folder / "updates").iterdir()), sorted(listed))
        for file, row in listed.items():
            data, clients = (self.folder / "updates" / file).read_bytes(), json.loads(row["clients"])
            self.agree(f"updates/{file}", [row["bytes"], row["digest"]], [len(data), sha256(data)])
            self.check(not forgotten & {int(c) for c in clients}, f"updates/{file} holds a forgotten client")
            self.check(row["node"] in active, f"updates/{file} is of a round that was cut off")
            end = 8 + struct.unpack_from("<Q", data)[0]
            header = json.loads(data[8:end])
            places = {c: header[c]["data_offsets"] for c in header}
            self.agree(f"updates/{file}: size", len(data), end + max(stop for _, stop in places.values()))
            first, last = (end + place for place in places.pop("salts"))
            salts = {c: data[first + 32 * k : first + 32 * (k + 1)] for k, c in enumerate(sorted(places, key=int))}
            self.agree(f"updates/{file}: salts", last - first, 32 * len(places))
            digests = {c: sha256(salts[c] + data[end + start : end + stop]) for c, (start, stop) in places.items()}
            self.agree(f"updates/{file}: tensors", digests, clients)

    def check_statistics(self) -> None:
        """Section 5a: the sum is that of clients' statistics, the head solves its equations, and no forgotten client
        is in any of them."""
        listed = {row["file"]: row for row in self.tables["statistics"]}
        self.agree("statistics/", sorted(p.name for p in (self.folder / "statistics").iterdir()), sorted(listed))
        if self.spec["model"]["kind"] != "ridge":
            self.check(not listed and not self.solves, "there are statistics, but the model is not solved from any")
            return
        rounds = [n for n, row in self.nodes.items() if row["kind"] == "round"]
        self.agree("rounds that are solves", sorted(self.solves), rounds)
        for node, (client_count, left) in self.solvers.items():
            staying = [c for c in range(client_count) if self.clients[c]["name"] not in left]
            absent = self.solves[node].get("absent", [])
            self.agree(f"clients of solve {node}", sorted([*self.rounds[node], *absent]), staying)
        forgotten = {c for clients in self.subjects.values() for c in clients}
        shapes, ridge = json.loads(self.run["layout"])["shapes"], self.spec["ridge"]
        (k, outputs), a, b = shapes[0], ridge["feature_bits"], ridge["target_bits"]
        reach = {"classification": 1.0, "multi_label": math.sqrt(outputs), "regression": 8.0 * math.sqrt(outputs)}
        tuned, places = self.spec["features"].get("tune", "none"), self.block_places(k)
        parts = {"none": 1, "merge": 2, "blocks": 1 + self.spec["groups"]["count"]}[tuned]
        norm = float(self.spec["features"]["norm"]) * math.sqrt(parts)
        norms = f"norm={norm!r} target_norm={reach[ridge['task']]!r}"
        bits = f"features={k} outputs={outputs} feature_bits={a} target_bits={b}"
        heading = f"sifu statistics 1 {bits} {norms}\n".encode()
        words, whole, samples_of = {}, None, {}
        nodes = {trunk for row in listed.values() for trunk in json.loads(row["trunks"]) if trunk in self.groups}
        of_groups = {self.groups[node]["grp"] for node in nodes}
        lists = {row["trunks"] for row in listed.values()} if tuned != "blocks" else {""}
        alike = len(of_groups) == len(nodes) and len(lists) <= 1
        self.check(alike, "statistics are through different networks")
        public = [*range(k - sum(len(own) for own in places.values())), k]
        for file, row in listed.items():
            trunks = json.loads(row["trunks"])
            self.check(tuned != "none" or not trunks, f"statistics/{file}: there are no networks of groups")
            for trunk in trunks:
                there = trunk in self.groups and (self.folder / "models" / f"{trunk}.safetensors").exists()
                self.check(there, f"statistics/{file}: the network of node {trunk} is not there")
            data, clients = (self.folder / "statistics" / file).read_bytes(), json.loads(row["clients"])
            self.agree(f"statistics/{file}", [row["bytes"], row["digest"]], [len(data), sha256(data)])
            self.check(not forgotten & set(clients), f"statistics/{file} holds a forgotten client")
            counted = sum(self.clients[c]["samples"] for c in clients)
            through = [self.groups[trunk]["grp"] for trunk in trunks if trunk in self.groups]
            is_sum = file.endswith(".sum.statistics")
            part = "-".join(map(str, through)) or "public"
            named = f"{row['node']}.{clients[0]}{f'.{part}' if tuned == 'blocks' else ''}.statistics"
            self.check(is_sum or file == named, f"statistics/{file} is not named as its part is")
            start = heading[:-1] + f" part={part}\n".encode() if tuned == "blocks" and not is_sum else heading
            self.check(data.startswith(start), f"statistics/{file}: it is written otherwise than the spec says")
            numbers = np.frombuffer(data[len(start) : -32], "<i8")  # the last 32 bytes are the salt
            square, cross = np.zeros((k + 1, k + 1), dtype=np.int64), np.zeros((k + 1, outputs), dtype=np.int64)
            if is_sum or tuned != "blocks":
                self.agree(f"statistics/{file}: words", len(numbers), (k + 1) * (k + 2) // 2 + (k + 1) * outputs + 2)
                square[np.tril_indices(k + 1)] = numbers[: (k + 1) * (k + 2) // 2]
                cross, there = numbers[(k + 1) * (k + 2) // 2 : -2].reshape(k + 1, outputs), set(through)
                struck = sorted(place for group, own in places.items() if group not in there for place in own)
                held = square[struck].any() or square[:, struck].any() or cross[struck].any()
                self.check(not held, f"statistics/{file}: a block without a network is not zero")
                self.agree(f"statistics/{file}: samples", row["samples"], int(numbers[-2]))
            else:
                # Section 5b: a file has the numbers that went through the networks it names, and no other.
                high = np.array([*places[through[-1]]] if through else public)
                low = np.array([*places[through[0]]] if len(through) == 2 else public if through else [], dtype=int)
                rows, columns = np.tril_indices(len(high) if len(through) < 2 else 0)
                below, corner = np.split(numbers[: high.size * low.size + len(rows)], [high.size * low.size])
                square[np.ix_(high, low)] = below.reshape(high.size, low.size)
                square[np.ix_(low, high)] = square[np.ix_(high, low)].T
                square[high[rows], high[columns]] = square[high[columns], high[rows]] = corner
                rest = numbers[below.size + corner.size : None if through else -2]
                cross[high if len(through) < 2 else []] = rest.reshape(-1, outputs)
            totals = numbers[-2:] if is_sum or not (tuned == "blocks" and through) else np.zeros(2, dtype=np.int64)
            self.agree(f"statistics/{file}: of that many samples", row["samples"], counted)
            numbers = np.concatenate([square[np.tril_indices(k + 1)], cross.ravel(), totals])
            if is_sum:
                self.check(whole is None, "there are two sums")
                whole = (row, clients, numbers)
                continue
            own = samples_of.setdefault(clients[0], set()) if len(clients) == 1 else {part}
            fresh = part not in own and (tuned == "blocks" or not own)
            self.check(len(clients) == 1 and fresh, f"statistics/{file} is not of one client")
            own.add(part)
            words[clients[0]] = words[clients[0]] + numbers if clients[0] in words else numbers
        count = len(of_groups)
        needed = 1 + count + count * (count - 1) // 2 if tuned == "blocks" else 1
        for client, own in samples_of.items():
            if len(own) < needed:
                incomplete = whole is not None and client in whole[1]
                self.check(not incomplete, f"parts of the statistics of client {client} are not there")
                words.pop(client)
        tip = self.nodes[int(self.run["tip"])]
        if whole is None or tip["kind"] != "round":
            return
        row, clients, numbers = whole
        if set(clients) <= words.keys():  # integers: any order of summation gives the same bits
            self.check(np.array_equal(sum(words[c] for c in clients), numbers), "the sum is not that of its clients")
        solve = self.solves[tip["node"]]
        self.agree("the current head's sum", [solve["sum"], sorted(self.rounds[tip["node"]])], [row["digest"], clients])
        gram = np.zeros((k + 1, k + 1))
        gram[np.tril_indices(k + 1)] = numbers[: (k + 1) * (k + 2) // 2]
        gram = np.ldexp(gram + np.tril(gram, -1).T, -2 * a)
        cross = np.ldexp(numbers[(k + 1) * (k + 2) // 2 : -2].reshape(k + 1, outputs).astype(float), -a - b)
        energy, n = math.ldexp(int(numbers[-1]), -2 * b), int(numbers[-2])
        tensors = tensors_of((self.folder / "models" / f"{tip['node']}.safetensors").read_bytes(), "<f8")
        head = np.concatenate([tensors["weight"], tensors["bias"]]).reshape(k + 1, outputs)
        # Section 5b: a head has only the features whose network is there, and the constant.
        through = {self.groups[trunk]["grp"] for trunk in json.loads(row["trunks"])}
        lost = {place for group, own in places.items() if group not in through for place in own}
        if tuned == "merge" and not through:
            lost = set(range(k // 2, k))
        self.check(not head[sorted(lost)].any(), "the current head has weights of features without a network")
        kept = [place for place in range(k + 1) if place not in lost]
        gram, cross, head, k = gram[np.ix_(kept, kept)], cross[kept], head[kept], len(kept) - 1
        chosen = solve["relative_penalty"] * float(np.trace(gram)) / (k + 1)
        if ridge["regularisation"] == "auto":
            values, vectors = np.linalg.eigh(gram)
            rotated, scores = vectors.T @ cross, {}
            for r in (10.0 ** (eighth / 8.0) for eighth in range(-64, 17)):
                penalty = r * float(np.trace(gram)) / (k + 1)
                weights = rotated / (np.maximum(values, 0.0) + penalty)[:, None]
                left = energy - float(np.sum(weights * rotated)) - penalty * float(np.sum(weights**2))
                free = 1 - float(np.sum(np.maximum(values, 0.0) / (np.maximum(values, 0.0) + penalty))) / n
                noise = 64 * 2.0**-52 * (k + 1) * energy
                if left > noise and free > 1e-9:
                    scores[r] = ((left - noise) / n / free**2, (left + noise) / n / free**2)
            least, _ = scores.get(solve["relative_penalty"], (math.inf, math.inf))
            good = least <= min(most for _, most in scores.values()) * (1 + 1e-6)
            self.check(good, f"r = {solve['relative_penalty']} is not what cross-validation chooses")
        else:
            self.agree("r", solve["relative_penalty"], ridge["regularisation"])
        residual = np.linalg.norm(cross - gram @ head - chosen * head) / np.linalg.norm(cross)
        self.check(residual <= 1e-9, f"the current head leaves a residual of {residual}")

    def block_places(self, k: int) -> dict[int, range]:
        """Section 5b: where in the features the block of each group lies."""
        features, count = self.spec["features"], self.spec["groups"]["count"]
        if features.get("tune", "none") != "blocks":
            return {}
        block = features["block"]
        if not 0 < block < k - count * block:
            block = k // (count + 1)
        first = k - count * block
        return {group: range(first + group * block, first + (group + 1) * block) for group in range(count)}

    def check_networks(self) -> None:
        """Section 5b: every head stands on all networks that groups had finished and that were there."""
        if self.spec["features"].get("tune", "none") == "none":
            self.check(not any("trunks" in solve for solve in self.solves.values()), "a solve names networks of groups")
            return
        for node, solve in self.solves.items():
            models, gone = self.at_solve[node]
            there = [self.groups[n] for n in models if n in self.groups]
            latest = {row["grp"]: row for row in there}
            wanted = [row for _, row in sorted(latest.items()) if row["rounds"] == self.spec["groups"]["rounds"]]
            self.agree(f"networks of solve {node}", solve.get("trunks"), [row["node"] for row in wanted])
            held = set(gone) & {client for row in wanted for client in row["members"]}
            self.check(not held, f"solve {node} stands on a network that held a forgotten client")

    def check_statistics_of_request(self, request: Row) -> None:
        """Sections 5a and 5b: what held a forgotten client went, and what is left of the others took its place."""
        moment, at = self.rolled[request["request"]], f"request {request['request']}"
        own = {c for i, clients in self.subjects.items() if self.owner[i] is request for c in clients}
        stored = {file: json.loads(row["clients"]) for (file,), row in moment["statistics"].items()}
        trunks = {file: json.loads(row["trunks"]) for (file,), row in moment["statistics"].items()}
        erased = {n for n in moment["payload"].get("dropped_models", []) if n in self.groups}
        gone = sorted(file for file, clients in stored.items() if own & set(clients) or erased & set(trunks[file]))
        self.agree(f"{at}: statistics erased", moment["payload"].get("dropped_statistics", []), gone)
        if self.spec["features"].get("tune", "none") != "none":
            self.check_struck_statistics(request, own, stored, trunks, erased)
            return
        sums = [clients for file, clients in stored.items() if file.endswith(".sum.statistics")]
        single = {clients[0] for file, clients in stored.items() if not file.endswith(".sum.statistics")}
        leaving = set(sums[0]) & own if sums else set()
        stays = [sorted(set(sums[0]) - own)] if leaving and leaving <= single else []
        written = [row["clients"] for row in moment["payload"].get("statistics", [])]
        self.agree(f"{at}: sum that stays", written, [stay for stay in stays if stay])

    def check_struck_statistics(
        self, request: Row, own: set[int], stored: dict[str, list], trunks: dict[str, list], erased: set[int]
    ) -> None:
        """Section 5b: of blocks the sum is left without the struck ones, of a merge nothing is."""
        wanted, merge = [], self.spec["features"]["tune"] == "merge"
        for file, clients in stored.items():
            if not file.endswith(".sum.statistics"):
                continue
            left, leaving = [n for n in trunks[file] if n not in erased], set(clients) & own
            files = dict.fromkeys(leaving, 0)
            for part, of in stored.items():
                through = trunks[part] == trunks[file] if merge else set(trunks[part]) <= set(trunks[file])
                if of[0] in files and through and not part.endswith(".sum.statistics"):
                    files[of[0]] += 1
            count = len(trunks[file])
            needed = 1 if merge else 1 + count + count * (count - 1) // 2
            possible = all(number == needed for number in files.values()) and not (merge and left != trunks[file])
            if (leaving or left != trunks[file]) and possible and set(clients) - own:
                wanted.append([True, sorted(set(clients) - own), left])
        written = self.rolled[request["request"]]["payload"].get("statistics", [])
        stated = [[row["file"].endswith(".sum.statistics"), row["clients"], row["trunks"]] for row in written]
        self.agree(f"request {request['request']}: statistics left", sorted(stated), sorted(wanted))

    def check_updates_of_request(self, request: Row, active: list[int], hidden: dict[int, dict]) -> None:
        """What had to go and what had to stay, when a request was carried out."""
        name, source, heuristic = request["request"], request["source_node"], request["method"] in REPLAYING
        moment, at = self.rolled[name], f"request {name}"
        mine = {i for i in hidden if self.owner[i] is request}
        own = {c for i in mine for c in self.subjects[i]}
        forgotten = {row["client"] for row in self.clients.values() for text in moment["asked"]
                 if row["name"] in json.loads(text)}  # fmt: skip
        rows = sorted(moment["updates"].values(), key=lambda row: (active.index(row["node"]), row["part"]))
        dropped, stay, replayed = [], {}, []
        promised: dict[int, dict] = {i: hidden[i] for i in hidden.keys() - mine}
        for i, clients in self.subjects.items():  # noise of training does not cover what is replayed
            order = self.owner[i]["request_order"]
            if heuristic and self.owner[i]["method"] == "dp" and order < request["request_order"]:
                fresh = self.nodes[active[0]]["request_order"] >= order
                promised[i] = dict.fromkeys(active, 0.0) if fresh else self.psi_along(active, clients)
        promised = {i: held for i, held in promised.items() if self.owner[i]["level"] not in (None, "none")}
        for row in rows:
            node, clients = self.nodes[row["node"]], json.loads(row["clients"])
            start = node["node"] if node["kind"] == "heuristic" else node["parent"]
            cut = source is None or active.index(row["node"]) > active.index(source)
            strict = request["retention"] == "strict" and any(hidden[i][start] for i in mine)
            if cut or strict or own & {int(c) for c in clients}:
                dropped.append(row["file"])
                rest = {c: digest for c, digest in clients.items() if int(c) not in own}
                if rest and not cut and not strict:
                    stay[row["node"], row["part"]] = rest
            left = {c: digest for c, digest in clients.items() if int(c) not in forgotten}
            replayed += [left] if left and heuristic else []
            for i, held in promised.items() if heuristic else ():
                self.check(not held[start], f"{at}: breaks what subject {i} was promised")
        rounds = 0
        if request["method"] == "fed_eraser":
            replayed = replayed[: request["max_rounds"] or self.spec["stop"]["max_rounds"]]
            rounds = len(replayed)
        stay |= {(request["noise_node"], part): left for part, left in enumerate(replayed, 1)}
        recorded = {(row["node"], row["part"]): row["clients"] for row in moment["payload"].get("updates", [])}
        if request["method"] == "fed_eraser":  # its updates are new: only whose they are can be told
            stay, recorded = ({key: sorted(value) for key, value in updates.items()} for updates in (stay, recorded))
        self.agree(f"{at}: updates erased", sorted(moment["payload"].get("dropped_updates", [])), sorted(dropped))
        self.check(recorded == stay, f"{at}: the updates that stay are not those of the remaining clients")
        self.agree(f"{at}: extra rounds", moment["payload"]["extra"]["rounds"], rounds)
        self.agree(f"{at}: position of the new node", self.nodes[request["noise_node"]]["position"], rounds)

    # ---- sections 3 and 4: Psi and the requests

    def path(self, node: int | None) -> list[int]:
        chain: list[int] = []
        while node is not None:
            chain.append(node)
            node = self.nodes[node]["parent"]
        return chain[::-1]

    def parents_come_first(self) -> bool:
        """Whether every path of nodes ends."""
        pairs = [(row["parent"], row["node"]) for row in self.nodes.values() if row["parent"] is not None]
        return all(isinstance(parent, int) and isinstance(node, int) and parent < node for parent, node in pairs)

    def psi_along(self, path: list[int], subject: list[int], known: int | None = None) -> dict[int, float]:
        """Psi(n, W) at every node n of a path; the population are the first `known` clients."""
        g, psi, rounding, touched, result = self.facts["server_rate"], 0.0, 0.0, False, {}
        unbounded = False
        everybody = sum(row["samples"] for client, row in self.clients.items() if known is None or client < known)
        for node in path:
            row, here = self.nodes[node], self.rounds[node]
            if row["kind"] in ("round", "merge"):
                mine, change, factor = [c for c in here if c in subject], 0.0, 1.0
                samples, drifts = (np.array([here[c][k] for c in mine], float) for k in ("samples", "drift"))
                rest, touched = row["samples"] - int(samples.sum()), touched or bool(mine)
                population = self.spec["privacy"]["accounting"] == "population"
                outside = everybody - int(samples.sum()) if population else rest
                if mine and outside == 0:
                    change = g * row["mean_shift"]
                elif mine:
                    length = float(samples @ drifts)
                    if node in self.grams and len(mine) > 1 and not population:
                        index = [list(here).index(c) for c in mine]
                        gram = self.grams[node].reshape(len(here), -1)[np.ix_(index, index)]
                        length = min(length, math.sqrt(max(0.0, samples @ gram @ samples)))
                    change = g * length / outside
                if rest:
                    of = self.regular[self.rate_since(node)]
                    less_p, less_a = (sum(here[c]["samples"] * of[c][k] for c in mine) for k in (0, 1))
                    factor = abs(1 - g) + g * (row["factor_sum"] - less_p) / rest
                    averaged = g * (row["averagedness_sum"] - less_a) / rest <= 1 - EDGE
                    if g > 1 and row["factor_max"] <= 1 and averaged:
                        factor = min(factor, 1.0)
                psi = factor * psi + change
                still = row["factor_max"] <= 1 and (g <= 1 or g * row["averagedness_max"] <= 1)
                growth = 1.0 if still else max(1.0, abs(1 - g) + g * row["factor_max"])
                rounding = growth * rounding + row["rounding"]
            elif row["kind"] == "noise":
                rounding += row["rounding"]
            unbounded = unbounded or row["kind"] == "heuristic"
            result[node] = math.inf if unbounded else max(psi + rounding, 2.0**-1000) if touched else 0.0
        return result

    def check_requests(self) -> None:
        carried = [row for row in self.requests.values() if row["request_order"] is not None]
        carried.sort(key=lambda row: row["request_order"])
        self.agree("orders of the requests", [r["request_order"] for r in carried], list(range(1, len(carried) + 1)))
        spent = dict.fromkeys(self.subjects, 0.0)
        for request in carried:
            if request["request"] in self.not_recomputed:
                self.check_rest_of_request(request)
            elif self.check(request["noise_std"] is not None, f"request {request['request']}: its figures are missing"):
                self.check_request(request, spent)

    def check_request(self, request: Row, spent: dict[int, float]) -> None:
        name, order, sigma, source = (request[k] for k in ("request", "request_order", "noise_std", "source_node"))
        at, moment, noise = f"request {name}", self.rolled[name], self.nodes[request["noise_node"]]
        chains = [self.chain(client) for client in json.loads(request["clients"])]
        forgotten = [client for chain in chains for client in chain]
        own = [clients for i, clients in self.subjects.items() if self.owner[i] is request]
        self.agree(f"{at}: subjects", own, [forgotten] if request["unit"] == "joint" else chains)
        self.agree(f"{at}: multiplier", request["multiplier"], multiplier(request))
        self.agree(f"{at}: sigma", sigma, float(request["sigma"]) if sigma and request["sigma"] != "auto" else sigma)
        if request["final_node"] is not None and self.spec["model"]["kind"] != "ridge":
            limit = request["max_rounds"] or self.spec["stop"]["max_rounds"]
            limit = max(noise["position"], 0 if request["release"] == "now" else limit)
            rounds = self.nodes[request["final_node"]]["position"]
            self.check(rounds <= limit, f"{at}: {rounds} rounds, where the terms allow {limit}")
        heuristic = request["method"] in REPLAYING
        usual_kind = "merge" if request["method"] == "groups" else "noise"
        kind = "heuristic" if heuristic else "initial" if source is None else usual_kind
        expected = {"kind": kind, "parent": source, "request_order": order, "branch": order, "noise_std": sigma}
        self.agree(f"{at}: noise node", {key: noise[key] for key in expected}, expected)

        active, available = self.path(int(moment["tip"])), sorted(moment["models"])
        charges = {row["subject"]: row for row in self.tables["charges"] if row["noise_node"] == noise["node"]}
        left, hidden, people, highest = {}, {}, {}, 0.0
        by_noise = PROTECTION[request["method"]] == "noise"
        for i, clients in self.subjects.items():
            owner, mine = self.owner[i], self.owner[i] is request
            if owner["request_order"] is None or owner["request_order"] > order:
                continue
            if not mine and PROTECTION[owner["method"]] != "noise":
                continue
            budget, psi, covered = 1 / multiplier(owner) ** 2, self.psi_along(active, clients, moment["clients"]), False
            left[i] = budget * (1 - owner["reserve"] if mine else 1) - (spent[i] if owner["scope"] == "all" else 0)
            hidden[i] = {None: 0.0}
            for n in active:
                row = self.nodes[n]
                later = row["request_order"] >= owner["request_order"]
                fresh, noised = row["kind"] == "initial", row["kind"] == "noise" and row["noise_std"] > 0
                covered = covered or (later and (fresh or noised))
                hidden[i][n] = 0.0 if covered else psi[n]
            here = math.inf if heuristic else hidden[i][source]
            if mine or (by_noise and here > 0):
                highest = max(highest, *(psi[n] for n in self.path(source)), 0.0)
                charge = charge_of(here, sigma) if by_noise else None
                if by_noise:
                    row, pair = charges.get(i, {"psi": "nan", "charge": math.nan}), [here, charge]
                    self.agree(f"{at}: psi and charge of subject {i}", [float(row["psi"]), row["charge"]], pair)
                    self.check(charge <= left[i] * (1 + RELATIVE), f"{at}: subject {i} owes {charge} of {left[i]}")
                    spent[i] += charge
                names = list(dict.fromkeys(self.plain(self.clients[c]["name"]) for c in clients))
                text = "inf" if math.isinf(here) else here
                people[i] = {"clients": names, "psi": text, "charge": charge, "budget": budget}
        self.agree(f"{at}: subjects charged", sorted(charges), sorted(people) if by_noise else [])
        self.check_rates(request)
        self.check_updates_of_request(request, active, hidden)
        self.check_statistics_of_request(request)
        untouched = source is None or not (heuristic or any(h[source] for h in hidden.values())
                                           or self.left_out(request, self.names_of(request)))  # fmt: skip
        if request["method"] != "sifu":
            fresh = request["method"] in ("scratch", "noisy_scratch", "closed_form") or noise["kind"] == "initial"
            start = None if fresh else active[0] if heuristic or noise["kind"] == "merge" else active[-1]
            self.agree(f"{at}: where it starts", [source, request["wanted_node"]], [start, start])
        if request["method"] in ("scratch", "closed_form", "groups") or not by_noise:
            self.agree(f"{at}: no noise", sigma, 0.0)

        def fits(node: int, slack: float) -> bool:
            return all(charge_of(h[node], sigma) <= left[i] * slack for i, h in hidden.items() if h[node])

        for key, among in (("source_node", [n for n in active if n in available]), ("wanted_node", active)):
            chosen = request[key]
            there = request["method"] != "sifu" or self.check(chosen in among, f"{at}: {key} {chosen} is not to be had")
            if request["method"] == "sifu" and sigma and there:
                self.check(fits(chosen, 1 + RELATIVE), f"{at}: {key} {chosen} exceeds a budget")
                later = [n for n in among if n > chosen and fits(n, 1 - RELATIVE)]
                self.check(not later, f"{at}: {key} is {chosen}, but {later} fit too")
        strict = request["retention"] == "strict"
        held = {n for i, h in hidden.items() for n in h if strict and self.owner[i] is request and h[n] > 0}
        hit = {n for n, row in self.groups.items() if set(forgotten) & set(row["members"])}
        groups = self.spec.get("groups", {"count": 0})
        tuned = self.spec["features"].get("tune", "none") != "none"
        fresh = {0} if groups["count"] and groups.get("stretch", 1.0) != 1.0 and not tuned else set()
        erased = [n for n in available if n in hit or (n not in self.groups and n not in fresh
                  and (source is None or n > source or n in held))]  # fmt: skip
        remaining = [n for n in available if n not in erased]
        self.agree(f"{at}: models erased", sorted(moment["payload"].get("dropped_models", [])), erased)
        self.agree(f"{at}: models that remain", sorted(moment["payload"]["remaining_models"]), remaining)
        if name in self.done:
            noise = self.training_noise(request, own) if request["method"] == "dp" else None
            level = self.level(request, highest, untouched, noise)
            self.agree(f"{at}: level", request["level"], level)
            self.check_auto(request, level)
            most = max(delta_of(multiplier(request), request["epsilon"]), FLOOR)
            if noise is not None:
                most = noise.pop("delta")
                noise.pop("counted")
            mine = [charge_of(float(p["psi"]), sigma) for i, p in people.items() if self.owner[i] is request]
            spent_now = max(mine) if by_noise else 0.0
            reached = most if noise is not None else 1.0
            if by_noise:
                reached = max(delta_of(1 / math.sqrt(spent_now), request["epsilon"]), FLOOR) if spent_now else 0.0
            body = {
                "untouched": untouched,
                "protection": PROTECTION[request["method"]],
                "training_noise": noise,
                "delta_at_most": 1.0 if PROTECTION[request["method"]] == "nothing" else 0.0 if untouched else most,
                "delta_reached": reached,
                "erased_nodes": erased,
                "remaining_nodes": remaining,
                "solve": self.solve_of(request),
                "psi": max((p["psi"] for i, p in people.items() if self.owner[i] is request), key=float),
            }
            body |= {key: [p for i, p in sorted(people.items()) if (self.owner[i] is request) == (key == "subjects")]
                     for key in ("subjects", "earlier_subjects")}  # fmt: skip
            self.check_certificates(request, body)

    def solve_of(self, request: Row) -> Row | None:
        """What an auditor's copy says of a head in closed form."""
        if request["method"] != "closed_form":
            return None
        return {key: self.solves[request["final_node"]][key] for key in ("sum", "samples")}

    def check_purges(self) -> None:
        """Section 5: a purge erases what holds an uncovered part of anybody forgotten by then, and nothing else."""
        for moment in self.purges:
            if moment["seq"] < self.wish:
                continue  # section 6e: what it erased is not said any more
            active, held, at = self.path(int(moment["tip"])), set(), f"event {moment['seq']}"
            self.agree(f"{at}: subjects", moment["payload"]["subjects"], moment["known"])
            for i in moment["known"]:
                psi, covered, order = self.psi_along(active, self.subjects[i]), False, self.owner[i]["request_order"]
                for n in active:
                    row = self.nodes[n]
                    noised = row["kind"] == "initial" or (row["kind"] == "noise" and row["noise_std"] > 0)
                    covered = covered or (row["request_order"] >= order and noised)
                    held |= {n} if psi[n] > 0 and not covered else set()
            models = [n for n in sorted(moment["models"]) if n in held and n != active[-1]]
            updates = []
            for (file,), row in sorted(moment["updates"].items()):
                node = self.nodes[row["node"]]
                start = node["node"] if node["kind"] == "heuristic" else node["parent"]
                updates += [file] if start in held else []
            said, wish = moment["payload"], "all_figures" in moment["payload"]
            served = [r for r in moment["requests"].values() if r.get("request_order")]
            since = [r for r in served if r["request"] not in self.not_recomputed]
            if wish:
                self.check_wish(moment)
            first = json.loads(self.tables["events"][0]["payload"])
            exact = bool(served) and all(
                row.get("level") == "exact" and row["method"] in ("scratch", "groups", "closed_form") for row in since
            )
            exact = exact or wish
            able = "sealed" in first and not self.spec["keep"]["gram_clients"] and "reported" not in self.run
            able = able and self.spec["privacy"]["noise"] != "seeded" and exact
            in_the_open = self.spec["local"]["rate"] != "auto" == json.loads(self.run["asked"])["local"]["rate"]
            able = able and not in_the_open
            self.agree(f"{at}: figures erased", said.get("figures_erased", False), able and "kept_rows" in said)
            if said.get("figures_erased"):
                stays = self.kept_path(active) if wish else active
                cut = [row for n, row in self.nodes.items() if n <= said["kept_rows"]["last"] and n not in stays]
                rounds = [row["node"] for row in cut if row["kind"] in ("round", "merge")]
                back = [node for node in rounds if self.nodes[node]["distance"] or not self.figures_gone(node)]
                noised = [row for row in cut if row["kind"] == "noise"]
                back += [row["node"] for row in noised if [row["parent"], row["noise_std"], row["rounding"]]
                         != [row["node"] - 1, math.inf, math.inf]]  # fmt: skip
                gone = {c for i in moment["known"] for c in self.subjects[i]}
                back += [c for c in gone if self.clients[c]["smoothness"] is not None]
                self.check(not back, f"{at}: figures of {back} are there again")
                rates = [first for first in self.rates if first <= said["kept_rows"]["last"]]
                self.check(len(rates) <= 1, f"{at}: local rates of {rates} are there again")
            if not wish:
                self.agree(f"{at}: models purged", moment["payload"].get("dropped_models", []), models)
                self.agree(f"{at}: updates purged", moment["payload"].get("dropped_updates", []), updates)

    def training_noise(self, request: Row, subjects: list[list[int]]) -> Row:
        """Section 4a."""
        z, delta, ratios, counted = self.facts["noise"], request["delta"], [], 0
        for clients in subjects:
            squares = 0.0
            counted += sum(any(c in here for c in clients) for here in self.rounds.values())
            for here in self.rounds.values():
                mine, everyone = (sum(here[c]["samples"] for c in who if c in here) for who in (clients, list(here)))
                if any(c in here for c in clients):
                    width = z * math.sqrt(sum(p["samples"] ** 2 for p in here.values())) / everyone
                    squares += ((2 * mine / everyone + (len(here) + 8) * 2**-51) / width) ** 2
            ratios.append(math.sqrt(squares))
        mu, once = max(ratios), epsilon_of(1 / z, delta)
        if request["calibration"] == "classical":
            once = math.sqrt(2 * math.log(1.25 / delta)) / z
        composed, reached = epsilon_of(mu, delta), max(delta_of(1 / mu, request["epsilon"]), FLOOR) if mu else 0.0
        return {"clip": self.facts["clip"], "noise": z, "epsilon_one_round": once, "epsilon_composed": composed,
                "delta": reached, "counted": counted}  # fmt: skip

    def check_auto(self, request: Row, level: str) -> None:
        """Section 4a: the method asked for, or the one the rule takes from the recorded figures."""
        at, auto = f"request {request['request']}", self.rolled[request["request"]]["payload"].get("auto")
        strength = ("none", "conditional", "proven", "exact").index
        restored = bool(self.restored_before(request))
        least = request["asked_level"] or "none"
        self.check(restored or strength(level) >= strength(least), f"{at}: {level} is below the {least} asked for")
        if request["asked_method"] != "auto":
            self.agree(f"{at}: method", [request["method"], auto], [request["asked_method"], None])
            return
        rolled = next(e for e in self.tables["events"] if e["seq"] == self.rolled[request["request"]]["seq"])
        if self.is_erased(rolled) or not self.check(auto, f"{at}: what auto chose from is not recorded"):
            return
        order = ("closed_form", "groups", "sifu", "last", "dp", "scratch")
        places = {way["method"]: order.index(way["method"]) if way["method"] in order else 6 for way in auto["ways"]}
        self.check(strength(auto["least_level"]) >= strength(least), f"{at}: auto chose below {least}")
        if self.spec.get("requests", {}).get("approval", "none") != "none":
            approved = request["asked_level"] or "conditional"
            self.agree(f"{at}: level approved", auto["least_level"], approved)
        enough = [way for way in auto["ways"] if strength(way["level"]) >= strength(auto["least_level"])]
        exact = sorted((way for way in enough if way["level"] == "exact"), key=lambda way: places[way["method"]])[:1]
        others = [way for way in enough if way["level"] != "exact"] if auto["least_level"] != "exact" else []
        costs = [(math.inf if way["rounds"] is None else way["rounds"], -strength(way["level"]), places[way["method"]],
                  way["method"], way["level"]) for way in exact + others]  # fmt: skip
        taken = min(costs)[3:] if costs else (None, None)
        self.agree(f"{at}: the way auto takes", [request["method"], level if not restored else taken[1]], list(taken))

    def level(self, request: Row, highest: float, untouched: bool, noise: Row | None) -> str:
        facts, privacy, classical = self.facts, self.spec["privacy"], request["calibration"] == "classical"
        if PROTECTION[request["method"]] == "nothing":
            return "none"
        fresh = request["source_node"] is None or request["method"] == "groups" or self.from_initial(request)
        before = (facts["preprocessing"] not in ("fixed constants", "declared fixed by the operator"),
                  facts["initial"] not in ("drawn from the seed", "made by the operator's program"),
                  facts["identity"] not in ("in process", "node keys"), self.rate_depends(request),
                  self.groups_depend(request), facts.get("engine", "not known") == "not known",
                  self.draws_by_number(request))  # fmt: skip
        couples = ("a minimum of", "dropping a masked round in which one client fails")
        rounds = (facts["participation"].startswith("fixed"), self.left_out(request), self.restored_before(request),
                  any(what.startswith(couples) for what in facts["outside"]))  # fmt: skip
        if untouched:
            chosen = request["method"] == "noisy_scratch" and request["sigma"] == "auto"
            engine = facts.get("engine", "")
            bits = "computed on a GPU" in engine or (
                request["method"] != "closed_form" and "padded to the largest" in engine
            )
            return "conditional" if any((*before, chosen, bits, not fresh and any(rounds))) else "exact"
        seeded = (privacy["noise"] if noise is None else facts["noise_source"]) != "system"
        if noise is not None:
            replayed = any(self.nodes[n]["kind"] == "heuristic" for n in self.path(request["noise_node"]))
            above = noise["epsilon_composed"] > request["epsilon"] * (1 + RELATIVE)
            if replayed or seeded or above or noise["counted"] > 0:
                return "none"
            return "conditional" if any((*before, *rounds)) else "proven"
        if privacy["accounting"] == "population" or seeded or (classical and request["epsilon"] >= 1):
            return "none"
        doubts = (self.spec["regularity"]["kind"] == "assumed", not facts["smooth_model"], bool(facts["outside"]),
                  classical, facts["dtype"] != "float64", not facts["rounding_bounded"], highest > 1000,
                  self.is_steep(request))  # fmt: skip
        return "conditional" if any((*before, *rounds, *doubts)) else "proven"

    def rules(self, request: Row) -> int:
        """Section 7: the version of the rules by which a request was certified."""
        issued = [row for row in self.tables["certificates"] if row["request"] == request["request"]]
        return json.loads(issued[0]["content"])["body"]["wording"] if issued else 3

    def from_initial(self, request: Row) -> bool:
        """Whether training went on from the initial model without noise, which is a fresh one (from version 3 on)."""
        node = self.nodes.get(request["source_node"], {})
        plain = request["noise_std"] == 0 and request["method"] in ("sifu", "last")
        return plain and node.get("kind") == "initial" and self.rules(request) >= 3

    def is_steep(self, request: Row) -> bool:
        """Whether eta beta > 2 for a client that was there when the path of the request began."""
        eta = self.rates.get(self.rate_since(request["noise_node"]), self.facts["local_rate"])
        begun = self.nodes[min(self.path(request["noise_node"]))]["request_order"]
        gone = {c for i, clients in self.subjects.items() for c in clients
                if (self.owner[i]["request_order"] or math.inf) <= begun}  # fmt: skip
        there = range(self.rolled[request["request"]]["clients"])
        return any(eta * (self.clients[c]["smoothness"] or 0) > 2 for c in there if c not in gone)

    def draws_by_number(self, request: Row) -> bool:
        """Whether a record less would have changed which rows are held out."""
        data = self.spec["data"]
        if data.get("held_out_by", "number") != "number" or data["id"] or self.rules(request) < 3:
            return False
        return bool(json.loads(request["records"])) and (data["name"] == "hospitals" or data["held_out"] > 0)

    def names_gone(self, request: Row) -> list[str]:
        """The names of everyone gone with the request: from version 3 on also those who left before."""
        if self.rules(request) < 3:
            return self.names_of(request)
        earlier = {c for i, clients in self.subjects.items() for c in clients
                   if (self.owner[i]["request_order"] or math.inf) <= request["request_order"]}  # fmt: skip
        return [*self.names_of(request), *(self.clients[c]["name"] for c in earlier)]

    def left_out(self, request: Row, names: list[str] | None = None) -> bool:
        """Whether a reply (of one of these clients) was left out in a round on the path to the source (section 1a)."""
        rounds = {(self.nodes[n]["branch"], self.nodes[n]["position"] - 1) for n in self.path(request["source_node"])
                  if self.nodes[n]["kind"] == "round"}  # fmt: skip
        return any(row["left_out"] and (row["branch"], row["round"]) in rounds
                   and (names is None or row["client"] in names) for row in self.tables["rejections"])  # fmt: skip

    def groups_depend(self, request: Row) -> bool:
        """Whether the rule would have made another number of groups without the clients of the request."""
        count, given = self.spec["groups"]["count"], json.loads(self.run["asked"]).get("groups", {})
        if (
            count == 0
            or given.get("count", count)
            or request["method"] in ("scratch", "noisy_scratch")
            or (self.from_initial(request))
        ):
            return False
        founders = len(self.clients) - sum(event["kind"] == "client joined" for event in self.tables["events"])
        names, part = self.names_gone(request), self.facts["participation"]
        rate = float(part[len("poisson(") : -1]) if part.startswith("poisson") else 1.0
        left = sum(1 for client, row in self.clients.items() if client < founders and row["name"] not in names)
        return count != max(2, min(10, left // 5, int(left * rate) // 4))

    def rate_since(self, node: int) -> int:
        """The fresh model from which on the local rate of a node was in use (section 2)."""
        return max((first for first in self.rates if first <= node), default=0)

    def largest_rates(self, clients: Any) -> dict[str, float]:
        """The largest certified rate of each of these clients, by name."""
        rows = [self.clients[client] for client in clients]
        return {
            row["name"]: momentum_limit(row["local_steps"], self.facts["momentum"]) / row["smoothness"]
            if row["smoothness"] else math.inf for row in rows
        }  # fmt: skip

    def founders(self) -> range:
        joined = sum(event["kind"] == "client joined" for event in self.tables["events"])
        return range(len(self.clients) - joined)

    def set_the_rate(self, request: Row) -> Any:
        """Those from whom the local rate was found at which training went on after the request."""
        since = self.rate_since(request["noise_node"])
        began = [row for row in self.requests.values() if since and row["noise_node"] == since]
        return self.there_since(began[0]) if began else self.founders()

    def found_anew(self, request: Row) -> bool:
        """Whether the request found an automatic local rate anew (section 4)."""
        measured = [row for c, row in self.clients.items() if c not in self.erased]
        unknown = any(row["smoothness"] is None or (row["curvature"] or 0) < 0 for row in measured)
        begins_afresh = request["method"] in ("scratch", "noisy_scratch") and not json.loads(request["records"])
        ours = self.facts.get("engine", "").startswith(("the data of its participants", "its participants, padded"))
        if not begins_afresh or not ours or self.spec["groups"]["count"] or unknown:
            return False
        eta = self.rates.get(self.rate_since(request["noise_node"]), self.facts["local_rate"])
        if json.loads(self.run["asked"])["local"]["rate"] != "auto" or eta == 0:
            return eta == 0  # section 6d: a purge erased it
        anew = self.automatic(self.set_the_rate(request))
        return abs((1.0 if math.isinf(anew) else anew) / eta - 1) <= 2 * RELATIVE

    def automatic(self, clients: Any) -> float:
        largest = min(self.largest_rates(clients).values())
        if self.facts["momentum"]:
            largest /= 1 + RELATIVE  # x_max is an eigenvalue, and is rounded down (section 4)
        return (0.5 if self.spec["model"]["kind"] == "least_squares" else 1.0) * largest

    def check_rates(self, request: Row) -> None:
        """Section 4: where training begins afresh, an automatic rate is that of those who stay."""
        moment, node = self.rolled[request["request"]], request["noise_node"]
        said, at = moment["payload"].get("local_rates"), f"request {request['request']}: local rates"
        if not self.found_anew(request):
            self.agree(at, (said, node in self.rates), (None, False))
            return
        anew = self.automatic(self.there_since(request))
        rate = 1.0 if math.isinf(anew) else anew
        if self.is_erased(moment):  # section 6d: of rates that were cut off nothing is left, if it erased figures
            gone = node <= self.erased_up_to and bool(self.rates) and node < min(self.rates)
            self.agree(at, self.rates.get(node), None if gone else rate)
            return
        earlier = {str(first): value for first, value in self.rates.items() if first < node}
        self.agree(at, said, earlier | {str(node): rate})

    def there_since(self, request: Row) -> list[int]:
        """The clients that there were, and that neither this request nor one before it forgot."""
        gone = {c for i, clients in self.subjects.items() for c in clients
                if (self.owner[i]["request_order"] or math.inf) <= request["request_order"]}  # fmt: skip
        return [client for client in range(self.rolled[request["request"]]["clients"]) if client not in gone]

    def rate_depends(self, request: Row) -> bool:
        """Whether the automatic local rate would be another one without the clients of the request."""
        if self.facts["shape_from_labels"] or request["method"] == "closed_form":
            return bool(self.facts["shape_from_labels"])
        measured = {c: row for c, row in self.clients.items() if c not in self.erased}
        if any(row["smoothness"] is None or (row["curvature"] or 0) < 0 for row in measured.values()) or not measured:
            return False
        if self.found_anew(request):
            return False
        names, since = self.names_gone(request), self.rate_since(request["noise_node"])
        rates = self.largest_rates([client for client in self.set_the_rate(request) if client in measured])
        largest, eta = min(rates.values()), self.rates.get(since, self.facts["local_rate"])
        halved = self.spec["model"]["kind"] in ("least_squares", "python")
        copied = any(abs(eta / (share * largest) - 1) <= 0.01 for share in ((1.0, 0.5) if halved else (1.0,)))
        if json.loads(self.run["asked"])["local"]["rate"] != "auto" and not copied:
            return False
        return largest != min(rate for name, rate in rates.items() if name not in names)

    # ---- section 7: the certificates

    def check_certificates(self, request: Row, body: Row) -> None:
        name, sigma, s = request["request"], request["noise_std"], multiplier(request)
        rolled, done = self.rolled[name], self.done[name]
        noised = next(m for m in rolled["payload"]["models"] if m["node"] == request["noise_node"])
        source = noised if request["source_node"] is None else rolled["models"][request["source_node"]]
        recorded = {"source": source, "noised": noised, "final": done["models"][request["final_node"]]}
        models = {f"{which}_model": dict(done["payload"]["certified_models"][which]) for which in recorded}
        for which, row in recorded.items():
            for key in ("node", "digest"):
                self.agree(f"request {name}: {key} of the {which} model", models[f"{which}_model"][key], row[key])
        for m in models.values():
            m["commitment"] = sha256(bytes.fromhex(m["nonce"]), bytes.fromhex(m["digest"]))
        ledger = next(e for e in self.tables["events"] if e["seq"] == done["seq"] - 1)
        body |= {key: request[key] for key in COPIED} | {
            "accounting": self.spec["privacy"]["accounting"], "noise_source":
                self.facts["noise_source"] if request["method"] == "dp" else self.spec["privacy"]["noise"],
            "participation": self.facts["participation"], "versions": json.loads(self.run["versions"]),
            "run": self.run["run"], "format": "sifu-certificate-4",
            "clients": [self.plain(name) for name in json.loads(request["clients"])],
            "start": {"heuristic": "initial", "merge": "merge"}.get(
                self.nodes[request["noise_node"]]["kind"],
                "fresh" if request["source_node"] is None or self.from_initial(request) else "trained"),
            "keeps_updates": self.spec["keep"].get("updates_every", 0) > 0,
            "keeps_statistics": self.spec["keep"]["statistics"] if request["method"] == "closed_form" else None,
            "records": len(json.loads(request["records"])) or None,
            "terms": {key: value for key, value in json.loads(request["terms"]).items()
                      if key not in ("clients", "records")},
            "noise_multiplier": s, "sigma": sigma, "psi_star": sigma / s,
            "node": source["node"], "models": models,
            "commitments": {which: m["commitment"] for which, m in models.items()}
            | ({"records": self.committed[request["request"]]} if request["request"] in self.committed else {}),
            "rounds": self.nodes[request["final_node"]]["position"],
            "ledger": {"head": ledger["hash"].hex(), "seq": ledger["seq"], "time": ledger["time"]},
            "attacker_true_positive_rate_at_1_percent": None if request["level"] == "none" else
                0.01 if request["level"] == "exact" else math.ceil(1e4 * ndtr(ndtri(0.01) + 1 / s) - 1e-6) / 1e4,
        }  # fmt: skip
        for form in ("auditor", "public"):
            at, file = f"certificate {name}.{form}", self.folder / "certificates" / f"{name}.{form}.json"
            text = file.read_bytes().decode("utf-8")
            certificate, stored = json.loads(text), {(r["request"], r["form"]): r for r in self.tables["certificates"]}
            self.check(stored.get((name, form), {}).get("content") == text, f"{at}: file and table differ")
            self.agree(f"{at}: hash in the ledger", done["payload"]["certificates"][form], sha256(text.encode()))
            named = [key for seq, key in self.keys if seq < done["seq"]][-1]
            self.agree(f"{at}: public_key", certificate["public_key"], named)
            try:
                key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(named))
                key.verify(bytes.fromhex(certificate["signature"]), canonical(certificate["body"]).encode())
                named_head = body["ledger"] | {"format": "sifu-checkpoint-1", "run": self.run["run"]}
                signature = certificate["body"]["ledger"].pop("signature")
                key.verify(bytes.fromhex(signature), canonical(named_head).encode())
            except Exception:
                self.problems.append(f"{at}: the signature does not verify")
            for premise in certificate["body"]["premises"]:
                keys = {"name", "status", "case", "values"} | ({"confidential"} if form == "auditor" else set())
                self.check(premise.keys() == keys, f"{at}: premise {premise}")
            hidden = CONFIDENTIAL if form == "public" else set()
            self.check(not hidden & certificate["body"].keys(), f"{at}: holds what only the auditor may see")
            for field, value in (body | {"form": form}).items():
                if field == "delta_reached" and form == "auditor":  # rounded up to four digits
                    said = certificate["body"]["delta_reached"]
                    good = value * (1 - 1e-6) <= said <= value * 1.002 + 1e-15
                    self.check(good, f"{at}: delta_reached is {said}, not {value}")
                elif field not in hidden:
                    self.agree(f"{at}: {field}", certificate["body"].get(field), value)


def not_recomputed(folder: Path) -> dict[str, str]:
    """The requests whose certificates verify(folder) does not recompute, with the time their figures were erased."""
    return Verifier(Path(folder)).not_recomputed


def verify(folder: Path) -> list[str]:
    """The problems of a run folder; none if everything agrees."""
    try:
        verifier = Verifier(Path(folder))
    except Exception as error:
        return [f"the folder cannot be read: {error!r}"]
    for step in (verifier.check_ledger, verifier.check_nodes, verifier.check_rejections, verifier.check_files,
                 verifier.check_groups, verifier.check_records, verifier.check_salts,
                 verifier.check_updates, verifier.check_statistics, verifier.check_networks,
                 verifier.check_requests, verifier.check_purges,
                 verifier.check_restored, verifier.check_timestamps):  # fmt: skip
        try:
            step()
        except Exception as error:
            verifier.problems.append(f"{step.__name__} gave up: {error!r}")
        if step == verifier.check_ledger and not verifier.parents_come_first():
            verifier.problems.append("nodes: a parent does not come before its child, so a path may lead in circles")
            break
    return verifier.problems


if __name__ == "__main__":
    results = {folder: verify(Path(folder)) for folder in sys.argv[1:]}
    for folder, problems in results.items():
        erased = [f"not recomputed, figures erased {time}: {name}" for name, time in not_recomputed(folder).items()]
        print(f"{folder}: {f'{len(problems)} problems' if problems else 'all good'}", *problems, *erased, sep="\n  ")
    sys.exit(any(results.values()))
