"""The hash chain of a run detects every change to its events."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from sifu.core.ledger import (
    GENESIS,
    Event,
    broken_links,
    canonical_json,
    chain,
    commit,
    finite_or_text,
    read_json,
    seal,
)
from sifu_verifier.canonical import canonical

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**53, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
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
    """rfc8785, our faster implementation and a third one agree to the byte."""
    text = canonical_json(value)
    assert read_json(text) == value
    assert canonical_json(read_json(text)) == text == rfc8785.dumps(value) == canonical(value).encode()
    assert b"\n" not in text


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        # RFC 8785, appendix B.
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_numbers_are_written_as_ecmascript_writes_them(bits: str, text: str) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(value) == text.encode()
    assert canonical(value) == text


def test_keys_are_sorted_by_utf_16_units_and_large_integers_are_refused() -> None:
    assert canonical_json({"\ufb33": 1, "\U0001f600": 2}) == '{"\U0001f600":2,"\ufb33":1}'.encode()
    assert canonical_json(2**53 - 1) == b"9007199254740991"
    with pytest.raises(ValueError, match="integer"):
        canonical_json({"seed": 2**53})
    with pytest.raises(ValueError, match="5000 digits"):
        read_json("1" * 5000)


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
    """Dropping an event and renumbering the rest breaks the hashes."""
    events = ledger()
    del events[index]
    assert complaints([replace(event, seq=seq) for seq, event in enumerate(events, start=1)])


@given(st.integers(0, 4))
def test_an_event_that_is_sealed_again_breaks_the_next_link(index: int) -> None:
    """A forged event with a matching commitment and hash is detected by the event after it."""
    events = ledger()
    previous = events[index - 1].hash if index else GENESIS
    event = events[index]
    events[index] = seal(previous, event.seq, event.time, event.kind, {"round": 99}, event.nonce)
    assert any(f"event {index + 2}" in complaint for complaint in complaints(events))


def test_control_a_chain_without_links_would_not_notice() -> None:
    """Negative control: commitments alone would allow swapped and renumbered events; the hash over the previous event
    does not.
    """
    events = ledger()
    events[1], events[2] = replace(events[2], seq=2), replace(events[1], seq=3)
    assert all(commit(event.nonce, event.payload) == event.commitment for event in events)
    assert complaints(events)


def test_a_complaint_names_the_event() -> None:
    events = ledger()
    events[2] = replace(events[2], payload=b"{}")
    assert complaints(events) == ["ledger: the content of event 3 (round) does not match its commitment"]
    del events[2]
    assert complaints(events) == ["ledger: event 3 is missing or out of order (found event 4)"]


def test_commitments_hide_equal_payloads() -> None:
    """Two events with equal content and different nonces share neither commitment nor hash."""
    first = seal(GENESIS, 1, "t", "round", {"drift": 0.5}, bytes(32))
    other = seal(GENESIS, 1, "t", "round", {"drift": 0.5}, bytes([1]) * 32)
    assert first.payload == other.payload
    assert first.commitment != other.commitment
    assert first.hash != other.hash


def test_fields_of_an_event_cannot_run_into_each_other() -> None:
    """Time and kind have variable lengths: moving a character from one to the other changes the hash."""
    commitment = bytes(32)
    assert chain(GENESIS, 1, "ab", "c", commitment) != chain(GENESIS, 1, "a", "bc", commitment)
    assert chain(GENESIS, 1, "2", "c", commitment) != chain(GENESIS, 12, "", "c", commitment)
