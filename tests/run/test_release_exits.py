"""Outputs of a run with noise on releases: none contains the solved head, its scores or its accuracy."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command

NOISE, DROWNING = 0.05, 100.0
SPEC = {
    "model": {"kind": "ridge"},
    "data": {"clients": 6, "samples_per_client": 60},
    "features": {"kind": "random_fourier", "count": 32, "bandwidth": 4.0},
    "ridge": {"regularisation": 0.05},
}
HAND_OUT_MODELS = {"export", "export onnx", "predict", "Run.model"}
"""Outputs that contain the model or its scores."""
MEASURE = {
    "status",
    "evaluate",
    "evaluate on training data",
    "forget",
    "console /api/v1/runs/{run}",
}
"""Outputs that contain an accuracy."""


def _trained(folder: Path, noise: float) -> sifu.Run:
    return sifu.train(SPEC | {"release": {"noise": noise}}, run=folder)


def _pieces(content: bytes) -> Iterator[bytes]:
    """Yield the content, and the files in it if it is an archive."""
    yield content
    if content.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                yield from _pieces(archive.read(name))


def _shows(content: bytes, secrets: np.ndarray) -> bool:
    """Return whether most of these numbers occur in the content, as float64, float32, or text with six digits."""
    pieces = list(_pieces(content))

    def written(value: float) -> bool:
        digits = f"{abs(value):.15e}".split("e")[0].replace(".", "")[:6]
        wanted = (np.float64(value).tobytes(), np.float32(value).tobytes(), digits.encode())
        return any(form in piece for piece in pieces for form in wanted)

    return sum(map(written, secrets)) > len(secrets) / 2


def _pages(run: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every page and API answer of the console that needs no form."""
    from starlette.testclient import TestClient

    from sifu_console import finding, json_api, pages, request_pages
    from sifu_console.app import Settings, make_app
    from sifu_console.tokens import TokenFile, state_folder

    state = state_folder(run.parent)
    secret = TokenFile(state).create("eve", ["auditor", "operator", "requester", "approver"])[1]
    app = make_app(Settings([run.parent], state))
    program = TestClient(app, base_url="http://localhost", headers={"Authorization": f"Bearer {secret}"})
    browser = TestClient(app, base_url="http://localhost", follow_redirects=True)
    assert browser.post("/login", data={"token": secret}).status_code == 200
    key = program.get("/api/v1/runs").json()["runs"][0]["run"]
    routes = [route for part in (pages, request_pages, finding, json_api) for route in part.router.routes]
    for path in [route.path for route in routes if route.methods and "GET" in route.methods]:
        client = program if path.startswith("/api") else browser
        answer = client.get(path.replace("{run}", key).replace("{number:int}", "1"))
        assert answer.status_code in (200, 404), (path, answer.text)
        yield f"console {path}", answer.content


def _ways_out(run: sifu.Run, folder: Path, command: Command) -> dict[str, bytes]:
    """Return all outputs of a run by name, except `sifu backup`, which copies the folder itself."""
    here, out = run.folder, folder / "out"
    out.mkdir()
    x = np.random.default_rng(1).uniform(0.0, 1.0, size=(20, 64)).astype(np.float32)
    np.savez(out / "rows.npz", x=x)
    forgotten = command("forget", here, "--clients", "client-001", "--format", "json")
    assert forgotten.code == 0, forgotten.err
    found = {"forget": forgotten.out.encode()}
    calls: dict[str, tuple[Any, ...]] = {
        "export": ("export", here, "--model", out / "model.safetensors"),
        "export onnx": ("export", here, "--model", out / "model.onnx"),
        "predict": ("predict", out / "model.safetensors", out / "rows.npz"),
        "status": ("status", here, "--all"),
        "evaluate": ("evaluate", here),
        "evaluate on training data": ("evaluate", here, "--on", "training"),
        "plan": ("plan", here, "--clients", "client-002", "--all"),
        "report": ("report", here, "--output", out / "report.html"),
        "verify": ("verify", here, "--all"),
        "certificate": ("certificate", here, "r1", "--public"),
        "auditor's certificate": ("certificate", here, "r1", "--all"),
        "bundle": ("certificate", here, "r1", "--bundle", out / "bundle.json"),
        "audit": ("audit", here, "--output", out / "audit", "--replays", "20"),
        "update": ("update", here),
    }
    for name, words in calls.items():
        before = set(out.rglob("*"))
        answer = command(*words, "--format", "json")
        assert answer.code == 0, (name, answer.err)
        written = [path.read_bytes() for path in sorted(set(out.rglob("*")) - before) if path.is_file()]
        found[name] = b"\n".join([answer.out.encode(), answer.err.encode(), *written])
    parameters = (value.detach().numpy().astype(np.float64).tobytes() for value in run.model().parameters())
    return found | {"Run.model": b"".join(parameters)} | dict(_pages(here))


def _secrets(run: sifu.Run) -> np.ndarray:
    """Return the largest weights of the solved head."""
    with run.reader() as reader:
        head = reader.load_model(reader.tip)
    return head[np.argsort(-np.abs(head))[:9]]


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_no_way_out_shows_the_solved_head(tmp_path: Path, cli: Command, noise: float) -> None:
    run = _trained(tmp_path / "runs" / "run", noise)
    found = _ways_out(run, tmp_path, cli)
    secrets = _secrets(run)
    showing = {name for name, content in found.items() if _shows(content, secrets)}
    expected = HAND_OUT_MODELS - {"predict"} if noise == 0.0 else set()
    assert showing == expected, "without noise the model is the solved head, and these ways out must show it"
    module = sifu.load_model(tmp_path / "out" / "model.safetensors")
    x = np.load(tmp_path / "out" / "rows.npz")["x"]
    with run.reader() as reader:
        weights = reader.load_model(reader.tip).reshape(-1, 10)
    scores = (module.features(x) @ weights[:-1] + weights[-1])[:3].ravel()
    assert _shows(found["predict"], scores) == (noise == 0.0)


def _accuracies(value: Any, name: str = "") -> Iterator[float]:
    """Yield every number under a key that names an accuracy."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _accuracies(inner, f"{name} {key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _accuracies(inner, name)
    elif isinstance(value, float) and re.search(r"accuracy", name) and "target" not in name:
        yield value


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON objects that start at the beginning of a line."""
    decoder, end = json.JSONDecoder(), 0
    for start in re.finditer(r"(?m)^\{", text):
        if start.start() >= end:
            try:
                value, end = decoder.raw_decode(text, start.start())
            except ValueError:
                continue
            yield value


@pytest.mark.parametrize("noise", [0.0, DROWNING])
def test_no_way_out_shows_an_accuracy_of_the_solved_head(tmp_path: Path, cli: Command, noise: float) -> None:
    """The noise dominates the head, so any accuracy far above guessing would be the solved head's."""
    run = _trained(tmp_path / "runs" / "run", noise)
    seen = dict.fromkeys(MEASURE, 0)
    for name, content in _ways_out(run, tmp_path, cli).items():
        for answer in _objects(content.decode(errors="replace")):
            high = [figure for figure in _accuracies(answer) if figure > 0.6]
            assert not (noise and high), (name, high)
            seen[name] = seen.get(name, 0) + len(high)
    if noise == 0.0:
        assert all(seen[name] for name in MEASURE), seen
