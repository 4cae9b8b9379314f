"""Terms of requests in the console: what the form and the API accept, store and refuse."""

from __future__ import annotations

import re
from typing import Any

import sifu
from sifu.choices import terms_on_offer
from sifu.core.request_terms import Terms
from sifu.requests.filing import usual_terms
from sifu_console.asking import client_names
from sifu_console.bodies import terms_in_form

UNUSUAL: dict[str, Any] = {
    "epsilon": 7.5, "delta": 0.003, "sigma": 0.9,
    "retention": "strict", "method": "sifu", "level": "none",
}  # fmt: skip
"""A value other than the default for every term that this run offers, except records."""
PROTECTION = {"records": [2, 5], "epsilon": 1.0, "level": "exact"}

TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("otto", UNUSUAL, ""),
    ("otto", {"records": [2, 5], "epsilon": 3.0}, ""),
    ("rita", PROTECTION, ""),
    ("rita", {"method": "scratch"}, "an operator sets method"),
    ("rita", {"epsilon": 1000}, "protects less"),
    ("rita", {"delta": 0.5}, "protects less"),
    ("rita", {"level": "none"}, "guarantees nothing"),
    ("rita", {"epsilon": -1.0}, "epsilon"),
    ("otto", {"epsilon": True}, "epsilon"),
    ("otto", {"epsilon": "1e999"}, "epsilon"),
    ("otto", {"sigma": "nan"}, "sigma"),
    ("otto", {"records": [1.5]}, "records"),
    ("otto", {"records": [True]}, "records"),
    ("otto", {"records": ["9" * 5000]}, "named by identities"),
    ("otto", {"method": ["scratch"]}, "method"),
]
"""A person, the terms, and what the API's refusal says; nothing if the terms are accepted."""
JSON_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"records": []}, "terms.records"),  # not the whole client
    ({"records": "1, 2"}, "records"),
    ({"records": [10**18]}, "records"),
    ({"epsilon": ""}, "epsilon"),
]
"""Terms that the form reads as others."""


def as_field(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def test_form_and_api_store_a_term_as_given_or_refuse_it(service: Any) -> None:
    path = f"runs/{service.key('north')}/requests"
    run = sifu.open_run(service.folder / "north")
    clients, accepted = (client.name for client in run.status().clients), {}
    for number, (person, terms, words) in enumerate(TABLE):
        program, browser = service.program(person), service.browser(person)
        asked = {f"{way}-{number}": "client-003" if words else next(clients) for way in ("api", "form")}
        body = {"clients": [asked[f"api-{number}"]], "request": f"api-{number}", "terms": terms}
        answer = program.post(f"/api/v1/{path}", json=body)
        fields = {name: as_field(value) for name, value in terms.items()}
        sent = browser.send(f"/{path}", clients=asked[f"form-{number}"], request=f"form-{number}", **fields)
        if words:
            refusal = 403 if any(word in words for word in ("operator", "protects", "guarantees")) else 400
            assert (answer.status_code, sent.status_code) == (refusal, refusal), terms
            assert words in answer.json()["error"]
        else:
            assert (answer.status_code, sent.status_code) == (201, 200), answer.text
            accepted |= {name: (client, terms) for name, client in asked.items()}
    for terms, words in JSON_ONLY:
        body = {"clients": ["client-003"], "terms": terms}
        answer = service.program("otto").post(f"/api/v1/{path}", json=body)
        assert (answer.status_code, words in answer.json()["error"]) == (400, True), terms
    service.program("ann").get(f"/api/v1/{path}")  # an approver's view examines what requesters filed
    stored = {record.request: record.terms for record in run.request_records()}
    assert stored == {
        name: Terms.from_mapping(usual_terms(run.spec, [client]).to_mapping() | terms)
        for name, (client, terms) in accepted.items()
    }


def test_clients_and_records_are_pasted_in_any_separation() -> None:
    clients = ["a", "b", "c", "Smith, Ann", "Mayo Clinic"]
    for text in ("a\nb\nc", "a, b,c", "a;b; c", "a\tb c", "a b\r\nc,", "a|b|c|a"):
        assert client_names(text, clients) == ["a", "b", "c"], text
    assert client_names("Smith, Ann\nMayo Clinic, a", clients) == ["Smith, Ann", "Mayo Clinic", "a"]
    assert client_names("no such", clients) == ["no such"]
    for text, records in {
        "1 2, 3": [1, 2, 3],
        "P-1; P-2|P-3": ["P-1", "P-2", "P-3"],
        "Ann Lee, Bob 7": ["Ann Lee", "Bob 7"],
        "0012\n7": ["0012", 7],
        f"{2**53 - 1} {10**18}": [str(2**53 - 1), str(10**18)],
    }.items():
        assert terms_in_form({"records": text}) == {"records": records}


def test_the_form_offers_what_its_reader_may_set(service: Any) -> None:
    north, otto = service.key("north"), service.browser("otto")
    form = otto.get(f"/runs/{north}").text
    offered = {person: set(re.findall(r'name="(\w+)"', service.browser(person).get(f"/runs/{north}").text))
               for person in ("rita", "otto")}  # fmt: skip
    assert set(terms_on_offer()) <= offered["otto"]
    assert offered["rita"] & set(terms_on_offer()) == {"records", "epsilon", "delta", "level"}
    compared = otto.send(f"/runs/{north}/requests", clients="client-003", plan="1").text
    for page in (form, compared):
        assert ">scratch</option>" in page
        assert "go_on" not in page  # it guarantees nothing
    link = re.search(
        r'>(client-\d+)</td><td data-label="Request"><a href="([^"]+)">', otto.get(f"/runs/{north}/clients").text
    )
    assert link
    assert link[1] not in link[2]  # the address contains no name
    assert f">{link[1]}</textarea>" in otto.get(link[2]).text
