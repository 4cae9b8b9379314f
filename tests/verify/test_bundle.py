"""The bundle of a request: checkable by strangers, and without a word about anybody else."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

import sifu
from run_tools import Command, connect, query, state
from sifu.checking.bundle import bundle_bytes
from sifu.core.ledger import canonical_json
from sifu.errors import VerificationError


def test_the_command_writes_a_file_that_verifies_and_changes_nothing(
    own_run: Path, tmp_path: Path, cli: Command
) -> None:
    before, file = state(own_run), tmp_path / "bundle.json"
    answer = cli("certificate", own_run, "strictly", "--bundle", file, "--format", "json")
    assert answer.code == 0, answer.err
    assert answer.json == {"bundle": str(file), "request": "strictly"}
    assert json.loads(file.read_bytes())["certificate"] == json.loads(
        (own_run / "certificates" / "strictly.public.json").read_bytes()
    )
    assert state(own_run) == before
    assert cli("verify", file).code == 0
    assert cli("verify", file, "--public-key", "00" * 32).code == 3


def test_no_byte_of_it_tells_of_others_or_of_a_key(own_run: Path) -> None:
    everything = bundle_bytes(own_run, "strictly")
    own = "client-004"
    assert own.encode() in everything
    pem = (own_run / "operator.key").read_bytes()
    seed = load_pem_private_key(pem, None).private_bytes_raw()  # type: ignore[union-attr]
    forbidden: dict[str, bytes] = {
        f"client {name}": name.encode() for (name,) in query(own_run, "SELECT name FROM clients") if name != own
    }
    forbidden |= {
        f"request {name}": name.encode()
        for (name,) in query(own_run, "SELECT request FROM requests")
        if name != "strictly"
    }
    for form in ("hex", "base64"):
        forbidden[f"the key in {form}"] = seed.hex().encode() if form == "hex" else base64.b64encode(seed)
    forbidden["the key, raw"] = seed
    forbidden["the key's file"] = pem.splitlines()[1]
    forbidden["any private key"] = b"PRIVATE"
    forbidden["where the run lies"] = str(own_run).encode()
    for digest, nonce in query(own_run, "SELECT digest, nonce FROM models"):
        forbidden[f"digest {digest}"], forbidden[f"nonce {nonce}"] = digest.encode(), nonce.encode()
    for request, content in query(own_run, "SELECT request, content FROM certificates WHERE form = 'auditor'"):
        forbidden[f"auditor's certificate of {request}"] = json.loads(content)["signature"].encode()
    for seq, nonce in query(own_run, "SELECT seq, nonce FROM events"):
        forbidden[f"nonce of event {seq}"] = nonce
        forbidden[f"nonce of event {seq} in hex"] = nonce.hex().encode()
    for (psi,) in query(own_run, "SELECT psi FROM charges WHERE charge > 0"):
        forbidden[f"Psi {psi}"] = psi.encode()
    for (drift,) in query(own_run, "SELECT drift FROM participation WHERE drift > 0"):
        forbidden[f"drift {drift}"] = repr(drift).encode()
    forbidden["its actor"] = (
        json.loads(query(own_run, "SELECT payload FROM events WHERE kind = 'request done'")[0][0])["actor"].encode()
        + b'"'
    )
    assert len(forbidden) > 100
    leaked = [name for name, text in forbidden.items() if text in everything]
    assert leaked == []


def test_a_new_key_continues_the_chain(own_run: Path, tmp_path: Path, cli: Command) -> None:
    old = sifu.open_run(own_run).keys().public_keys[-1].key
    assert cli("key", "--rotate", own_run).code == 0
    new = sifu.open_run(own_run).keys().public_keys[-1].key
    assert cli("certificate", own_run, "strictly", "--bundle", tmp_path / "b.json").code == 0
    for key in (old, new):
        assert cli("verify", tmp_path / "b.json", "--public-key", key).code == 0
    assert sifu.verify(tmp_path / "b.json").public_key == old  # the certificate's


def test_only_keys_that_the_chain_passes_through_are_the_operators(own_run: Path, tmp_path: Path, cli: Command) -> None:
    published = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    assert cli("key", "--rotate", own_run).code == 0
    content, file = json.loads(bundle_bytes(own_run, "strictly")), tmp_path / "b.json"
    genuine = content["keys"][1]
    forged = {"event": genuine["event"], "old": "x", "new": published}
    later = dict(genuine, event=genuine["event"] + 1)
    for changes, code in (([genuine], 0), ([forged, genuine], 3), ([genuine, forged], 3), ([later], 3), ([], 3)):
        file.write_text(json.dumps(content | {"keys": [content["keys"][0], *changes]}))
        assert cli("verify", file).code == code
        assert cli("verify", file, "--public-key", published).code == 3


def test_a_bundle_with_a_key_twice_is_no_bundle(own_run: Path, tmp_path: Path, cli: Command) -> None:
    text, file = bundle_bytes(own_run, "strictly").decode(), tmp_path / "b.json"
    for given, code in ((text, 0), (text.replace('"clients": ', '"clients": ["client-001"], "clients": ', 1), 2)):
        file.write_text(given)
        assert cli("verify", file).code == code


def drop_an_event(content: Any) -> None:
    del content["events"][2]


def change_a_time(content: Any) -> None:
    content["events"][1][1] = "2020-01-01T00:00:00Z"


def drop_the_end(content: Any) -> None:
    content["events"] = content["events"][: content["certificate"]["body"]["ledger"]["seq"] - 1]


def name_another_key(content: Any) -> None:
    content["keys"][0] = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()


def change_the_certificate(content: Any) -> None:
    content["certificate"]["body"]["clients"] = ["client-001"]


def sign_the_certificate_with_another_key(content: Any) -> None:
    key = Ed25519PrivateKey.generate()
    content["certificate"]["public_key"] = key.public_key().public_bytes_raw().hex()
    content["certificate"]["signature"] = key.sign(canonical_json(content["certificate"]["body"])).hex()


def leave_out_a_signature(content: Any) -> None:
    content["events"][-1][4] = None


def leave_out_the_events(content: Any) -> None:
    content["events"] = []


def another_run(content: Any) -> None:
    content["certificate"]["body"]["run"] = "another"


@pytest.mark.parametrize(
    "tamper",
    [
        drop_an_event, change_a_time, drop_the_end, name_another_key, change_the_certificate,
        sign_the_certificate_with_another_key, leave_out_a_signature, leave_out_the_events, another_run,
    ],
)  # fmt: skip
def test_every_change_is_noticed(own_run: Path, tmp_path: Path, tamper: Callable[[Any], None]) -> None:
    content = json.loads(bundle_bytes(own_run, "strictly"))
    file = tmp_path / "bundle.json"
    file.write_text(json.dumps(content))
    assert sifu.verify(file).problems == []  # control
    tamper(content)
    file.write_text(json.dumps(content))
    assert sifu.verify(file).problems


def test_a_run_that_does_not_verify_gets_no_bundle(own_run: Path) -> None:
    with connect(own_run) as database:
        database.execute("UPDATE participation SET drift = 2 * drift")
    with pytest.raises(VerificationError, match="no bundle was written"):
        bundle_bytes(own_run, "strictly")
