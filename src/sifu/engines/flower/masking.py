"""Updates that only their sum can be read from: pairwise masks modulo 2^64 over fixed-point numbers.

docs/theory.md, section 11. Every two participants of a round share a secret (X25519, keys made for this round alone)
and stretch it to a vector (HKDF-SHA256, then ChaCha20), which one adds to its numbers and the other subtracts. If a
participant is missing, nothing can be read and the round is dropped. An update that does not fit the range is refused
by its client before anything is sent; nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sifu.core.layout import Vector
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Words
from sifu.theory.facts import LEAST_MASKED

HEADROOM_BITS = 10
"""An update may be this many doublings larger than the largest parameter of the model it started from."""
SUM_BITS = 61
_KEYSTREAM_BYTES = 2**24


@dataclass(frozen=True)
class FixedPoint:
    """Entries of an update lie within 2^`reach_bits` and are sent in units of 2^-`scale_bits`."""

    reach_bits: int
    scale_bits: int

    @staticmethod
    def of(start: Vector, total_samples: int) -> FixedPoint:
        """For a round from `start` whose participants have `total_samples` samples together.

        >>> FixedPoint.of(np.array([0.5, -3.0]), 1000)
        FixedPoint(reach_bits=12, scale_bits=39)
        """
        largest = float(np.max(np.abs(start), initial=1.0))
        if not math.isfinite(largest) or total_samples < 1:
            raise InputError(f"no range fits a model with {largest} in it and {total_samples} samples")
        reach = math.ceil(math.log2(max(1.0, largest))) + HEADROOM_BITS
        return FixedPoint(reach, SUM_BITS - reach - math.ceil(math.log2(total_samples)))

    def fits(self, update: Vector) -> bool:
        """Whether every entry is a number within the range."""
        return bool(np.max(np.abs(update), initial=0.0) <= 2.0**self.reach_bits)  # False for NaN

    def words(self, update: Vector, samples: int) -> Words:
        """round(2^b n_i update), modulo 2^64, and a one at the end that counts who is in a sum."""
        if not self.fits(update):
            raise InputError(f"the update has entries beyond 2^{self.reach_bits}, or NaN: it was not sent")
        scaled = np.rint(np.ldexp(samples * update.astype(np.float64), self.scale_bits))
        return np.append(scaled.astype(np.int64).view(np.uint64), np.uint64(1))

    def mean(self, total: Words, total_samples: int, participants: int) -> Floats | None:
        """The mean update of a sum of words; None where the sum cannot be one of these participants' updates."""
        signed = total.view(np.int64)
        entries = signed[:-1]
        limit = 2 ** (self.reach_bits + self.scale_bits) * total_samples + participants
        if signed[-1] != participants or not (-limit <= entries.min(initial=0) and entries.max(initial=0) <= limit):
            return None
        return np.ldexp(entries.astype(np.float64), -self.scale_bits) / total_samples

    def error(self, size: int, total_samples: int, participants: int) -> float:
        """How far the mean can be from exact, in norm: each participant rounds every entry by half a unit."""
        return math.sqrt(size) * participants * 2.0 ** (-self.scale_bits - 1) / total_samples


def new_secret() -> bytes:
    """A private key for one round."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_part(secret: bytes) -> bytes:
    """What the other participants get."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def mask(words: Words, secret: bytes, own: int, keys: Mapping[int, bytes], context: bytes) -> Words:
    """The words with a mask for every other participant; `context` names the round, so that no mask is used twice."""
    if keys.get(own) != public_part(secret):
        raise InputError("the participants' keys do not hold the one this client made for the round: nothing was sent")
    if len(set(keys.values())) < len(keys) or len(keys) < LEAST_MASKED:
        raise InputError(f"a masked round needs {LEAST_MASKED} participants with keys of their own")
    mine = X25519PrivateKey.from_private_bytes(secret)
    roll = b"".join(number.to_bytes(8, "big") + keys[number] for number in sorted(keys))
    masked = words.copy()
    for other, key in keys.items():
        if other == own:
            continue
        try:
            shared = mine.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError as error:
            raise InputError(f"the key of participant {other} is not one ({error}): nothing was sent") from error
        pair = b"%d.%d" % (min(own, other), max(own, other))
        seed = HKDF(SHA256(), 32, salt=None, info=b"sifu mask " + context + b" " + pair + b" " + roll).derive(shared)
        _add_stream(masked, seed, own < other)
    return masked


def _add_stream(words: Words, seed: bytes, plus: bool) -> None:
    """Add (or subtract) the keystream of a seed, a piece at a time."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    step = _KEYSTREAM_BYTES // 8
    for first in range(0, words.size, step):
        piece = words[first : first + step]
        noise = np.frombuffer(stream.update(bytes(piece.nbytes)), dtype="<u8")
        if plus:
            piece += noise
        else:
            piece -= noise
