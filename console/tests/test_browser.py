"""A complete story in a real browser: system Chromium, driven by Playwright, against `sifu serve`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from provider_for_tests import ProviderForTests
from service_for_tests import start_console

import sifu
from free_ports import free_port
from run_tools import copy_run, query, small_spec
from sifu.report import write_report
from sifu.report.figures import FIGURES
from sifu_console.tokens import TokenFile, state_folder

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")
pytest.importorskip("axe_core_python")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
AXE = Path(str(files("axe_core_python").joinpath("axe.min.js"))).read_text(encoding="utf-8")
PATIENCE = 120_000
"""Timeout in milliseconds; a shared machine may be slow, and executing a request starts a process."""


@dataclass(frozen=True)
class Served:
    """Console in a separate process: its address, its folder and every person's token."""

    address: str
    folder: Path
    secrets: dict[str, str]
    process: subprocess.Popen[bytes]


@pytest.fixture
def served(approved_run: Path, tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "desk"
    folder.mkdir()
    copy_run(approved_run, folder / "north")
    late = sifu.open_run(folder / "north")
    late.request(["client-009"], "old-case", deadline_days=0, actor="rita")
    tokens = TokenFile(state_folder(folder))
    people = {"rita": "requester", "bob": "approver", "eve": "auditor", "otto": "operator"}
    secrets = {name: tokens.create(name, [role])[1] for name, role in people.items()}
    tokens.create("ann@hospital.example", ["approver"], sign_in=True)
    provider, port = ProviderForTests(), free_port()
    provider.claims = {"email": "ann@hospital.example", "email_verified": True}
    process = start_console(folder, port, "--sign-in", provider.issuer)
    yield Served(f"http://127.0.0.1:{port}", folder, secrets, process)
    process.kill()
    process.wait()
    provider.server.shutdown()


def serious_barriers(page: Any) -> list[str]:
    """Return the serious accessibility barriers that axe finds on a page."""
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")
    page.evaluate(AXE)
    violations = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{page.url}: {violation['id']} {[node['html'][:120] for node in violation['nodes']][:3]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]


def log_in(browser: Any, address: str, secret: str, **options: Any) -> Any:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(f"{address}/login")
    page.wait_for_function("document.activeElement.id === 'token'")  # the field has the focus
    page.keyboard.type(secret)  # the page works by keyboard
    page.keyboard.press("Enter")
    page.wait_for_selector(".me")
    return page


def test_the_story_in_a_browser(served: Served, tmp_path: Path) -> None:
    address, folder, secrets = served.address, served.folder, served.secrets
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        complaints: list[str] = []

        forged = browser.new_page()
        forged.goto(f"{address}/login")
        forged.fill("#token", "sifu_forged")
        forged.keyboard.press("Enter")
        forged.wait_for_selector("text=That token does not work")

        rita = log_in(browser, address, secrets["rita"])
        rita.click("main a:has-text('north')")
        rita.fill("#clients", "client-003\nclient-004")
        rita.fill("#request", "case-1")
        rita.click("text=Submit request")
        rita.wait_for_selector("text=Request case-1: received")
        run = rita.url
        assert "case-1" not in run
        rita.goto(f"{run}/trail")
        rita.wait_for_selector("text=do not allow that")

        otto = log_in(browser, address, secrets["otto"], color_scheme="dark")
        otto.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        otto.goto(f"{run}/requests/2")
        otto.wait_for_selector("text=Not approved yet")
        assert otto.locator("button:has-text('Execute now')").count() == 0
        otto.evaluate("window.neverLoadedAgain = true")

        phone = {"viewport": {"width": 390, "height": 844}}
        ann = browser.new_context(**phone).new_page()
        ann.set_default_timeout(PATIENCE)
        ann.goto(f"{address}/login")
        ann.click("text=Sign in with your organisation")
        ann.wait_for_selector(".me:has-text('ann@hospital.example')")
        for person in (ann, log_in(browser, address, secrets["bob"], **phone)):
            person.goto(f"{run}/requests/2")
            person.click("button:has-text('Approve')")
            person.wait_for_selector("text=is approved")
            assert person.evaluate("document.documentElement.scrollWidth") <= 390  # no horizontal scrolling on a phone

        otto.wait_for_selector("button:has-text('Execute now')")  # the page shows the two approvals without a reload
        assert otto.evaluate("window.neverLoadedAgain") is True
        otto.check("#confirm-carry-out")
        otto.click("button:has-text('Execute now')")
        otto.wait_for_selector("text=is being executed")
        otto.evaluate("window.neverLoadedAgain = true")
        otto.wait_for_selector("text=The certificate in words")  # the certificate appears without a reload
        assert otto.evaluate("window.neverLoadedAgain") is True
        with otto.expect_download() as started:
            otto.click("text=Download the bundle")
        started.value.save_as(tmp_path / "bundle.json")
        assert sifu.verify(tmp_path / "bundle.json").holds

        eve = log_in(browser, address, secrets["eve"])
        eve.goto(run)
        eve.click("text=Verify now")
        eve.wait_for_selector(".badge:has-text('verified')")
        eve.goto(f"{run}/trail")
        eve.wait_for_selector("text=request approved")

        # A page of another site cannot act for a logged-in person.
        hostile = tmp_path / "hostile.html"
        hostile.write_text(
            f"<form method=post action='{run}/requests'><input name=clients value=client-005></form>"
            "<script>document.forms[0].submit()</script>"
        )
        other = otto.context.new_page()
        other.goto(hostile.as_uri())
        other.wait_for_selector("text=another site")
        browser.close()
    assert complaints == []
    assert sifu.verify(folder / "north").problems == []
    assert query(folder / "north", "SELECT COUNT(*) FROM requests") == [(2,)]


def test_a_killed_console_loses_nothing(served: Served) -> None:
    """After a kill right at the start of a request's execution, the work continues and is certified."""
    address, folder, secrets = served.address, served.folder, served.secrets
    run = sifu.open_run(folder / "north")
    for name in ("ann", "bob"):
        run.decide("old-case", "approved", actor=name)

    def call(path: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": f"Bearer {secrets['otto']}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", body, headers), timeout=60) as answer:
            return bytes(answer.read())

    (row,) = json.loads(call("/api/v1/runs"))["runs"]
    call(f"/api/v1/runs/{row['run']}/carry-out", b'{"request": "old-case"}')
    served.process.kill()
    end = time.monotonic() + PATIENCE / 1000
    while run.request_record("old-case").status != "done" and time.monotonic() < end:
        time.sleep(0.2)
    assert run.request_record("old-case").status == "done"
    assert run.verify().problems == []


OVER_ALL = ("/", "/requests", "/overview", "/people", "/trail")
LONG_AND_HOSTILE = "<img src=x onerror=alert(1)>" + "Sankt-Elisabeth-Krankenhaus-" * 6
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1400, "height": 900}},
    "phone in the dark": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}},
}
OUT_OF_REACH = """[...document.querySelectorAll('*')].filter(part => part.scrollWidth > part.clientWidth + 1
    && ['auto', 'scroll'].includes(getComputedStyle(part).overflowX) && part.tabIndex < 0)
    .map(part => part.outerHTML)"""
