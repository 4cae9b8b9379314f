"""Groups tune a public network separately, a head in closed form joins them: forgetting drops, subtracts and solves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import public_backbone
import sifu
import sifu_verifier
from folder_values import places_that_differ
from forged_runs import rebuild_chain
from guessing import RANDOM
from run_tools import copy_run
from sifu.api import verify_run
from sifu.api.start_run import create_run
from sifu.cli.main import app
from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.spec import Spec
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.client_data import ClientData
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.data.feature_maps.tuned_networks import TunedFeatures
from sifu.engines.sim import embedded_heads
from sifu.errors import InputError, RoundRejectedError
from sifu.methods import closed_form
from sifu.requests import certification
from sifu.requests import erasure as statistics_erasure
from sifu.run import group_training
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.group_state import available_backbones, use_backbones
from sifu.store.files import SALT_BYTES
from sifu.store.reader import RunReader
from sifu.store.statistics_files import OwnStatistics, read_statistics
from sifu.store.writer import RunWriter
from sifu.theory.closed_form import Statistics, total
from sifu.theory.closed_form.blocks import Blocks, Part, drop, head_at, is_dropped, parts_through, words_of_part
from sifu.theory.merging import group_of

CLIENTS, GROUPS = 7, 3


def spec_of(**sections: Any) -> dict[str, Any]:
    sifu.allow_code("public_backbone:make")
    spec: dict[str, Any] = {
        "model": {"kind": "ridge", "outputs": 3},
        "data": {"preprocessing": "fixed"},
        "ridge": {"regularisation": 0.01},
        "features": {"kind": "module", "module": "public_backbone:make", "tune": "blocks", "block": 4},
        "groups": {"count": GROUPS, "rounds": 2, "rebuild": "later"},
        "local": {"rate": 0.05, "steps": 2, "momentum": 0.9},
        "privacy": {"noise": "seeded"},
    }
    return {name: spec.get(name, {}) | sections.get(name, {}) for name in spec.keys() | sections.keys()}


def clients_of(count: int = CLIENTS) -> list[ClientData]:
    """Return clients of different sizes, each with its own generator."""
    clients = []
    for number in range(count):
        generator = np.random.default_rng(number)
        rows = 6 + number % 3
        x = generator.random((rows, 1, 8, 8))
        clients.append(ClientData(f"client-{number:03d}", x, generator.integers(0, 3, rows)))
    return clients


def without(clients: Sequence[ClientData], names: Sequence[str]) -> list[ClientData]:
    return [client for client in clients if client.name not in names]


def whole_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        fixed = recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout)
        (row,) = [row for row in reader.statistics().values() if row.is_sum]
        return read_statistics(folder, row, fixed)


def released(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return np.array(reader.load_model(reader.tip))


def groups_of(folder: Path, names: Sequence[str]) -> set[int]:
    with RunReader(folder) as reader:
        return {group_of(bytes.fromhex(reader.value("group_key")), name, GROUPS) for name in names}


def blocks_of(folder: Path) -> Any:
    with RunReader(folder) as reader:
        return recorded_blocks(Spec.from_mapping(reader.spec), reader.layout)


def check(folder: Path) -> None:
    assert verify_run(folder).problems == []
    assert sifu_verifier.verify(folder) == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: blocks, before any request."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    sifu.train(spec_of(), run=folder, clients=clients_of())
    return folder


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    return copy_run(trained, tmp_path / "own")


def open_own(folder: Path, clients: Sequence[ClientData] | None = None) -> sifu.Run:
    sifu.allow_code("public_backbone:make")
    return sifu.open_run(folder, clients=clients_of() if clients is None else clients)


@pytest.mark.parametrize("leavers", [["client-003"], ["client-000"], ["client-002", "client-006"]])
def test_forgetting_takes_no_round_and_both_worlds_are_the_same_bits(
    own: Path, tmp_path: Path, leavers: list[str]
) -> None:
    (outcome,) = open_own(own).forget(leavers, "gone")
    assert (outcome.level, outcome.cost.rounds, outcome.cost.bytes_sent) == ("exact", 0, 0)
    check(own)
    # A federation in which they never were, of fewer clients and with a separate backbone for every group.
    never = tmp_path / "never"
    sifu.train(spec_of(), run=never, clients=without(clients_of(), leavers))
    hit = groups_of(own, leavers)
    expected = drop(whole_sum(never), blocks_of(never), hit)
    assert whole_sum(own) == expected
    places = blocks_of(own).left(set(range(GROUPS)) - hit)
    assert np.array_equal(released(own), head_at(expected, places, 0.01).weights.ravel())
    assert np.any(whole_sum(never).gram != expected.gram)  # a hit group has a network in the counterfactual, too


def test_mini_batches_are_those_of_the_other_world_for_a_client_that_came_last(tmp_path: Path) -> None:
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
    assert groups_of(own, gone) == set(range(GROUPS))  # else this shows nothing
    check(own)
    weights = released(own).reshape(blocks.features + 1, 3)
    assert not np.any(weights[blocks.frozen : -1])
    never = tmp_path / "never"
    sifu.train(spec_of(), run=never, clients=without(clients_of(), gone))
    assert whole_sum(own) == drop(whole_sum(never), blocks, range(GROUPS))
    # The head of a network that was never tuned, with the same rule for lambda: bit for bit.
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
    # What did not go through that network stays as it was: no client's file is written again.
    clean = {f for f, row in before.items() if not row.is_sum and hit not in (row.part or ()) and row.clients != (3,)}
    assert {file for file, row in rows.items() if not row.is_sum} == clean
    assert all(rows[file] == before[file] for file in clean)


@pytest.fixture(params=["rows", "statistics"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the form that statistics of clients are sent and kept in."""
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: request.param == "rows")
    return str(request.param)


