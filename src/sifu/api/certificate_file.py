"""A certificate by itself: its signature, and every figure that follows from its other figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from sifu.api.verification import TOLERANCE, Verification, agree, check_public_key
from sifu.core.calibration import noise_multiplier
from sifu.core.certificate import FORMAT, budget_reached
from sifu.core.composition import one_round_epsilon
from sifu.core.errors import InputError
from sifu.core.premises import Premise, level_of
from sifu.core.rollback import charge
from sifu.store.keys import signature_holds

LARGEST_CERTIFICATE_BYTES = 64 << 20


def verify_certificate(path: str | Path, public_key: str | None = None) -> Verification:
    """Check a certificate by itself: its signature, and every figure that follows from its other figures."""
    path = Path(path)
    check_public_key(public_key)
    result = Verification(str(path))
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file")
        if path.stat().st_size > LARGEST_CERTIFICATE_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes, far more than a certificate")
        content = json.loads(path.read_bytes(), object_pairs_hook=_each_once)
        body = content["body"]
        kind = body["format"]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is not a sifu certificate: it has no readable body ({type(error).__name__})"
        ) from error
    if kind != FORMAT:
        raise InputError(f"{path} has the format {kind!r}, this version of sifu reads {FORMAT!r}")
    result.public_key = str(content.get("public_key", ""))
    if not signature_holds(content, None if public_key is None else public_key.lower()):
        result.problems.append("signature: it does not hold over the certificate's content (or is of another key)")
    result.checked.append("signature")
    try:
        result.problems.extend(_check_body(body))
    except Exception as error:  # a stranger's file may be wrong in any way
        result.problems.append(f"content: cannot be recomputed: {type(error).__name__}: {error}")
    result.checked.append("content")
    return result


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object no key of which is there twice: another reader might take the one we do not."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _check_body(body: dict[str, Any]) -> Iterator[str]:
    multiplier = noise_multiplier(body["epsilon"], body["delta"], body["calibration"])
    names = {one.name for one in fields(Premise)}
    premises = [Premise(**{k: v for k, v in one.items() if k in names}) for one in body["premises"]]
    exact, protection = body["untouched"], body["protection"]
    reached = budget_reached(body["epsilon"], multiplier, exact, protection, None)
    if not agree(body["noise_multiplier"], multiplier):
        yield f"noise_multiplier says {body['noise_multiplier']!r}, recomputed {multiplier!r}"
    if protection == "training noise":
        yield from _check_training_noise(body)
    elif not agree(body["delta_reached"], reached):
        yield f"delta_reached says {body['delta_reached']!r}, recomputed {reached!r}"
    level = level_of(premises, exact=exact)
    if body["level"] != level:
        yield f"level says {body['level']!r}, the premises allow {level!r}"
    if body["form"] == "auditor":
        for one in body["subjects"]:
            if exact and float(one["psi"]) > 0.0:
                yield f"untouched is said of {', '.join(one['clients'])}, whose psi is {one['psi']!r}"
            if protection != "noise":
                continue
            cost = charge(float(one["psi"]), body["sigma"])
            if not agree(one["charge"], cost):
                yield f"the charge of {', '.join(one['clients'])} says {one['charge']!r}, recomputed {cost!r}"
            if cost > one["budget"] * (1.0 + TOLERANCE):
                yield f"the charge of {', '.join(one['clients'])} is above its budget"
        if protection == "noise" and float(body["psi"]) > body["psi_star"] * (1.0 + TOLERANCE):
            yield f"psi {body['psi']!r} is above psi_star {body['psi_star']!r}"


def _check_training_noise(body: dict[str, Any]) -> Iterator[str]:
    """The figures of noise in training, as far as they follow from each other."""
    found = body["training_noise"]
    one_round = one_round_epsilon(found["noise"], body["delta"], body["calibration"])
    if not agree(found["epsilon_one_round"], one_round):
        yield f"epsilon_one_round says {found['epsilon_one_round']!r}, recomputed {one_round!r}"
    within = found["epsilon_composed"] <= body["epsilon"]
    if body["level"] != "none" and not (within and body["delta_reached"] <= body["delta"] * (1.0 + TOLERANCE)):
        yield f"training reached epsilon {found['epsilon_composed']!r}, more than the {body['epsilon']!r} certified"
