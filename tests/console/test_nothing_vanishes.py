"""What the console says it received stays in its filer's list until it is settled, and afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from sifu.requests.messages import ingest
from sifu.store.writer import RunWriter


def states(person: Any, key: str) -> dict[str, str]:
    listed = person.get(f"/api/v1/runs/{key}/requests").json()
    return {row["request"]: name for name in ("requests", "posted", "refused") for row in listed[name]}


@pytest.mark.parametrize("examined", [False, True])
def test_other_terms_under_an_id_are_refused(service: Any, examined: bool) -> None:
    key, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    path, body = f"/api/v1/runs/{key}/requests", {"clients": ["client-001"], "request": "mine"}
    assert rita.post(path, json=body).status_code == 201
    if examined:
        assert states(otto, key) == {"mine": "requests"}
    assert rita.post(path, json=body).status_code == 201
    for other in ({"clients": ["client-002"]}, {"terms": {"epsilon": 0.5}}, {"deadline_days": 3}):
        assert rita.post(path, json=body | other).status_code == 409
    assert states(rita, key) == {"mine": "requests" if examined else "posted"}
    assert states(otto, key) == {"mine": "requests"}


def test_a_refused_request_stays_in_its_filers_list(service: Any) -> None:
    key, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    path = f"/api/v1/runs/{key}/requests"
    assert rita.post(path, json={"clients": ["nobody"], "request": "mine"}).status_code == 201
    assert states(otto, key) == states(rita, key) == {"mine": "refused"}
    assert "mine" in service.browser("rita").get("/requests").text
    assert rita.post(path, json={"clients": ["client-001"], "request": "mine"}).status_code == 409
    assert states(rita, key) == {"mine": "refused"}


def test_a_request_refused_by_the_writing_process_stays_visible(service: Any) -> None:
    key, otto = service.key("north"), service.program("otto")
    path, body = f"/api/v1/runs/{key}/requests", {"clients": ["client-001"]}
    with RunWriter.open(service.folder / "north") as writer:
        for name in ("first", "second"):
            assert otto.post(path, json=body | {"request": name}).json()["status"] == "posted"
        ingest(writer)
    assert states(otto, key) == {"first": "requests", "second": "refused"}
