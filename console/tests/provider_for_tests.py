"""OpenID Connect provider for tests: it signs every visitor in at once as the configured person."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey


class ProviderForTests:
    """Provider on localhost; `claims` are the claims about the next visitor."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {}
        self.discovery: dict[str, Any] = {}
        """Overrides of the provider's discovery document."""
        self.signing_key = self.key = RSAKey.generate_key(2048, {"kid": "one"})
        self.codes: dict[str, dict[str, str]] = {}
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.get(self)

            def do_POST(self) -> None:
                provider.post(self)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        address = urlsplit(request.path)
        if address.path == "/.well-known/openid-configuration":
            places = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/keys"}
            named = {name: self.issuer + path for name, path in places.items()}
            answer(request, {"issuer": self.issuer} | named | self.discovery)
        elif address.path == "/keys":
            answer(request, {"keys": [self.key.as_dict(private=False)]})
        else:
            asked_for = {name: values[0] for name, values in parse_qs(address.query).items()}
            code = secrets.token_hex(8)
            self.codes[code] = asked_for
            back = urlencode({"code": code, "state": asked_for["state"]})
            request.send_response(302)
            request.send_header("Location", f"{asked_for['redirect_uri']}?{back}")
            request.end_headers()

    def post(self, request: BaseHTTPRequestHandler) -> None:
        """Exchange a code, once, and only with the verifier of its challenge."""
        body = request.rfile.read(int(request.headers["content-length"])).decode()
        fields = {name: values[0] for name, values in parse_qs(body).items()}
        agreed = self.codes.pop(fields["code"], {})
        digest = hashlib.sha256(fields.get("code_verifier", "").encode()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != agreed.get("code_challenge"):
            answer(request, {"error": "invalid_grant"}, 400)
            return
        now = int(time.time())
        claims = {"iss": self.issuer, "sub": "7", "aud": "sifu", "iat": now, "exp": now + 60, "nonce": agreed["nonce"]}
        signed = jwt.encode({"alg": "RS256", "kid": "one"}, claims | self.claims, self.signing_key)
        answer(request, {"access_token": "x", "token_type": "Bearer", "id_token": signed})


def answer(request: BaseHTTPRequestHandler, content: dict[str, Any], status: int = 200) -> None:
    body = json.dumps(content).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
