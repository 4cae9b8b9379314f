"""Checks that a leaving client can make alone: its certificate, two released models and its data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import sifu
from run_tools import Command, small_spec
from sifu.audit import audit_client
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec

CLIENT = "client-003"


@dataclass(frozen=True)
class Held:
    """Files that the client holds in a separate folder, and the nonce the operator may hand over."""

    folder: Path
    key: str
    nonce: str


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    place = tmp_path_factory.mktemp("leaving")
    run = sifu.train(small_spec(), run=place / "run")
    own = place / "own"
    own.mkdir()
    run.export(own / "before.safetensors")
    run.forget([CLIENT], "leave", sigma=0.3)
    run.export(own / "after.safetensors")
    certificates = run.folder / "certificates"
    (own / "certificate.json").write_bytes((certificates / "leave.public.json").read_bytes())
    auditor = json.loads((certificates / "leave.auditor.json").read_bytes())
    mine = next(client for client in clients_from_spec(run.spec) if client.name == CLIENT)
    np.savez(own / "data.npz", x=mine.x, y=mine.y)
    return Held(own, auditor["public_key"], auditor["body"]["models"]["final_model"]["nonce"])


def test_an_honest_operator_leaves_nothing_wrong(held: Held) -> None:
    own = held.folder
    audited = audit_client(
        CLIENT,
        own / "certificate.json",
        before=own / "before.safetensors",
        after=own / "after.safetensors",
        data=own / "data.npz",
        public_key=held.key,
        nonce=held.nonce,
    )
    assert audited.holds, audited.problems
    assert audited.committed is True
    assert audited.samples == 10
    assert audited.distance is not None
    assert audited.distance > 0.0
    spec = Spec.from_mapping(small_spec())
    engine, _ = engine_from_spec(spec, clients_from_spec(spec))
    from sifu.store.files import read_model

    model = read_model(own / "before.safetensors", engine.layout)
    expected = engine.evaluate(model, np.array([3]))
    assert audited.before is not None
    assert audited.before.accuracy == pytest.approx(expected.accuracy)
    assert audited.before.loss == pytest.approx(expected.loss)
    assert any("cannot prove" in statement for statement in audited.statements)


def test_what_is_wrong_is_named(held: Held, tmp_path: Path) -> None:
    own = held.folder
    certificate = own / "certificate.json"
    assert any("does not name" in problem for problem in audit_client("client-007", certificate).problems)
    other_key = "0" * 64
    assert any("signature" in problem for problem in audit_client(CLIENT, certificate, public_key=other_key).problems)
    content = json.loads(certificate.read_bytes())
    content["body"]["epsilon"] = 0.1
    (tmp_path / "forged.json").write_text(json.dumps(content))
    assert not audit_client(CLIENT, tmp_path / "forged.json").holds
    same = audit_client(CLIENT, certificate, before=own / "after.safetensors", after=own / "after.safetensors")
    assert any("same model" in problem for problem in same.problems)
    wrong = audit_client(CLIENT, certificate, after=own / "before.safetensors", nonce=held.nonce)
    assert wrong.committed is False
    assert not wrong.holds


def test_a_model_before_that_is_not_from_before_is_found(held: Held, tmp_path: Path) -> None:
    own, certificate = held.folder, held.folder / "certificate.json"
    told = audit_client(CLIENT, certificate, before=own / "before.safetensors").statements
    assert any("the model before was released on" in statement for statement in told)
    swapped = audit_client(
        CLIENT, certificate, before=own / "after.safetensors", nonce=held.nonce, after=own / "after.safetensors"
    )
    assert any("released after the request" in problem for problem in swapped.problems)
    late = tmp_path / "late.safetensors"
    late.write_bytes((own / "before.safetensors").read_bytes())
    assert any("cannot be told" in statement for statement in audit_client(CLIENT, certificate, before=late).statements)
    description = json.loads((own / "before.safetensors.json").read_text())
    for change, words in (
        ({"time": "2999-01-01T00:00:00Z"}, "after your request was received"),
        ({"run": "another"}, "from another run"),
    ):
        changed = description | {"released": description["released"] | change}
        (tmp_path / "late.safetensors.json").write_text(json.dumps(changed))
        assert any(words in problem for problem in audit_client(CLIENT, certificate, before=late).problems)
    (tmp_path / "late.safetensors.json").write_text(json.dumps(description | {"sha256": "0" * 64}))
    assert any("not the file" in problem for problem in audit_client(CLIENT, certificate, before=late).problems)


def test_a_certificate_alone_can_be_checked(held: Held) -> None:
    audited = audit_client(CLIENT, held.folder / "certificate.json")
    assert audited.holds
    assert audited.before is None
    assert audited.committed is None


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((2, 64))}, "x and y"),
        ({"x": np.zeros((2, 64), dtype=np.uint8), "y": np.zeros(2, dtype=int)}, "as floats"),
        ({"x": np.zeros((2, 5)), "y": np.zeros(2, dtype=int)}, "64 features"),
        ({"x": np.zeros((2, 64)), "y": np.array([0, 99])}, "labels must lie"),
    ],
)
def test_bad_data_are_refused_with_a_sentence(held: Held, tmp_path: Path, arrays, words: str) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    own = held.folder
    with pytest.raises(InputError, match=words):
        audit_client(CLIENT, own / "certificate.json", after=own / "after.safetensors", data=tmp_path / "bad.npz")


def test_the_command_needs_no_run(held: Held, cli: Command, tmp_path: Path) -> None:
    answer = cli("client-audit", held.folder, "--client", CLIENT, "--format", "json")
    assert answer.code == 0
    assert answer.json["holds"] is True
    assert answer.json["after"]["loss"] > 0.0
    told = cli("client-audit", held.folder, "--client", CLIENT, "--nonce", held.nonce)
    assert told.code == 0
    assert "No problem found" in told.out
    assert cli("client-audit", "--client", "nobody", "--certificate", held.folder / "certificate.json").code == 3
    assert cli("client-audit", held.folder.parent / "run", "--client", CLIENT).code == 2
    assert cli("client-audit", tmp_path, "--client", CLIENT).code == 2
    assert cli("audit", "--nonce", "aa", "--controls").code == 2
    assert cli("audit").code == 2
