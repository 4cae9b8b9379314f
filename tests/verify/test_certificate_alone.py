"""False certificates that the operator's key signed, checked without their run, as a client would.

The holder of the key can sign anything. The statements of a certificate follow from its terms, method and premises, so
a client without the run can find inconsistencies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, query, spec_for
from sifu.api import verify_certificate
from sifu.errors import InputError
from sifu.methods.registry import METHODS
from sifu.requests.certification import FIELDS
from sifu.store.files import certificate_path
from sifu.store.keys import sign

Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("retention", ["paper", "strict"])
def test_every_honest_certificate_holds_by_itself(tmp_path: Path, method: str, retention: str) -> None:
    run = sifu.train(spec_for(method, stop={"max_rounds": 4}), run=tmp_path / "run")
    terms: dict[str, Any] = {"sigma": 0.3, "retention": retention, "level": "none"}
    run.forget(["client-001", "client-002"], "two", method=method, **terms)
    run.forget(["client-000", "client-003"], "each", method=method, **terms)
    for path in sorted((run.folder / "certificates").iterdir()):
        assert verify_certificate(path).problems == []
        body = json.loads(path.read_bytes())["body"]
        assert set(body) == FIELDS[body["form"]]


def without(*names: str) -> Change:
    return lambda body: body | {"premises": [premise for premise in body["premises"] if premise["name"] not in names]}


def premise(name: str, **values: str) -> Change:
    return lambda body: (
        body | {"premises": [premise | values if premise["name"] == name else premise for premise in body["premises"]]}
    )


FALSE: dict[str, tuple[str, Change]] = {
    "an attacker who finds no client": (
        "attacker_true_positive_rate_at_1_percent", lambda b: b | {"attacker_true_positive_rate_at_1_percent": 0.01}
    ),
    "a promise in its own words": ("guarantee", lambda b: b | {"guarantee": "Everything is forgotten."}),
    "other terms than it was carried out under": ("epsilon", lambda b: b | {"terms": b["terms"] | {"epsilon": 1.0}}),
    "another method than was asked for": ("method", lambda b: b | {"terms": b["terms"] | {"method": "scratch"}}),
    "terms that no request has": ("terms", lambda b: b | {"terms": b["terms"] | {"extra": 1}}),
    "a fresh model where there was none": ("start", lambda b: b | {"start": "fresh"}),
    "statistics that a model of rounds has none of": ("keeps_statistics", lambda b: b | {"keeps_statistics": "sum"}),
    "no head": ("ledger", lambda b: b | {"ledger": None}),
    "a head without a signature": ("ledger", lambda b: b | {"ledger": b["ledger"] | {"signature": ""}}),
    "a head with the signature of nothing": (
        "ledger: the head", lambda b: b | {"ledger": b["ledger"] | {"signature": "00" * 64}}
    ),
    "another head": ("ledger: the head", lambda b: b | {"ledger": b["ledger"] | {"head": "ab" * 32}}),
    "a head of another event": ("ledger: the head", lambda b: b | {"ledger": b["ledger"] | {"seq": 1}}),
    "carried out before it was received": ("out of order", lambda b: b | {"received": "2099-01-01T00:00:00Z"}),
    "a day that is none": ("received", lambda b: b | {"received": "yesterday"}),
    "a retention that is none": ("retention", lambda b: b | {"retention": None}),
    "a method that is a number": ("method", lambda b: b | {"method": 3}),
    "a request that is a list": ("request", lambda b: b | {"request": []}),
    "commitments of nothing": ("commitments", lambda b: b | {"commitments": {}}),
    "a commitment that is short": (
        "commitments", lambda b: b | {"commitments": b["commitments"] | {"final_model": "00"}}
    ),
    "versions as a text": ("versions", lambda b: b | {"versions": "all of them"}),
    "a sigma as text": ("sigma", lambda b: b | {"sigma": "0.3"}),
    "a sigma that is true": ("sigma", lambda b: b | {"sigma": True}),
    "a premise left out": ("regularity", without("regularity")),
    "all of them left out": ("premises", lambda b: b | {"premises": []}),
    "fixed rounds as if they were independent": (
        "premise counterfactual", lambda b: b | {"participation": "fixed(5)"}
    ),
    "given noise as if the system drew it": ("premise noise", lambda b: b | {"noise_source": "given"}),
    "a premise of no status": ("premises", premise("regularity", status="sure")),
    "a premise in its own words": ("premises", premise("noise", statement="The noise is perfect.")),
    "a premise of no case": ("means nothing", premise("regularity", case="perfect")),
    "a premise of another case": ("premise noise", premise("noise", case="given")),
    "a premise without its values": ("means nothing", premise("regularity", case="assumed")),
    "a method that does not exist": ("unknown method", lambda b: b | {"method": "go_on"}),
    "no noise": ("no noise was added", lambda b: b | {"sigma": 0.0}),
    "a word in place of true": ("untouched", lambda b: b | {"untouched": "no"}),
    "a field that was added": ("note", lambda b: b | {"note": "audited by the authority"}),
    "a field less": ("start", lambda b: {k: v for k, v in b.items() if k != "start"}),
    "clients as one text": ("clients says", lambda b: b | {"clients": "client-000 and client-0001"}),
    "clients of no name": ("clients says", lambda b: b | {"clients": [1]}),
    "no client": ("clients says", lambda b: b | {"clients": []}),
}  # fmt: skip
OF_THE_AUDITOR: dict[str, tuple[str, Change]] = {
    "a larger psi_star": ("psi_star", lambda b: b | {"psi_star": 2 * b["psi_star"]}),
    "a smaller psi": ("the largest of the subjects", lambda b: b | {"psi": 0.5 * b["psi"]}),
    "a larger budget": (
        "the budget",
        lambda b: b | {"subjects": [subject | {"budget": 10 * subject["budget"]} for subject in b["subjects"]]},
    ),
    "another subject": (
        "subjects names", lambda b: b | {"subjects": [subject | {"clients": ["x"]} for subject in b["subjects"]]}
    ),
    "no subject": ("subjects names", lambda b: b | {"subjects": []}),
    "less noise than the budget needs": ("psi_star", lambda b: b | {"sigma": 0.1 * b["sigma"]}),
    "a commitment to another model": (
        "another commitment", lambda b: b | {"commitments": b["commitments"] | {"final_model": "ab" * 32}}
    ),
    "a commitment that does not open": (
        "not that of its digest",
        lambda b: b | {"models": b["models"] | {"final_model": b["models"]["final_model"] | {"nonce": "ab" * 32}}},
    ),
    "a node that is a text": ("node", lambda b: b | {"node": "44"}),
}  # fmt: skip


def reissued(folder: Path, target: Path, form: str, change: Change, request: str = "to-the-middle") -> Path:
    (public,) = query(folder, "SELECT value FROM run WHERE key = 'public_key'")[0]
    body = json.loads(certificate_path(folder, request, form).read_bytes())["body"]
    target.write_text(json.dumps(sign(folder, change(body), public)))
    return target


@pytest.mark.parametrize(
    ("form", "name"), [("public", field) for field in FALSE] + [("auditor", field) for field in OF_THE_AUDITOR]
)
def test_a_false_certificate_that_is_signed_is_caught(
    run_with_requests: Path, tmp_path: Path, form: str, name: str
) -> None:
    words, change = (FALSE if form == "public" else OF_THE_AUDITOR)[name]
    path = reissued(run_with_requests, tmp_path / "signed.json", form, change)
    verification = verify_certificate(path)
    assert "signature" not in "\n".join(verification.problems)
    assert words in "\n".join(verification.problems)


@pytest.mark.parametrize("source", ["", "a lava lamp", "none", "not known"])
def test_noise_comes_from_a_source_there_is_where_none_was_added_too(
    run_with_requests: Path, tmp_path: Path, source: str
) -> None:
    """In a certificate of Scratch no premise concerns noise, so the noise source itself must be one
    of the known ones.
    """
    for word, sound in (("system", True), (source, False)):
        change: Change = lambda body, word=word: body | {"noise_source": word}  # noqa: E731
        path = reissued(run_with_requests, tmp_path / "signed.json", "public", change, "from-scratch")
        problems = verify_certificate(path).problems
        assert (problems == []) == sound
        assert sound or problems == [f"noise_source says {word!r}, which no noise of method scratch comes from"]


def test_control_a_certificate_signed_again_holds(run_with_requests: Path, tmp_path: Path) -> None:
    for form in ("public", "auditor"):
        assert verify_certificate(reissued(run_with_requests, tmp_path / "signed.json", form, dict)).problems == []


@pytest.mark.parametrize("values", [{"epsilon": None}, {"epsilon": "ten"}, {"commitments": 3}, {"level": []}])
def test_a_signed_certificate_with_values_of_other_types_is_caught(
    run_with_requests: Path, tmp_path: Path, values: dict[str, Any], cli: Command
) -> None:
    path = reissued(run_with_requests, tmp_path / "signed.json", "public", lambda b: b | values)
    assert verify_certificate(path).problems
    assert cli("verify", path).code == 3


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_many_digits_is_a_sentence(run_with_requests: Path, tmp_path: Path, digits: int) -> None:
    """Canonical JSON cannot contain a number of so many digits, so it cannot have been signed."""
    content = certificate_path(run_with_requests, "strictly", "public").read_text()
    changed = re.sub(r'"sigma": [^,]+', '"sigma": ' + "7" * digits, content)
    assert changed != content
    (tmp_path / "long.json").write_text(changed)
    with pytest.raises(InputError, match="not a sifu certificate"):
        verify_certificate(tmp_path / "long.json")
