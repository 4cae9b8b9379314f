"""Secret draws of the library: `secret_draws` fixes all of them in tests, and a test can ask for system randomness."""

from __future__ import annotations

import ast
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "sifu"
NOT_FIXED = {"urandom", "getrandom", "SystemRandom", "uuid1", "uuid4", "randbits", "randbelow"}
SYSTEM = secrets.token_bytes


def draws_elsewhere(source: str) -> Iterator[str]:
    """Yield draws that the fixture does not fix: other sources of randomness, and names bound before it runs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "secrets":
            yield "from secrets import"
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in NOT_FIXED:
                yield name
        unseeded = isinstance(node, ast.Call) and not node.args and not node.keywords
        if unseeded and ast.unparse(node.func).rpartition(".")[2] in {"default_rng", "Random"}:  # type: ignore[attr-defined]
            yield ast.unparse(node)


def test_the_library_draws_secrets_in_no_other_way() -> None:
    elsewhere = {
        f"{path.relative_to(SOURCES)}: {draw}"
        for path in sorted(SOURCES.rglob("*.py"))
        for draw in draws_elsewhere(path.read_text(encoding="utf-8"))
    }
    assert elsewhere == set()


@pytest.mark.parametrize(
    "source",
    [
        "os.urandom(8)",
        "from secrets import token_hex",
        "np.random.default_rng()",
        "uuid.uuid4()",
        "random.SystemRandom",
    ],
)
def test_control_another_source_is_noticed(source: str) -> None:
    assert len(list(draws_elsewhere(source))) == 1


def test_draws_follow_from_the_name_of_the_test(request: pytest.FixtureRequest) -> None:
    expected = random.Random(request.node.nodeid)
    assert secrets.token_hex(8) == expected.randbytes(8).hex()
    key = Ed25519PrivateKey.generate().private_bytes_raw()
    assert key == expected.randbytes(32)


@pytest.mark.system_secrets
def test_a_test_can_ask_for_the_systems() -> None:
    assert secrets.token_bytes is SYSTEM
    assert secrets.token_hex(16) != secrets.token_hex(16)
