"""An anchor: the head of a run's hash chain, published or kept elsewhere, that nobody can rewrite unnoticed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sifu.errors import InputError
from sifu.store.reader import RunReader


def anchor_of(reader: RunReader) -> str:
    """`SEQ:HASH` of the last event: publish it, and nobody can rewrite what came before it unnoticed."""
    return reader.value("head")


def parse_anchor(anchor: str) -> tuple[int, str]:
    """An anchor as somebody kept it."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,17}):([0-9a-fA-F]{64})\s*", anchor)
    if not match:
        raise InputError(
            f"an anchor is SEQ:HASH with 64 hexadecimal digits, as sifu anchor prints it; found {anchor[:90]!r}"
        )
    return int(match[1]), match[2].lower()


def holds_anchor(reader: RunReader, anchor: str) -> bool:
    """Whether the chain has this event."""
    seq, digest = parse_anchor(anchor)
    rows = reader.query("SELECT hash FROM events WHERE seq = ?", (seq,))
    return bool(rows) and bytes(rows[0][0]).hex() == digest


def check_anchor(reader: RunReader, anchor: str) -> Iterator[str]:
    """An anchor that was published must still be in the chain."""
    if not holds_anchor(reader, anchor):
        seq, _ = parse_anchor(anchor)
        last = reader.query("SELECT MAX(seq) FROM events")[0][0] or 0
        how = (
            f"it ends at event {last}, before the anchor's {seq}: an older state was put back"
            if seq > last
            else f"its event {seq} is another one: the chain was rewritten"
        )
        yield f"anchor: the chain does not hold the anchor given; {how}"
