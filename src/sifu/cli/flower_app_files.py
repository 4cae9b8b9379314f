"""`sifu flower new`: the files of an app to start a federation on Flower with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sifu.cli.options import Format, FormatOption, tell
from sifu.errors import InputError

flower = typer.Typer(
    name="flower", help="Federations on Flower, see docs/flower.md.", no_args_is_help=True, rich_markup_mode="rich"
)


@flower.command("new")
def new_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write the app into.")],
    run: Annotated[
        Path | None, typer.Option("--run", help="Its run folder.", show_default="DIR-run, next to the app")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure-identity", help="For a demo: nodes are believed to be who they say; caps every certificate."
        ),
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """Write an app: ServerApp, ClientApp, spec, pyproject and a README. Needs no network."""
    files = write_app(folder, run or default_run(folder), insecure)
    tell(
        format,
        {"app": str(folder), "files": files},
        f"Wrote {', '.join(files)} into {folder}. Next: read {folder / 'README.md'}",
    )


SERVER = '''"""The server: trains, takes requests in while it runs, carries them out, certifies."""

from sifu.server.flower_app import server_app

app = server_app()
'''

CLIENT = '''"""A client: trains on the data of its node. Put your own loading into `load`; nothing else changes."""

import numpy as np
from flwr.app import Context

from sifu.engines.flower.client import client_app
from sifu.engines.flower.ready import ReadyClient


def load(context: Context) -> ReadyClient:
    """This node's data: x (samples, ...) and y (labels), from the file its node config names."""
    config = context.node_config
    if "data" in config:
        with np.load(str(config["data"])) as arrays:
            cache = str(config["cache"]) if "cache" in config else None
            return ReadyClient(str(config.get("name", "client")), arrays["x"], arrays["y"], cache)
    return digits_share(int(config["partition-id"]), int(config["num-partitions"]))


def digits_share(part: int, parts: int) -> ReadyClient:
    """For a first try: one share of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return ReadyClient(f"client-{part:03d}", x[part::parts] / 16.0, y[part::parts])


app = client_app(load)
'''

PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "sifu-federation"
version = "1.0.0"
description = "A federation that can forget"
license = "Apache-2.0"
dependencies = ["sifu[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["federation"]

[tool.flwr.app]
publisher = "operator"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

[tool.flwr.app.config]
run = {run}                  # the run folder, on the server's machine
spec = {spec}                # what is trained
insecure-identity = {insecure}   # true: nodes are believed to be who they say they are; caps every certificate
clients = 2                  # with insecure-identity: start when this many nodes are online
wait = 300.0                 # seconds to wait for clients before the run is made
linger = 0.0                 # seconds to wait for requests after training is done
timeout = 600.0              # seconds a client has to answer
min-replies = 1              # answers that make a round; more than 1 is conditional at best
masked-updates = false       # true: the server sees no single update; conditional at best
masked-statistics = true     # heads in closed form: the server sees only the sum of statistics
"""

README = """# A federation that can forget

The server's side is `federation/server_app.py`, the clients' `federation/client_app.py`, what is trained `spec.toml`.
Every machine needs `pip install "sifu[flower]"`. The whole guide is docs/flower.md of sifu.

1. Each client makes a key: `ssh-keygen -t ecdsa -b 384 -N "" -f node0`, and sends the operator `node0.pub`.
2. The operator puts it on the list and registers it:

       sifu clients add {run} --name hospital-a --key node0.pub
       flwr supernode register node0.pub CONNECTION

3. The operator starts SuperLink with TLS and `--enable-supernode-auth`, each client its SuperNode with
   `--auth-supernode-private-key node0`.
4. `flwr run . CONNECTION --stream` trains. If it is killed, the same command resumes.
5. `sifu request {run} --clients hospital-a` from another terminal: the running server carries it out.
   `sifu verify {run}` checks everything, offline.
"""


def default_run(folder: Path) -> Path:
    """The run folder of an app that names none: next to the app, because an app's files are sent to every node."""
    whole = folder.resolve()
    return whole.with_name(f"{whole.name}-run")


def write_app(folder: Path, run: Path, insecure: bool) -> list[str]:
    """Write the app into an empty or absent folder; returns the names of its files."""
    from sifu.core.spec import Spec, commented_toml
    from sifu.store.files import write_atomically

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: choose another folder for the app")
    if run.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"the run folder {run} lies in the app {folder}, and flwr run sends an app's files to every node: "
            "choose a run folder outside the app"
        )
    base = Spec()
    spec = replace(
        base,
        data=replace(base.data, preprocessing="fixed"),
        model=replace(base.model, outputs=10),
        server=replace(base.server, rejected="reply"),
        stop=replace(base.stop, max_rounds=50, target=0.9),
    )
    where, plan = run.resolve(), folder.resolve() / "spec.toml"
    config = PYPROJECT.format(
        run=json.dumps(str(where)), spec=json.dumps(str(plan)), insecure="true" if insecure else "false"
    )
    files = {
        "pyproject.toml": config,
        "README.md": README.format(run=where),
        "spec.toml": commented_toml(spec),
        "federation/__init__.py": '"""A federation that can forget."""\n',
        "federation/server_app.py": SERVER,
        "federation/client_app.py": CLIENT,
    }
    (folder / "federation").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content.encode())
    return list(files)
