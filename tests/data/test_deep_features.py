"""Deep features: their definition, their use, and the behaviour of runs made before they existed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import public_backbone
import sifu
from onnx_tools import answers_of_the_graph
from sifu.api import verify_run
from sifu.core.spec import Spec
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.client_data import ClientData
from sifu.data.feature_maps import fixed_networks
from sifu.data.feature_maps.build import specified_map
from sifu.data.feature_maps.deep_network import deep_network, signs
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.errors import InputError
from sifu.run import devices
from sifu.store.reader import RunReader

SHOWING = "public_backbone:make_showing"


@pytest.fixture(autouse=True)
def _allowed() -> None:
    sifu.allow_code(SHOWING)


def images(count: int, *, seed: int = 0, shape: tuple[int, ...] = (1, 8, 8)) -> NDArray[np.float64]:
    return np.random.default_rng(seed).random((count, *shape))


def unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def by_hand(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute deep features from the layers of the backbone and numpy, by the definition."""
    network = public_backbone.make_showing().eval()
    with torch.no_grad():
        first = torch.relu(network.first(torch.tensor(x.copy(), dtype=torch.float32)))
        second = torch.relu(network.second(first))
        last = torch.tanh(network.last(second.mean(dim=(2, 3))))
    parts = [first.mean(dim=(2, 3)), second.mean(dim=(2, 3)), last]
    return np.concatenate([unit(part.double().numpy()) for part in parts], axis=1)


def test_deep_features_of_a_module_are_those_of_the_definition() -> None:
    x = images(40)
    deep = specified_map(FeaturesSpec(kind="module", module=SHOWING), (1, 8, 8))
    assert deep.features == 4 + 6 + 10
    np.testing.assert_allclose(deep(x), 10.0 * unit(by_hand(x)), atol=1e-5)
    one = specified_map(FeaturesSpec(kind="module", module=SHOWING, layers=1), (1, 8, 8))
    np.testing.assert_allclose(one(x), 10.0 * unit(by_hand(x)[:, 4:]), atol=1e-5)
    last = specified_map(FeaturesSpec(kind="module", module=SHOWING, layers="last"), (1, 8, 8))
    np.testing.assert_allclose(last(x), 10.0 * unit(by_hand(x)[:, 10:]), atol=1e-5)
    assert len({deep.digest(), one.digest(), last.digest()}) == 3


def test_a_mirror_image_has_the_same_features_where_both_are_averaged() -> None:
    x = images(5)
    both = NetworkFeatures(deep_network(public_backbone.make_showing(), (1, 8, 8), 2, mirror=True), (1, 8, 8))
    expected = unit(by_hand(x) + by_hand(x[..., ::-1]))
    np.testing.assert_allclose(both(x), 10.0 * expected, atol=1e-5)
    np.testing.assert_allclose(both(x), both(x[..., ::-1].copy()), atol=1e-5)
    one_side = NetworkFeatures(deep_network(public_backbone.make_showing(), (1, 8, 8), 2), (1, 8, 8))
    assert np.abs(one_side(x) - one_side(x[..., ::-1].copy())).max() > 0.01


def test_a_projection_is_drawn_from_the_public_seed() -> None:
    x = images(5)
    features = FeaturesSpec(kind="module", module=SHOWING, count=7, seed=3)
    projected = specified_map(features, (1, 8, 8))
    assert projected.features == 7
    np.testing.assert_allclose(projected(x), 10.0 * unit(by_hand(x) @ signs(3, 20, 7).double().numpy()), atol=1e-5)
    assert projected.digest() != specified_map(replace(features, seed=4), (1, 8, 8)).digest()
    assert specified_map(replace(features, count=30), (1, 8, 8)).features == 20  # the backbone has only 20 features


def test_a_sample_has_the_same_bits_whichever_samples_are_next_to_it() -> None:
    x = images(70)
    deep = specified_map(FeaturesSpec(kind="module", module=SHOWING, count=9), (1, 8, 8))
    rows = deep(x)
    for place in (0, 31, 32, 69):
        assert np.array_equal(deep(x[place : place + 1])[0], rows[place])
    assert np.array_equal(deep(x[::-1].copy())[::-1], rows)


