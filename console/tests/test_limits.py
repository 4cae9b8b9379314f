"""Limits of the console: hosts, addresses, and bodies that the published schema forbids."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from sifu.errors import InputError
from sifu_console.security import origin_of
from sifu_console.serving import Binding, check_binding

HOSTS = ("localhost", "127.0.0.1", "[::1]")


@pytest.mark.parametrize("seed", range(3))
def test_only_a_plain_host_name_with_a_port_is_answered(service: Any, seed: int) -> None:
    draw, stranger = random.Random(seed), service.stranger()
    for host in HOSTS:
        assert stranger.get("/login", headers={"Host": f"{host}:8765"}).status_code == 200
        for _ in range(20):
            user = draw.choice((":8765@evil.example", "@evil.example", ":@evil.example:80", "]evil.example", "/evil"))
            before = draw.choice(("", "evil.example@", "x:y@", "evil.example#", "evil.example?"))
            strange = draw.choice(
                (f"{host}{user}", f"{before or 'a@'}{host}", f"{host}:{draw.choice(['x', '', '999999'])}")
            )
            assert stranger.get("/login", headers={"Host": strange}).status_code == 400, strange


@pytest.mark.parametrize(
    "name", ["ann@desk.example.org", "https://desk.example.org", "desk.example.org:443", "a b", ""]
)
def test_a_name_that_is_no_host_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InputError, match="not a host name"):
        check_binding(Binding(names=[name]))
    check_binding(Binding(names=["desk.example.org", "::1"]))


def test_wrong_logins_count_for_a_whole_ipv6_network(service: Any) -> None:
    draw = random.Random(5)

    def attempt(address: str) -> int:
        client = TestClient(service.app, base_url="http://localhost", client=(address, 50000))
        return int(client.post("/login", data={"token": "sifu_wrong"}).status_code)

    network = [f"2001:db8:0:7:{draw.getrandbits(16):x}::{draw.getrandbits(16):x}" for _ in range(30)]
    assert [attempt(address) for address in network].count(429) >= 15
    assert attempt("2001:db8:0:8::1") == 401  # control: the neighbouring network
    assert attempt("10.0.0.7") == 401
    assert origin_of({"client": ("fe80::1%eth0", 1)}) == "fe80::/64"


VALID: dict[str, dict[str, Any]] = {
    "requests": {"request": "a", "clients": ["b"], "deadline_days": 3, "terms": {"epsilon": 1.0, "records": [1, "x"]}},
    "decisions": {"request": "a", "decision": "approved", "reason": "", "terms": ""},
    "carry-out": {"request": "a"},
    "plan": {"clients": ["b"], "terms": {"sigma": "auto", "level": "exact"}},
}
VALUES = (None, True, False, 0, 1, -1, 2.5, "", "a", "auto", "approved", "exact", [], [1], ["a"], [None], {}, {"a": 1})


def mutate(draw: random.Random, value: Any) -> Any:
    """Return a value with one random change."""
    if isinstance(value, dict) and draw.random() < 0.8:
        value, name = dict(value), draw.choice((*value, "terms", "epsilon", "x"))
        if name in value and draw.random() < 0.3:
            del value[name]
        else:
            value[name] = mutate(draw, value.get(name))
        return value
    if isinstance(value, list) and value and draw.random() < 0.7:
        return [mutate(draw, value[0]), *value[1:]]
    return copy.deepcopy(draw.choice(VALUES))


@pytest.mark.parametrize("path", VALID)
def test_bodies_are_refused_exactly_where_the_description_forbids_them(service: Any, path: str) -> None:
    """The API's answers agree with an independent reading of the schemas that it publishes."""
    document = service.stranger().get("/api/v1/openapi.json").json()
    (content,) = document["paths"][f"/api/v1/runs/{{run}}/{path}"]["post"]["requestBody"]["content"].values()
    judge = jsonschema.Draft202012Validator(content["schema"] | {"components": document["components"]})
    draw, north = random.Random(path), service.key("north")
    program = service.program("ann" if path == "decisions" else "otto")
    seen = set()
    for _ in range(50):
        body = VALID[path]
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            body = mutate(draw, body)
        answer, valid = program.post(f"/api/v1/runs/{north}/{path}", json=body), judge.is_valid(body)
        seen.add(valid)
        # What is valid is refused later, because the run has no such client or request; pydantic names what it found.
        assert answer.status_code in (400, 404), (body, answer.text)
        assert valid == (not re.match(r"(the body|[a-z_.0-9]+): ", answer.json()["error"])), (body, answer.text)
    assert seen == {True, False}
    assert program.get(f"/api/v1/runs/{north}/requests").json()["requests"] == []
