"""Pairwise masks modulo 2^64 that cancel in the sum over all participants (docs/theory.md, section 11).

Every two participants of a round share a secret (X25519, with keys made for this round only) and expand it to a vector
(HKDF-SHA256, then ChaCha20). One participant adds the vector to its numbers and the other subtracts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from sifu.core.engine import Position
from sifu.errors import InputError
from sifu.theory.arrays import Words
from sifu.theory.closed_form import Rows, Statistics, total
from sifu.theory.facts import LEAST_MASKED

_KEYSTREAM_BYTES = 2**24


def new_secret() -> bytes:
    """Make a private key for one round."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_part(secret: bytes) -> bytes:
    """Return the public key of a private key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def is_usable(key: bytes) -> bool:
    """Return whether a public key is valid and not of low order; clients refuse a round with an unusable key.

    >>> is_usable(public_part(new_secret())), is_usable(bytes(32))
    (True, False)
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def refused_keys(keys: Mapping[int, bytes]) -> list[int]:
    """Return the clients whose key is invalid or repeated; all clients refuse a round with such a key."""
    holders = Counter(keys.values())
    return [client for client, key in keys.items() if holders[key] > 1 or not is_usable(key)]


def mask(words: Words, secret: bytes, own: int, keys: Mapping[int, bytes], context: bytes) -> Words:
    """Return the words of client `own` with one mask per other participant.

    Args:
        words: The numbers to mask.
        secret: This client's private key of the round.
        own: Index of this client.
        keys: Public keys of all participants by index.
        context: Identifier of the round, so that no mask is used twice.

    Raises:
        InputError: If the keys are invalid, repeated or too few, or do not contain this client's key.
    """
    if keys.get(own) != public_part(secret):
        raise InputError("the participants' keys do not include this client's key for the round: nothing was sent")
    if len(set(keys.values())) < len(keys) or len(keys) < LEAST_MASKED:
        raise InputError(
            f"a masked round needs at least {LEAST_MASKED} participants with different keys, found "
            f"{len(set(keys.values()))} keys of {len(keys)} participants: nothing was sent"
        )
    mine = X25519PrivateKey.from_private_bytes(secret)
    roll = b"".join(number.to_bytes(8, "big") + keys[number] for number in sorted(keys))
    masked = words.copy()
    for other, key in keys.items():
        if other == own:
            continue
        try:
            shared = mine.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError as error:
            raise InputError(f"the key of participant {other} is invalid ({error}): nothing was sent") from error
        pair = b"%d.%d" % (min(own, other), max(own, other))
        seed = HKDF(SHA256(), 32, salt=None, info=b"sifu mask " + context + b" " + pair + b" " + roll).derive(shared)
        _add_stream(masked, seed, own < other)
    return masked


def mask_context(position: Position, *, of_statistics: bool) -> bytes:
    """Return the identifier of a masked sum for `mask`; it differs between sums of updates and of statistics."""
    return (b"statistics " if of_statistics else b"") + b"%d.%d" % (position.branch, position.round)


def _add_stream(words: Words, seed: bytes, plus: bool) -> None:
    """Add the keystream of a seed to `words` in place, or subtract it if `plus` is false."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    step = _KEYSTREAM_BYTES // 8
    for first in range(0, words.size, step):
        piece = words[first : first + step]
        noise = np.frombuffer(stream.update(bytes(piece.nbytes)), dtype="<u8")
        if plus:
            piece += noise
        else:
            piece -= noise


def in_order(arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Concatenate named arrays in the order of their names, which both sides of a masked round know."""
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])


def counted_words(statistics: Statistics | Rows) -> Words:
    """Return the words of statistics for a masked sum, followed by a 1, so that the sum counts its summands."""
    words = total(statistics.fixed, [statistics]).words  # `total` also converts rows
    return np.append(words.view(np.uint64), np.uint64(1))