def spec_of(kind: str = "ridge", **features: Any) -> dict[str, Any]:
    outputs = {} if kind == "logistic" else {"outputs": 2}
    return {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": kind} | outputs,
        "features": {"kind": "module", "module": SHOWING} | features,
        "stop": {"target": 0.0, "max_rounds": 3},
    }


def clients_of(count: int = 6) -> list[ClientData]:
    labels = np.arange(7) % 2
    return [ClientData(f"client-{number}", images(7, seed=number), labels) for number in range(count)]


@pytest.mark.parametrize(
    ("features", "why"),
    [
        ({"layers": "first"}, "must be a number or 'deep' or 'last'"),
        ({"layers": 0}, "number of blocks"),
        ({"layers": 1.5}, "whole number"),
        ({"layers": 3}, "asks for 3 blocks, and the network exposes 2"),
        ({"size": -1}, "in 0 to 4096"),
    ],
)
def test_layers_that_cannot_be_are_refused(tmp_path: Path, features: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        sifu.train(spec_of(**features), run=tmp_path / "run", clients=clients_of())


@pytest.mark.parametrize("kind", ["ridge", "softmax", "logistic"])
def test_every_head_can_be_put_on_deep_features(tmp_path: Path, kind: str) -> None:
    run = sifu.train(spec_of(kind), run=tmp_path / "run", clients=clients_of())
    with RunReader(run.folder) as reader:
        assert reader.layout.shapes[0][0] == 20
    run.forget(["client-2"])
    assert verify_run(run.folder).problems == []
    exported = run.export(tmp_path / "model.safetensors")
    loaded = sifu.load_model(exported, module=SHOWING)
    assert np.array_equal(loaded.predict(images(9, seed=50)), run.model().predict(images(9, seed=50)))


def test_weights_are_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, digest = [], fixed_networks.weights_digest
    monkeypatch.setattr(fixed_networks, "weights_digest", lambda module: taken.append(1) or digest(module))
    module = deep_network(public_backbone.make_showing(), (1, 8, 8), 2)
    features = NetworkFeatures(module, (1, 8, 8), kind="pretrained")
    for _ in range(5):
        list(features.chunks(images(3)))
        features.digest()
    assert len(taken) == 1


def test_auto_takes_the_gpu_for_networks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(devices, "why_no_gpu", lambda: None)
    monkeypatch.setattr(ClosedFormFederation, "with_features_on", lambda self, device: moved.append(device))
    engine = object.__new__(ClosedFormFederation)
    for kind, device, expected in (
        ("module", "auto", ["cuda"]),
        ("random_fourier", "auto", []),
        ("random_fourier", "cuda", ["cuda"]),
        ("module", "cpu", []),
    ):
        spec = Spec.from_mapping({"model": {"kind": "ridge"}, "features": {"kind": kind} | _module(kind)})
        devices.on_device(engine, [], spec, device, "float32")
        assert moved == expected, (kind, device)
        moved.clear()
    trained = Spec.from_mapping({"features": {"kind": "module"} | _module("module")})
    assert [devices.features_device(trained, device) for device in ("auto", "cpu")] == ["cuda", "cpu"]
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "there is none")
    assert devices.features_device(trained, "auto") == "cpu"


def _module(kind: str) -> dict[str, str]:
    return {"module": SHOWING} if kind == "module" else {}


@pytest.mark.long
def test_a_graph_of_deep_features_says_what_predict_says(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    run = sifu.train(spec_of(count=12), run=tmp_path / "run", clients=clients_of())
    graph, x = run.export(tmp_path / "model.onnx"), images(5, seed=9)
    for answer in answers_of_the_graph(graph, {"x": x}):
        np.testing.assert_allclose(answer["scores"], run.model().scores(x), atol=1e-5)
