"""Sign-in through OpenID Connect, against a provider on localhost."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from provider_for_tests import ProviderForTests

import sifu
from run_tools import Command
from sifu.errors import InputError
from sifu_console.app import Settings, make_app
from sifu_console.sign_in import SignIn
from sifu_console.tokens import TokenFile, state_folder

ANN = {"email": "Ann@hospital.example", "email_verified": True}


@pytest.fixture
def provider() -> Iterator[ProviderForTests]:
    provider = ProviderForTests()
    yield provider
    provider.server.shutdown()


@pytest.fixture
def signing_service(service: Any, provider: ProviderForTests) -> Any:
    """Return the service with a provider and one approver who signs in there."""
    TokenFile(state_folder(service.folder)).create("ann@hospital.example", ["approver"], sign_in=True)
    settings = Settings(
        [service.folder], state_folder(service.folder), provider=SignIn(provider.issuer, "sifu", "secret")
    )
    service.app = make_app(settings)
    return service


def sign_in(service: Any) -> tuple[Any, Any]:
    """Send a browser to the provider and back; return the browser and the console's last answer."""
    browser = service.stranger()
    sent = browser.get("/sign-in")
    assert sent.status_code == 302
    back = httpx.get(sent.headers["location"], follow_redirects=False).headers["location"]
    return browser, browser.get(f"{urlsplit(back).path}?{urlsplit(back).query}")


def test_an_approver_signs_in_and_approves_under_their_identity(
    signing_service: Any, provider: ProviderForTests
) -> None:
    north = signing_service.key("north")
    body = {"clients": ["client-003"], "request": "a"}
    assert signing_service.program("rita").post(f"/api/v1/runs/{north}/requests", json=body).status_code == 201
    provider.claims = ANN
    browser, answer = sign_in(signing_service)
    assert "You are signed in" in answer.text
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    page = browser.get(f"/runs/{north}/requests/1").text
    fields = {name: page.split(f'name="{name}" value="')[1].split('"')[0] for name in ("csrf", "request", "terms")}
    browser.post(f"/runs/{north}/decide", data=fields | {"decision": "approved", "number": "1"})
    status = sifu.open_run(signing_service.folder / "north").request_record("a")
    assert status.approvals == ("ann@hospital.example",)


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        (ANN | {"email_verified": False}, 403),
        ({"email": "ann@hospital.example"}, 403),
        ({"email": "eve@hospital.example", "email_verified": True}, 403),
        ({"email": "otto", "email_verified": True}, 403),  # a person with a token cannot sign in through the provider
        (ANN | {"iss": "https://other.example"}, 401),
        (ANN | {"aud": "another"}, 401),
        (ANN | {"aud": "another", "azp": "sifu"}, 401),  # identifies the person to another program
        (ANN | {"nonce": "another"}, 401),
        (ANN | {"exp": 1000}, 401),
    ],
)
def test_others_do_not_get_in(signing_service: Any, provider: ProviderForTests, claims: Any, status: int) -> None:
    provider.claims = claims
    browser, answer = sign_in(signing_service)
    assert answer.status_code == status
    assert browser.get("/").status_code == 303  # back to the login page


def test_a_forged_signature_or_a_way_back_without_a_beginning_opens_nothing(
    signing_service: Any, provider: ProviderForTests
) -> None:
    from joserfc.jwk import RSAKey

    provider.claims = ANN
    browser = signing_service.stranger()
    location = browser.get("/sign-in").headers["location"]
    back = httpx.get(location, follow_redirects=False).headers["location"]
    path = f"/sign-in/back?{urlsplit(back).query}"
    assert signing_service.stranger().get(path).status_code == 401  # the callback link in another browser
    assert browser.get(path.replace("state=", "state=x")).status_code == 401
    provider.signing_key = RSAKey.generate_key(2048, {"kid": "one"})
    assert sign_in(signing_service)[1].status_code == 401
    assert parse_qs(urlsplit(location).query)["code_challenge_method"] == ["S256"]


