"""Specs, engines, networks and runs of earlier versions that are refused for tuning, each with a clear message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from sifu.api import verify_run
from sifu.api.start_run import create_run
from sifu.core.spec import Spec
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.data.feature_maps.tuned_networks import TunedFeatures
from sifu.errors import InputError
from sifu.run.clients_and_engine import engine_from_spec
from sifu.store.reader import RunReader
from sifu.theory.closed_form.blocks import Blocks
from tuned_runs import clients_of, open_own, released, spec_of


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


def test_an_engine_that_cannot_tune_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tuned = Spec.from_mapping(spec_of())
    frozen = Spec.from_mapping(spec_of(features={"tune": "none"}, groups={"count": 0, "rounds": 0}))
    engine = engine_from_spec(frozen, clients_of())[0]
    with pytest.raises(InputError, match="needs an engine that can tune networks in groups"):
        create_run(tmp_path / "run", tuned, tuned, engine)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tune", ["blocks", "merge"])
def test_a_network_that_remembers_samples_in_evaluation_is_refused(tmp_path: Path, tune: str) -> None:
    """The features that it computes for remaining clients would hold data of the forgotten client."""
    sifu.allow_code("public_backbone:make_remembering")
    clients = [replace(client, x=client.x + 1.0) for client in clients_of()]  # probe samples are smaller
    with pytest.raises(
        InputError,
        match=r"the feature module('s output .* depends on other samples| no longer gives the same features)",
    ):
        sifu.train(
            spec_of(features={"module": "public_backbone:make_remembering", "tune": tune}),
            run=tmp_path / "run",
            clients=clients,
        )


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
    """Earlier, features.norm was the length of a sample over all its parts; now it is the length of each part."""
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