def test_a_part_holds_no_number_that_went_through_another_network(form: str, tmp_path: Path) -> None:
    """Two federations whose group 0 has other data: every part that does not name it has the same numbers."""
    clients, trained = clients_of(), tmp_path / "run"
    sifu.train(spec_of(), run=trained, clients=clients)
    key = RunReader(trained).value("group_key")
    other = [
        replace(client, y=np.zeros_like(client.y)) if group_of(bytes.fromhex(key), client.name, GROUPS) == 0 else client
        for client in clients
    ]
    sifu.train(spec_of(), run=tmp_path / "other", clients=other)
    stays = next(n for n, client in enumerate(clients) if client is other[n])
    words: list[dict[Part | None, bytes]] = []
    for folder in (trained, tmp_path / "other"):
        with RunReader(folder) as reader:
            rows = [row for row in reader.statistics().values() if row.clients == (stays,) and not row.is_sum]
        words.append({row.part: (folder / "statistics" / row.file).read_bytes()[:-SALT_BYTES] for row in rows})
    pairs = form == "statistics"
    assert words[0].keys() == {part for part in parts_through(range(GROUPS)) if pairs or len(part) < 2}
    different = {part for part in words[0] if words[0][part] != words[1][part]}
    assert different == ({(0,), (0, 1), (0, 2)} if pairs else {(0,)})


def test_rows_and_statistics_give_the_same_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through training, a request, a rebuilt network and another request, in blocks and whole."""
    for tune in ("blocks", "merge"):
        sums: dict[bool, list[str]] = {}
        for rows in (True, False):
            folder = tmp_path / f"{tune} {rows}"
            monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples, rows=rows: rows)
            run = sifu.train(spec_of(features={"tune": tune}), run=folder, clients=clients_of())
            sums[rows] = [whole_sum(folder).digest()]
            for step in (
                lambda run: run.forget(["client-003"], "gone"),
                lambda run: run.rebuild(),
                lambda run: run.forget(["client-004"], "next"),
            ):
                step(run)
                sums[rows].append(whole_sum(folder).digest())
            check(folder)
            with RunReader(folder) as reader:
                assert {row.is_rows for row in reader.statistics().values() if not row.is_sum} == {rows}
        assert sums[True] == sums[False]


def test_a_client_with_kept_statistics_goes_on_sending_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run from before rows: a rebuilt network adds parts of the form that is there."""
    folder = tmp_path / "old"
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: False)
    sifu.train(spec_of(), run=folder, clients=clients_of())
    monkeypatch.undo()
    run = open_own(folder)
    run.forget(["client-003"], "gone")
    assert run.rebuild() == 1
    check(folder)
    never = sifu.train(spec_of(), run=tmp_path / "never", clients=without(clients_of(), ["client-003"]))
    assert whole_sum(folder) == whole_sum(never.folder)
    with RunReader(folder) as reader:
        assert not any(row.is_rows for row in reader.statistics().values())


