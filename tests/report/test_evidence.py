"""Evidence bundle of a request: complete, checkable by strangers, and without confidential content."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

import sifu
from run_tools import Command, connect, query, small_spec, state
from sifu.core.certificate_words import words_of
from sifu.core.ledger import canonical_json
from sifu.errors import InputError, VerificationError
from sifu.report.evidence import evidence_bytes
from sifu.store.keys import public_hex, rotation_statement

NAMES = {
    "README.txt", "SHA256SUMS", "aisvs.json", "checkpoints.jsonl", "index.html", "keys.json", "public-key.pem",
    "statement.dsse.json", "strictly.public.json", "verified.json", "verify.py",
}  # fmt: skip


def unpack(content: bytes) -> dict[str, bytes]:
    """Return the files of a bundle by name, without the name of its folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return {Path(name).name: archive.read(name) for name in archive.namelist()}


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python verify.py` in an unpacked bundle, as a stranger without sifu does."""
    return subprocess.run([sys.executable, "-I", str(folder / "verify.py"), *arguments], capture_output=True, text=True)


def write_all(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_command_writes_everything_and_changes_nothing(own_run: Path, tmp_path: Path, cli: Command) -> None:
    before = state(own_run)
    answer = cli("evidence", own_run, "strictly", "--out", tmp_path / "e.zip", "--format", "json")
    assert answer.code == 0, answer.err
    assert answer.json == {"evidence": str(tmp_path / "e.zip"), "request": "strictly"}
    files = unpack((tmp_path / "e.zip").read_bytes())
    assert set(files) == NAMES
    assert (tmp_path / "e.zip").stat().st_mode & 0o777 == 0o600
    assert files["strictly.public.json"] == (own_run / "certificates" / "strictly.public.json").read_bytes()
    digests = dict(reversed(line.split("  ")) for line in files["SHA256SUMS"].decode().splitlines())  # type: ignore[misc]
    assert digests == {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != "SHA256SUMS"
    }
    assert state(own_run) == before


def test_no_byte_of_it_tells_of_others_or_of_a_key(own_run: Path) -> None:
    files = unpack(evidence_bytes(own_run, "strictly"))
    # Envelopes encode text in base64, so the payload is decoded for the search.
    files["payload"] = base64.b64decode(json.loads(files["statement.dsse.json"])["payload"])
    everything = b"\n".join(files.values())
    own = "client-004"
    assert own.encode() in everything
    pem = (own_run / "operator.key").read_bytes()
    key = load_pem_private_key(pem, None)
    seed = key.private_bytes_raw()  # type: ignore[union-attr]
    forbidden: dict[str, bytes] = {
        f"client {name}": name.encode() for (name,) in query(own_run, "SELECT name FROM clients") if name != own
    }
    forbidden |= {
        f"request {name}": name.encode()
        for (name,) in query(own_run, "SELECT request FROM requests")
        if name != "strictly"
    }
    for form in ("hex", "base64"):
        forbidden[f"the key in {form}"] = seed.hex().encode() if form == "hex" else base64.b64encode(seed)
    forbidden["the key, raw"] = seed
    forbidden["the key's file"] = pem.splitlines()[1]
    forbidden["any private key"] = b"PRIVATE"
    forbidden["where the run lies"] = str(own_run).encode()
    for digest, nonce in query(own_run, "SELECT digest, nonce FROM models"):
        forbidden[f"digest {digest}"], forbidden[f"nonce {nonce}"] = digest.encode(), nonce.encode()
    for file, digest, clients in query(own_run, "SELECT file, digest, clients FROM updates"):
        forbidden[f"updates {file}"] = digest.encode()
        forbidden |= {f"update {value}": value.encode() for value in json.loads(clients).values()}
    for request, content in query(own_run, "SELECT request, content FROM certificates WHERE form = 'auditor'"):
        forbidden[f"auditor's certificate of {request}"] = json.loads(content)["signature"].encode()
    for seq, nonce in query(own_run, "SELECT seq, nonce FROM events"):
        forbidden[f"nonce of event {seq}"] = nonce
        forbidden[f"nonce of event {seq} in hex"] = nonce.hex().encode()
    for (psi,) in query(own_run, "SELECT psi FROM charges WHERE charge > 0"):
        forbidden[f"Psi {psi}"] = psi.encode()
    for (drift,) in query(own_run, "SELECT drift FROM participation WHERE drift > 0"):
        forbidden[f"drift {drift}"] = repr(drift).encode()
    forbidden["its actor"] = (
        json.loads(query(own_run, "SELECT payload FROM events WHERE kind = 'request done'")[0][0])["actor"].encode()
        + b'"'
    )
    assert len(forbidden) > 100
    leaked = [name for name, text in forbidden.items() if text in everything]
    assert leaked == []


def test_a_stranger_checks_it_without_sifu(own_run: Path, tmp_path: Path) -> None:
    files = unpack(evidence_bytes(own_run, "strictly"))
    folder = write_all(files, tmp_path / "bundle")
    public = sifu.open_run(own_run).keys().public_keys[-1].key
    checked = check(folder, "--public-key", public)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "Everything holds" in checked.stdout
    assert load_pem_public_key(files["public-key.pem"]).public_bytes_raw().hex() == public  # type: ignore[union-attr]
    assert sifu.verify_certificate(folder / "strictly.public.json", public).holds
    assert sifu.verify_run(own_run, witnesses=[folder / "checkpoints.jsonl"]).problems == []
    assert check(folder, "--public-key", "00" * 32).returncode == 1


def sum_again(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files with matching digests, as a forger would make them."""
    lines = [
        f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in sorted(files.items()) if name != "SHA256SUMS"
    ]
    return files | {"SHA256SUMS": "".join(lines).encode()}


@pytest.mark.parametrize(
    "name", ["strictly.public.json", "statement.dsse.json", "checkpoints.jsonl", "keys.json", "index.html"]
)
def test_a_change_of_any_file_is_noticed(own_run: Path, tmp_path: Path, name: str) -> None:
    """Negative control: the check finds a change in any one file of a bundle."""
    files = unpack(evidence_bytes(own_run, "strictly"))
    changes = {
        "strictly.public.json": (b'"level": "', b'"level": "not '),
        "statement.dsse.json": (b'"payload": "e', b'"payload": "f'),
        "checkpoints.jsonl": (b'"seq":', b'"seq":1'),
        "keys.json": (b'"keys": [\n  "', b'"keys": [\n  "00'),
        "index.html": (b"asked", b"never asked"),
    }
    old, new = changes[name]
    assert old in files[name]
    files[name] = files[name].replace(old, new)
    assert check(write_all(files, tmp_path / "plain")).returncode == 1
    assert check(write_all(sum_again(files), tmp_path / "summed")).returncode == 1


@pytest.mark.parametrize("change", ["no digests", "a digest less", "a folder more", "a pipe", "a link", "a device"])
def test_what_is_not_as_it_was_written_is_noticed_and_nothing_endless_is_read(
    own_run: Path, tmp_path: Path, change: str, cli: Command
) -> None:
    folder = write_all(unpack(evidence_bytes(own_run, "strictly")), tmp_path / "bundle")
    sums, page = folder / "SHA256SUMS", folder / "index.html"
    if change.endswith(("digests", "less")):
        sums.write_text("".join(sums.read_text().splitlines(keepends=True)[1:] if change == "a digest less" else ()))
    elif change == "a folder more":
        (folder / "more").mkdir()
    else:
        page.rename(tmp_path / "index.html")
        if change == "a pipe":
            os.mkfifo(page)
        else:
            page.symlink_to("/dev/zero" if change == "a device" else tmp_path / "index.html")
    wrong = check(folder)
    assert wrong.returncode == 1
    assert "WRONG" in wrong.stdout
    answer = cli("verify", folder)
    assert answer.code == 3, answer.err


def test_a_damaged_archive_is_a_sentence(own_run: Path, tmp_path: Path, cli: Command) -> None:
    content = evidence_bytes(own_run, "strictly")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
    damaged = bytearray(content)
    for member in members:
        begin = member.header_offset + 30 + len(member.filename)
        for place in range(begin, begin + min(40, member.compress_size)):
            damaged[place] ^= 0xA5
    (tmp_path / "damaged.zip").write_bytes(damaged)
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_LZMA) as archive:
        for name, text in unpack(content).items():
            archive.writestr(name, text)
    for name in ("damaged.zip", "packed.zip"):
        answer = cli("verify", tmp_path / name)
        assert answer.code == 2, answer.err
        assert "is not a bundle of evidence" in " ".join(answer.err.split())


def test_a_certificate_of_any_name_is_the_one_that_is_checked(own_run: Path, tmp_path: Path, cli: Command) -> None:
    """A forger's own bundle may call its certificate anything; what is checked is what the statement names."""
    files, key = unpack(evidence_bytes(own_run, "strictly")), Ed25519PrivateKey.generate()
    run, statement = "another run", json.loads(base64.b64decode(json.loads(files["statement.dsse.json"])["payload"]))
    point = {"format": "sifu head 1", "run": run, "seq": 1, "head": "00", "time": "now"}
    body = {"run": run, "request": "r", "level": "exact", "ledger": {"seq": 1, "head": "00"}}
    mine = {"public_key": public_hex(key), "signature": key.sign(canonical_json(body)).hex()}
    point |= {"public_key": public_hex(key), "signature": key.sign(canonical_json(point)).hex()}
    files["mine.json"] = json.dumps({"body": body} | mine).encode()
    files["keys.json"] = json.dumps({"run": run, "keys": [public_hex(key)], "changes": []}).encode()
    files["checkpoints.jsonl"] = json.dumps(point).encode() + b"\n"
    statement["subject"][0]["name"], statement["predicate"] = "mine.json", body
    del files["strictly.public.json"]
    folder = write_all(stated_again(files, statement, key), tmp_path / "bundle")
    assert check(folder).returncode == 0
    answer = cli("verify", folder)
    assert answer.code == 2, answer.err
    assert "is not a sifu certificate" in " ".join(answer.err.split())


def signed_again(statement: dict[str, object], key: Ed25519PrivateKey) -> bytes:
    """Return an envelope around a statement, signed with this key."""
    envelope = Envelope(canonical_json(statement), "application/vnd.in-toto+json", {})
    envelope.sign(CryptoSigner(key))
    return json.dumps(envelope.to_dict()).encode()


def forged(
    files: dict[str, bytes], key: Ed25519PrivateKey, change: Callable[[dict[str, Any]], None]
) -> dict[str, bytes]:
    """Return the bundle with another body and matching signatures by a key other than the operator's."""
    public = public_hex(key)
    certificate = json.loads(files["strictly.public.json"])
    change(certificate["body"])
    certificate |= {"public_key": public, "signature": key.sign(canonical_json(certificate["body"])).hex()}
    forged = files | {"strictly.public.json": json.dumps(certificate).encode()}
    statement = json.loads(base64.b64decode(json.loads(files["statement.dsse.json"])["payload"]))
    statement["predicate"] = certificate["body"]
    return stated_again(forged, statement, key)


def stated_again(files: dict[str, bytes], statement: dict[str, Any], key: Ed25519PrivateKey) -> dict[str, bytes]:
    """Return the files with a new statement about their current content."""
    for subject in statement["subject"]:
        subject["digest"]["sha256"] = hashlib.sha256(files[subject["name"]]).hexdigest()
    return sum_again(files | {"statement.dsse.json": signed_again(statement, key)})


def refused(files: dict[str, bytes], folder: Path, public: str, cli: Command, words: str) -> None:
    """Check that both verifiers refuse a bundle under the operator's published key, and give the reason."""
    write_all(files, folder)
    checked = check(folder, "--public-key", public)
    assert checked.returncode == 1, checked.stdout
    assert any(line.startswith("WRONG") and words in line for line in checked.stdout.splitlines()), checked.stdout
    answer = cli("verify", folder, "--public-key", public)
    assert answer.code == 3
    assert words in " ".join(answer.err.split())


def test_an_invented_client_is_refused_although_a_stranger_claims_to_have_replaced_the_key(
    own_run: Path, tmp_path: Path, cli: Command
) -> None:
    """A key change from one key of a stranger to another does not follow from the operator's key."""
    files = unpack(evidence_bytes(own_run, "strictly"))
    keys = json.loads(files["keys.json"])
    (operator,) = keys["keys"]
    first, second = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    statement = canonical_json(rotation_statement(keys["run"], public_hex(first), public_hex(second)))
    own_change = {
        "old": public_hex(first),
        "new": public_hex(second),
        "signature_by_old": first.sign(statement).hex(),
        "signature_by_new": second.sign(statement).hex(),
    }

    def invent(body: dict[str, Any]) -> None:
        body["clients"], body["level"] = ["somebody-else"], "exact"

    forgeries = {
        "is from the key before it": [own_change],
        "is signed by the old key and by the new one": [own_change | {"old": operator}],
        "there is a signed change for every key": [],
    }
    for number, (words, changes) in enumerate(forgeries.items()):
        chain = {"run": keys["run"], "keys": [operator, public_hex(second)], "changes": changes}
        bundle = forged(files | {"keys.json": json.dumps(chain).encode()}, second, invent)
        refused(bundle, tmp_path / str(number), operator, cli, words)
    # Without any claim about keys: a stranger signed the certificate.
    refused(forged(files, second, invent), tmp_path / "plain", operator, cli, "signed with the operator's latest key")


def test_a_page_and_a_certificate_that_the_operator_did_not_sign_are_refused(
    own_run: Path, tmp_path: Path, cli: Command
) -> None:
    files = unpack(evidence_bytes(own_run, "strictly"))
    operator = sifu.open_run(own_run).keys().public_keys[-1].key
    page = files | {"index.html": files["index.html"].replace(b"asked", b"never asked")}
    refused(sum_again(page), tmp_path / "page", operator, cli, "index.html is the file that the statement is about")
    refused(sum_again(files | {"more.html": b"more"}), tmp_path / "more", operator, cli, "more.html is the file")
    # A statement signed with the operator's key does not replace the certificate's own signature.
    key = load_pem_private_key((own_run / "operator.key").read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    certificate = json.loads(files["strictly.public.json"]) | {"signature": "00" * 64}
    statement = json.loads(base64.b64decode(json.loads(files["statement.dsse.json"])["payload"]))
    zeroed = files | {"strictly.public.json": json.dumps(certificate).encode()}
    bundle = stated_again(zeroed, statement, key)
    refused(bundle, tmp_path / "zeroed", operator, cli, "the certificate is signed with the key it names")


def test_sifu_verifies_the_bundle_packed_and_unpacked_and_its_envelope(
    own_run: Path, tmp_path: Path, cli: Command
) -> None:
    content = evidence_bytes(own_run, "strictly")
    (tmp_path / "e.zip").write_bytes(content)
    folder = write_all(unpack(content), tmp_path / "bundle")
    public = sifu.open_run(own_run).keys().public_keys[-1].key
    envelope = folder / "statement.dsse.json"
    for target in (tmp_path / "e.zip", folder, envelope):
        answer = cli("verify", target, "--public-key", public)
        assert answer.code == 0, answer.err
        assert public in answer.out.replace("\n", "")
        assert cli("verify", target, "--public-key", "00" * 32).code == 3
    # The envelope's key comes from the certificate in the same folder; a separate envelope needs a given key.
    assert cli("verify", envelope).code == 0
    alone = tmp_path / "alone.json"
    alone.write_bytes(envelope.read_bytes())
    answer = cli("verify", alone)
    assert answer.code == 2
    assert "--public-key" in answer.err
    assert cli("verify", alone, "--public-key", public).code == 0
    statement = json.loads(base64.b64decode(json.loads(envelope.read_bytes())["payload"]))
    statement["predicate"]["level"] = "none"
    alone.write_bytes(signed_again(statement, Ed25519PrivateKey.generate()))
    answer = cli("verify", alone, "--public-key", public)
    assert answer.code == 3
    assert "the envelope has no signature" in " ".join(answer.err.split())


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"payload": 1, "payloadType": 2, "signatures": 3}'])
def test_what_is_no_evidence_is_a_sentence(tmp_path: Path, content: bytes, cli: Command) -> None:
    (tmp_path / "strange.json").write_bytes(content)
    assert cli("verify", tmp_path / "strange.json").code == 2
    with zipfile.ZipFile(tmp_path / "strange.zip", "w") as archive:
        archive.writestr("../../statement.dsse.json", content)
    assert cli("verify", tmp_path / "strange.zip").code == 3
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("other", content)
    assert cli("verify", tmp_path / "other.zip").code == 2


def test_the_page_says_what_the_certificate_says(own_run: Path) -> None:
    page = unpack(evidence_bytes(own_run, "strictly"))["index.html"].decode()
    body = sifu.open_run(own_run).certificate("strictly").body
    for words in (*words_of(body).not_covered, words_of(body).erased, body["level"], body["carried_out"][:10]):
        assert words.replace("'", "&#39;") in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_hostile_name_is_text_on_the_page(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    rows = [([[0.1 * k, 0.2], [0.3, 0.1 * k]], [0, 1]) for k in range(5)]
    clients = {hostile if k == 0 else f"other-{k}": data for k, data in enumerate(rows)}
    spec = small_spec(model={"kind": "logistic"}) | {"data": {}}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    run.forget([hostile], "a", sigma=0.5)
    page = unpack(evidence_bytes(tmp_path / "run", "a"))["index.html"].decode()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_after_a_new_key_both_keys_are_shown(own_run: Path, tmp_path: Path) -> None:
    run = sifu.open_run(own_run)
    old = run.keys().public_keys[-1].key
    new = run.rotate_key()
    folder = write_all(unpack(evidence_bytes(own_run, "strictly")), tmp_path / "bundle")
    assert json.loads((folder / "keys.json").read_text())["keys"] == [old, new]
    for key in (old, new):
        assert check(folder, "--public-key", key).returncode == 0


def test_what_is_not_done_or_does_not_verify_has_no_evidence(own_run: Path, tmp_path: Path, cli: Command) -> None:
    for request in ("waits", "nobody"):
        with pytest.raises(InputError, match="only a finished request"):
            sifu.write_evidence(own_run, request, tmp_path / "e.zip")
    for target in (tmp_path, tmp_path / "nowhere" / "e.zip"):
        with pytest.raises(InputError, match="folder"):
            sifu.write_evidence(own_run, "strictly", target)
    with connect(own_run) as connection:
        connection.execute("UPDATE nodes SET factor_sum = factor_sum + 1 WHERE node = 2")
    with pytest.raises(VerificationError):
        sifu.write_evidence(own_run, "strictly", tmp_path / "e.zip")
    assert cli("evidence", own_run, "strictly", "--out", tmp_path / "e.zip").code == 3
    assert not (tmp_path / "e.zip").exists()
