"""Check of a certificate without its run: signatures, commitments, and figures that follow from other figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sifu_verifier.calibration import attacker_rate, multiplier
from sifu_verifier.canonical import Row, same, sha256
from sifu_verifier.certificates import CONFIDENTIAL
from sifu_verifier.signatures import is_signed

FORMAT = "sifu certificate 1"


def verify_certificate(file: Path, public_key: str | None = None) -> list[str]:
    """Return the problems of a certificate file, or an empty list if its statements are consistent.

    The run is neither needed nor read, so the level, Psi and the budgets are not recomputed.

    Args:
        file: A public certificate or an auditor's copy, as in the folder `certificates` of a run.
        public_key: The operator's key in hexadecimal digits from another source, or None for the file's own key.
    """
    try:
        certificate = json.loads(Path(file).read_bytes())
        if "body" not in certificate:
            return ["it is not a readable certificate; of a bundle, check the part `certificate` in a file of its own"]
        body, key = certificate["body"], certificate["public_key"]
        problems = [] if public_key in (None, key) else [f"it is signed with the key {key}, not with {public_key}"]
        return [*problems, *_signature_problems(certificate, public_key or key), *_figure_problems(body)]
    except Exception as error:
        return [f"it is not a readable certificate: {error!r}"]


def _signature_problems(certificate: Row, public_key: str) -> list[str]:
    """Return the problems of two signatures: of the certificate, and of the ledger head that it names."""
    body = certificate["body"]
    head = {"format": "sifu head 1", "run": body["run"]} | body["ledger"]
    of_head = head.pop("signature")
    signatures = {"the certificate": (certificate["signature"], body), "the head of the ledger": (of_head, head)}
    return [
        f"the signature of {what} does not verify"
        for what, (signature, signed) in signatures.items()
        if not is_signed(public_key, signature, signed)
    ]


def _figure_problems(body: Row) -> list[str]:
    """Return the problems of figures that follow from others in the certificate (docs/store.md, sections 4 and 7)."""
    s, level = multiplier(body), body["level"]
    expected: dict[str, Any] = {
        "noise_multiplier": s,
        "attacker_true_positive_rate_at_1_percent": attacker_rate(level, s),
    }
    if body["form"] == "auditor":
        models = body["models"].items()
        expected["psi_star"] = body["sigma"] / s
        expected["commitments"] = body["commitments"] | {
            name: sha256(bytes.fromhex(model["nonce"]), bytes.fromhex(model["digest"])) for name, model in models
        }
    problems = [
        f"{name}: recorded {body.get(name)!r}, computed {value!r}"
        for name, value in expected.items()
        if not same(body.get(name), value)
    ]
    if body["format"] != FORMAT:
        problems.append(f"format is {body['format']!r}, not {FORMAT!r}: another version wrote it")
    if level == "exact" and not body["untouched"]:
        problems.append("its level is exact, but the client took part in the model that training resumed from")
    if level != "none" and not body["untouched"] and body["noise_source"] != "system":
        problems.append(f"its level is {level}, but its noise is {body['noise_source']}")
    if body["form"] == "public" and CONFIDENTIAL & body.keys():
        problems.append(f"it is public, but holds {', '.join(sorted(CONFIDENTIAL & body.keys()))}")
    return problems
