"""Both verifiers agree on how convex a training was, also where a bound is nearly infinite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from forged_runs import replace_certificate
from run_tools import query, small_spec
from sifu.api import verify_run
from sifu.store.keys import sign

TRAININGS: dict[str, dict[str, Any]] = {
    "convex": {},
    "convex, with a limit above the safe steps": {"rate": 3.0},
    "strongly convex": {"weight_decay": 0.01, "rate": 0.05},
    "strongly convex, and every client at its limit": {"weight_decay": 0.01},
}


def trained(folder: Path, local: dict[str, Any]) -> sifu.Run:
    stop = {"target": 0.0, "max_rounds": 3}
    return sifu.train(small_spec(local={"steps": 3, "rate": "auto"} | local, stop=stop), run=folder)


@pytest.mark.parametrize("name", TRAININGS)
def test_untouched_runs_have_no_findings(name: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", TRAININGS[name])
    run.forget(["client-003"], "leaves", method="sifu", sigma=100.0)
    (stated,) = [said for said in run.certificate("leaves").body["premises"] if said["name"] == "regularity"]
    assert stated["case"] == name.split(",")[0]
    assert verify_run(run.folder).problems == sifu_verifier.verify(run.folder) == []


@pytest.mark.parametrize(("name", "case"), [("convex", "strongly convex"), ("strongly convex", "convex")])
def test_control_another_case_is_reported(name: str, case: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", TRAININGS[name])
    run.forget(["client-003"], "leaves", method="sifu", sigma=100.0)
    ((content,),) = query(run.folder, "SELECT content FROM certificates WHERE form = 'public'")
    certificate = json.loads(content)
    for said in certificate["body"]["premises"]:
        said["case"] = case if said["name"] == "regularity" else said["case"]
    text = json.dumps(sign(run.folder, certificate["body"], certificate["public_key"]), indent=1, sort_keys=True)
    replace_certificate(run.folder, "leaves", "public", text)
    assert any("premises" in problem for problem in verify_run(run.folder).problems)
    assert any("premises" in problem for problem in sifu_verifier.verify(run.folder))


def test_a_client_of_enormous_samples_is_no_finding(tmp_path: Path) -> None:
    """Its own safe step is tiny, and nobody else's depends on it."""
    generator = np.random.default_rng(0)
    clients = {f"c{k}": (generator.normal(size=(5, 2)), generator.normal(size=5)) for k in range(3)}
    clients["huge"] = (1e80 * generator.normal(size=(5, 2)), generator.normal(size=5))
    spec = {
        "data": {"preprocessing": "fixed"}, "model": {"kind": "least_squares"},
        "local": {"steps": 3, "weight_decay": 0.01}, "stop": {"target": 0.0, "max_rounds": 2},
    }  # fmt: skip
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    assert run.forget(["huge"], method="scratch")[0].level == "exact"
    assert verify_run(run.folder).problems == sifu_verifier.verify(run.folder) == []
