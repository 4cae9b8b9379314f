"""The second verifier on a certificate without its run: it agrees with `sifu verify` and notices changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sifu.checking.bundle import verify_certificate as verify_by_sifu
from sifu_verifier import verify_certificate
from sifu_verifier.canonical import canonical
from sifu_verifier.command import main

NAMES = [f"{request}.{form}.json" for request in ("to-the-middle", "from-scratch") for form in ("public", "auditor")]
CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "epsilon": lambda body: body.update(epsilon=body["epsilon"] / 2),
    "multiplier": lambda body: body.update(noise_multiplier=body["noise_multiplier"] * 1.001),
    "attacker": lambda body: body.update(attacker_true_positive_rate_at_1_percent=0.02),
    "level": lambda body: body.update(level="exact", untouched=False),
    "noise": lambda body: body.update(noise_source="given"),
    "head": lambda body: body["ledger"].update(seq=body["ledger"]["seq"] + 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_both_verifiers_accept_a_certificate(run_with_requests: Path, name: str) -> None:
    file = run_with_requests / "certificates" / name
    assert verify_by_sifu(file).problems == [] == verify_certificate(file)
    assert verify_certificate(file, json.loads(file.read_text())["public_key"]) == []
    assert main(["certificate", str(file)]) == 0


@pytest.mark.parametrize("change", CHANGES)
def test_control_a_change_is_noticed_also_when_it_is_signed_again(
    run_with_requests: Path, tmp_path: Path, change: str
) -> None:
    certificate = json.loads((run_with_requests / "certificates" / "to-the-middle.public.json").read_text())
    CHANGES[change](certificate["body"])
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(certificate))
    assert any("signature of the certificate" in problem for problem in verify_certificate(file))
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    body = certificate["body"]
    head = {"format": "sifu head 1", "run": body["run"]} | body["ledger"]
    if change != "head":  # a forger who signs everything again; otherwise the head keeps the operator's signature
        head.pop("signature")
        body["ledger"]["signature"] = key.sign(canonical(head).encode()).hex()
    certificate["public_key"] = key.public_key().public_bytes_raw().hex()
    certificate["signature"] = key.sign(canonical(body).encode()).hex()
    file.write_text(json.dumps(certificate))
    assert verify_certificate(file)
    assert main(["certificate", str(file)]) == 1


def test_control_another_key_and_another_file_are_noticed(run_with_requests: Path, tmp_path: Path) -> None:
    file = run_with_requests / "certificates" / "to-the-middle.public.json"
    assert any("not with" in problem for problem in verify_certificate(file, "00" * 32))
    (tmp_path / "other.json").write_text("[]")
    assert "not a readable certificate" in verify_certificate(tmp_path / "other.json")[0]
