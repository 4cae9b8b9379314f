"""Generators for everything that is replayed: one independent stream for each purpose and place.

A round must draw the same participants and batches whether the run was interrupted or not, and a
client's batches must not depend on who else takes part (the counterfactual of docs/theory.md, section 2.2 is "the
same schedule, W absent"). So nothing is drawn from a running generator: each stream is keyed by what it
is for.

Certified noise never comes from these generators but from the operating system's entropy, drawn and added in float64.
Every certified normal is made from bytes handed out for this one draw; they are used once and never logged. A seeded
generator is for experiments only and caps a certificate at `none`.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, Protocol

import numpy as np

from sifu.core.layout import Vector
from sifu.theory.arrays import Floats
from sifu.theory.facts import ROUNDING_HOLDS_UP_TO
from sifu.theory.rounding import UNIT_ROUNDOFF, norm_up, up


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator for `purpose` at place `key`, independent of every other purpose and place.

    >>> a = keyed_generator(7, "participation", 0, 3).random()
    >>> b = keyed_generator(7, "participation", 0, 3).random()
    >>> c = keyed_generator(7, "participation", 0, 4).random()
    >>> a == b, a == c
    (True, False)
    """
    text = ":".join([str(int(seed)), purpose, *(str(int(part)) for part in key)])
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").copy()))


NoiseSource = Literal["system", "seeded"]


class NormalSource(Protocol):
    """Anything that draws standard normals; numpy's Generator is one."""

    def standard_normal(self, size: int) -> Floats: ...


class SystemNormals:
    """Standard normals straight from the operating system's entropy (Box and Muller 1958, 53-bit uniforms)."""

    def standard_normal(self, size: int) -> Floats:
        """`size` independent standard normals."""
        pairs = (size + 1) // 2
        raw = np.frombuffer(secrets.token_bytes(16 * pairs), dtype="<u8") >> np.uint64(11)
        radius_uniform = (raw[:pairs].astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1]: its log is finite
        angle = raw[pairs:].astype(np.float64) * (2.0**-53 * 2.0 * np.pi)
        radius = np.sqrt(-2.0 * np.log(radius_uniform))
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


def noise_source(source: NoiseSource, seed: int, branch: int) -> NormalSource:
    """What a noise edge draws from; `seed` is used by `seeded` only."""
    if source == "seeded":
        return keyed_generator(seed, "seeded noise", branch)
    return SystemNormals()


def add_noise(model: Vector, noise_std: float, normals: NormalSource) -> Vector:
    """theta + N(0, sigma^2 I), in float64, then rounded to the model's own type.

    Rounding the sum is post-processing for those whom this noise hides: it costs nothing of their guarantee. It is not
    for those who ask later, see `noise_rounding`.
    """
    noisy = model.astype(np.float64) + noise_std * normals.standard_normal(model.size)
    return noisy.astype(model.dtype)


def noise_rounding(noisy: Vector) -> float:
    """How far rounding of `theta + xi` in float64 may move two worlds further apart than theta and phi were.

    To a client that asks later this noise is part of the plan (docs/theory.md, section 6.5). `noisy` is the rounded
    sum, whose norm is off by a factor 1 + u, which `norm_up` covers.
    """
    return up(UNIT_ROUNDOFF * up(2.0 * norm_up(noisy) + ROUNDING_HOLDS_UP_TO))
