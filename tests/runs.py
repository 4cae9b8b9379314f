"""Named finished runs: each is built once per test run, for all workers; tests read it, or change a copy.

    run("requests")              the folder of a run that tests only read
    own("requests", tmp_path)    a copy of it that a test may change

Everything secret in a run is drawn from a generator seeded with its name, so every test run has the same keys, salts,
groups and noise. The runs are made through `import sifu` alone. `begin` and `changed` frame a test run: whoever begins
it makes the folder, and at the end every finished run must have the bytes that it was built with.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import small_spec
from secret_draws import fix_draws

PLACE = "SIFU_FINISHED_RUNS"
"""Environment variable with the folder of all finished runs; workers inherit it."""
TINY: dict[str, Any] = {
    "data": {"clients": 8, "samples_per_client": 6},
    "local": {"steps": 2, "rate": 0.05},
    "stop": {"target": 0.0, "max_rounds": 4},
}
TABLE: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "softmax", "outputs": 3},
    "local": {"rate": 0.05, "steps": 2},
    "stop": {"max_rounds": 3, "target": 0.0},
}
HEAD: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"norm": 8.0},
}
LOOP: dict[str, Any] = {
    "local": {"rate": 0.5, "steps": 1},
    "regularity": {"kind": "assumed", "factor": 1.0},
    "server": {"rejected": "round"},
    "stop": {"max_rounds": 5, "target": 0.0},
}
TARGETS = {f"site-{number}": np.array([number, -2.0 * number, 2.0**number, 1.0, -number]) for number in range(6)}
"""Model that each client of the loop steps towards."""


# -- the runs ----------------------------------------------------------------------------------------------------------


def trained(folder: Path) -> None:
    """Train twelve clients; nobody asked for anything yet."""
    sifu.train(small_spec(), run=folder)


def approving(folder: Path) -> None:
    """Train clients whose requests need two approvals."""
    sifu.train(small_spec(requests={"approval": "two"}), run=folder)


def requests(folder: Path) -> None:
    """Finish requests of several kinds: rollback, Scratch, two clients at once, strict; one more waits."""
    run = sifu.train(small_spec(), run=folder)
    run.forget(["client-000"], "to-the-middle", sigma=0.05)
    run.forget(["client-001"], "from-scratch", method="scratch")
    run.forget(["client-002", "client-003"], "both-together", sigma=1.0, epsilon=20.0)
    run.forget(["client-004"], "strictly", sigma=0.12, retention="strict")
    run.request(["client-005"], "waits", epsilon=3.0)


def poisson(folder: Path) -> None:
    """Sample few clients, some of them alone, whose steps contract by factors of their own; withdraw, and purge."""
    local, stop = {"steps": 2, "weight_decay": 0.5}, {"target": 0.0, "max_rounds": 8}
    spec = small_spec(
        **TINY | {"local": local, "stop": stop}, server={"participation": "poisson(0.3)"}, privacy={"sigma": 0.05}
    )
    run = sifu.train(spec, run=folder)
    run.forget(["client-000"], "first", sigma=0.05)
    run.request(["client-001"], "not-any-more")
    run.decide("not-any-more", "withdrawn", "changed its mind", actor="desk")
    run.forget(["client-002", "client-003"], "second", sigma=1.0, retention="strict")
    run.forget(["client-004"], "third", method="scratch")
    run.purge()


def network(folder: Path) -> None:
    """Train a network, whose smoothness is assumed, with a bound on replies that leaves some out."""
    spec = small_spec(**TINY, model={"kind": "mlp"}, regularity={"kind": "assumed", "factor": 1.01},
                      server={"update_bound": 0.2, "rejected": "reply"})  # fmt: skip
    run = sifu.train(spec, run=folder)
    run.forget(["client-002"], "noised", sigma=1.0)
    run.forget(["client-003"], "again", method="scratch")


def groups(folder: Path) -> None:
    """Merge groups without the ones that were hit, rebuild these, and merge again."""
    local = {"steps": 2, "rate": 50.0, "momentum": 0.5}
    run = sifu.train(small_spec(**TINY | {"local": local}, groups={"count": 3, "rounds": 2}), run=folder)
    run.forget(["client-001"], "merged", method="groups")
    run.forget(["client-002"], "noised", sigma=1.0)
    run.update()
    run.forget(["client-003"], "merged-again", method="groups", retention="strict")


def network_groups(folder: Path) -> None:
    """Merge groups of a network, whose fresh model is not zero."""
    spec = small_spec(**TINY, model={"kind": "mlp"}, regularity={"kind": "assumed"}, groups={"count": 3, "rounds": 2})
    sifu.train(spec, run=folder).forget(["client-001"], "merged", method="groups")


def _rows(count: int, seed: int) -> dict[str, tuple[Any, Any]]:
    """Return clients of unequal sizes, as a mapping from names to samples and labels."""
    draw, clients = np.random.default_rng(seed), {}
    for number in range(count):
        y = draw.integers(0, 3, 4 + number)
        clients[f"client-{number:03d}"] = (draw.normal(size=(y.size, 4)) + np.eye(4)[y], y)
    return clients


def closed_form(folder: Path) -> None:
    """Solve a head, forget clients and records from its statistics, and let a client join."""
    clients = _rows(7, 3)
    founders = dict(list(clients.items())[:6])
    sifu.train(HEAD, run=folder, clients=founders).forget(["client-001"], "first")
    run = sifu.open_run(folder, clients=clients)
    run.join()
    run = sifu.open_run(folder, clients=clients)
    run.forget(["client-003", "client-004"], "second")
    run.forget(["client-005"], "records", records=[1])


def regression(folder: Path) -> None:
    """Solve a head for two real numbers a sample, and forget a client and records."""
    clients = {}
    for name, (x, _) in _rows(5, 9).items():
        clients[name] = (x, np.stack([2.0 * x[:, 0] + 1.0, x[:, 1] - x[:, 2]], axis=1))
    spec = HEAD | {"model": {"kind": "ridge", "outputs": 2}, "ridge": {"task": "regression", "scale": 2.0}}
    run = sifu.train(spec, run=folder, clients=clients)
    run.forget(["client-002"], "first")
    run.forget(["client-003"], "records", records=[0, 2])


def releases(folder: Path) -> None:
    """Release a head with noise, so that no release differs measurably from the one before."""
    data = {"clients": 3, "samples_per_client": 12, "preprocessing": "fixed"}
    spec = {"data": data, "model": {"kind": "ridge"}, "ridge": {"regularisation": 0.05}, "release": {"noise": 0.5}}
    run = sifu.train(spec, run=folder)
    run.forget(["client-001"], "first")
    run.forget(["client-002"], "second")


def records(folder: Path) -> None:
    """Forget records of a client that stays, before a witness that hears of every event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIFU_WITNESS", str(witness_of(folder)))
        run = sifu.train(TABLE, run=folder, clients=_rows(6, 5))
        run.forget(["client-003"], "rows", records=[2, 0], sigma=1.0)
        run.forget(["client-003"], "more-rows", records=[1], sigma=1.0)
        run.forget(["client-001"], "whole", sigma=1.0)
        run.request(["client-002"], "waits")
        run.request(["client-004"], "rows-wait", records=[1])


