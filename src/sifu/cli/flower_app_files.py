"""`sifu flower new`: the files of an app to start a federation on Flower with."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from sifu.cli.options import Answer, Commands
from sifu.errors import InputError

flower = Commands("flower", "Federations on Flower, see docs/flower.md.")


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
) -> Answer:
    """Write an app: ServerApp, ClientApp, spec, pyproject and a README. Needs no network."""
    files = write_app(folder, run or default_run(folder), insecure)
    return Answer(
        {"app": str(folder), "files": files},
        f"Wrote {', '.join(files)} into {folder}. Next: read {folder / 'README.md'}",
    )


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
    config = _template("pyproject.toml").format(
        run=json.dumps(str(where)), spec=json.dumps(str(plan)), insecure="true" if insecure else "false"
    )
    files = {
        "pyproject.toml": config,
        "README.md": _template("README.md").format(run=where),
        "spec.toml": commented_toml(spec),
        "federation/__init__.py": '"""A federation that can forget."""\n',
        "federation/server_app.py": _template("server_app.py"),
        "federation/client_app.py": _template("client_app.py"),
    }
    (folder / "federation").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content.encode())
    return list(files)


def _template(name: str) -> str:
    """The text of a file of the app, some with places to fill in."""
    return resources.files("sifu.cli").joinpath("flower_app", f"{name}.txt").read_text(encoding="utf-8")
