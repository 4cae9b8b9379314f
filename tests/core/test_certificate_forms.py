"""A certificate's public form contains nothing about the forgotten client's data (docs/theory.md, section 12.5)."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.choices import Level
from sifu.core.certificate_words import (
    Certificate,
    exact_words,
    not_covered_by,
    what_was_erased,
    words_of,
)
from sifu.core.ledger import canonical_json
from sifu.core.method_info import attacker_rate
from sifu.core.operator_words import psi_words
from sifu.core.premises import Premise
from sifu.core.request_terms import Terms
from sifu.requests.certification import FIELDS, FORMAT, MODELS, STATED_TERMS, SubjectStatement, public_form

FORBIDDEN_WORDS = ("psi", "drift", "beta", "node", "digest", "hash", "nonce", "smoothness", "confidential")
ROW = 7_654_321
"""A row to be forgotten, which only the ledger names."""


Body = dict[str, Any]


@st.composite
def bodies_with_secrets(draw: st.DrawFn) -> tuple[Body, list[str]]:
    """Draw an auditor's form with a unique value in every confidential field; return it and these values."""
    secrets: list[str] = []
    generator = random.Random(draw(st.integers(0, 2**32 - 1)))

    def number() -> float:
        value = generator.choice((1e-9, 1e-3, 1.0, 1e6)) * (1.0 + generator.random())
        secrets.append(repr(value))
        return value

    def whole() -> int:
        value = generator.randrange(10**11, 10**12)
        secrets.append(str(value))
        return value

    def word() -> str:
        value = f"secret{generator.getrandbits(128):032x}"
        secrets.append(value)
        return value

    def subject() -> dict[str, Any]:
        return SubjectStatement(("client-7",), number(), number(), number()).to_mapping()

    terms = Terms(("client-7",), 10.0, 0.01, retention=draw(st.sampled_from(("paper", "strict"))), records=(ROW,))
    level = draw(st.sampled_from(("exact", "proven", "conditional", "none")))
    body = {
        "format": FORMAT,
        "form": "auditor",
        "run": "run-1",
        "request": "r-1",
        "method": "sifu",
        "clients": ["client-7"],
        "records": draw(st.sampled_from((None, 1, 3))),
        "terms": {name: value for name, value in terms.to_mapping().items() if name in STATED_TERMS},
        **{name: getattr(terms, name) for name in ("epsilon", "delta", "retention")},
        "level": level,
        "premises": [
            dataclasses.asdict(Premise("regularity", "met", "convex", confidential={"figure": word()})),
        ],
        "untouched": False,
        "start": "trained",
        "delta_at_most": 0.01,
        "delta_reached": number(),
        "noise_multiplier": 0.35,
        "noise_source": "system",
        "sigma": 0.1,
        "attacker_true_positive_rate_at_1_percent": attacker_rate(level, 0.35),
        "participation": "all",
        "keeps_statistics": None,
        "psi": number(),
        "psi_star": number(),
        "subjects": [subject(), subject()],
        "earlier_subjects": [subject()],
        **{name: whole() for name in ("node", "noise_node", "final_node", "rounds")},
        "models": {name: {"node": whole(), "digest": word(), "nonce": word()} for name in MODELS},
        "commitments": {name: f"commitment of {name}" for name in MODELS},
        "erased_nodes": [whole(), whole()],
        "remaining_nodes": [whole()],
        "solve": None,
        "ledger": {"seq": 3, "head": "ab" * 32, "time": "2026-01-02T00:00:00Z", "signature": "cd" * 64},
        "received": "2026-01-01T00:00:00Z",
        "carried_out": "2026-01-02T00:00:00Z",
        "issued": "2026-01-03T00:00:00Z",
        "versions": {"sifu": "0.1.0"},
    }
    assert set(body) == FIELDS["auditor"]
    return body, secrets


