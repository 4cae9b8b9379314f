"""Tuning of networks by groups on a device (a GPU if there is one), compared with the plain loop."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import sifu
import sifu_verifier
from public_backbone import make
from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_group_rounds
from sifu.core.spec import Spec, StopSpec
from sifu.data.client_data import ClientData
from sifu.data.feature_maps.tuned_networks import TunedNetwork
from sifu.engines.sim import LocalTraining
from sifu.engines.sim.gpu import captured_loop
from sifu.engines.sim.tuned_engine import TunedOnDevice, TuningFederation, TuningOnDevice
from sifu.errors import InputError, RoundRejectedError
from sifu.run import devices
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Statistics
from sifu.theory.closed_form.blocks import drop
from sifu.theory.merging import group_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS = [np.array([0, 2, 3]), np.array([1, 4])]


def clients_of(sizes: tuple[int, ...] = (7, 4, 9, 5, 6)) -> list[ClientData]:
    clients = []
    for number, rows in enumerate(sizes):
        generator = np.random.default_rng(number)
        clients.append(
            ClientData(f"client-{number}", generator.random((rows, 1, 8, 8)), generator.integers(0, 3, rows))
        )
    return clients


def network_of(public: nn.Module | None = None) -> TunedNetwork:
    return TunedNetwork(public or make(), 12, 3, "all")


def rounds_of(engine: Any, rounds: int = 2, groups: list[np.ndarray] = GROUPS) -> list[np.ndarray]:
    """Return the models of the groups after some rounds from the public network."""
    start = engine.initial_model(0)
    wanted = RoundsWanted(
        StopSpec(0.0, 0, 3 + rounds, 2**62), start.astype(np.float64), evaluated=np.zeros(0, np.int64)
    )
    *_, last = stream_group_rounds(engine, [start] * len(groups), Position(1, 3), groups, wanted)
    return [result.fetch_model() for result in last]


TRAININGS = {
    "whole data": LocalTraining(0.05, 2),
    "momentum": LocalTraining(0.05, 3, 4, 0.9),
    "nesterov, decay, clipped": LocalTraining(0.05, 2, 3, 0.5, nesterov=True, weight_decay=0.1, clip=0.3),
    "batches larger than some clients": LocalTraining(0.05, 2, 6, 0.9),
}


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS.keys())
def test_groups_tune_as_the_plain_loop_does(training: LocalTraining, lanes: int) -> None:
    plain = TuningFederation(clients_of(), network_of(), training, 1)
    on_device = TuningOnDevice(clients_of(), network_of(), training, 1, DEVICE, lanes=lanes)
    expected, start = rounds_of(plain), plain.initial_model(0)
    for model, other in zip(rounds_of(on_device), expected, strict=True):
        assert np.abs(model - other).max() < 1e-3 * np.abs(other - start).max()
    assert np.array_equal(on_device.initial_model(0), start)
    everyone = np.arange(5)
    single, reference = (engine.run_round(start, Position(0, 0), everyone) for engine in (on_device, plain))
    assert np.abs(single.model - reference.model).max() < 1e-4
    assert np.isinf(single.drifts).all()
    measured = on_device.run_round(start, Position(0, 0), everyone, want_gram=True)
    np.testing.assert_allclose(measured.drifts, reference.drifts, rtol=1e-3)


def test_a_group_has_the_same_bits_whoever_is_in_the_others_and_whatever_lanes_there_are() -> None:
    training = LocalTraining(0.05, 2, 4, 0.9)
    whole = rounds_of(TuningOnDevice(clients_of(), network_of(), training, 1, DEVICE, lanes=3))[0]
    # All other clients have other data, sizes and positions.
    others = clients_of((7, 4, 9, 5, 31))
    alone = TuningOnDevice(others, network_of(), training, 1, DEVICE, lanes=2)
    assert np.array_equal(rounds_of(alone, groups=[GROUPS[1], GROUPS[0]])[1], whole)
    changed = clients_of()
    changed[2] = replace(changed[2], y=np.zeros_like(changed[2].y))
    control = TuningOnDevice(changed, network_of(), training, 1, DEVICE, lanes=3)
    assert not np.array_equal(rounds_of(control)[0], whole)


def test_batches_are_filled_up_with_a_clients_own_samples() -> None:
    """A sample that turns everything into NaN affects its own client's group and no other."""
    clients = clients_of()
    clients[0] = replace(clients[0], x=np.full_like(clients[0].x, np.finfo(np.float32).max))
    engine = TuningOnDevice(
        clients, network_of(nn.Sequential(Overflowing(), make())), LocalTraining(0.05, 1, 6), 1, DEVICE
    )
    means, finite = engine.loop.means([engine.loop.on_device(engine.initial_model(0))] * 2, Position(0, 0), GROUPS)
    assert not finite
    assert [bool(torch.isfinite(mean).all()) for mean in means] == [False, True]
    with pytest.raises(RoundRejectedError, match="NaN or Inf"):
        rounds_of(engine)


