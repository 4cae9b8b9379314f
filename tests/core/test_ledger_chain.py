"""The hash chain of a run notices every change to what it holds."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.core.ledger import GENESIS, Event, broken_links, canonical_json, chain, commit, finite_or_text, seal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def ledger(length: int = 6) -> list[Event]:
    events, previous = [], GENESIS
    for seq in range(1, length + 1):
        payload = {"round": seq, "drift": 0.1 * seq}
        events.append(seal(previous, seq, f"2026-01-0{seq}T00:00:00Z", "round", payload, bytes([seq]) * 32))
        previous = events[-1].hash
    return events


def complaints(events: list[Event]) -> list[str]:
    return list(broken_links(iter(events)))


@given(JSON)
def test_canonical_json_reads_back_and_is_unique(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    assert b"\n" not in text


def test_canonical_json_does_not_depend_on_order() -> None:
    assert canonical_json({"b": 1, "a": {"d": 2, "c": 3}}) == canonical_json({"a": {"c": 3, "d": 2}, "b": 1})
    assert canonical_json({"name": "Zoë"}) == '{"name":"Zoë"}'.encode()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_canonical_json_refuses_what_is_not_json(bad: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"psi": bad})
    assert canonical_json(finite_or_text(bad)) == canonical_json(str(bad))


def test_an_honest_chain_has_no_complaints() -> None:
    assert complaints(ledger()) == []
    assert complaints([]) == []


@given(st.integers(0, 5), st.sampled_from(("payload", "nonce", "commitment", "hash", "time", "kind")), st.data())
def test_any_changed_field_is_noticed(index: int, name: str, data: st.DataObject) -> None:
    events = ledger()
    old = getattr(events[index], name)
    if isinstance(old, bytes):
        at = data.draw(st.integers(0, len(old) - 1))
        new: object = old[:at] + bytes([old[at] ^ (1 << data.draw(st.integers(0, 7)))]) + old[at + 1 :]
    else:
        new = old + "x"
    events[index] = replace(events[index], **{name: new})
    assert complaints(events)


@given(st.integers(0, 4), st.data())
def test_swapped_dropped_and_repeated_events_are_noticed(index: int, data: st.DataObject) -> None:
    other = data.draw(st.integers(index + 1, 5))
    swapped = ledger()
    swapped[index], swapped[other] = swapped[other], swapped[index]
    assert complaints(swapped)
    dropped = ledger()
    del dropped[index]
    assert complaints(dropped)
    repeated = ledger()
    repeated.insert(index, repeated[index])
    assert complaints(repeated)


@given(st.integers(0, 4))
def test_renumbering_does_not_hide_a_dropped_event(index: int) -> None:
    """Whoever drops an event and numbers the rest again has broken the hashes instead."""
    events = ledger()
    del events[index]
    assert complaints([replace(event, seq=seq) for seq, event in enumerate(events, start=1)])


@given(st.integers(0, 4))
def test_an_event_sealed_anew_breaks_the_next_link(index: int) -> None:
    """A forged event with its own matching commitment and hash is caught by the one after it."""
    events = ledger()
    previous = events[index - 1].hash if index else GENESIS
    event = events[index]
    events[index] = seal(previous, event.seq, event.time, event.kind, {"round": 99}, event.nonce)
    assert any(f"event {index + 2}" in one for one in complaints(events))


def test_control_a_chain_without_links_would_not_notice() -> None:
    """Commitments alone let events be swapped and renumbered: the hash over the previous one is what stops it."""
    events = ledger()
    events[1], events[2] = replace(events[2], seq=2), replace(events[1], seq=3)
    assert all(commit(one.nonce, one.payload) == one.commitment for one in events)
    assert complaints(events)


def test_a_complaint_names_the_event() -> None:
    events = ledger()
    events[2] = replace(events[2], payload=b"{}")
    assert complaints(events) == ["ledger: the content of event 3 (round) does not match its commitment"]
    del events[2]
    assert complaints(events) == ["ledger: event 3 is missing or out of order (found event 4)"]


def test_commitments_hide_equal_payloads() -> None:
    """Two events with the same content and other nonces share neither commitment nor hash."""
    one = seal(GENESIS, 1, "t", "round", {"drift": 0.5}, bytes(32))
    other = seal(GENESIS, 1, "t", "round", {"drift": 0.5}, bytes([1]) * 32)
    assert one.payload == other.payload
    assert one.commitment != other.commitment
    assert one.hash != other.hash


def test_fields_of_an_event_cannot_run_into_each_other() -> None:
    """Time and kind have no fixed length: moving a character from one to the other must change the hash."""
    commitment = bytes(32)
    assert chain(GENESIS, 1, "ab", "c", commitment) != chain(GENESIS, 1, "a", "bc", commitment)
    assert chain(GENESIS, 1, "2", "c", commitment) != chain(GENESIS, 12, "", "c", commitment)