def keys_of(value: Any) -> list[str]:
    """Return every key at any depth."""
    if isinstance(value, dict):
        return [*value, *(key for inner in value.values() for key in keys_of(inner))]
    if isinstance(value, list | tuple):
        return [key for inner in value for key in keys_of(inner)]
    return []


def leaks(form: dict[str, Any], secrets: list[str]) -> list[str]:
    """Return the secrets found in the text of a form, and its forbidden keys."""
    text = json.dumps(form)
    leaked = [secret for secret in secrets if secret in text]
    return leaked + [key for key in keys_of(form) if set(key.lower().split("_")) & set(FORBIDDEN_WORDS)]


@given(bodies_with_secrets())
def test_the_public_form_holds_no_secret(drawn: tuple[Body, list[str]]) -> None:
    body, secrets = drawn
    assert len(set(secrets)) == len(secrets) == 29
    assert set(public_form(body)) == FIELDS["public"]
    assert leaks(public_form(body), [*secrets, str(ROW)]) == []


@given(bodies_with_secrets())
def test_the_auditors_form_holds_every_one_of_them(drawn: tuple[Body, list[str]]) -> None:
    """Negative control: the same search finds every secret in the auditor's form."""
    body, secrets = drawn
    assert set(secrets) <= set(leaks(body, secrets))


@given(bodies_with_secrets(), st.sampled_from(("psi", "node", "rounds", "digest", "nonce", "confidential")))
def test_control_one_leaked_field_is_caught(drawn: tuple[Body, list[str]], name: str) -> None:
    body, secrets = drawn
    leaked = {
        "psi": body["psi"],
        "node": body["node"],
        "rounds": body["rounds"],
        "digest": body["models"]["source_model"]["digest"],
        "nonce": body["models"]["final_model"]["nonce"],
        "confidential": body["premises"][0]["confidential"]["figure"],
    }[name]
    assert leaks(public_form(body) | {"remark": leaked}, secrets)
    assert leaks(public_form(body) | {name: 1}, []) or name == "rounds"


@given(bodies_with_secrets())
def test_changing_confidential_fields_does_not_change_the_public_form(drawn: tuple[Body, list[str]]) -> None:
    """Non-interference: the public bytes are a function of the public fields alone."""
    body, _ = drawn
    other = body | dict.fromkeys(FIELDS["auditor"] - FIELDS["public"], "another")
    other["premises"] = [premise | {"confidential": {}} for premise in body["premises"]]
    assert canonical_json(public_form(other)) == canonical_json(public_form(body))


@given(bodies_with_secrets())
def test_what_every_certificate_states(drawn: tuple[Body, list[str]]) -> None:
    body, _ = drawn
    for form in (public_form(body), body):
        assert {
            "clients", "level", "epsilon", "delta", "delta_at_most",
            "sigma", "commitments", "versions", "issued", "premises",
        } <= set(form)  # fmt: skip
        # A client that was never seen cannot be found better than by guessing; at level none nothing bounds the
        # attacker.
        rate = {"exact": pytest.approx(0.01), "none": None}.get(body["level"], pytest.approx(0.70, abs=0.005))
        assert form["attacker_true_positive_rate_at_1_percent"] == rate
        text = json.dumps(form)
        assert "GDPR" not in text
        assert any("trusted" in sentence for sentence in words_of(form).not_covered)


def test_an_infinite_psi_can_be_written_down() -> None:
    """An infinite Psi is written as "inf"."""
    stated = SubjectStatement(("client-7",), float("inf"), float("inf"), 8.16).to_mapping()
    assert json.loads(canonical_json(stated))["psi"] == "inf"


@given(bodies_with_secrets())
def test_the_public_form_says_what_stays_on_disk(drawn: tuple[Body, list[str]]) -> None:
    strict, paper = (words_of(public_form(drawn[0] | {"retention": word})) for word in ("strict", "paper"))
    scratch = words_of(public_form(drawn[0] | {"method": "scratch", "start": "fresh"}))
    assert strict.remains.startswith("No model")
    assert "may contain the client's influence" in paper.remains
    assert scratch.remains.startswith("No model")
    assert strict.erased != paper.erased


