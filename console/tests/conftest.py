"""Console with two runs and a token for every person."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_for_tests import PEOPLE, ServiceForTests

import suite_setup  # noqa: F401  before anything of ours is imported
from run_fixtures import (  # noqa: F401
    approved_run,
    cli,
    heads,
    own_run,
    own_trained,
    pytest_configure,
    pytest_sessionfinish,
    run_with_requests,
    trained_run,
)
from run_tools import copy_run
from secret_draws import fixed_secrets, pytest_fixture_setup  # noqa: F401
from sifu_console.app import Settings, make_app
from sifu_console.tokens import TokenFile, state_folder


@pytest.fixture
def service(
    approved_run: Path, run_with_requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ServiceForTests:
    folder = tmp_path / "service"
    folder.mkdir()
    copy_run(approved_run, folder / "north")
    copy_run(run_with_requests, folder / "south")
    tokens = TokenFile(state_folder(folder))
    secrets = {name: tokens.create(name, roles)[1] for name, roles in PEOPLE.items()}
    return ServiceForTests(folder, secrets, make_app(Settings([folder], state_folder(folder))))
