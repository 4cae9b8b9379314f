"""Digests of every engine: the bits are the same as before (see digests.py)."""

from __future__ import annotations

import pytest
from digests import CASES, digest, missing, recorded

from machine import machine_key


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_recorded(name: str) -> None:
    digests = recorded().get(machine_key())
    if missing(name):
        pytest.skip(missing(name))
    if digests is None or name not in digests:
        pytest.skip(
            f"no digest was recorded for {machine_key()}: run `python tests/house/digests.py --record` at a commit "
            "that is known to be good"
        )
    assert digest(name) == digests[name]


def test_a_digest_sees_one_bit() -> None:
    """Negative control: equal numbers give equal digests, and a change of the last bit gives another one."""
    from digests import Hasher

    def hashed(value: float) -> str:
        hasher = Hasher()
        hasher.add([1.0, value], 3)
        return hasher.hex()

    assert hashed(0.1) == hashed(0.1)
    assert hashed(0.1) != hashed(0.1 + 2.0**-56)