def test_a_revoked_person_is_out_at_once_and_no_secret_opens_their_entry(
    signing_service: Any, provider: ProviderForTests, cli: Command
) -> None:
    provider.claims = ANN
    browser, _ = sign_in(signing_service)
    assert browser.get("/").status_code == 200
    (entry,) = (token for token in TokenFile(state_folder(signing_service.folder)).all() if "@" in token.name)
    for secret in (entry.hash, "", "ann@hospital.example"):
        assert signing_service.stranger().post("/login", data={"token": secret}).status_code == 401
    assert cli("token", "revoke", signing_service.folder, "ann@hospital.example").code == 0
    assert browser.get("/").status_code == 303
    assert sign_in(signing_service)[1].status_code == 403


def test_an_address_belongs_to_the_account_that_first_signed_in(
    signing_service: Any, provider: ProviderForTests, cli: Command
) -> None:
    provider.claims = ANN
    assert sign_in(signing_service)[1].status_code == 200
    provider.claims = ANN | {"sub": "8"}  # the provider gave the address to another person
    assert sign_in(signing_service)[1].status_code == 403
    provider.claims = ANN | {"sub": "7", "email": "ANN@hospital.example"}
    assert sign_in(signing_service)[1].status_code == 200
    # One account does not approve under two names.
    TokenFile(state_folder(signing_service.folder)).create("ben@hospital.example", ["approver"], sign_in=True)
    provider.claims = ANN | {"email": "ben@hospital.example"}
    assert sign_in(signing_service)[1].status_code == 403
    # The remedy, which is also the control: the entry is created again.
    assert cli("token", "revoke", signing_service.folder, "ann@hospital.example").code == 0
    TokenFile(state_folder(signing_service.folder)).create("ann@hospital.example", ["approver"], sign_in=True)
    provider.claims = ANN | {"sub": "8"}
    assert sign_in(signing_service)[1].status_code == 200


@pytest.mark.parametrize("issuer", ["https://other.example", None, 7, "http://127.0.0.1"])
def test_a_discovery_document_of_another_issuer_is_refused(
    signing_service: Any, provider: ProviderForTests, issuer: Any
) -> None:
    provider.claims = ANN | {"iss": issuer}
    provider.discovery = {"issuer": issuer}
    answer = signing_service.stranger().get("/sign-in")
    assert answer.status_code == 400
    assert "does not answer as an OpenID Connect provider" in answer.text


def lookalikes(draw: random.Random, address: str) -> set[str]:
    """Return other addresses that become equal to `address` under Unicode compatibility forms or case folding."""
    folded = {}
    for code in range(0x80, 0x30000):
        for message in {chr(code).casefold(), unicodedata.normalize("NFKC", chr(code)).casefold()}:
            folded.setdefault(message, []).append(chr(code))
    found = set()
    for _ in range(40):
        start = draw.randrange(len(address))
        part = address[start : start + draw.choice((1, 1, 2, 3))]
        if part.casefold() in folded:
            found.add(address[:start] + draw.choice(folded[part.casefold()]) + address[start + len(part) :])
    return found


@pytest.mark.parametrize("seed", range(4))
def test_no_lookalike_of_an_address_signs_in(tmp_path: Path, seed: int) -> None:
    draw, address = random.Random(seed), "strauss.office@hospital.example"
    tokens = TokenFile(tmp_path)
    tokens.create(address, ["approver"], sign_in=True)
    others = lookalikes(draw, address) | {"strau\u00df.office@hospital.example", f" {address}", f"{address}\u200b"}
    assert len(others) > 10
    for other in sorted(others):
        assert tokens.signed_in(other, "https://login.example", "eve") is None, other
        assert tokens.owner(other) is None
    shouted = "".join(draw.choice((message, message.upper())) for message in address)
    assert tokens.signed_in(shouted, "https://login.example", "7") is not None


def test_a_console_without_a_provider_offers_none(service: Any) -> None:
    assert service.stranger().get("/sign-in").status_code == 404
    assert "Sign in with your organisation" not in service.stranger().get("/login").text
    with pytest.raises(InputError, match="sent unencrypted"):
        SignIn("http://provider.example", "sifu", "")
