"""Groups of a server loop that tune networks with masked updates: the server sees only the mean of each group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_loop_heads import (
    Federation,
    check_only_the_sum_is_visible,
    head_of,
    head_spec,
    incidents,
    networks_of,
    tuned_spec,
)

import sifu
import sifu_verifier
from sifu.engines.outside import Task
from sifu.errors import InputError, NoClientResponseError

MASKED = ["prepare_train", "masked_train", "prepare", "masked"]


def masked_spec(**sections: Any) -> dict[str, Any]:
    """Return a spec of eight clients in two groups of four."""
    return {**tuned_spec(data={"clients": 8}, keep={"statistics": "sum"}, **sections), "seed": 5}


def test_masked_groups_tune_and_forget_as_open_ones(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", masked_spec(), masked_updates=True)
    assert fed.serve() == MASKED
    clear = Federation(tmp_path / "clear", masked_spec())
    assert clear.serve() == ["train", "prepare", "masked"]
    hidden, seen = networks_of(fed.folder), networks_of(clear.folder)
    assert hidden.keys() == seen.keys() == {0, 1}
    for group, vector in hidden.items():
        np.testing.assert_allclose(vector, seen[group], rtol=0, atol=1e-5)  # rounding of fixed-point numbers
    assert fed.forget("client-002") == ["prepare", "masked"]
    never = Federation(tmp_path / "never", masked_spec(), ("client-002",), masked_updates=True)
    never.serve()
    left, others = networks_of(fed.folder), networks_of(never.folder)
    assert len(left) == 1
    for group, vector in left.items():
        np.testing.assert_array_equal(vector, others[group])
    run = sifu.open_run(fed.folder)
    assert run.verify().problems == sifu_verifier.verify(fed.folder) == []


def test_the_program_never_holds_a_clients_own_update(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", masked_spec(), masked_updates=True)
    check_only_the_sum_is_visible(fed, "prepare_train", "masked_train")


def test_a_client_that_goes_missing_drops_the_round_of_its_group_alone(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", masked_spec(groups={"count": 2, "rounds": 2}), masked_updates=True)
    lost: list[int] = []

    def lose(task: Task, replies: dict[str, Any]) -> dict[str, Any]:
        if task.kind == "masked_train" and not lost:
            lost.append(task.round)
            return {name: reply for name, reply in replies.items() if name != "client-003"}
        return replies

    fed.serve(lose)
    dropped = [what for client, what in incidents(fed.folder) if what.endswith("the round was dropped")]
    assert len(dropped) == 1
    assert "masked updates arrived" in dropped[0]
    assert ("client-003", "no reply was submitted") in incidents(fed.folder)
    assert sifu.open_run(fed.folder).verify().problems == []


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "other samples": ("it trained on 13 samples, not on 12", lambda reply: {**reply, "samples": 13}),
    "a key of low order": ("its key is invalid or repeated", lambda reply: {**reply, "key": bytes(32).hex()}),
    "no key": ("its reply was refused: no samples, range and key", lambda reply: {**reply, "key": "none"}),
    "text": ("its reply was refused: no samples, range and key", lambda reply: "ready"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_client_that_cannot_take_part_counts_as_absent(tmp_path: Path, kind: str) -> None:
    why, change = BAD[kind]
    fed = Federation(tmp_path / "run", masked_spec(), masked_updates=True)

    def hostile(task: Task, replies: dict[str, Any]) -> dict[str, Any]:
        if task.kind != "prepare_train":
            return replies
        return {**replies, "client-004": change(replies["client-004"]), "a stranger": replies["client-005"]}

    fed.serve(hostile)
    assert {("client-004", why), ("a stranger", "its reply was refused: unknown client")} <= set(incidents(fed.folder))
    absent = Federation(tmp_path / "absent", masked_spec(), masked_updates=True)
    absent.serve(
        lambda task, replies: {
            name: reply for name, reply in replies.items() if (task.kind, name) != ("prepare_train", "client-004")
        }
    )
    np.testing.assert_array_equal(head_of(fed.folder), head_of(absent.folder))


def test_what_masked_tuning_cannot_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tune a network with sifu\.LoopClient"):
        Federation(tmp_path / "head", head_spec(), masked_updates=True).loop()
    # Six clients: one group has two members.
    with pytest.raises(InputError, match="or with masked_updates=False"):
        Federation(tmp_path / "small", tuned_spec(keep={"statistics": "sum"}), masked_updates=True).serve()
    bound = masked_spec(server={"rejected": "reply", "update_bound": 1.0})
    with pytest.raises(InputError, match="update_bound need the update of each client: set masked_updates=False"):
        Federation(tmp_path / "bound", bound, masked_updates=True).loop()
    fed = Federation(tmp_path / "run", masked_spec())
    fed.serve()
    fed.options["masked_updates"] = True
    with pytest.raises(InputError, match="was not started with"):
        fed.loop()
    cautious = sifu.LoopClient("client-000", np.zeros((2, 64)), np.zeros(2, dtype=int), masked_only=True)
    with pytest.raises(InputError, match="masked updates only: the server must use masked_updates=True"):
        cautious.answer({}, fed.tasks[0].instructions["client-000"])


def test_a_client_sends_its_update_once(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", masked_spec(), masked_updates=True)
    fed.serve()
    told = next(task for task in fed.tasks if task.kind == "masked_train").instructions
    with pytest.raises(InputError, match=r"no update is prepared for round .* has sent it already"):
        fed.clients["client-001"].answer({}, told["client-001"])


def test_rounds_that_are_always_dropped_end_the_loop(tmp_path: Path) -> None:
    fed = Federation(tmp_path / "run", masked_spec(groups={"count": 2, "rounds": 6}), masked_updates=True)
    with pytest.raises(NoClientResponseError, match="rounds in a row were lost"):
        fed.serve(lambda task, replies: {} if task.kind == "masked_train" else replies)