def test_a_rebuilt_group_comes_back_with_one_round_of_statistics(form: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    run = sifu.train(spec_of(), run=own, clients=clients_of())
    run.forget(["client-003"], "gone")
    with RunReader(own) as reader:
        before = {file: row for file, row in reader.statistics().items() if not row.is_sum}
    assert run.rebuild() == 1
    check(own)
    (hit,) = groups_of(own, ["client-003"])
    with RunReader(own) as reader:
        rows = {file: row for file, row in reader.statistics().items() if not row.is_sum}
        solve = next(event.content["solve"] for event in reversed(reader.events()) if "solve" in event.content)
        fixed = recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout)
    # Its rows and columns alone are sent; what is there stays as it is.
    came = {file: row for file, row in rows.items() if file not in before}
    assert all(rows[file] == before[file] for file in before)
    assert came
    assert all(hit in (row.part or ()) for row in came.values())
    sent = sum(words_of_part(fixed, blocks_of(own), part) for part in parts_through(range(GROUPS)) if hit in part)
    samples = sum(len(client.y) for client in without(clients_of(), ["client-003"]))
    expected = 4 * blocks_of(own).block * samples if form == "rows" else 8 * sent * (CLIENTS - 1)
    assert (solve["asked"], solve["bytes_sent"]) == (CLIENTS - 1, expected)
    never = tmp_path / "never"
    sifu.train(spec_of(), run=never, clients=without(clients_of(), ["client-003"]))
    # Nothing but the place of its rounds tells a rebuilt network from one that never held the client.
    assert whole_sum(own) == whole_sum(never)
    (outcome,) = run.forget(["client-004"], "next")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    check(own)


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


def test_only_sums_are_kept_where_the_spec_says_so_and_those_who_stay_send_again(tmp_path: Path) -> None:
    spec = spec_of(keep={"statistics": "sum"})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    (outcome,) = run.forget(["client-003"], "gone")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 1)
    sifu.train(spec, run=tmp_path / "never", clients=without(clients_of(), ["client-003"]))
    hit = groups_of(tmp_path / "run", ["client-003"])
    assert whole_sum(tmp_path / "run") == drop(whole_sum(tmp_path / "never"), blocks_of(tmp_path / "never"), hit)
    check(tmp_path / "run")


@pytest.mark.parametrize("stretch", [1.0, 1.25])
def test_a_merge_without_the_hit_group_takes_one_round_and_both_worlds_are_the_same_bits(
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
    assert whole_sum(tmp_path / "never") != expected  # the hit group's network is in the merge there


def test_control_a_hit_block_left_in_is_caught(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_erasure, "drop", lambda statistics, blocks, groups: statistics)
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


def test_control_networks_that_are_tuned_together_are_told_from_the_other_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every group trains on everyone's data, groups that a leaver was never in still hold its data."""
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


def test_advice_compares_blocks_a_merge_and_the_frozen_network_on_the_same_rows() -> None:
    clients = clients_of()
    answer = sifu.advise(Spec.from_mapping(spec_of(data={"held_out": 0.2})), clients=clients)
    assert [way.name for way in answer.ways] == ["frozen network", "blocks", "merge"]
    assert [way.request_rounds for way in answer.ways] == [0, 0, 1]
    assert [way.training_rounds for way in answer.ways] == [1, 3, 3]
    assert {way.level for way in answer.ways} == {"exact"}
    best = max(way.accuracy or 0.0 for way in answer.ways)
    (chosen,) = [way for way in answer.ways if way.name == answer.recommended]
    assert (chosen.accuracy or 0.0) >= best - 0.005


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


def test_the_accuracy_after_striking_takes_no_network_where_features_were_kept(own: Path) -> None:
    engine: Any = engine_from_spec(Spec.from_mapping(spec_of()), clients_of())[0]
    everyone = np.arange(CLIENTS)
    model = np.random.default_rng(0).normal(size=engine.layout.size)
    with RunReader(own) as reader:
        backbones = available_backbones(reader)
        use_backbones(engine, reader, backbones)
        whole = engine.evaluate(model, everyone)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TunedFeatures, "__call__", None)  # no features are computed
            use_backbones(engine, reader, backbones[1:])
            dropped = engine.evaluate(model, everyone)
        fresh: Any = engine_from_spec(Spec.from_mapping(spec_of()), clients_of())[0]
        use_backbones(fresh, reader, backbones[1:])
        assert np.array_equal(dropped.loss_sum, fresh.evaluate(model, everyone).loss_sum)
        assert np.all(dropped.loss_sum != whole.loss_sum)
        use_backbones(engine, reader, backbones)  # a network that came back is one to run again
        assert np.array_equal(engine.evaluate(model, everyone).loss_sum, whole.loss_sum)


