"""Flower's published quickstarts, deployed with TLS and node keys: train, forget a client by Scratch, verify.

    python benchmarks/flower_quickstarts.py EXAMPLE... [--data FOLDER] [--rounds N] [--undeclared] [--preloaded]
        [--logs FOLDER]

EXAMPLE is a copy of `examples/quickstart-pytorch` or `examples/quickstart-sklearn` of Flower's repository; the program
changes only a copy of it. The copy gets the lines of docs/flower.md, which are printed as a diff and counted. One
SuperLink and four SuperNodes then run on loopback, each node with its own key, as Flower's documentation starts them.

`--data` is for machines that cannot reach the Hugging Face hub; without it, the script first checks that the hub
answers. The folder holds each data set as Parquet files under its name on the hub (`uoft-cs/cifar10/train.parquet`). It
is linked into the folder that SuperLink and SuperNodes are started in, where the quickstarts' own `load_dataset` looks
first, so that none of their lines changes. `--undeclared` is the control: without the declared preprocessing the
certificate must not be `exact`. `--preloaded` is for busy machines: Flower starts a process for every message, and with
this option each is a fork that has already imported torch. `--logs` keeps a copy of all output.

Prints one JSON object per example; the exit code is 3 if a level differs
from the expected one, the run does not verify, or more than six lines changed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "engines" / "flower"), str(ROOT / "tests")]

from deployment import BIN, Deployment, make_node_key  # noqa: E402

import sifu  # noqa: E402

NODES = 4
MOST_LINES = 6
LEAVES = "client-1"
IMPORT = "from flwr.serverapp.strategy import FedAvg"
TABLE = "[tool.flwr.app.config]"
USED = ("datasets", "flwr_datasets", "torchvision.transforms", "sklearn.linear_model")
"""Modules that the quickstarts import."""


class Published(Deployment):
    """Deployment of Flower's own programs with their default timings."""

    PRELOADED = False
    NODE = (BIN / "flower-supernode",)


class Preloaded(Deployment):
    """Deployment as in the tests: SuperLink and SuperNodes start forks of a process with all imports."""

    ALSO = tuple(name for name in USED if find_spec(name.partition(".")[0]))


def forgetting(name: str, text: str, run: Path, declared: bool) -> str:
    """Return a file of a quickstart with the lines of docs/flower.md added."""
    if name == "pyproject.toml":
        assert text.count(TABLE) == 1, f"{name} has no {TABLE}"
        lines = [TABLE, f'run = "{run}"', *(['preprocessing = "fixed"'] if declared else [])]
        return text.replace(TABLE, "\n".join(lines))
    assert text.count(IMPORT) == 1, f"{name} does not import FedAvg as the quickstarts do"
    text = text.replace(IMPORT, "from sifu.flower import ForgettingFedAvg")
    return text.replace("= FedAvg(", "= ForgettingFedAvg(context, ")


def change(app: Path, run: Path, declared: bool) -> tuple[str, int]:
    """Change the app for forgetting; return the diff and its number of added or changed lines."""
    (server,) = app.glob("*/server_app.py")
    diff: list[str] = []
    for path in (app / "pyproject.toml", server):
        name, before = path.relative_to(app).as_posix(), path.read_text(encoding="utf-8")
        after = forgetting(name, before, run, declared)
        path.write_text(after, encoding="utf-8")
        diff += difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", "", "", 0, "")
    return "\n".join(diff), sum(line.startswith("+") and not line.startswith("+++") for line in diff)


def serve(federation: Deployment, app: Path, name: str, rounds: int) -> None:
    """Run the app to its end."""
    overrides = ["--run-config", f"num-server-rounds={rounds}"] if rounds else []
    federation.start(name, federation.program("flwr"), "run", app, "here", "--stream", *overrides).wait()


def call(federation: Deployment, *arguments: object) -> str:
    """Return the output of a sifu command, which must succeed."""
    ended = federation.sifu(*arguments)
    assert ended.returncode == 0, f"sifu {arguments[0]}: {ended.stdout}{ended.stderr}\n{federation.logs()}"
    return ended.stdout


def deploy(example: Path, federation: Deployment, data: Path | None, rounds: int, declared: bool) -> dict[str, Any]:
    """Train a quickstart on four SuperNodes, forget a client, verify, and return the results."""
    folder, began = federation.folder, time.monotonic()
    app, run = folder / example.name, folder / "run"
    shutil.copytree(example, app)
    diff, lines = change(app, run, declared)
    print(diff, flush=True)
    if data is not None:
        for owner in data.iterdir():
            (folder / owner.name).symlink_to(owner.resolve())
    try:
        federation.superlink()
        for number in range(NODES):
            make_node_key(folder / f"node{number}")
            federation.register(f"node{number}")
            key = folder / f"node{number}.pub"
            call(federation, "clients", "add", run, "--name", f"client-{number}", "--node-key", key)
            federation.supernode(f"node{number}", f"partition-id={number} num-partitions={NODES}")
        serve(federation, app, "training", rounds)
        trained = json.loads(call(federation, "status", run, "--format", "json"))
        call(federation, "request", run, "--clients", LEAVES, "--id", "case-1", "--method", "scratch")
        serve(federation, app, "forgetting", rounds)
        verified = federation.sifu("verify", run)
        print(verified.stdout, flush=True)
    finally:
        federation.close()
    opened = sifu.open_run(run)
    (outcome,) = opened.outcomes()
    return {
        "example": example.name,
        "changed_lines": lines,
        "clients": NODES,
        "rounds": trained["rounds"],
        "forgotten": list(outcome.clients),
        "method": outcome.method,
        "level": outcome.level,
        "rounds_after": opened.status().rounds,
        "verified": verified.returncode == 0 and opened.verify().holds,
        "seconds": round(time.monotonic() - began),
    }


def check_data(data: Path | None) -> None:
    """End the script with a message if the quickstarts could not load their data."""
    missing = [name for name in USED if find_spec(name.partition(".")[0]) is None]
    if missing:
        sys.exit(f"the quickstarts import {', '.join(missing)}: install what their pyproject.toml lists")
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        if data is None:
            urllib.request.urlopen(hub, timeout=20).close()
    except OSError as error:
        sys.exit(
            f"the quickstarts download their data from {hub}, which cannot be reached ({error}): give the data as "
            "Parquet files with --data FOLDER"
        )


def main() -> None:
    """Deploy each example and compare its level with the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, nargs="+")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds; by default the quickstart's")
    parser.add_argument("--undeclared", action="store_true")
    parser.add_argument("--preloaded", action="store_true")
    parser.add_argument("--logs", type=Path)
    chosen = parser.parse_args()
    check_data(chosen.data)
    expected, failed = "conditional" if chosen.undeclared else "exact", False
    for example in chosen.example:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if chosen.data:  # must be set before any import
                os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=str(folder / "huggingface"))
            try:
                federation = (Preloaded if chosen.preloaded else Published)(folder)
                found = deploy(example.resolve(), federation, chosen.data, chosen.rounds, not chosen.undeclared)
            finally:
                for log in folder.glob("*.log") if chosen.logs else ():
                    target = chosen.logs / example.name / log.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(log, target)
        print(json.dumps(found), flush=True)
        failed |= found["level"] != expected or not found["verified"] or found["changed_lines"] > MOST_LINES
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
