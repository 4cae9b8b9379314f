"""What the commands say is true, no more, as seen through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_tools import Command
from sifu.store.keys import sign
from sifu.store.reader import RunReader
from sifu_verifier import verify

HEAD = """
[data]
clients = 12
samples_per_client = 10
[model]
kind = "ridge"
[features]
kind = "random_fourier"
count = 32
[ridge]
regularisation = 0.1
"""


def file_of(run: Path, cli: Command, tmp_path: Path) -> Path:
    certificate = cli("certificate", "show", run, "to-the-middle", "--format", "json").json
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(certificate))
    return path


@pytest.mark.parametrize("change", [{}, {"clients": ["client-007"]}, {"epsilon": 0.001}])
def test_a_certificate_handed_in_is_the_recorded_one_or_a_finding(
    own_run: Path, cli: Command, tmp_path: Path, change: dict[str, object]
) -> None:
    path = file_of(own_run, cli, tmp_path)
    body = json.loads(path.read_text())["body"] | change
    with RunReader(own_run) as reader:
        path.write_text(json.dumps(sign(own_run, body, reader.value("public_key"))))
    answer = cli("verify", own_run, "--witness", path)
    assert answer.code == (3 if change else 0)
    if change:
        assert str(path) in answer.err


def test_noise_is_trusted_to_be_the_operators(own_run: Path, cli: Command, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(HEAD + "[release]\nnoise = 5.0\n")
    assert cli("train", spec, "--run", tmp_path / "run").code == 0
    assert cli("forget", tmp_path / "run", "--clients", "client-001").code == 0
    for run, request in ((own_run, "to-the-middle"), (tmp_path / "run", "r1")):
        body = cli("certificate", "show", run, request, "--format", "json").json["body"]
        assert {"trusted"} == {premise["status"] for premise in body["premises"] if premise["name"] == "noise"}
        assert verify(run) == []
