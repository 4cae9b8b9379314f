"""Use of models on tuned networks: exports, accuracy, advice, status and the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import sifu
from sifu.cli.main import app
from sifu.core.spec import Spec
from sifu.data.feature_maps.tuned_networks import TunedFeatures
from sifu.errors import InputError
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.group_state import available_backbones, use_backbones
from sifu.store.reader import RunReader
from tuned_runs import CLIENTS, GROUPS, clients_of, groups_of, spec_of, without


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


def test_the_accuracy_after_dropping_needs_no_network_where_features_were_kept(own: Path) -> None:
    engine: Any = engine_from_spec(Spec.from_mapping(spec_of()), clients_of())[0]
    everyone = np.arange(CLIENTS)
    model = np.random.default_rng(0).normal(size=engine.layout.size)
    with RunReader(own) as reader:
        backbones = available_backbones(reader)
        use_backbones(engine, reader, backbones)
        whole = engine.evaluate(model, everyone)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TunedFeatures, "__call__", None)  # computing features would raise an error
            use_backbones(engine, reader, backbones[1:])
            dropped = engine.evaluate(model, everyone)
        fresh: Any = engine_from_spec(Spec.from_mapping(spec_of()), clients_of())[0]
        use_backbones(fresh, reader, backbones[1:])
        assert np.array_equal(dropped.loss_sum, fresh.evaluate(model, everyone).loss_sum)
        assert np.all(dropped.loss_sum != whole.loss_sum)
        use_backbones(engine, reader, backbones)  # the features of a network that comes back are computed again
        assert np.array_equal(engine.evaluate(model, everyone).loss_sum, whole.loss_sum)


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


def test_groups_without_members_are_counted_not_listed(tmp_path: Path) -> None:
    sifu.train(spec_of(groups={"count": 20}), run=tmp_path / "run", clients=clients_of())
    said = " ".join(CliRunner().invoke(app, ["status", str(tmp_path / "run")]).output.split())
    with RunReader(tmp_path / "run") as reader:
        built = len(available_backbones(reader))
    assert f"20 groups: {built} have a finished model that a request can use; {20 - built} without members" in said
    assert "0 members" not in said
