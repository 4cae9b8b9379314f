"""One small run of each kind that sifu has, with its final model, levels, Psi and charges pinned in guards.json.

    python tests/guards/guards.py --record [NAME ...]     writes what this machine computes into guards.json

Record again only after an intended change of numbers, in a commit that says why. Digests of models depend on the
machine, so they are kept for each `machine_key`; levels, Psi and charges hold everywhere. The runs go through
`import sifu` alone; only `statements` reads certificates.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from safetensors.numpy import load_file

import sifu
import sifu_verifier
from machine import machine_key, one_thread
from secret_draws import fix_draws

RECORDED = Path(__file__).resolve().with_name("guards.json")
LINEAR: dict[str, Any] = {
    "seed": 3,
    "data": {"clients": 10, "samples_per_client": 10},
    "local": {"rate": 0.02, "steps": 3},
    "stop": {"target": 0.0, "max_rounds": 12},
}
RIDGE: dict[str, Any] = {
    "seed": 3,
    "data": {"clients": 6, "samples_per_client": 20, "preprocessing": "fixed"},
    "model": {"kind": "ridge"},
    "features": {"kind": "random_fourier", "count": 32, "bandwidth": 4.0},
    "ridge": {"regularisation": 0.05},
}
LOOP: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "local": {"rate": 0.5, "steps": 1},
    "regularity": {"kind": "assumed", "factor": 1.0},
    "stop": {"max_rounds": 5, "target": 0.0},
}
BACKBONE = "guarded_backbone:make"
sifu.allow_code(BACKBONE)


@dataclass(frozen=True)
class Request:
    """A request for one client."""

    client: str
    terms: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Guard:
    """A run: its spec, its requests in order, and the number of clients that join last."""

    spec: dict[str, Any]
    requests: tuple[Request, ...]
    joins: int = 0
    noised: bool = False
    loop: bool = False


def with_sections(base: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a spec whose sections have other or additional keys."""
    return base | {name: base.get(name, {}) | values for name, values in sections.items()}


def noised(*clients: str, sigma: float = 0.03) -> tuple[Request, ...]:
    """Return requests that add noise of the same size."""
    return tuple(Request(client, {"method": "sifu", "sigma": sigma}) for client in clients)


SCRATCH = (Request("client-002", {"method": "scratch"}), Request("client-005", {"method": "scratch"}))
THREE = ("client-003", "client-001", "client-007")
GUARDS: dict[str, Guard] = {
    "linear, three requests with noise": Guard(LINEAR, noised(*THREE), noised=True),
    "linear, Poisson participation": Guard(
        with_sections(LINEAR, server={"participation": "poisson(0.6)"}, local={"batch": 4, "momentum": 0.5}),
        noised(*THREE, sigma=0.05),
        noised=True,
    ),
    "strongly convex": Guard(with_sections(LINEAR, local={"weight_decay": 0.5}), noised(*THREE), noised=True),
    "scratch": Guard(with_sections(LINEAR, local={"rate": "auto"}), SCRATCH),
    "network in groups": Guard(
        with_sections(
            LINEAR,
            data={"clients": 8},
            model={"kind": "mlp"},
            groups={"count": 3, "rounds": 2},
            stop={"max_rounds": 5},
            local={"batch": 5, "momentum": 0.9},
            regularity={"kind": "assumed"},
        ),
        (Request("client-004", {"method": "groups"}), Request("client-006", {"method": "groups"})),
    ),
    "closed form, Fourier features": Guard(RIDGE, (Request("client-001"), Request("client-004"))),
    "closed form, deep features": Guard(
        RIDGE | {"features": {"kind": "module", "module": BACKBONE}}, (Request("client-001"),)
    ),
    "closed form, records": Guard(RIDGE, (Request("client-002", {"records": [0, 7, 11]}), Request("client-002"))),
    "closed form, a join": Guard(
        with_sections(RIDGE, model={"outputs": 3}), (Request("client-001"),), joins=2
    ),
    "closed form, release noise": Guard(
        with_sections(RIDGE, release={"noise": 0.05}), (Request("client-001"), Request("client-003")), noised=True
    ),
    "server loop": Guard(LOOP, (*noised("site-1", "site-4", sigma=0.3), Request("site-2", {"method": "scratch"})),
                         noised=True, loop=True),
}  # fmt: skip


def run(guard: Guard, folder: Path, *, given: bool) -> sifu.Run:
    """Return the finished run of a guard; its noise is `given` or drawn from the operating system."""
    noise = np.random.default_rng(11) if given and guard.noised else None
    level = {"level": "none"} if noise is not None and "release" not in guard.spec else {}
    if guard.loop:
        return _loop(guard, folder, noise, level)
    clients = _clients(guard) if guard.joins else None
    founders = None if clients is None else clients[: -guard.joins]
    opened = sifu.train(guard.spec, run=folder, device="cpu", noise=noise, clients=founders)
    for number, request in enumerate(guard.requests, start=1):
        opened.forget([request.client], f"request-{number}", **request.terms, **level)
    if clients is not None:
        sifu.open_run(folder, clients=clients, device="cpu", noise=noise).join()
    return opened