class Overflowing(nn.Module):
    """Module that returns its input, or NaN for numbers whose double overflows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input; where doubling overflows, infinity minus infinity gives NaN."""
        return x + (2 * x - 2 * x)


def test_layers_that_draw_are_keyed_by_their_place() -> None:
    public = nn.Sequential(make(), nn.Dropout(0.5))
    training = LocalTraining(0.05, 2, 4)
    engine, other = (TuningOnDevice(clients_of(), network_of(public), training, seed, DEVICE) for seed in (1, 2))
    first = rounds_of(engine)
    assert engine.loop.why_uncaptured
    assert all(map(np.array_equal, first, rounds_of(engine)))
    assert not np.array_equal(first[0], rounds_of(other)[0])


class Remembering(nn.Module):
    """Module whose output depends on earlier inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus a sum over earlier inputs."""
        self.seen = self.seen + 0.01 * x.detach().mean()
        return x + self.seen


class RememberingTogether(Remembering):
    """Module like `Remembering`, with one memory for all copies, in a tensor that is changed in place."""

    everyones: ClassVar[dict[torch.device, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus a sum over the earlier inputs of all copies."""
        seen = self.everyones.setdefault(x.device, torch.zeros((), device=x.device))
        seen.add_(0.01 * x.detach().mean())
        return x + seen


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_network_that_remembers_clients_is_refused_or_begins_afresh(together: bool, on_device: bool) -> None:
    training = LocalTraining(0.05, 3, 4)
    make_engine: Any = partial(TuningOnDevice, device=DEVICE) if on_device else TuningFederation
    memory = RememberingTogether() if together else Remembering()
    engine = make_engine(clients_of(), network_of(nn.Sequential(make(), memory)), training, 1)
    if together:
        with pytest.raises(InputError, match="between clients"):
            rounds_of(engine)
        return
    others = make_engine(clients_of((7, 4, 9, 5, 31)), network_of(nn.Sequential(make(), Remembering())), training, 1)
    assert np.array_equal(rounds_of(engine)[0], rounds_of(others)[0])


class WholeNumbersOnly(nn.Module):
    """Module that accepts only whole numbers, as ids of tokens are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        if not torch.equal(x, x.round()):
            raise InputError("only whole numbers")
        return x


def test_a_network_that_takes_only_ids_of_tokens_is_tuned() -> None:
    clients = [ClientData(c.name, np.round(c.x), c.y) for c in clients_of()]
    engine = TuningOnDevice(
        clients, network_of(nn.Sequential(WholeNumbersOnly(), make())), LocalTraining(0.05, 2), 1, DEVICE
    )
    assert np.isfinite(rounds_of(engine)[0]).all()


def test_an_engine_that_was_only_made_has_computed_no_gradients() -> None:
    """Otherwise an audit could not fork the process to train counterfactuals on the CPU."""
    engine = TuningOnDevice(clients_of(), network_of(), LocalTraining(0.05, 2), 1, DEVICE)
    assert engine.loop.why_uncaptured is None


def test_a_round_has_the_bits_of_the_streamed_round() -> None:
    engine = TuningOnDevice(clients_of(), network_of(), LocalTraining(0.05, 3, 4, 0.9), 1, DEVICE)
    model = engine.initial_model(0)
    for place in (3, 4):
        model = engine.run_round(model, Position(1, place), GROUPS[0]).model
    assert np.array_equal(model, rounds_of(engine)[0])


AUDITED = """
import sifu
import sifu.store.unfinished
from test_captured_loop import clients_of, spec_of

sifu.store.unfinished._group_key = lambda spec: bytes(32)
spec_of()
if {first}:
    sifu.train(spec_of(), run="run", clients=clients_of(), device="cuda").forget(["client-3"], "gone")
else:
    report = sifu.audit_run(sifu.open_run("run", clients=clients_of()))
    print(report.exact[0].same_model, report.contradictions)
"""


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_run_tuned_on_a_gpu_is_audited_in_another_process(tmp_path: Path) -> None:
    found = os.pathsep.join(sys.path)
    for first in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", AUDITED.format(first=first)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": found},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "True ()\n"


def test_a_rougher_precision_stays_close() -> None:
    training = LocalTraining(0.05, 2, 4)
    fine = rounds_of(TuningOnDevice(clients_of(), network_of(), training, 1, DEVICE))
    rough = TuningOnDevice(clients_of(), network_of(), training, 1, DEVICE, precision="bfloat16")
    moved = np.abs(fine[0] - rough.initial_model(0)).max()
    assert 0.0 < np.abs(rounds_of(rough)[0] - fine[0]).max() < 0.2 * moved


def test_a_precision_that_is_not_for_tuning_is_refused() -> None:
    with pytest.raises(InputError, match="found precision 'tf32x3'"):
        TuningOnDevice(clients_of(), network_of(), LocalTraining(0.05, 1), 1, DEVICE, precision="tf32x3")


def spec_of() -> dict[str, Any]:
    sifu.allow_code("public_backbone:make")
    return {
        "model": {"kind": "ridge", "outputs": 3},
        "data": {"preprocessing": "fixed"},
        "ridge": {"regularisation": 0.01},
        "features": {"kind": "module", "module": "public_backbone:make", "tune": "blocks", "block": 4},
        "groups": {"count": 2, "rounds": 2, "rebuild": "later"},
        "local": {"rate": 0.05, "steps": 2, "batch": 4, "momentum": 0.9},
    }


def test_a_run_tuned_on_a_gpu_forgets_exactly_and_says_that_its_bits_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "GPU", "cpu")
        monkeypatch.setattr(devices, "why_no_gpu", lambda: None)
    # A random key could put client-3 into a group by itself, which is not rebuilt.
    monkeypatch.setattr("sifu.store.unfinished._group_key", lambda spec: bytes(32))
    run = sifu.train(spec_of(), run=tmp_path / "run", clients=clients_of(), device="cuda", precision="bfloat16")
    assert isinstance(run.engine(), TunedOnDevice)
    (outcome,) = run.forget(["client-3"], "gone")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    premises = {premise["name"]: premise["status"] for premise in run.certificate("gone").body["premises"]}
    assert (premises["deterministic device"], "layout" in premises) == ("trusted", False)
    assert run.rebuild() == 1
    assert run.verify().problems == []
    assert sifu_verifier.verify(tmp_path / "run") == []
    # A run begun on a GPU may continue on a CPU, which is more precise; a run begun on a CPU is not tuned further on a
    # GPU. Forgetting only reads files, so it works there too.
    sifu.open_run(tmp_path / "run", clients=clients_of(), device="cpu").forget(["client-1"], "next")
    sifu.train(spec_of(), run=tmp_path / "cpu", clients=clients_of(), device="cpu")
    begun_on_cpu = sifu.open_run(tmp_path / "cpu", clients=clients_of(), device="cuda")
    (outcome,) = begun_on_cpu.forget(["client-3"])
    assert outcome.level == "exact"
    with pytest.raises(InputError, match="an engine whose rounds follow from"):
        begun_on_cpu.rebuild()


