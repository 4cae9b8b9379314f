"""Whether every field of a certificate is of the type that docs/store.md, section 7, says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

from sifu.choices import Calibration, Level, Retention, Scope, Unit
from sifu.core.certificate import SOLVE_FIELDS, STATED_TERMS, Start
from sifu.core.method_info import Protection
from sifu.core.premises import Status
from sifu.core.request_terms import is_request_id
from sifu.theory.history import Accounting

Check = Callable[[Any], bool]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}")
SIGNATURE = re.compile(r"[0-9a-f]{128}")
MODELS = ("source_model", "noised_model", "final_model")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _figure(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _figure_or_infinite(value: Any) -> bool:
    return value == "inf" or _figure(value)


def _of(words: Any) -> Check:
    return lambda value: isinstance(value, str) and value in get_args(words)


def _like(pattern: re.Pattern[str]) -> Check:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check, least: int = 0) -> Check:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(check, value))


def _object(**checks: Check) -> Check:
    """An object with exactly these keys."""
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == checks.keys()
        and all(check(value[name]) for name, check in checks.items())
    )


def _map_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _plain(value: Any) -> bool:
    """A figure or a text."""
    return value is None or isinstance(value, str | bool) or (type(value) in (int, float) and math.isfinite(value))


NAMES, NODES = _list_of(_text, 1), _list_of(_whole)
SUBJECTS = _list_of(
    _object(clients=NAMES, psi=_figure_or_infinite, charge=_or_null(_figure_or_infinite), budget=_figure)
)
PREMISE = {"name": _text, "status": _of(Status), "case": _text, "values": _map_of(_plain)}
SOLVE: dict[str, Check] = {"sum": _like(DIGEST), "samples": _whole, "relative_penalty": _figure, "penalty": _figure}
MODEL = _object(node=_whole, digest=_like(DIGEST), nonce=_like(DIGEST), commitment=_like(DIGEST))
TYPES: dict[str, Check] = {
    "accounting": _of(Accounting),
    "attacker_true_positive_rate_at_1_percent": _or_null(_figure),
    "calibration": _of(Calibration),
    "carried_out": _like(TIME),
    "clients": NAMES,
    "commitments": _object(**dict.fromkeys(MODELS, _like(DIGEST))),
    "delta": _figure,
    "delta_at_most": _figure,
    "delta_reached": _figure,
    "earlier_subjects": SUBJECTS,
    "epsilon": _figure,
    "erased_nodes": NODES,
    "final_node": _whole,
    "form": _text,
    "format": _text,
    "issued": _like(TIME),
    "keeps_statistics": lambda value: value is None or (isinstance(value, str) and value in ("clients", "sum")),
    "keeps_updates": _truth,
    "ledger": _object(seq=_whole, head=_like(DIGEST), time=_like(TIME), signature=_like(SIGNATURE)),
    "level": _of(Level),
    "method": _text,
    "models": _object(**dict.fromkeys(MODELS, MODEL)),
    "node": _whole,
    "noise_multiplier": _figure,
    "noise_node": _whole,
    "noise_source": _text,
    "participation": _text,
    "protection": _of(Protection),
    "psi": _figure_or_infinite,
    "psi_star": _figure,
    "received": _like(TIME),
    "records": lambda value: value is None or (type(value) is int and value >= 1),
    "remaining_nodes": NODES,
    "request": is_request_id,
    "retention": _of(Retention),
    "rounds": _whole,
    "run": _text,
    "scope": _of(Scope),
    "sigma": _figure,
    "solve": _or_null(_object(**{name: SOLVE[name] for name in SOLVE_FIELDS})),
    "start": _of(Start),
    "subjects": SUBJECTS,
    "terms": lambda value: isinstance(value, dict) and value.keys() == set(STATED_TERMS),
    "training_noise": _or_null(
        _object(clip=_figure, noise=_figure, epsilon_one_round=_figure, epsilon_composed=_figure_or_infinite)
    ),
    "unit": _of(Unit),
    "untouched": _truth,
    "versions": _map_of(_text),
    "wording": lambda value: type(value) is int and value >= 1,
}
"""Every field but `premises`, whose objects have one key more in the auditor's form."""


def wrong_types(body: dict[str, Any]) -> Iterator[str]:
    """The fields of a certificate that cannot be what they are called; `form` is a known one."""
    confidential: dict[str, Check] = {"confidential": _map_of(_plain)} if body["form"] == "auditor" else {}
    checks = TYPES | {"premises": _list_of(_object(**PREMISE, **confidential), 1)}
    for name in sorted(body):
        if not checks[name](body[name]):
            yield f"{name} says {str(body[name])[:80]!r}, which no {name} is"
    if body["records"] is not None and isinstance(body["clients"], list) and len(body["clients"]) != 1:
        yield f"records are those of one client, but clients names {len(body['clients'])}"