RECORD_FIELDS = {"clients": ["client-7"], "sigma": 0.1}


@pytest.mark.parametrize(("level", "solved", "says"), [("proven", False, 1), ("exact", True, 0), ("none", False, 0)])
def test_records_are_compared_with_a_client_that_was_not_there(level: Level, solved: bool, says: int) -> None:
    """With noise, records are compared with a client that was absent, because noise hides the whole contribution."""
    sentences = not_covered_by(
        RECORD_FIELDS | {"level": level, "records": 2, "method": "closed_form" if solved else "sifu"}
    )
    assert sum("took part without these records" in sentence for sentence in sentences) == says


def test_what_stays_may_have_been_released() -> None:
    """The remaining models may have been released before and may contain training noise; the text allows both."""
    _, remains = what_was_erased("paper", "trained")
    assert "unreleased" not in remains
    assert "without the noise of this request" in remains


@pytest.mark.parametrize("method", ["scratch", "sifu", "groups", "closed_form"])
def test_an_exact_promise_about_records_says_what_it_is_compared_with(method: str) -> None:
    """Only a closed-form head equals the head of a client that never had the records."""
    solved = method == "closed_form"
    words = exact_words("the client", method, 1)
    assert ("without this record" in words) == solved
    assert ("contributed nothing before this request" in words) != solved
    body = RECORD_FIELDS | {"level": "exact", "records": 1, "method": method}
    denied = any("took part without these records" in sentence for sentence in not_covered_by(body))
    assert denied != solved
    assert "without the client under the same plan" in exact_words("the client", method, None)


def test_words_on_psi_promise_no_more_than_what_it_rests_on() -> None:
    assert psi_words("met").startswith("Psi bounds")
    assert psi_words("assumed").startswith("If the assumptions")


def said_by(body: Body) -> str:
    """Return all sentences of a certificate for people, in lower case, without the premises."""
    return " ".join(Certificate("public", body, "", "").lines(everything=True)).lower()


NOISE_WORDS = (
    "noise",
    "epsilon",
    "delta",
    "% of forgotten",
    "false-alarm",
    "may contain the client's influence",
    "sigma",
)


@pytest.mark.parametrize("level", ["exact", "conditional"])
@pytest.mark.parametrize(
    ("method", "start"), [("closed_form", "fresh"), ("scratch", "fresh"), ("sifu", "trained"), ("groups", "merge")]
)
@given(drawn=bodies_with_secrets())
def test_no_clause_on_noise_or_remains_applies_to_a_model_without_the_client(
    level: str, method: str, start: str, drawn: tuple[Body, list[str]]
) -> None:
    fields = {"method": method, "start": start, "level": level, "premises": []}
    statistics = "clients" if method == "closed_form" else None
    body = drawn[0] | fields | {"sigma": 0.0, "untouched": True, "keeps_statistics": statistics}
    said = said_by(body | {"attacker_true_positive_rate_at_1_percent": attacker_rate(level, 0.35)})  # type: ignore[arg-type]
    assert [word for word in NOISE_WORDS if word in said] == []
    assert "no better than guess" in said
    if method == "closed_form":
        assert "group" not in said
        assert "drift" not in said
        assert "rate" not in said.split()


@given(bodies_with_secrets())
def test_clauses_on_noise_stay_where_noise_hides_the_client(drawn: tuple[Body, list[str]]) -> None:
    """Negative control: with noise, each of the clauses is present."""
    rate = {"attacker_true_positive_rate_at_1_percent": attacker_rate("proven", 0.35)}
    said = said_by(drawn[0] | {"level": "proven", "retention": "paper"} | rate)
    assert [word for word in NOISE_WORDS if word not in said] == []


def test_groups_are_mentioned_where_clients_trained_in_groups() -> None:
    for grouped in (True, False):
        _, remains = what_was_erased("paper", "fresh", grouped=grouped)
        assert ("groups" in remains) == grouped
