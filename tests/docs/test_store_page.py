"""docs/store.md is complete: it names everything that the author of a verifier needs."""

from __future__ import annotations

import json
import re
import sqlite3
from importlib.resources import files
from pathlib import Path
from string import Formatter

import pytest

from run_tools import query
from sifu.core.premise_sentences import SENTENCES
from sifu.requests.certification import COMMON_FIELDS, FIELDS
from sifu.store.events_check import EFFECTS, KINDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "store.md"


def rows_of(section: str) -> dict[str, str]:
    """Return the first table of a section: the first cell of each row, and the rest."""
    text = re.split(rf"^## {re.escape(section)}.*$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, flags=re.M))


def test_every_kind_of_event_is_documented_with_what_it_may_change() -> None:
    documented = rows_of("6b.")
    assert set(documented) == set(KINDS)
    for kind, may in KINDS.items():
        for effect in (*EFFECTS, "run"):
            allowed = bool(may.run) if effect == "run" else effect in may.effects
            assert (f"`{effect}`" in documented[kind]) == allowed, (kind, effect)


@pytest.mark.parametrize("fixture", ["run_with_requests", "trained_run"])
def test_no_payload_has_a_key_that_is_not_documented(fixture: str, request: pytest.FixtureRequest) -> None:
    documented = rows_of("6b.")
    events = query(request.getfixturevalue(fixture), "SELECT kind, payload FROM events")
    assert events
    for kind, payload in events:
        undocumented = [key for key in json.loads(payload) if f"`{key}`" not in documented[kind]]
        assert undocumented == [], kind


def test_every_table_and_column_is_documented_in_its_order() -> None:
    schema = sqlite3.connect(":memory:")
    schema.executescript(files("sifu.store").joinpath("schema.sql").read_text(encoding="utf-8"))
    names = [name for (name,) in schema.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
    expected = {name: [row[1] for row in schema.execute(f"PRAGMA table_info({name})")] for name in names}
    schema.close()
    assert {table: re.findall(r"`(\w+)`", columns) for table, columns in rows_of("6c.").items()} == expected


def test_every_field_of_a_certificate_is_documented() -> None:
    text = PAGE.read_text(encoding="utf-8").split("Fields that both forms have: ")[1].split("\n")[0]
    common, rest = text.split("The auditor's form has besides: ")
    assert set(re.findall(r"`(\w+)`", common)) == COMMON_FIELDS == FIELDS["public"]
    assert set(re.findall(r"`(\w+)`", rest.split("`form` is")[0])) == FIELDS["auditor"] - COMMON_FIELDS


def test_every_premise_is_documented_with_its_cases_and_values() -> None:
    text = PAGE.read_text(encoding="utf-8").split("| premise | cases |")[1].split("\n\n")[0]
    documented = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, flags=re.M))
    for name, cases in SENTENCES.items():
        described = dict(re.findall(r"`([^`]+)`(?: \(([^)]*)\))?(?:; |$)", documented.pop(name)))
        values = {case: {part[1] for part in Formatter().parse(words) if part[1]} for case, words in cases.items()}
        assert {case: set(re.findall(r"`(\w+)`", figures)) for case, figures in described.items()} == values, name
    assert documented == {}
