"""Node keys: the signature check and the key lookup must read the same key from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from sifu.core.client_names import key_fingerprint
from sifu.errors import InputError
from sifu.requests.client_list import fingerprint_of_file
from sifu.store.keys import sign_statement, signer_of

BEGIN = "-----BEGIN PUBLIC KEY-----\n"


class NodeKey:
    """Key pair in files, as ssh-keygen writes them, with the public key as PEM."""

    def __init__(self, file: Path) -> None:
        key = ec.generate_private_key(ec.SECP384R1())
        self.file, self.public_file = file, file.with_suffix(".pub")
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        self.public_file.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        self.pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        self.fingerprint = key_fingerprint(self.pem.encode())


@pytest.fixture
def mine(tmp_path: Path) -> NodeKey:
    return NodeKey(tmp_path / "mine")


@pytest.fixture
def victim(tmp_path: Path) -> NodeKey:
    return NodeKey(tmp_path / "victim")


def test_every_way_to_write_a_key_down_gives_the_same_fingerprint(mine: NodeKey, tmp_path: Path) -> None:
    pem = tmp_path / "mine.pem"
    pem.write_text("as openssl -text writes it\n" + mine.pem)
    assert fingerprint_of_file(mine.public_file) == fingerprint_of_file(pem) == mine.fingerprint
    assert key_fingerprint(mine.pem.replace("\n", "\r\n").encode()) == mine.fingerprint
    assert signer_of(sign_statement(mine.file, {"a": 1})) == mine.fingerprint


@pytest.mark.parametrize(
    "name_key",
    [
        lambda mine, victim: mine.replace(BEGIN, BEGIN + "Proc-Type: 4\n\n") + victim,
        lambda mine, victim: mine + victim,
        lambda mine, victim: victim + mine,
        lambda mine, victim: mine.replace(BEGIN, BEGIN + "Comment: " + victim.splitlines()[1] + "\n\n"),
        lambda mine, victim: victim.replace(BEGIN, BEGIN + "A: b\n\n") + mine,
    ],
)
def test_a_key_with_another_beside_it_speaks_for_nobody_else(mine: NodeKey, victim: NodeKey, name_key: Any) -> None:
    """A header inside the first block once made the signature belong to the first key and the fingerprint to the
    second.
    """
    statement = sign_statement(mine.file, {"do": "forget me"})
    statement["key"] = name_key(mine.pem, victim.pem)
    assert signer_of(statement) in (None, mine.fingerprint)
    with pytest.raises(InputError, match="not a single public key in PEM form"):
        key_fingerprint(statement["key"].encode())


def test_a_key_written_in_another_way_is_no_key(mine: NodeKey) -> None:
    body = "".join(mine.pem.splitlines()[1:-1])
    for bent in (body + "====", body[:-1], body[:8] + "=" + body[8:]):
        with pytest.raises(InputError):
            key_fingerprint(f"{BEGIN}{bent}\n-----END PUBLIC KEY-----\n".encode())


def test_a_private_key_handed_in_by_mistake_is_named_as_one(mine: NodeKey, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a private key, which stays at its client"):
        fingerprint_of_file(mine.file)
    strange = tmp_path / "strange.pub"
    strange.write_text("no key at all")
    with pytest.raises(InputError, match="holds no public key"):
        fingerprint_of_file(strange)
    with pytest.raises(InputError, match="cannot read the key"):
        fingerprint_of_file(tmp_path / "absent.pub")
