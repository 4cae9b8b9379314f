"""Methods of a user's module are called with tuned weights only in copies of the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import listening_backbone
import sifu
from listening_backbone import Listening, Passing, keep, kept
from sifu.core.layout import Vector
from sifu.data.feature_maps.tuned_networks import TunedFeatures
from sifu.data.forked import in_this_process
from sifu.theory.closed_form.blocks import drop
from tuned_runs import blocks_of, clients_of, groups_of, spec_of, whole_sum, without

LEAVER = "client-003"


class Quiet(Listening):
    """Network whose features never depend on the stored number, which an export could not express."""

    def is_changed(self) -> bool:
        """Return False."""
        return False


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    keep(0)
    yield
    keep(0)


def outcome_of(method: str, folder: Path, monkeypatch: pytest.MonkeyPatch, base: type[Listening] = Listening) -> str:
    """Return the refusal, or whether all sums after a request are the `same` as if the leaver had never existed."""
    sifu.allow_code("listening_backbone:make")
    monkeypatch.setattr(listening_backbone, "CHOSEN", (method, base))
    spec = spec_of(features={"module": "listening_backbone:make"})
    own, never = folder / "own", folder / "never"
    try:
        (outcome,) = sifu.train(spec, run=own, clients=clients_of()).forget([LEAVER], "gone")
        assert outcome.level == "exact"
        keep(0)
        sifu.train(spec, run=never, clients=without(clients_of(), [LEAVER]))
    except sifu.InputError as error:
        return str(error)
    expected = drop(whole_sum(never), blocks_of(never), groups_of(own, [LEAVER]))
    return "same" if whole_sum(own) == expected else "different"


@pytest.mark.parametrize("method", listening_backbone.METHODS)
def test_methods_that_keep_tuned_weights_change_no_features(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(method, tmp_path, monkeypatch)
    assert outcome == "same" or "no longer gives the same features" in outcome
    assert not kept(), "this process never called the method with tuned weights"


@pytest.mark.parametrize("method", listening_backbone.METHODS)
def test_nothing_passes_from_one_groups_network_to_another(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaver's group has the first network, and its block is dropped; the other blocks are kept."""
    outcome = outcome_of(method, tmp_path, monkeypatch, Passing)
    assert outcome == "same"
    assert groups_of(tmp_path / "own", [LEAVER]) == {0}


def test_control_a_method_called_in_this_process_changes_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = TunedFeatures.through

    def made_here(self: TunedFeatures, networks: Mapping[int, Vector]) -> TunedFeatures:
        made = through(self, networks)
        assert made.parts
        return made

    monkeypatch.setattr(TunedFeatures, "through", made_here)
    assert outcome_of("train", tmp_path, monkeypatch) == "different"


@pytest.mark.parametrize("method", ["train", "state_dict"])
def test_an_export_calls_no_method_with_tuned_weights_in_this_process(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    sifu.allow_code("listening_backbone:make")
    monkeypatch.setattr(listening_backbone, "CHOSEN", (method, Quiet))
    run = sifu.train(
        spec_of(features={"module": "listening_backbone:make"}), run=tmp_path / "run", clients=clients_of()
    )
    run.export(tmp_path / "model.onnx")
    assert not kept()
    monkeypatch.setattr("sifu.data.forked.forked", in_this_process)  # the control
    run.export(tmp_path / "again.onnx")
    assert kept()
