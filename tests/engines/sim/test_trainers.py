"""Recorded trainers: a run continues only with its own, and installing a package changes no bits."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sifu
from run_tools import small_spec
from sifu.engines.sim.networks import cnn
from sifu.engines.sim.plain_loop import LoopTrainer
from sifu.engines.sim.trainers import OWN, who_trains
from sifu.errors import InputError

NETWORK = cnn((1, 8, 8), 3)
SPEC = small_spec(
    data={"clients": 4, "samples_per_client": 4},
    model={"kind": "cnn", "dtype": "float32"},
    local={"steps": 1, "rate": 0.05, "batch": 4},
    regularity={"kind": "assumed"},
    stop={"target": 0.0, "max_rounds": 2},
)


class Slower(LoopTrainer):
    """Trainer of an installed package; it differs from the library's by its class alone."""


def install(monkeypatch: pytest.MonkeyPatch, bits: int = 1) -> None:
    """Install a package that trains the networks of a spec on the CPU."""

    def cpu_trainer(network: Any, clients: Any, plan: Any) -> LoopTrainer:
        from sifu.engines.sim import ModuleModel

        return Slower(ModuleModel(network), clients, plan)

    package = SimpleNamespace(
        NAME=f"kernels, bits {bits}",
        serves=lambda network, dtype, device: network is not None and device == "cpu",
        cpu_trainer=cpu_trainer,
    )
    monkeypatch.setitem(sys.modules, "sifu_kernels", package)


def test_the_best_installed_trainer_trains_a_new_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert who_trains(NETWORK, "float32", "cpu").name == OWN
    install(monkeypatch)
    assert who_trains(NETWORK, "float32", "cpu").name == "kernels, bits 1"
    assert who_trains(None, "float32", "cpu").name == who_trains(NETWORK, "float32", "cuda").name == OWN


def test_installing_a_package_changes_no_bits_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sifu.train(SPEC, run=tmp_path / "run", device="cpu")
    with run.reader() as reader:
        assert reader.facts["trainer"] == OWN
    install(monkeypatch)
    engine: Any = sifu.open_run(tmp_path / "run").engine()
    assert type(engine._trainer) is LoopTrainer
    # Control: a new run is trained by the package.
    engine = sifu.train(SPEC, run=tmp_path / "new", device="cpu").engine()
    assert (type(engine._trainer), engine.facts.trainer) == (Slower, "kernels, bits 1")


@pytest.mark.parametrize("bits", [None, 2])
def test_a_run_goes_on_only_with_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None) -> None:
    """Another number of bits is another trainer; what needs no training still works."""
    install(monkeypatch)
    sifu.train(SPEC, run=tmp_path / "run", device="cpu")
    if bits is None:
        monkeypatch.setitem(sys.modules, "sifu_kernels", None)
    else:
        install(monkeypatch, bits)
    with pytest.raises(InputError, match="trained by kernels, bits 1"):
        sifu.open_run(tmp_path / "run").forget(["client-003"], method="scratch")
    assert sifu.open_run(tmp_path / "run").verify().problems == []