def whole_sum(folder: Path) -> Statistics:
    """Return the sum of statistics that a run keeps."""
    with RunReader(folder) as reader:
        fixed = recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout)
        (row,) = [row for row in reader.statistics().values() if row.is_sum]
        return read_statistics(folder, row, fixed)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("batch", [0, 4])
def test_both_counterfactuals_have_the_same_bits_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, precision: str
) -> None:
    """The run and its counterfactual agree bit for bit although the leaver is the largest client, whose size a layout
    could show.
    """
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "GPU", "cpu")
        monkeypatch.setattr(devices, "why_no_gpu", lambda: None)
    monkeypatch.setattr("sifu.store.unfinished._group_key", lambda spec: bytes(32))
    everyone, leaver = clients_of((7, 4, 9, 5, 6, 41)), "client-5"
    spec = spec_of()
    spec["local"]["batch"] = batch
    train = partial(sifu.train, spec, device="cuda", precision=precision)
    run = train(run=tmp_path / "run", clients=everyone)
    (outcome,) = run.forget([leaver], "gone")
    assert outcome.level == "exact"
    train(run=tmp_path / "never", clients=everyone[:-1])
    with RunReader(tmp_path / "never") as reader:
        blocks = recorded_blocks(Spec.from_mapping(reader.spec), reader.layout)
    hit = {group_of(bytes(32), leaver, 2)}
    expected = drop(whole_sum(tmp_path / "never"), blocks, hit)
    assert whole_sum(tmp_path / "run") == expected
    # Negative control: one sample of a remaining client differs.
    changed = everyone[:-1]
    stays = next(n for n, client in enumerate(changed) if group_of(bytes(32), client.name, 2) not in hit)
    changed[stays] = replace(changed[stays], y=(changed[stays].y + 1) % 3)
    train(run=tmp_path / "control", clients=changed)
    assert drop(whole_sum(tmp_path / "control"), blocks, hit) != expected


def test_control_a_device_that_does_not_repeat_its_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: noise of the size of rounding, as from sums in a changing order, is refused."""
    engine = TuningOnDevice(clients_of(), network_of(), LocalTraining(0.05, 2, 4), 1, DEVICE)
    train, calls = captured_loop._Lane.train, []

    def rough(self: Any, start: Any, chosen: Any, shares: Any, result: torch.Tensor, **more: Any) -> None:
        train(self, start, chosen, shares, result, **more)
        calls.append(1)
        result.mul_(1.0 + 1e-6 * (len(calls) % 2))

    monkeypatch.setattr(captured_loop._Lane, "train", rough)
    with pytest.raises(InputError, match="gave different parameters"):
        rounds_of(engine)


@pytest.mark.skipif(DEVICE == "cpu", reason="torch finds no CUDA device")
def test_a_run_on_a_gpu_records_its_hardware_driver_and_libraries(tmp_path: Path) -> None:
    run = sifu.train(spec_of(), run=tmp_path / "run", clients=clients_of(), device="cuda")
    run.forget(["client-3"], "gone")
    assert {"gpu", "cuda", "cudnn", "torch"} <= run.certificate("gone").body["versions"].keys()
