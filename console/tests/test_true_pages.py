"""Pages show the truth and the important things first: changed terms, counted approvals, finished jobs, errors in
place.
"""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from sifu.choices import terms_on_offer
from sifu_console.jobs import Job, Jobs


def badges_of(page: str) -> list[str]:
    return re.findall(r'<span class="badge [^"]*">([^<]*)</span>', page)


def test_changed_terms_come_first_and_the_others_are_folded(service: Any) -> None:
    north = service.key("north")
    otto = service.browser("otto")
    otto.send(f"/runs/{north}/requests", clients="client-003", request="a", epsilon="3", retention="strict")
    otto.send(f"/runs/{north}/requests", clients="client-004", request="b")
    term = re.compile(r'<td data-label="Term">(\w+)</td>')
    open_part, _, folded = otto.get(f"/runs/{north}/requests/1").text.partition("terms with the run")
    assert term.findall(open_part) == ["epsilon", "retention"]
    assert sorted(term.findall(folded)) == sorted(set(terms_on_offer()) - {"epsilon", "retention"})
    assert f"<summary>{len(terms_on_offer()) - 2} " in open_part
    open_part, _, folded = otto.get(f"/runs/{north}/requests/2").text.partition("terms with the run")
    assert term.findall(open_part) == []
    assert len(term.findall(folded)) == len(terms_on_offer())


def test_a_request_says_how_many_have_approved_it(service: Any) -> None:
    north = service.key("north")
    rita = service.browser("rita")
    rita.send(f"/runs/{north}/requests", clients="client-003", request="a")
    pages = (f"/runs/{north}", f"/runs/{north}/requests/1", "/", "/requests", "/overview")
    found = []
    for approver in ("", "ann", "bob"):
        if approver:
            service.approve(approver, north, 1)
        page = service.browser("otto")
        found.append([[badge for badge in badges_of(page.get(path).text) if "appr" in badge] for path in pages])
    none, one, both = found
    assert none == [["waiting for approval"]] * len(pages)
    assert one == [["1 of 2 approvals"]] * len(pages)
    assert both == [["approved"]] * len(pages)
    shown = service.browser("eve").get("/requests?state=waiting+for+approval").text
    assert "1 of 2" not in shown  # control: once both have approved, no such list shows the request


def test_a_finished_job_is_not_listed_as_running(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    north = service.key("north")
    listed = [
        Job(state, "verify", north, f"person-{state}", 0.0, state=state)  # type: ignore[arg-type]
        for state in ("running", "failed", "done")
    ]
    monkeypatch.setattr(Jobs, "of_run", lambda *_: listed)
    page = service.browser("otto").get(f"/runs/{north}").text
    sections = dict(re.findall(r"<h2>(Running now|Finished jobs)</h2>(.*?)</section>", page, re.DOTALL))
    assert re.findall(r"by person-(\w+)", sections["Running now"]) == ["running"]
    assert re.findall(r"by person-(\w+)", sections["Finished jobs"]) == ["failed", "done"]
    del listed[0]
    assert "Running now" not in service.browser("otto").get(f"/runs/{north}").text


BAD = {
    "clients": "nobody", "epsilon": "abc", "delta": "2", "sigma": "x", "records": "99999",
    "before_after": "1", "deadline_days": "x",
    "request": "not an id",
}  # fmt: skip


def test_an_error_is_beside_its_field(service: Any) -> None:
    north = service.key("north")
    otto = service.browser("otto")
    for field, value in BAD.items():
        answer = otto.send(f"/runs/{north}/requests", **{"clients": "client-003", field: value})
        page = html.unescape(answer.text)
        assert re.findall(r'role="alert" id="problem-(\w+)"', page) == [field], field
        marked = re.findall(r'<(?:input|textarea|select) id="(?:term-)?(\w+)"[^>]*aria-invalid="true"', page)
        assert marked == [field], field
    assert 'role="alert"' not in otto.send(f"/runs/{north}/requests", clients="client-003").text  # control
