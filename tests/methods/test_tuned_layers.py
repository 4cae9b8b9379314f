"""Groups that tune layers or adapters of a public network: nothing else is sent or kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import public_backbone
import sifu
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.data.feature_maps.tuned_networks import TunedFeatures, keep_parameters
from sifu.errors import InputError
from sifu.run.group_state import available_backbones
from sifu.store.reader import RunReader
from sifu.theory.closed_form.blocks import drop
from tuned_runs import blocks_of, check, clients_of, groups_of, spec_of, whole_sum, without


def test_low_rank_adapters_of_linear_layers_are_all_that_is_tuned_sent_and_kept(tmp_path: Path) -> None:
    spec = spec_of(features={"trainable": "lora(2)"})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    with RunReader(tmp_path / "run") as reader:
        assert reader.group_layout.size == 2 * (36 + 12) + 12 * 3 + 3
        tuned = [reader.load_model(row.node) for row in available_backbones(reader)]
    assert all(np.any(vector[2 * 36 : 2 * (36 + 12)]) for vector in tuned)  # B in B A x started at zero
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
    """The low-rank adapters on a linear layer are named in `trainable`."""
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


def test_features_go_through_adapters_of_layers_that_have_a_fused_pass_for_evaluation() -> None:
    public = NetworkFeatures(public_backbone.make_encoder(), (1, 8, 8))
    features = TunedFeatures(public, FeaturesSpec(tune="blocks", block=0, trainable="lora(2)"), 3, 1, 1.0)
    tuned = features.network.tuned_by(features.network.flat() + np.float32(0.1))
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    in_evaluation = tuned(x)
    assert torch.allclose(in_evaluation, tuned.train()(x), atol=1e-5)
    assert not torch.allclose(in_evaluation, public.module(x), atol=1e-3)


@pytest.mark.parametrize("trainable", ["second", "first", "first, second", "all", "third"])
def test_tied_weights_stay_tied_or_are_refused(trainable: str) -> None:
    """Tuning one of two tied layers would separate them: the tuned network would not be the public one."""
    network = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("first", "second", "third")})
    network["second"].weight = network["first"].weight
    if trainable in ("first", "second"):
        with pytest.raises(InputError, match=r"shares its values with .*: name both, or neither"):
            keep_parameters(network, trainable)
        return
    keep_parameters(network, trainable)
    assert torch.equal(network["first"].weight, network["second"].weight)
    tuned = trainable != "third"
    assert isinstance(network["first"].weight, torch.nn.Parameter) == tuned
    assert (network["first"].weight is network["second"].weight) == tuned


def test_a_network_of_bfloat16_has_a_digest() -> None:
    digests = set()
    for scale in (1.0, 1.0, 2.0):
        layer = torch.nn.Linear(4, 3).bfloat16()
        with torch.no_grad():
            layer.weight.fill_(scale)
            layer.bias.zero_()
        features = NetworkFeatures(layer, (4,))
        assert features(np.ones((2, 4))).shape == (2, 3)
        digests.add(features.digest())
    assert len(digests) == 2