def approvals(folder: Path) -> None:
    """Ask two people for approval; refuse, file without the key, change the key, restore a backup, purge."""
    begun = own("approving", folder.parent)
    run = sifu.open_run(begun)
    run.request(["client-001"], "asked", actor="rita")
    run.decide("asked", "verified", actor="desk")
    for person in ("ann", "bob"):
        run.decide("asked", "approved", "it is theirs", actor=person)
    run.request(["client-002"], "refused", actor="rita")
    run.decide("refused", "refused", "not theirs", actor="ann")
    run.forget(sigma=1.0)
    run.rotate_key()
    key = (begun / "operator.key").read_bytes()
    (begun / "operator.key").unlink()
    run.request(["client-004"], "without-the-key", actor="rita")
    (begun / "operator.key").write_bytes(key)
    run.backup(folder.with_name("backup"))
    sifu.restore(folder.with_name("backup"), folder)
    run = sifu.open_run(folder)
    for person in ("ann", "bob"):
        run.decide("without-the-key", "approved", actor=person)
    run.forget(sigma=1.0, retention="strict")
    run.purge()


def loop(folder: Path) -> None:
    """Serve a user's own loop: replies are refused or missing, a round is lost, a client leaves, a request arrives."""
    samples, left = {name: 10 * place for place, name in enumerate(TARGETS, start=1)}, set[str]()
    for _ in range(2):
        with sifu.ServerLoop(folder, LOOP, samples, lambda: {"w": np.zeros(5)}) as server:
            while task := server.next():
                replies: dict[str, Any] = {
                    name: {"w": model["w"] + 0.5 * (TARGETS[name] - model["w"])} for name, model in task.models.items()
                }
                if task.branch == 0 and task.round == 1:
                    replies["site-0"] = {"w": np.full(5, np.nan)}
                    del replies["site-3"]
                    server.run.request(["site-1"], "meanwhile", sigma=0.3, level="none")
                if task.branch == 1:
                    replies["site-1"] = {"w": np.zeros(5)}  # it was forgotten
                server.take({} if (task.branch, task.round) == (1, 2) else replies)
                if (task.branch, task.round) == (1, 3) and "site-5" not in left:
                    break
            server.leave("site-5")
            left.add("site-5")


