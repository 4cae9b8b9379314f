"""The commands `sifu clients` and `sifu flower`: the keys of the nodes, and the files of a Flower app.

Only listed nodes are ever asked to train.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from sifu.cli.options import ID, Commands, NameOption, RunOption, argument, collect_run, option
from sifu.cli.output import Answer, table
from sifu.errors import InputError

clients = Commands("clients", "Manage the clients of a Flower federation.")

RunArgument = Annotated[Path, argument("DIR", "The run folder, even if there is no run yet.", callback=collect_run)]
NodeKeyOption = Annotated[
    Path, option("Key file of the node, as ssh-keygen wrote it: public to add, private to sign.", "--node-key")
]


@clients.command("add")
def add_client(
    run: RunArgument,
    name: NameOption,
    key: NodeKeyOption,
    other_key: Annotated[bool, option("Replace the key of a known client.", "--replace")] = False,
) -> Answer:
    """Add a client to the list, or replace its key."""
    from sifu.core.client_names import check_names
    from sifu.requests.client_list import fingerprint_of_file

    check_names([name])
    change = {"do": "replace" if other_key else "add", "name": name, "key": fingerprint_of_file(key)}
    return _apply(run, change, f"{name} takes part with the key {change['key'][:16]}")


@clients.command("list")
def list_clients(run: RunArgument) -> Answer:
    """List the clients of the federation."""
    from sifu.requests.client_list import described_clients, run_id

    listed, number = described_clients(run), run_id(run)
    shown = table("client", "state", "SHA-256 of its key")
    for client in listed:
        shown.add_row(client["name"], client["status"], client["key"])
    return Answer({"clients": listed, "run_id": number}, shown, f"Run id: {number or 'there is no run yet'}")


@clients.command("block")
def block_client(run: RunArgument, name: NameOption) -> Answer:
    """Exclude a client from all future rounds. This does not forget it: use sifu request."""
    return _apply(run, {"do": "block", "name": name}, f"{name} is blocked; its influence on the model remains")


@clients.command("sign")
def sign_own_request(
    key: NodeKeyOption,
    name: NameOption,
    run_id: Annotated[str, option("Id of the run, see sifu clients list.")],
    id: Annotated[str, ID],
    output: Annotated[Path, option("File or folder to write.", "--output", metavar="PATH")],
) -> Answer:
    """Sign, as a client, a request to be forgotten. The operator files it with sifu request DIR --signed FILE."""
    from sifu.requests.messages import sign_request
    from sifu.store.files import write_output

    write_output(output, json.dumps(sign_request(key, name, run_id, id), indent=1).encode() + b"\n")
    return Answer({"request": id, "file": str(output)}, f"Wrote {output}: send it to the operator.")


def read_statement(path: Path) -> dict[str, Any]:
    """Return a signed request from a file."""
    try:
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a signed request: {error}") from error


def _apply(run: Path, change: dict[str, Any], sentence: str) -> Answer:
    from sifu.requests.client_list import ask_for_change

    done = ask_for_change(run, change)
    told = "" if done else "The change waits in the inbox of the running server, which ingests it between rounds: "
    return Answer({"change": change, "done": done}, f"{told}{sentence}.")


def flower(
    folder: Annotated[Path, argument("DIR", "Folder for the app.")],
    run: RunOption = None,
    insecure: Annotated[
        bool,
        option("Trust the names that nodes give, for demos only; limits certificates.", "--insecure-identity"),
    ] = False,
) -> Answer:
    """Write a Flower app, with a spec and a README.

    Needs no network. The run's folder is DIR-run by default, next to the app. See docs/flower.md.
    """
    files = write_app(folder, run or default_run(folder), insecure)
    return Answer(
        {"app": str(folder), "files": files},
        f"Wrote {', '.join(files)} into {folder}. Next: read {folder / 'README.md'}",
    )


def default_run(folder: Path) -> Path:
    """Return the default run folder of an app: next to the app, because an app's files are sent to every node."""
    whole = folder.resolve()
    return whole.with_name(f"{whole.name}-run")


def write_app(folder: Path, run: Path, insecure: bool) -> list[str]:
    """Write the app into an empty or absent folder, and return the names of its files."""
    from sifu.core.spec import Spec, commented_toml
    from sifu.store.files import write_atomically

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: choose another folder for the app")
    if run.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"the run folder {run} is inside the app {folder}, and flwr run sends an app's files to every node: "
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
        write_atomically(folder / name, content.encode(errors="surrogateescape"))  # a path may be any bytes
    return list(files)


def _template(name: str) -> str:
    """Return the text of a file of the app, which may contain placeholders."""
    return resources.files("sifu.cli").joinpath("flower_app", f"{name}.txt").read_text(encoding="utf-8")
