"""Fixed secret draws in tests: salts, nonces, keys, partitions and noise are the same in every run of a test.

A conftest imports the fixture and the hook. Tests marked `system_secrets`, and processes that a test starts, draw from
the operating system.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from run_tools import SameNoise

KEYS: tuple[Any, ...] = (Ed25519PrivateKey, X25519PrivateKey)
"""Classes of private keys that the library draws, from 32 bytes each."""
LONGEST_NONCE = 32
"""Length in bytes of keys, salts and nonces; noise is longer."""


def fix_draws(patch: pytest.MonkeyPatch, place: str) -> None:
    """Replace every source of secrets by generators seeded with `place`.

    Noise, which is longer than a nonce, has a generator of its own: the number of nonces depends on the machine's
    speed, because rounds are committed by time.
    """
    generator, noise = random.Random(place), random.Random(f"noise of {place}")

    def token_bytes(nbytes: int | None = None) -> bytes:
        length = secrets.DEFAULT_ENTROPY if nbytes is None else nbytes
        return (noise if length > LONGEST_NONCE else generator).randbytes(length)

    patch.setattr(secrets, "token_bytes", token_bytes)  # token_hex and token_urlsafe call it
    for kind in KEYS:
        patch.setattr(kind, "generate", classmethod(lambda cls: cls.from_private_bytes(token_bytes(32))))


@pytest.fixture(autouse=True)
def fixed_secrets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the secret draws of a test by its name, unless it is marked `system_secrets`."""
    if request.node.get_closest_marker("system_secrets") is None:
        fix_draws(monkeypatch, request.node.nodeid)


def fix_groups(patch: pytest.MonkeyPatch) -> None:
    """Assign clients to the same groups in every run."""
    patch.setattr("sifu.store.unfinished.new_group_key", lambda: "07" * 32)


def repeat_draws(patch: pytest.MonkeyPatch) -> None:
    """Assign clients to the same groups, and draw the same noise from the system, in every run and process."""
    fix_groups(patch)
    patch.setattr("sifu.core.round.SystemNormals.standard_normal", SameNoise.standard_normal)


@pytest.fixture
def same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assign clients to the same groups in every run of a test."""
    fix_groups(monkeypatch)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """Fix the draws of a shared fixture by its own name, whichever test needs it first."""
    if fixturedef.scope == "function":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        fix_draws(patch, f"{request.node.nodeid}::{fixturedef.argname}::{getattr(request, 'param', None)!r}")
        return (yield)