def masked(folder: Path) -> None:
    """Serve a loop whose clients send masked statistics of a head, and forget one of them."""
    data = _rows(6, 8)
    clients = {name: sifu.LoopClient(name, x, y) for name, (x, y) in data.items()}
    samples = {name: len(y) for name, (_, y) in data.items()}
    for _ in range(2):
        with sifu.ServerLoop(
            folder, HEAD, samples, sample_shape=(4,), masked_statistics=True, authenticated=True
        ) as server:
            while task := server.next():
                told = json.loads(json.dumps(task.instructions))
                server.take({name: clients[name].answer(model, told[name]) for name, model in task.models.items()})
        if not server.run.request_records():
            server.run.request(["client-002"], "first")


BUILT: tuple[Callable[[Path], None], ...] = (
    *(trained, approving, requests, poisson, network, groups, network_groups),
    *(closed_form, regression, releases, records, approvals, loop, masked),
)
BUILT_BY = {build.__name__: build for build in BUILT}


# -- their folder ------------------------------------------------------------------------------------------------------


def run(name: str) -> Path:
    """Return the folder of a finished run, which is only read; the first one to ask builds it."""
    place = _all() / name
    with (_all() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            unfinished = place.with_name(f"{name}.unfinished")
            unfinished.mkdir()
            _build(name, unfinished / "run")
            place.with_name(f"{name}.digest").write_text(_digest(unfinished))
            unfinished.rename(place)
    return place / "run"


def own(name: str, folder: Path) -> Path:
    """Return a copy of a finished run, with the files next to it, in a new folder within `folder`."""
    source = run(name).parent
    target = folder / name
    for number in range(2, 100):
        if not target.exists():
            break
        target = folder / f"{name}-{number}"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("run.db-*"))
    return target / "run"


def witness_of(folder: Path) -> Path:
    """Return the file that the witness of a run keeps, if it has one."""
    return folder.with_name("witness")


def _build(name: str, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fix_draws(patch, f"finished run {name}")
        patch.setenv("SIFU_HEADS", os.devnull)
        patch.delenv("SIFU_WITNESS", raising=False)
        BUILT_BY[name](folder)
    connection = sqlite3.connect(folder / "run.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _all() -> Path:
    return Path(os.environ[PLACE]) if PLACE in os.environ else begin()


def begin() -> Path:
    """Make the folder of this test run, in memory if there is some; remove it when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="sifu-runs-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    os.environ[PLACE] = str(folder)
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def changed() -> list[str]:
    """Return the names of the finished runs that somebody changed."""
    digests = sorted(_all().glob("*.digest"))
    return [file.stem for file in digests if _digest(file.with_suffix("")) != file.read_text()]


def _digest(place: Path) -> str:
    """Return a digest of every file but SQLite's log, which readers make, and the lock, which names a process."""
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*")):
        if path.is_file() and not path.name.startswith("run.db-") and path.name != "lock":
            digest.update(f"{path.relative_to(place)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()