"""Scroll areas that cannot be reached by keyboard."""
LETTERS = """[...document.querySelectorAll('.sheet svg')].filter(svg => svg.clientWidth)
    .map(svg => 7.5 * svg.clientWidth / svg.viewBox.baseVal.width)"""
"""Size of the smallest text in each figure of the report, in pixels."""


def test_an_overdue_request_among_ten_is_seen_first_on_every_screen(tmp_path: Path) -> None:
    """The overdue request comes first on every screen; pictures of the pages go to the folder in SIFU_PICTURES."""
    folder = tmp_path / "desk"
    rows = [([[0.1 * k, 0.2], [0.3, 0.1 * k]], [0, 1]) for k in range(14)]
    clients = {LONG_AND_HOSTILE if k == 0 else f"client-{k:03d}": data for k, data in enumerate(rows)}
    spec = small_spec(model={"kind": "logistic"}, stop={"max_rounds": 3}, requests={"approval": "one"}) | {"data": {}}
    run = sifu.train(spec, run=folder / "wards", clients=clients)
    run.request([LONG_AND_HOSTILE], "overdue-one", deadline_days=0, actor="rita")
    for number in range(1, 10):
        run.request([f"client-{number:03d}"], f"case-{number}", deadline_days=3 * number, actor="rita")
    for request in ("case-8", "case-9"):
        run.decide(request, "approved", actor="ann")
    run.forget(request="case-8")
    write_report(folder / "wards")
    _, secret = TokenFile(state_folder(folder)).create("otto", ["operator"])
    port = free_port()
    process = start_console(folder, port, days_later=1)
    pictures = Path(os.environ.get("SIFU_PICTURES") or tmp_path)
    dialogs: list[str] = []
    barriers: list[str] = []
    try:
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for look, options in LOOKS.items():
                page = log_in(browser, f"http://127.0.0.1:{port}", secret, **options)
                page.on("dialog", lambda dialog: dialogs.append(dialog.message))
                page.wait_for_selector("text=overdue")
                assert "overdue-one" in page.locator("tbody tr").first.inner_text()
                page.screenshot(path=pictures / f"home-{look}.png", full_page=True)
                width = options["viewport"]["width"]
                for name, way in (
                    ("run", "main a:has-text('wards') >> nth=0"),
                    ("overdue", "a:has-text('overdue-one')"),
                ):
                    page.click(way)
                    page.wait_for_selector(".badge")
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, (look, name)
                    page.screenshot(path=pictures / f"{name}-{look}.png", full_page=True)
                request, wards = page.url, page.url.split("/requests/")[0]
                of_run = [
                    f"{wards}{path}" for path in ("", "/clients", "/trail", "/requests/9", "/requests/999", "/report")
                ]
                for path in (*OVER_ALL, "/login", request, *of_run, "the comparison of methods"):
                    if path.startswith("the comparison"):
                        page.goto(wards)
                        page.fill("#clients", "client-012")
                        page.click("text=Compare methods first")
                        page.wait_for_selector("text=Side by side")
                    else:
                        page.goto(path if path.startswith("http") else f"http://127.0.0.1:{port}{path}")
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, (look, path)
                    if path.endswith("/report"):
                        messages = page.evaluate(LETTERS)
                        assert len(messages) == len(FIGURES)
                        assert min(messages) > 9.0, look  # legible without zooming
                        table = page.locator(".scroll:has(caption:text-is('Requests'))")
                        assert table.evaluate("table => table.scrollWidth <= table.clientWidth"), look
                    barriers += serious_barriers(page)
                    assert page.evaluate(OUT_OF_REACH) == [], (look, path)
                page.goto(f"http://127.0.0.1:{port}/")
                page.click("a:has-text('case-9')")
                page.wait_for_selector("text=made from Python with custom data or a custom model")
                assert page.locator("button:has-text('Execute now')").count() == 0
            page.set_content("<button></button>")
            assert serious_barriers(page) != []  # control: axe reports barriers on a page that has some
            browser.close()
    finally:
        process.kill()
        process.wait()
    assert dialogs == []
    assert barriers == []
