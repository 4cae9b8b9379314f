"""Guards: what small runs of every kind compute stays what it was (see guards.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from guards import GUARDS, LINEAR, Result, recorded, result_of, statements
from machine import machine_key
from sifu.errors import InputError

pytestmark = pytest.mark.system_secrets


def approximately(value: Any) -> Any:
    """Return a value whose numbers compare with a relative tolerance of 1e-9."""
    if isinstance(value, dict):
        return {key: approximately(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [approximately(inner) for inner in value]
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


def check_source(name: str, result: Result) -> None:
    """Check that the noise source changes no level but `proven` and `conditional`, and not the first Psi."""
    for given, system in zip(result.given, result.system, strict=True):
        assert system["level"] == given["level"] or given["level"] == "none"
    assert result.given[0]["psi"] == approximately(result.system[0]["psi"]), name


@pytest.mark.parametrize("name", GUARDS)
def test_the_same_as_recorded(name: str) -> None:
    result, content = result_of(name), recorded()
    assert json.loads(json.dumps(result.numbers())) == approximately(content["numbers"][name])
    check_source(name, result)
    digest = content["models"].get(machine_key(), {}).get(name)
    if digest is None:
        pytest.skip(f"no model was recorded for {machine_key()}: python tests/guards/guards.py --record {name!r}")
    assert result.model == digest


def test_given_noise_is_never_proven(tmp_path: Path) -> None:
    """Negative control: of two runs that differ in nothing but the source of noise, one is proven."""
    for name, noise in (("system", None), ("given", np.random.default_rng(1))):
        run = sifu.train(LINEAR, run=tmp_path / name, noise=noise)
        run.forget(["client-003"], "request-1", method="sifu", sigma=0.03, level="none")
        stated = statements(run, 1)
        assert stated["level"] == ("proven" if name == "system" else "none")
        assert stated["premises"].get("noise") == ("trusted" if name == "system" else "failed")
        assert run.verify().problems == []


def test_a_run_keeps_the_noise_source_it_was_made_with(tmp_path: Path) -> None:
    sifu.train(LINEAR, run=tmp_path / "system")
    with pytest.raises(InputError, match="operating system"):
        sifu.open_run(tmp_path / "system", noise=np.random.default_rng(1))
    sifu.train(LINEAR, run=tmp_path / "given", noise=np.random.default_rng(1))
    run = sifu.open_run(tmp_path / "given")
    run.forget(["client-003"], "request-1", method="sifu", sigma=0.03, level="none")
    assert statements(run, 1)["level"] == "none", "noise of the system in a run of given noise proves nothing either"
