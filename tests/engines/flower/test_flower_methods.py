"""Requests of every method over Flower's messages, through the same code as on the embedded engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from flower_federation import small_spec
from served_runs import Federation

import sifu
from secret_draws import repeat_draws
from sifu.methods.registry import METHODS


def spec_for(method: str) -> object:
    """Return a spec that the method supports."""
    sections: dict = {}
    if method == "groups":
        sections["groups"] = {"count": 3, "rounds": 2}
    sections["data"] = {"preprocessing": "fixed"}
    return small_spec(stop={"max_rounds": 6, "target": 0.0, "evaluate_every": 3}, **sections)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"closed_form"}))  # closed-form heads are solved, not trained
def test_a_request_ends_as_on_the_embedded_engine(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat_draws(monkeypatch)  # both engines draw the same noise
    spec = spec_for(method)
    fed = Federation(tmp_path, spec)  # type: ignore[arg-type]
    fed.serve()
    name = fed.data[2].name
    sifu.open_run(fed.run_folder).request([name], "one", method=method)
    fed.grid.sent.clear()
    embedded = sifu.train(spec, run=tmp_path / "embedded")  # type: ignore[arg-type]
    embedded.forget([name], "one", method=method, level="none")
    done = fed.serve(level="none")
    assert done == ["one"]
    assert name not in fed.contacted()
    on_flower, expected = (sifu.open_run(folder) for folder in (fed.run_folder, tmp_path / "embedded"))
    assert on_flower.verify().problems == []
    (a,), (b,) = on_flower.outcomes(), expected.outcomes()
    assert (a.rollback_to, a.rounds, a.sigma) == (b.rollback_to, b.rounds, pytest.approx(b.sigma))
    assert a.level == b.level or b.level == "proven"
    assert a.psi == pytest.approx(b.psi, rel=1e-6)
    first, second = on_flower.reader(), expected.reader()
    np.testing.assert_allclose(first.load_model(first.tip), second.load_model(second.tip), rtol=0, atol=1e-8)
    first.close()
    second.close()
    shutil.rmtree(fed.run_folder)
