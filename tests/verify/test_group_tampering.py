"""Changes to the record of groups: noticed even if the forger rebuilds and signs the whole chain."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from forged_runs import add_event, execute, rebuild_chain
from run_tools import connect, copy_run, query, small_spec
from sifu.api import verify_run
from sifu.store.files import model_bytes, stored_path
from sifu.store.reader import RunReader

Content = dict[str, Any]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with four groups, one client forgotten by their merge, and its group rebuilt; tests only read it."""
    folder = tmp_path_factory.mktemp("groups") / "run"
    spec = small_spec(groups={"count": 4, "rounds": 3}, stop={"target": 0.0, "max_rounds": 5})
    sifu.train(spec, run=folder).forget(["client-001"], "gone", method="groups")
    return folder


@pytest.fixture
def own(grouped: Path, tmp_path: Path) -> Path:
    return copy_run(grouped, tmp_path / "own")


def hit_group(folder: Path) -> tuple[int, int, int]:
    """Return node, group and samples of the erased model that contained the forgotten client."""
    rows = query(folder, "SELECT node, grp, samples, members FROM group_models ORDER BY node DESC")
    return next((row[0], row[1], row[2]) for row in rows if 1 in json.loads(row[3]))


def request_merge(folder: Path) -> int:
    (node,) = query(folder, "SELECT noise_node FROM requests")[0]
    return int(node)


def leave_a_hit_group_in(folder: Path) -> None:
    node, merge = hit_group(folder), request_merge(folder)
    execute(folder, f"INSERT INTO merges VALUES ({merge}, {node[1]}, {node[0]}, {node[2]})")
    row = {"node": merge, "grp": node[1], "source_node": node[0], "samples": node[2]}

    def edit(kind: str, content: Content) -> None:
        if kind == "rolled back":
            content["merges"] = sorted([*content["merges"], row], key=lambda part: part["grp"])

    rebuild_chain(folder, edit)


def listed(members: list[int]) -> str:
    """Return the members as canonical JSON."""
    return json.dumps(members, separators=(",", ":"))


def on_the_first_models(change: Callable[[Content], None]) -> Callable[[Path], None]:
    """Return a forger of the group rows in the first event that records them, and in the table."""

    def forge(folder: Path) -> None:
        done: list[bool] = []

        def edit(kind: str, content: Content) -> None:
            if kind == "group rounds" and not done:
                done.append(True)
                change(content)
                connection = connect(folder)
                for row in content["group_models"]:
                    connection.execute(
                        "UPDATE group_models SET rounds = ?, samples = ?, members = ? WHERE node = ?",
                        (row["rounds"], row["samples"], listed(row["members"]), row["node"]),
                    )
                connection.close()

        rebuild_chain(folder, edit)

    return forge


def move_a_member(content: Content) -> None:
    """Move a member to another group, as any grouping other than by name would."""
    first, second = content["group_models"][:2]
    second["members"] = sorted([*second["members"], first["members"].pop()])


def stop_earlier(content: Content) -> None:
    for row in content["group_models"]:
        row["rounds"] -= 1


def weigh_more(content: Content) -> None:
    content["group_models"][0]["samples"] += 10


def put_the_forgotten_back(folder: Path) -> None:
    """Put the forgotten client back into the rebuilt group."""

    def edit(kind: str, content: Content) -> None:
        branch = "SELECT branch FROM nodes WHERE node = ?"
        if kind == "group rounds" and query(folder, branch, (content["rows"]["first"],)) == [(-1,)]:
            row = content["group_models"][0]
            row["members"], row["samples"] = sorted([*row["members"], 1]), row["samples"] + 10
            connection = connect(folder)
            values = (row["samples"], listed(row["members"]), row["node"])
            connection.execute("UPDATE group_models SET samples = ?, members = ? WHERE node = ?", values)
            connection.close()

    rebuild_chain(folder, edit)


def forge_the_merged_model(folder: Path) -> None:
    """Replace the merged model, with its digest in table, ledger and file."""
    merge = request_merge(folder)
    with RunReader(folder) as reader:
        content = model_bytes(reader.layout, reader.load_model(merge) + np.asarray(1e-9, dtype=reader.layout.dtype))
    forge_model(folder, merge, content)


def forge_model(folder: Path, merge: int, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    stored_path(folder, "models", merge).write_bytes(content)
    execute(folder, f"UPDATE models SET digest = '{digest}' WHERE node = {merge}")

    def edit(kind: str, payload: Content) -> None:
        for row in [*payload.get("models", []), *payload.get("certified_models", {}).values()]:
            if row["node"] == merge:
                row["digest"] = digest

    rebuild_chain(folder, edit)


def merge_with_another_stretch(folder: Path) -> None:
    """Replace the merge by one with a stretch of 1.5, as if chosen after a look at the leavers' data."""
    merge = request_merge(folder)
    with RunReader(folder) as reader:
        fresh, moved = (reader.load_model(node).astype(np.float64) for node in (0, merge))
        other = fresh + 1.5 / 1.25 * (moved - fresh)
        content = model_bytes(reader.layout, other.astype(reader.layout.dtype))
    forge_model(folder, merge, content)


def know_a_drift(folder: Path) -> None:
    execute(folder, f"UPDATE participation SET drift = 0.001 WHERE node = {request_merge(folder)} AND client = 4")
    rebuild_chain(folder)


def another_key(folder: Path) -> None:
    execute(folder, f"UPDATE run SET value = '{'ab' * 32}' WHERE key = 'group_key'")

    def edit(kind: str, content: Content) -> None:
        if kind == "run created":
            content["run"]["group_key"] = "ab" * 32

    rebuild_chain(folder, edit)


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a hit group is left in the merge": (leave_a_hit_group_in, "the rule says"),
    "a client is in another group": (on_the_first_models(move_a_member), "into another group"),
    "groups stopped earlier": (on_the_first_models(stop_earlier), "has rounds other than separate ones"),
    "a group weighs more": (on_the_first_models(weigh_more), "not the sum of its members"),
    "the forgotten client is in the group built again": (put_the_forgotten_back, "forgotten before"),
    "another model takes the place of the merge": (forge_the_merged_model, "is not the merge"),
    "a merge made with another stretch": (merge_with_another_stretch, "is not the merge"),
    "a merge with a known drift": (know_a_drift, "its participants are not the members"),
    "another key of the hash": (another_key, "into another group"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_with_every_hash_rebuilt_are_caught(own: Path, name: str) -> None:
    forge, words = FORGERIES[name]
    forge(own)
    assert any(words in problem for problem in verify_run(own).problems), verify_run(own).problems
    assert sifu_verifier.verify(own) != []


@pytest.mark.parametrize("kind", ["group rounds", "merged"])
def test_added_events_are_caught(own: Path, kind: str) -> None:
    """An added event is signed with the key in the folder, so its content must be refused."""
    row = {"node": 1, "grp": 0, "rounds": 1, "samples": 1, "members": [0]}
    payload: Content = {"group_models": [row]} if kind == "group rounds" else {"merges": [], "run": {"tip": "1"}}
    add_event(own, kind, payload)
    assert verify_run(own).problems


def test_nothing_is_recorded_of_psi_through_a_merge(grouped: Path) -> None:
    drifts = query(grouped, "SELECT DISTINCT drift FROM participation JOIN merges USING (node)")
    assert drifts == [(math.inf,)]
