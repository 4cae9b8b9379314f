"""Verification without torch and matplotlib: an environment without any extra verifies everything."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from runtime_environment import ROOT, declared, make_environment

import sifu
from forged_runs import execute
from run_tools import copy_run, small_spec, state

CLIENT = "client-000"
KINDS = {"noise": ({}, {"method": "sifu", "sigma": 0.5}), "closed form": ({"model": {"kind": "ridge"}}, {})}


@dataclass(frozen=True)
class Environment:
    """Environment without extras; commands run in `folder`."""

    python: Path
    folder: Path

    def __call__(self, *arguments: object, module: str = "sifu.cli.main") -> subprocess.CompletedProcess[str]:
        command = [self.python, "-m", module, *arguments]
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return subprocess.run(
            list(map(str, command)), cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without-torch") / "environment"
    return make_environment(folder, declared(), ROOT / "src" / "sifu", ROOT / "verifier" / "src" / "sifu_verifier")


@pytest.fixture
def bare(python: Path, tmp_path: Path) -> Environment:
    return Environment(python, tmp_path)


@pytest.fixture(scope="module", params=KINDS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in which one client was forgotten; tests only read it."""
    changes, terms = KINDS[request.param]
    folder = tmp_path_factory.mktemp("finished") / "run"
    sifu.train(small_spec(**changes), run=folder).forget([CLIENT], "gone", **terms)
    return folder


@pytest.mark.parametrize("package", ["torch", "matplotlib", "sklearn", "flwr", "starlette"])
def test_control_the_environment_lacks(bare: Environment, package: str) -> None:
    answer = subprocess.run([bare.python, "-c", f"import {package}"], capture_output=True, text=True, check=False)
    assert f"No module named '{package}'" in answer.stderr


def test_a_run_a_certificate_and_a_bundle_are_verified(bare: Environment, finished: Path) -> None:
    run, certificate = copy_run(finished, bare.folder / "run"), "run/certificates/gone.public.json"
    for arguments in (
        ["verify", run],
        ["verify", certificate],
        ["certificate", run, "gone"],
        ["certificate", run, "gone", "--bundle", "bundle.json"],
        ["verify", "bundle.json"],
    ):
        answer = bare(*arguments)
        assert answer.returncode == 0, f"{arguments}: {answer.stdout}{answer.stderr}"
    answer = bare(run, module="sifu_verifier")
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_control_a_changed_run_and_a_changed_certificate_are_noticed(bare: Environment, finished: Path) -> None:
    run = copy_run(finished, bare.folder / "run")
    execute(run, "UPDATE requests SET level = 'proven' WHERE level != 'proven'")
    execute(run, "UPDATE participation SET samples = samples + 1")
    assert bare("verify", run).returncode == 3
    assert bare(run, module="sifu_verifier").returncode == 1
    content = json.loads((run / "certificates" / "gone.public.json").read_text())
    content["body"]["epsilon"] /= 2
    (bare.folder / "changed.json").write_text(json.dumps(content))
    assert bare("verify", "changed.json").returncode == 3


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["forget", "run", "--client", "client-001", "--method", "scratch"], "train"),
        (["train", "spec.toml", "--run", "new"], "train"),
        (["audit", "run"], "train"),
        (["report", "run"], "report"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_command_that_needs_an_extra_names_it(
    bare: Environment, trained_run: Path, arguments: list[str], extra: str
) -> None:
    copy_run(trained_run, bare.folder / "run")
    (bare.folder / "spec.toml").write_text("[data]\nclients = 6\nsamples_per_client = 5\n")
    before = state(bare.folder / "run")
    answer = bare(*arguments)
    assert answer.returncode == 2, answer.stderr
    assert f"pip install '.[{extra}]'" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert state(bare.folder / "run") == before
    assert not (bare.folder / "new").exists()