def test_low_rank_adapters_of_linear_layers_are_all_that_is_tuned_sent_and_kept(tmp_path: Path) -> None:
    spec = spec_of(features={"trainable": "lora(2)"})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    with RunReader(tmp_path / "run") as reader:
        assert reader.group_layout.size == 2 * (36 + 12) + 12 * 3 + 3
        tuned = [reader.load_model(row.node) for row in available_backbones(reader)]
    assert all(np.any(vector[2 * 36 : 2 * (36 + 12)]) for vector in tuned)  # B of B A x was zero
    (outcome,) = run.forget(["client-003"], "gone")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    sifu.train(spec, run=tmp_path / "never", clients=without(clients_of(), ["client-003"]))
    hit = groups_of(tmp_path / "run", ["client-003"])
    assert whole_sum(tmp_path / "run") == drop(whole_sum(tmp_path / "never"), blocks_of(tmp_path / "never"), hit)
    check(tmp_path / "run")
    model = sifu.load_model(run.export(tmp_path / "model.safetensors"), module="public_backbone:make")
    others = without(clients_of(), ["client-003"])
    right = sum(int(np.sum(model.predict(client.x) == client.y)) for client in others)
    assert right / sum(len(client.y) for client in others) == pytest.approx(run.evaluate("training").accuracy)


def test_adapters_of_an_own_module_are_all_that_is_tuned_sent_and_kept(tmp_path: Path) -> None:
    """Low-rank adapters on a linear layer, named in `trainable`."""
    sifu.allow_code("public_backbone:make_with_adapter")
    features = {"module": "public_backbone:make_with_adapter", "trainable": "4.down, 4.up"}
    run = sifu.train(spec_of(features=features), run=tmp_path / "run", clients=clients_of())
    with RunReader(tmp_path / "run") as reader:
        assert reader.group_layout.size == 2 * (36 + 12) + 12 * 3 + 3
    (outcome,) = run.forget(["client-003"], "gone")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    sifu.train(spec_of(features=features), run=tmp_path / "never", clients=without(clients_of(), ["client-003"]))
    never, blocks = tmp_path / "never", blocks_of(tmp_path / "never")
    hit = groups_of(tmp_path / "run", ["client-003"])
    assert whole_sum(tmp_path / "run") == drop(whole_sum(never), blocks, hit)
    assert whole_sum(tmp_path / "run") != whole_sum(never)
    check(tmp_path / "run")


