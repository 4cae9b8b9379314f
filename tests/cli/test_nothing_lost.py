"""Nothing that an operator was told is received, written or used gets lost, as seen through the command line."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_tools import Command, query, start_cli, state


def write_own_data(folder: Path, **more: object) -> Path:
    rng = np.random.default_rng(0)
    np.savez(folder / "own.npz", x=rng.normal(size=(60, 4)), y=rng.integers(0, 2, 60), **more)
    return folder / "own.npz"


def status_of(cli: Command, run: Path) -> Any:
    return cli("status", run, "--all", "--format", "json").json


def spec_of(file: Path, keys: str = "", rounds: int = 2) -> Path:
    spec = file.with_name("spec.toml")
    data = f'[data]\nname = "npz"\nfile = "{file}"\nclients = 5\nsamples_per_client = 8\n{keys}\n'
    spec.write_text(f"{data}[local]\nsteps = 2\n[stop]\ntarget = 0.0\nmax_rounds = {rounds}\n")
    return spec


def test_the_clients_of_a_file_are_the_clients_of_the_run(cli: Command, tmp_path: Path) -> None:
    hospitals = np.repeat(["bern", "genf", "uri"], 20)
    spec = spec_of(write_own_data(tmp_path, client=hospitals))
    assert cli("train", spec, "--run", tmp_path / "run").code == 0
    assert {line["name"] for line in status_of(cli, tmp_path / "run")["clients"]} == set(hospitals)
    answer = cli("train", spec_of(tmp_path / "own.npz", 'partition = "iid"'), "--run", tmp_path / "other")
    assert answer.code == 2
    assert "data.partition" in answer.err
    assert not (tmp_path / "other").exists()


def test_a_file_without_clients_is_spread_over_those_of_the_spec(cli: Command, tmp_path: Path) -> None:
    assert cli("train", spec_of(write_own_data(tmp_path)), "--run", tmp_path / "run").code == 0
    assert len(status_of(cli, tmp_path / "run")["clients"]) == 5


def test_a_backup_is_only_called_written_if_it_can_be_restored(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, backup = tmp_path / "run", tmp_path / "backup.zip"
    monkeypatch.setenv("SIFU_PASSPHRASE", "a secret")
    assert cli("train", spec_of(write_own_data(tmp_path)), "--run", run).code == 0
    before = query(run, "SELECT COUNT(*) FROM events")
    monkeypatch.delenv("SIFU_PASSPHRASE")
    refused = cli("backup", run, backup)
    assert refused.code == 2
    assert "SIFU_PASSPHRASE" in refused.err
    assert not backup.exists()
    assert query(run, "SELECT COUNT(*) FROM events") == before
    monkeypatch.setenv("SIFU_PASSPHRASE", "a secret")
    assert cli("backup", run, backup).code == 0
    monkeypatch.delenv("SIFU_PASSPHRASE")
    assert cli("restore", backup, tmp_path / "restored").code == 0


def test_a_damaged_run_is_not_backed_up(cli: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", spec_of(write_own_data(tmp_path)), "--run", run).code == 0
    model = next((run / "models").iterdir())
    model.write_bytes(model.read_bytes()[:-1])
    assert cli("backup", run, tmp_path / "backup.zip").code == 5
    assert not (tmp_path / "backup.zip").exists()


def killed_in_training(run: Path, *arguments: str) -> None:
    """Start a command and kill it as soon as it has trained a round."""
    rounds = "SELECT max(node) FROM nodes"
    before, process = query(run, rounds), start_cli(*arguments)
    while query(run, rounds)[0][0] <= before[0][0] + 1:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()


def test_a_request_is_recorded_before_an_earlier_one_is_finished(cli: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", spec_of(write_own_data(tmp_path), rounds=1500), "--run", run).code == 0
    for number, method in enumerate(("scratch", "auto")):
        killed_in_training(run, "forget", run, "--clients", f"client-00{number}", "--method", method)
    states = {line["request"]: line["status"] for line in status_of(cli, run)["requests"]}
    assert states == {"r1": "running", "r2": "received"}
    assert cli("forget", run).code == 0
    assert {line["status"] for line in status_of(cli, run)["requests"]} == {"done"}


def test_a_certificate_of_a_key_that_a_backup_lacks_names_what_to_file(
    own_trained: Path, tmp_path: Path, cli: Command
) -> None:
    assert cli("backup", own_trained, tmp_path / "old.zip").code == 0
    assert cli("key", "--rotate", own_trained).code == 0
    assert cli("forget", own_trained, "--clients", "client-001", "--request", "lost-one").code == 0
    certificate = own_trained / "certificates" / "lost-one.public.json"
    answer = cli("restore", tmp_path / "old.zip", tmp_path / "new", "--accept-older", "--certificate", certificate)
    assert answer.code == 2
    assert "lost-one" in answer.err
    assert not (tmp_path / "new").exists()


def test_a_pipe_in_place_of_a_table_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    spec = tmp_path / "spec.toml"
    spec.write_text(f'[data]\nname = "table"\nfile = "{tmp_path / "pipe.csv"}"\nlabel = "y"\nclient = "c"\n')
    process = start_cli("plan", spec)
    process.communicate(timeout=60)
    assert process.returncode == 2


@pytest.mark.parametrize(
    "place",
    [
        "run.db",
        "operator.key",
        "salts.json",
        "models/0.safetensors",
        "certificates/to-the-middle.public.json",
        "new/../lock",
    ],
)
def test_no_output_is_written_over_the_record(own_run: Path, tmp_path: Path, cli: Command, place: str) -> None:
    target = own_run / place
    (own_run / "new").mkdir()
    samples, model = tmp_path / "rows.npz", tmp_path / "model.safetensors"
    np.savez(samples, x=np.zeros((2, 64)))
    assert cli("export", own_run, "--model", model).code == 0
    before = state(own_run)
    for command in (
        ("certificate", own_run, "to-the-middle", "--bundle", target),
        ("export", own_run, "--model", target),
        ("predict", model, samples, "--output", target),
        ("report", own_run, "--output", target),
        ("audit", own_run, "--no-attacks", "--output", target),
        ("--witness", target, "request", own_run, "--clients", "client-009"),
    ):
        assert cli(*command).code == 2, command
        assert state(own_run) == before, command
