"""Timestamp authority (RFC 3161) made with openssl: a root, a certificate that may sign timestamps, and answers."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path

CONFIG = """
[tsa]
default_tsa = here
[here]
serial = {folder}/{serial}
signer_cert = {folder}/tsa.pem
signer_key = {folder}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4
digests = sha256
ess_cert_id_alg = sha256
"""


def make_authority(folder: Path) -> Path:
    """Write keys and certificates to a folder; return the file with the root's certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("root", "tsa")}
    names = {name: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"test {name}")]) for name in keys}
    now = datetime.datetime.now(datetime.UTC)
    for name, key in keys.items():
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["root"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=9))
            .add_extension(x509.BasicConstraints(ca=name == "root", path_length=None), critical=True)
        )
        if name == "tsa":
            usage = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.TIME_STAMPING])
            builder = builder.add_extension(usage, critical=True)
        certificate = builder.sign(keys["root"], hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.key").write_bytes(private)
    return folder / "root.pem"


def answer(folder: Path, question: bytes) -> bytes:
    """Return the authority's answer to an RFC 3161 query. Files are named by process, so that several may ask."""
    own = str(os.getpid())
    (folder / f"{own}.cnf").write_text(CONFIG.format(folder=folder, serial=f"{own}.serial"))
    if not (folder / f"{own}.serial").exists():
        (folder / f"{own}.serial").write_text("01\n")
    (folder / f"{own}.question").write_bytes(question)
    arguments = ["-config", f"{own}.cnf", "-queryfile", f"{own}.question", "-out", f"{own}.answer"]
    _openssl(folder, "-reply", *arguments)
    return (folder / f"{own}.answer").read_bytes()


def stamp(folder: Path, content: bytes) -> bytes:
    """Return a timestamp of some content."""
    own = str(os.getpid())
    (folder / f"{own}.content").write_bytes(content)
    _openssl(folder, "-query", "-data", f"{own}.content", "-sha256", "-cert", "-out", f"{own}.asked")
    return answer(folder, (folder / f"{own}.asked").read_bytes())


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", "ts", *arguments], cwd=folder, check=True, capture_output=True)
