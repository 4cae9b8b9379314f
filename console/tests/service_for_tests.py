"""Console for tests, with people, their browsers and their programs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

import sifu_console
from run_tools import SOURCES, environment

PEOPLE = {
    "rita": ["requester"],
    "ann": ["approver"],
    "bob": ["approver"],
    "eve": ["auditor"],
    "otto": ["operator"],
}


@dataclass
class ServiceForTests:
    """Console, its folder, and the tokens of its people."""

    folder: Path
    secrets: dict[str, str]
    app: Any

    def browser(self, name: str) -> Browser:
        """Return a browser in which a person is logged in."""
        client = TestClient(self.app, base_url="http://localhost", follow_redirects=True)
        answer = client.post("/login", data={"token": self.secrets[name]})
        assert answer.status_code == 200, answer.text
        return Browser(client)

    def program(self, name: str) -> Any:
        """Return a program with a person's token."""
        client = TestClient(self.app, base_url="http://localhost", follow_redirects=False)
        client.headers["Authorization"] = f"Bearer {self.secrets[name]}"
        return client

    def stranger(self) -> Any:
        """Return a visitor without a token."""
        return TestClient(self.app, base_url="http://localhost", follow_redirects=False)

    def approve(self, name: str, key: str, number: int) -> Any:
        """Approve a request through the API, with the terms that it shows."""
        program = self.program(name)
        shown = program.get(f"/api/v1/runs/{key}/requests/{number}").json()
        body = {"request": shown["request"], "decision": "approved", "terms": shown["terms_digest"]}
        return program.post(f"/api/v1/runs/{key}/decisions", json=body)

    def key(self, run: str) -> str:
        """Return the key of a run by its folder's name."""
        runs = self.program("eve").get("/api/v1/runs").json()["runs"]
        return next(row["run"] for row in runs if row["name"] == run)


@dataclass
class Browser:
    """Browser that submits forms with the token of the page, as a real page does."""

    client: Any

    def get(self, path: str) -> Any:
        return self.client.get(path)

    def send(self, path: str, **fields: str) -> Any:
        page = self.client.get("/").text
        csrf = re.search(r'name="csrf" value="([^"]+)"', page)
        assert csrf
        return self.client.post(path, data={"csrf": csrf[1]} | fields)

    def approve(self, path: str, number: int) -> Any:
        """Approve a request from its page, with the page's digest of the shown terms."""
        digest = re.search(r'name="terms" value="([^"]+)"', self.get(f"{path}/requests/{number}").text)
        request = re.search(r'name="request" value="([^"]+)"', self.get(f"{path}/requests/{number}").text)
        assert digest
        assert request
        fields = {"request": request[1], "decision": "approved", "number": str(number), "terms": digest[1]}
        return self.send(f"{path}/decide", **fields)


def wait_for_jobs(service: Any, key: str, seconds: float = 120.0) -> list[dict[str, Any]]:
    """Return the jobs of a run once all of them have ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        jobs = service.program("otto").get(f"/api/v1/runs/{key}").json()["jobs"]
        if jobs and all(job["state"] != "running" for job in jobs):
            return jobs
        time.sleep(0.2)
    raise AssertionError("a job did not end")


DAYS_LATER = """
import datetime
from sifu.requests import deadlines
days_left = deadlines.days_until
deadlines.days_until = lambda deadline, now: days_left(deadline, now + datetime.timedelta(days=DAYS))
from sifu.cli.main import main
main()
"""
"""Program of a console whose clock is some days ahead: a request due today is overdue there."""


def start_console(folder: Path, port: int, *options: str, days_later: int = 0) -> subprocess.Popen[bytes]:
    program = ["-c", DAYS_LATER.replace("DAYS", str(days_later))]
    process = subprocess.Popen(
        [sys.executable, *program, "serve", str(folder), "--port", str(port), *options],
        env=environment(PYTHONPATH=f"{SOURCES}:{Path(sifu_console.__file__).parents[1]}"),
        stdout=subprocess.DEVNULL,
    )
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/login", timeout=5).close()
            return process
        except (urllib.error.URLError, OSError):
            assert process.poll() is None
            time.sleep(0.1)
    raise AssertionError("the console does not answer")
