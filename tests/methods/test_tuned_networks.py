"""Groups that tune a public network separately under a closed-form head: forgetting drops blocks and solves again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from forged_runs import rebuild_chain
from run_tools import copy_run
from sifu.api import verify_run
from sifu.core.spec import Spec
from sifu.errors import RoundRejectedError
from sifu.requests import files_to_erase
from sifu.run import group_training
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.group_state import available_backbones, use_backbones
from sifu.store.own_statistics import OwnStatistics
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter
from sifu.theory.closed_form import Statistics, total
from sifu.theory.closed_form.blocks import drop, head_at, is_dropped
from tuned_runs import (
    CLIENTS,
    GROUPS,
    blocks_of,
    check,
    clients_of,
    groups_of,
    open_own,
    released,
    spec_of,
    whole_sum,
    without,
)


@pytest.mark.parametrize("leavers", [["client-003"], ["client-000"], ["client-002", "client-006"]])
def test_forgetting_takes_no_round_and_has_the_bits_of_the_counterfactual(
    own: Path, tmp_path: Path, leavers: list[str]
) -> None:
    (outcome,) = open_own(own).forget(leavers, "gone")
    assert (outcome.level, outcome.cost.rounds, outcome.cost.bytes_sent) == ("exact", 0, 0)
    check(own)
    # The same federation trained without them.
    never = tmp_path / "never"
    sifu.train(spec_of(), run=never, clients=without(clients_of(), leavers))
    hit = groups_of(own, leavers)
    expected = drop(whole_sum(never), blocks_of(never), hit)
    assert whole_sum(own) == expected
    places = blocks_of(own).left(set(range(GROUPS)) - hit)
    assert np.array_equal(released(own), head_at(expected, places, 0.01).weights.ravel())
    assert np.any(whole_sum(never).gram != expected.gram)  # the counterfactual run has a network for a hit group, too


def test_mini_batches_are_those_of_the_counterfactual_for_a_client_that_came_last(tmp_path: Path) -> None:
    spec, leaver = spec_of(local={"batch": 3}), f"client-{CLIENTS - 1:03d}"
    sifu.train(spec, run=tmp_path / "run", clients=clients_of()).forget([leaver], "gone")
    sifu.train(spec, run=tmp_path / "never", clients=without(clients_of(), [leaver]))
    hit = groups_of(tmp_path / "run", [leaver])
    assert whole_sum(tmp_path / "run") == drop(whole_sum(tmp_path / "never"), blocks_of(tmp_path / "never"), hit)


def test_a_sequence_ends_with_the_public_network_alone(own: Path, tmp_path: Path) -> None:
    run, gone, blocks = open_own(own), [], blocks_of(own)
    for leaver in ("client-000", "client-001", "client-003", "client-004", "client-006"):
        (outcome,) = run.forget([leaver], f"without-{leaver}")
        gone.append(leaver)
        assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
        hit = groups_of(own, gone)
        left = whole_sum(own)
        assert {group for group in range(GROUPS) if is_dropped(left, blocks, group)} == hit
    assert groups_of(own, gone) == set(range(GROUPS))  # every network was dropped
    check(own)
    weights = released(own).reshape(blocks.features + 1, 3)
    assert not np.any(weights[blocks.frozen : -1])
    never = tmp_path / "never"
    sifu.train(spec_of(), run=never, clients=without(clients_of(), gone))
    assert whole_sum(own) == drop(whole_sum(never), blocks, range(GROUPS))
    # Bit for bit the head of a network that was never tuned, with the same rule for lambda.
    frozen = spec_of(features={"tune": "none", "block": 400})
    del frozen["groups"]
    sifu.train(frozen, run=tmp_path / "frozen", clients=without(clients_of(), gone))
    public = released(tmp_path / "frozen").reshape(blocks.frozen + 1, 3)
    assert np.array_equal(weights[[*range(blocks.frozen), -1]], public)


def test_nothing_that_went_through_the_network_of_a_hit_group_stays_on_disk(own: Path) -> None:
    with RunReader(own) as reader:
        before = reader.statistics()
    open_own(own).forget(["client-003"], "gone", retention="strict")
    (hit,) = groups_of(own, ["client-003"])
    with RunReader(own) as reader:
        rows = reader.statistics()
        assert hit not in {row.grp for row in available_backbones(reader)}
    assert {path.name for path in (own / "statistics").iterdir()} == rows.keys()
    assert is_dropped(whole_sum(own), blocks_of(own), hit)
    # Files of parts that did not go through that network stay unchanged.
    clean = {f for f, row in before.items() if not row.is_sum and hit not in (row.part or ()) and row.clients != (3,)}
    assert {file for file, row in rows.items() if not row.is_sum} == clean
    assert all(rows[file] == before[file] for file in clean)


def test_a_client_that_joins_later_sends_statistics_only_and_leaves_by_subtraction(own: Path) -> None:
    before, everyone = whole_sum(own), clients_of(CLIENTS + 1)
    with RunReader(own) as reader:
        networks = available_backbones(reader)
    open_own(own, everyone).join()
    joined = whole_sum(own)
    assert joined.samples == before.samples + len(everyone[-1].y)
    run = open_own(own, everyone)
    (outcome,) = run.forget([everyone[-1].name], "gone")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    assert whole_sum(own) == before
    with RunReader(own) as reader:
        assert available_backbones(reader) == networks
    check(own)


def test_records_hit_the_group_of_a_founder(own: Path) -> None:
    (outcome,) = open_own(own).forget(["client-002"], "records", records=[0, 2])
    assert outcome.level == "exact"
    with RunReader(own) as reader:
        assert not groups_of(own, ["client-002"]) & {row.grp for row in available_backbones(reader)}
    assert whole_sum(own).samples == sum(len(client.y) for client in clients_of()) - 2
    check(own)


@pytest.mark.parametrize("stretch", [1.0, 1.25])
def test_a_merge_without_the_hit_group_takes_one_round_and_has_the_bits_of_the_counterfactual(
    tmp_path: Path, stretch: float
) -> None:
    spec = spec_of(features={"tune": "merge"}, groups={"stretch": stretch})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    (outcome,) = run.forget(["client-003"], "gone")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 1)
    check(tmp_path / "run")
    others = without(clients_of(), ["client-003"])
    sifu.train(spec, run=tmp_path / "never", clients=others)
    hit = groups_of(tmp_path / "run", ["client-003"])
    engine: Any = engine_from_spec(Spec.from_mapping(spec), others)[0]
    with RunReader(tmp_path / "never") as reader:
        left = [row for row in available_backbones(reader) if row.grp not in hit]
        use_backbones(engine, reader, left)
    expected = total(engine.fixed, [engine.sent_by(client) for client in range(len(others))])
    assert whole_sum(tmp_path / "run") == expected
    assert whole_sum(tmp_path / "never") != expected  # there the merge includes the network of the hit group


def test_control_a_hit_block_left_in_is_caught(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_to_erase, "drop", lambda statistics, blocks, groups: statistics)
    open_own(own).forget(["client-003"], "gone")
    assert any("is dropped" in problem for problem in verify_run(own).problems)
    assert any("is not zero" in problem for problem in sifu_verifier.verify(own))


def test_control_the_network_of_a_hit_group_left_in_the_head_is_caught(own: Path) -> None:
    open_own(own).forget(["client-003"], "gone")
    with RunReader(own) as reader:
        gone = reader.group_models().keys() - reader.models().keys()
        erased = max(node for node in gone if reader.group_models()[node].rounds == 2)

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "rounds" and "solve" in content and content["solve"]["asked"] == 0:
            content["solve"]["trunks"] = sorted([*content["solve"]["trunks"], erased])

    rebuild_chain(own, edit)
    assert any("uses networks of nodes" in problem for problem in verify_run(own).problems)
    assert any("networks of solve" in problem for problem in sifu_verifier.verify(own))


def test_control_statistics_of_the_leaver_left_in_are_caught(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnStatistics, "read", lambda self, *arguments: Statistics.empty(self.fixed))
    open_own(own).forget(["client-003"], "gone")
    assert any("sum" in problem or "samples" in problem for problem in verify_run(own).problems)
    assert sifu_verifier.verify(own) != []


def test_control_networks_that_are_tuned_together_differ_from_the_counterfactual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every group trains on the data of all clients, groups without the leaver hold its data: the sums differ."""
    separate = group_training.stream_group_rounds

    def together(engine: Any, models: Any, position: Any, groups: Sequence[np.ndarray], wanted: Any) -> Any:
        return separate(engine, models, position, [np.arange(len(engine.clients))] * len(groups), wanted)

    monkeypatch.setattr(group_training, "stream_group_rounds", together)
    with pytest.raises(RoundRejectedError, match="participants that are not in the group"):
        sifu.train(spec_of(), run=tmp_path / "refused", clients=clients_of())

    def unnoticed(engine: Any, models: Any, position: Any, groups: Sequence[np.ndarray], wanted: Any) -> Any:
        for results in together(engine, models, position, groups, wanted):
            yield [
                replace(result, participants=np.intersect1d(result.participants, group))
                for result, group in zip(results, groups, strict=True)
            ]

    monkeypatch.setattr(group_training, "stream_group_rounds", unnoticed)
    leaver, run, never = "client-003", tmp_path / "run", tmp_path / "never"
    sifu.train(spec_of(), run=run, clients=clients_of()).forget([leaver], "gone")
    sifu.train(spec_of(), run=never, clients=without(clients_of(), [leaver]))
    assert whole_sum(run) != drop(whole_sum(never), blocks_of(never), groups_of(run, [leaver]))


def test_an_interrupted_request_goes_on_to_the_same_bits(own: Path, trained: Path, tmp_path: Path) -> None:
    open_own(own).forget(["client-003"], "gone")
    for events in (1, 2, 3):
        again = copy_run(trained, tmp_path / f"again-{events}")
        run, left = open_own(again), [events]

        real = RunWriter.record

        def stopping(self: Any, *arguments: Any, real: Any = real, left: list[int] = left, **named: Any) -> Any:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return real(self, *arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunWriter, "record", stopping)
            with pytest.raises(KeyboardInterrupt):
                run.forget(["client-003"], "gone")
        open_own(again).forget()
        assert whole_sum(again) == whole_sum(own)
        assert np.array_equal(released(again), released(own))
        check(again)


def test_the_plan_says_which_networks_go_and_that_nothing_is_sent(own: Path) -> None:
    plan = open_own(own).plan(["client-003"])
    (hit,) = groups_of(own, ["client-003"])
    assert plan.predicted_rounds == 0
    assert any(f"group {hit} is erased and dropped" in note for note in plan.notes)
    assert json.dumps([premise.name for premise in plan.premises]).count("rounds apart") == 1