def _clients(guard: Guard) -> list[Any]:
    """Return clients with random data, those who join included."""
    from sifu.data import ClientData

    generator = np.random.default_rng(0)
    clients = []
    for number in range(6 + guard.joins):
        y = generator.integers(0, 3, 6 + number)
        clients.append(ClientData(f"client-{number:03}", generator.normal(size=(y.size, 4)) + np.eye(4)[y], y))
    return clients


def _loop(guard: Guard, folder: Path, noise: Any, level: dict[str, Any]) -> sifu.Run:
    """Return the run of a loop whose clients take a step towards their own targets."""
    targets = {f"site-{number}": np.array([number, -2.0 * number, 2.0**number]) for number in range(6)}
    samples = {name: 10 * place for place, name in enumerate(targets, start=1)}
    for number in range(len(guard.requests) + 1):
        with sifu.ServerLoop(
            folder, guard.spec, samples, lambda: {"w": np.zeros(3)}, authenticated=True, noise=noise, **level
        ) as server:
            while task := server.next():
                server.take(
                    {
                        name: {"w": model["w"] + 0.5 * (targets[name] - model["w"])}
                        for name, model in task.models.items()
                    }
                )
        if number < len(guard.requests):
            request = guard.requests[number]
            server.run.request([request.client], f"request-{number + 1}", **request.terms)
    return server.run


def digest(opened: sifu.Run) -> str:
    """Return the SHA-256 of the released model's names and bytes, as an export has them."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = load_file(opened.export(Path(folder) / "model.safetensors"))
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return hasher.hexdigest()


def statements(opened: sifu.Run, number: int) -> dict[str, Any]:
    """Return what a request's certificate states: level, premises that are not met, Psi and charge by client."""
    body = opened.certificate(f"request-{number}", "auditor").body
    subjects = body["subjects"] + body["earlier_subjects"]
    return {
        "level": body["level"],
        "premises": {row["name"]: row["status"] for row in body["premises"] if row["status"] != "met"},
        "psi": {",".join(row["clients"]): row["psi"] for row in subjects},
        "charges": {",".join(row["clients"]): row["charge"] for row in subjects},
        "before_after": body.get("before_after"),
    }


@dataclass(frozen=True)
class Result:
    """Result of a guard with given and with the system's noise; without noise, both are the same run."""

    model: str
    given: list[dict[str, Any]]
    system: list[dict[str, Any]]

    def numbers(self) -> dict[str, Any]:
        """Return what holds on every machine: levels and premises with the system's noise, Psi and charges."""
        return {
            "level": [row["level"] for row in self.system],
            "premises": [row["premises"] for row in self.system],
            "psi": [row["psi"] for row in self.given],
            "charges": [row["charges"] for row in self.given],
            "before_after": [row["before_after"] for row in self.system],
        }


def result_of(name: str) -> Result:
    """Return the result of a guard, computed now."""
    guard, patch = GUARDS[name], pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory() as folder, one_thread():
        patch.setenv("SIFU_HEADS", f"{folder}/heads")
        numbers = range(1, len(guard.requests) + 1)
        try:
            if guard.noised:
                drawn = run(guard, Path(folder) / "system", given=False)
                system = [statements(drawn, number) for number in numbers]
            with pytest.MonkeyPatch.context() as fixed:
                fix_draws(fixed, f"guard {name}")  # groups are drawn with a secret key
                secrets.token_bytes()  # as when the digests were recorded, the key is not the first draw
                opened = run(guard, Path(folder) / "given", given=True)
            given = [statements(opened, number) for number in numbers]
            assert opened.verify().problems == sifu_verifier.verify(opened.folder) == [], name
            return Result(digest(opened), given, system if guard.noised else given)
        finally:
            patch.undo()


def recorded() -> dict[str, dict[str, Any]]:
    """Return the content of guards.json: `numbers` by guard, and `models` by machine and guard."""
    content: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
    return content


def record(names: list[str]) -> None:
    """Write the results of this machine; where its own digest changed, digests of other machines are dropped."""
    content = recorded() if RECORDED.exists() else {"numbers": {}, "models": {}}
    models = content["models"].setdefault(machine_key(), {})
    for name in names or GUARDS:
        result = result_of(name)
        content["numbers"][name] = result.numbers()
        if models.get(name, result.model) != result.model:
            for others in content["models"].values():
                others.pop(name, None)
        models[name] = result.model
    for table in (content["numbers"], *content["models"].values()):
        for name in set(table) - set(GUARDS):
            del table[name]
    RECORDED.write_text(_written(content) + "\n")


def _written(value: Any, depth: int = 3, margin: str = "\n ") -> str:
    """Return a value as JSON, with a line for each entry of the upper levels."""
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    lines = [f"{margin}{json.dumps(key)}: {_written(value[key], depth - 1, margin + ' ')}" for key in sorted(value)]
    return "{" + ",".join(lines) + margin[:-1] + "}"


if __name__ == "__main__":
    if sys.argv[1:2] != ["--record"]:
        sys.exit(__doc__)
    record(sys.argv[2:])