def test_what_is_tuned_is_all_that_is_kept(tmp_path: Path) -> None:
    sizes = {}
    for trainable in ("all", "last", "4.bias"):
        folder = tmp_path / trainable
        sifu.train(spec_of(features={"trainable": trainable}), run=folder, clients=clients_of())
        with RunReader(folder) as reader:
            sizes[trainable] = reader.group_layout.size
            assert all(
                reader.models()[row.node].bytes < 4 * sizes[trainable] + 1000 for row in available_backbones(reader)
            )
        check(folder)
    scores = 12 * 3 + 3
    assert sizes == {"all": 4 * 9 + 4 + 8 + 36 * 12 + 12 + scores, "last": 36 * 12 + 12 + scores, "4.bias": 12 + scores}


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"groups": {"count": 0, "rounds": 0}}, "groups.count"),
        ({"groups": {"rounds": 0}}, "groups.rounds"),
        ({"local": {"rate": "auto"}}, "local.rate"),
        ({"features": {"kind": "none", "module": ""}}, "features.tune"),
        ({"features": {"cache": "kept"}}, "features.cache"),
        ({"features": {"trainable": "nowhere"}}, "nowhere"),
        ({"ridge": {"task": "regression"}}, "ridge.task"),
    ],
)
def test_a_spec_that_cannot_be_tuned_is_refused_by_name(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        sifu.train(spec_of(**sections), run=tmp_path / "run", clients=clients_of())


def test_the_plan_says_which_networks_go_and_that_nothing_is_sent(own: Path) -> None:
    plan = open_own(own).plan(["client-003"])
    (hit,) = groups_of(own, ["client-003"])
    assert plan.predicted_rounds == 0
    assert any(f"group {hit} is erased and dropped" in note for note in plan.notes)
    assert json.dumps([premise.name for premise in plan.premises]).count("rounds apart") == 1


@pytest.mark.parametrize("tune", ["blocks", "merge"])
def test_an_exported_model_predicts_as_the_run_does(tmp_path: Path, tune: str) -> None:
    run = sifu.train(spec_of(features={"tune": tune}), run=tmp_path / "run", clients=clients_of())
    run.forget(["client-003"], "gone")
    file = run.export(tmp_path / "model.safetensors")
    model = sifu.load_model(file, module="public_backbone:make")
    others = without(clients_of(), ["client-003"])
    right = sum(int(np.sum(model.predict(client.x) == client.y)) for client in others)
    assert right / sum(len(client.y) for client in others) == pytest.approx(run.evaluate("training").accuracy)
    assert {name.split("/")[0] for name in model.networks} == {str(g) for g in range(GROUPS)} - {
        str(g) for g in groups_of(tmp_path / "run", ["client-003"])
    }
    networks = file.with_name("model.safetensors.networks")
    networks.write_bytes(networks.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.raises(InputError, match="export it again"):
        sifu.load_model(file, module="public_backbone:make")


@pytest.mark.long
def test_the_example_of_an_own_network_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import tuned_network

    assert len(Path(tuned_network.__file__).read_text().splitlines()) <= 40
    outcome = tuned_network.main(tmp_path / "run")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    assert sifu.open_run(tmp_path / "run").evaluate("training").accuracy > 0.9


def test_a_restored_backup_gives_up_what_went_through_the_network_of_a_forgotten_client(
    own: Path, tmp_path: Path
) -> None:
    backup = tmp_path / "backup.zip"
    open_own(own).backup(backup)
    open_own(own).forget(["client-003"], "gone")
    certificate = own / "certificates" / "gone.public.json"
    restored = tmp_path / "restored"
    sifu.restore(backup, restored, certificates=[certificate])
    check(restored)
    with RunReader(restored) as reader:
        (hit,) = groups_of(restored, ["client-003"])
        kept = reader.statistics().values()
        assert kept
        assert not any(row.is_sum or hit in (row.part or ()) or 3 in row.clients for row in kept)
        assert not groups_of(restored, ["client-003"]) & {row.grp for row in available_backbones(reader)}
    (outcome,) = open_own(restored).forget()
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    assert whole_sum(restored) == whole_sum(own)
    check(restored)


@pytest.mark.parametrize(("tune", "batch"), [("blocks", 0), ("blocks", 3), ("merge", 3)])
def test_an_audit_makes_the_release_again_without_the_client_and_finds_a_hit_network(
    tmp_path: Path, tune: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mini-batches of those who stay are drawn for the numbers that they had with the client."""
    spec = spec_of(features={"tune": tune}, local={"batch": batch})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    run.forget(["client-003"], "gone")
    report = sifu.audit_run(run)
    (release,) = report.exact
    assert release.same_model
    assert (release.sum_without is not None, release.same_sum) == (True, True)
    assert report.contradictions == ()
    # The negative control: the network of the hit group stays in the head.
    for module in (statistics_erasure, closed_form, certification):
        monkeypatch.setattr(module, "is_hit", lambda row, leaving: False)
    control = sifu.train(spec, run=tmp_path / "control", clients=clients_of())
    control.forget(["client-003"], "gone")
    report = sifu.audit_run(control)
    assert not report.exact[0].same_model
    assert any("another model comes out" in sentence for sentence in report.contradictions)


def test_a_purged_run_is_audited_as_before(tmp_path: Path) -> None:
    """The rate at which groups tune was not recomputed, though the head's record knows no rate."""
    spec = spec_of(privacy={"noise": "system"})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    run.forget(["client-003"], "gone")
    run.purge()
    assert sifu.audit_run(open_own(tmp_path / "run")).exact[0].same_model


def test_an_engine_that_cannot_tune_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tuned = Spec.from_mapping(spec_of())
    frozen = Spec.from_mapping(spec_of(features={"tune": "none"}, groups={"count": 0, "rounds": 0}))
    engine = engine_from_spec(frozen, clients_of())[0]
    with pytest.raises(InputError, match="needs an engine that can tune networks in groups"):
        create_run(tmp_path / "run", tuned, tuned, engine)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tune", ["blocks", "merge"])
def test_a_purged_run_holds_nothing_that_differs_with_a_record_of_the_forgotten(
    tmp_path: Path, tune: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network of its group is erased, and no figure of the separate rounds stays behind."""
    monkeypatch.setattr(
        group_training, "COMMIT_SECONDS", 1e9
    )  # as many models of groups in both the run and its counterfactual
    folders = [tmp_path / name for name in ("one-label", "another")]
    for label, folder in enumerate(folders):
        clients = clients_of()
        clients[2] = replace(clients[2], y=np.array([label, *clients[2].y[1:]]))
        run = sifu.train(spec_of(features={"tune": tune}), run=folder, clients=clients)
        run.forget([clients[2].name], retention="strict")
        run.purge()
    differ = places_that_differ(*folders)
    assert {place for place in differ if not any(fnmatchcase(place, pattern) for pattern in RANDOM)} == set()


@pytest.mark.parametrize("tune", ["blocks", "merge"])
def test_a_network_that_remembers_samples_in_evaluation_is_refused(tmp_path: Path, tune: str) -> None:
    """Its features of those who stay would hold the client that left."""
    sifu.allow_code("public_backbone:make_remembering")
    clients = [replace(client, x=client.x + 1.0) for client in clients_of()]  # larger than any drawn probe
    with pytest.raises(
        InputError,
        match=r"the feature module('s output .* depends on other samples| no longer gives the same features)",
    ):
        sifu.train(
            spec_of(features={"module": "public_backbone:make_remembering", "tune": tune}),
            run=tmp_path / "run",
            clients=clients,
        )


def test_features_go_through_adapters_of_layers_that_have_a_fused_pass_for_evaluation() -> None:
    public = NetworkFeatures(public_backbone.make_encoder(), (1, 8, 8))
    features = TunedFeatures(public, FeaturesSpec(tune="blocks", block=0, trainable="lora(2)"), 3, 1, 1.0)
    tuned = features.network.tuned_by(features.network.flat() + np.float32(0.1))
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    in_evaluation = tuned(x)
    assert torch.allclose(in_evaluation, tuned.train()(x), atol=1e-5)
    assert not torch.allclose(in_evaluation, public.module(x), atol=1e-3)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("make_for_other_samples", "cannot process samples of shape"),
        ("make_without_parameters", "no parameters to tune"),
    ],
)
def test_a_network_that_cannot_be_tuned_is_refused_in_a_sentence(tmp_path: Path, module: str, why: str) -> None:
    sifu.allow_code(f"public_backbone:{module}")
    with pytest.raises(InputError, match=why):
        sifu.train(
            spec_of(features={"module": f"public_backbone:{module}"}), run=tmp_path / "run", clients=clients_of()
        )


@pytest.mark.parametrize("tune", ["blocks", "merge"])
def test_a_run_of_an_earlier_version_is_refused_by_name_and_stays_as_it_is(tmp_path: Path, tune: str) -> None:
    """Before, a sample with all its parts had the length of features.norm; now each part has it."""
    init = TunedFeatures.__init__

    def earlier(
        self: TunedFeatures, public: NetworkFeatures, features: FeaturesSpec, outputs: int, count: int, stretch: float
    ) -> None:
        parts = 1 + (count if tune == "blocks" else 1)
        init(self, replace(public, norm=public.norm / parts**0.5), features, outputs, count, stretch)
        self.norm = public.norm

    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TunedFeatures, "__init__", earlier)
        patch.setattr(Blocks, "norm", lambda self, part: part)
        sifu.train(spec_of(features={"tune": tune}), run=folder, clients=clients_of())
        assert verify_run(folder).problems == []
    before = released(folder)
    assert any("earlier version trained it, use that version" in problem for problem in verify_run(folder).problems)
    with pytest.raises(InputError, match="an earlier version of sifu trained it"):
        open_own(folder).forget(["client-003"], "gone")
    with RunReader(folder) as reader:
        assert reader.requests() == []
    assert np.array_equal(released(folder), before)


def test_groups_without_members_are_counted_not_listed(tmp_path: Path) -> None:
    sifu.train(spec_of(groups={"count": 20}), run=tmp_path / "run", clients=clients_of())
    said = " ".join(CliRunner().invoke(app, ["status", str(tmp_path / "run")]).output.split())
    with RunReader(tmp_path / "run") as reader:
        built = len(available_backbones(reader))
    assert f"20 groups: {built} have a finished model that a request can use; {20 - built} without members" in said
    assert "0 members" not in said
