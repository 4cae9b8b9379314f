"""Terms of a request: every interface accepts each of them, and the ledger and the stored row keep it unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

import sifu
import sifu_console
from run_tools import query
from sifu.choices import terms_on_offer
from sifu.cli.main import app
from sifu.core.request_terms import TERMS, Terms
from sifu_console.bodies import TermsSent, terms_in_form

TERMS_GIVEN: dict[str, Any] = {
    "epsilon": 7.5, "delta": 0.003, "sigma": 0.25,
    "retention": "strict", "method": "scratch", "level": "none",
    "records": [2, 5], "before_after": "3,1e-5",
}  # fmt: skip
"""A value other than the default for every term; a new term needs one here."""


def test_callers_can_give_every_term() -> None:
    assert set(terms_on_offer()) | {"clients"} == set(TERMS)
    assert set(TERMS_GIVEN) == set(terms_on_offer())


def test_a_term_has_the_same_type_for_callers_and_in_the_request() -> None:
    hints = get_type_hints(Terms)
    for name, term in terms_on_offer().items():
        if name != "records":  # a caller may pass any sequence
            assert hints[name] in (term.kind, term.kind | None), name


@pytest.mark.parametrize("command", ["plan", "request", "forget"])
def test_the_command_line_has_an_option_for_every_term(command: str) -> None:
    parameters = {parameter.name for parameter in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    assert set(terms_on_offer()) <= parameters


def test_the_api_describes_every_term_and_reads_it() -> None:
    properties = TermsSent.model_json_schema()["properties"]
    assert set(properties) == set(TERMS_GIVEN)
    for name, term in terms_on_offer().items():
        assert set(properties[name].get("enum", ())) == set(term.choices), name
    assert TermsSent.model_validate(json.loads(json.dumps(TERMS_GIVEN))).model_dump(exclude_unset=True) == TERMS_GIVEN


def test_the_form_shows_every_term_and_texts_are_read_as_what_they_mean() -> None:
    as_texts = {name: str(value) for name, value in TERMS_GIVEN.items()} | {"records": "2, 5"}
    assert terms_in_form(as_texts) == TERMS_GIVEN
    template = (Path(sifu_console.__file__).parent / "templates" / "run.html").read_text(encoding="utf-8")
    assert "for name, term in terms_offered.items()" in template
    assert 'name="records"' in template


def test_ledger_and_stored_row_hold_every_term(own_trained: Path) -> None:
    given = TERMS_GIVEN | {}
    sifu.open_run(own_trained).request(["client-003"], "all-terms", **given)
    ((row,),) = query(own_trained, "SELECT terms FROM requests")
    ((payload,),) = query(own_trained, "SELECT payload FROM events WHERE kind = 'request received'")
    stored, recorded = json.loads(row), json.loads(payload)["request"]
    assert recorded == stored | {"request": "all-terms", "deadline_days": 30}
    assert set(stored) == set(TERMS)
    assert Terms.from_mapping(stored) == Terms.from_mapping(given | {"clients": ["client-003"]})
