"""The commands `sifu doctor|purge|backup|restore|key`, which maintain a run folder."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.markup import escape

import sifu
from sifu.cli.options import Commands, RunArgument, argument, option
from sifu.cli.output import Answer, out, table
from sifu.errors import install_extra

PACKAGES = ("numpy", "scipy", "torch", "safetensors", "cryptography", "matplotlib", "flwr")


def doctor() -> Answer:
    """Show what is installed, and which engines and devices work here."""
    from sifu.run.devices import why_no_gpu

    packages = {"sifu": sifu.__version__} | {name: _version_of(name) for name in PACKAGES}
    flwr = packages["flwr"]
    engines = {
        "embedded": f"needs torch: {install_extra('train')}",
        "flower": f"works, with flwr {flwr}" if flwr else f"needs Flower: {install_extra('flower')}",
        "gpu": "needs torch",
    }
    devices = ["cpu"]
    if packages["torch"]:
        import torch

        engines["embedded"] = f"works, on cpu with {torch.get_num_threads()} threads"
        engines["gpu"] = why_no_gpu() or "works, sifu train and forget take --device cuda"
        devices += [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    values: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": packages,
        "engines": engines,
        "devices": devices,
    }
    facts = table("", "")
    facts.add_row("python", f"{values['python']} on {values['platform']}, {values['cores']} cores")
    for name, version in packages.items():
        facts.add_row(name, version or "not installed")
    facts.add_row("embedded engine", escape(engines["embedded"]))
    facts.add_row("flower engine", escape(engines["flower"]))
    facts.add_row("on a gpu", engines["gpu"])
    facts.add_row("devices", ", ".join(values["devices"]))
    return Answer(values, facts)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def purge(run: RunArgument) -> Answer:
    """Permanently erase stored data that still depends on forgotten clients; shows what remains and why.

    Erases earlier kept models for everyone forgotten so far, as --retention strict does, even if their requests kept
    them for later ones, and cleans the database's free pages, its log and temporary files.
    """
    done = sifu.Run(run).purge()

    def show() -> None:
        out.print(f"Erased {len(done.models)} models, {done.bytes / 1e6:.2f} MB; the database was rewritten.")
        left_behind = "left with the operator's key by an interrupted backup or restore"
        for copy in done.copies:
            out.print(f"Deleted {escape(copy)}, {left_behind}.")
        if not done.complete:
            late = "Another process is reading the run: its log still holds old pages. Purge again later."
            out.print(f"[yellow]{late}[/]")
        out.print("What remains, and why:")
        for what, why in done.remains:
            out.print(f"  {escape(what)}: {escape(why)}.")

    return Answer(asdict(done), show)


BackupArgument = Annotated[Path, argument("FILE", "The backup file.")]


def backup(run: RunArgument, file: BackupArgument) -> Answer:
    """Write the whole run into one file; the ledger records that it was made."""
    head = sifu.Run(run).backup(file)
    return Answer(
        {"backup": str(file), "head": head},
        f"Wrote {file}. It is as confidential as the run, and holds the operator's key.",
    )


def restore(
    file: BackupArgument,
    run: Annotated[Path, argument("DIR", "A new folder for the run.")],
    heads: Annotated[
        list[Path] | None, option("File of signed heads kept elsewhere, or a certificate; repeatable.", "--head")
    ] = None,
    certificates: Annotated[
        list[Path] | None,
        option("Certificate issued since the backup; its request is named, to be filed again.", "--certificate"),
    ] = None,
    accept_older: Annotated[
        bool, option("Restore the backup even if a later state is known.", "--accept-older")
    ] = False,
) -> Answer:
    """Restore a run folder from a backup; the ledger records this permanently.

    After a restore, certificates are at best conditional, except for fresh models, merged groups and heads in closed
    form: nothing can prove that the original run did not continue after the backup.
    """
    restored = sifu.restore(file, run, heads or (), certificates or (), accept_older)
    sentences = [
        f"Restored {run} as of event {restored.backup_head.split(':')[0]}; the ledger records this.",
        "Later certificates are at best conditional, except for fresh models, merged groups and heads in closed form: "
        "nothing can prove that the original run did not continue after the backup. Clients forgotten since then must "
        "be forgotten again.",
    ]
    return Answer(restored.to_mapping(), *sentences, *(f"{lost[0].upper()}{lost[1:]}." for lost in restored.requests))


key = Commands("key", "Show or replace the operator's key.")


@key.command("rotate")
def rotate(
    run: RunArgument,
    brought: Annotated[Path | None, option("Your own Ed25519 key (PEM).", "--key", show_default="a new key")] = None,
) -> Answer:
    """Replace the operator's key; both keys sign the change. SIFU_PASSPHRASE encrypts the new key at rest."""
    public = sifu.Run(run).rotate_key(brought)
    return Answer({"public_key": public}, f"From now on, the run is signed with the key {public}. Publish it.")


@key.command("show")
def show(run: RunArgument) -> Answer:
    """Show the public keys of the run, and whether the private key is encrypted at rest."""
    keys = sifu.Run(run).keys()
    return Answer(
        keys.to_mapping(),
        *(f"{named.key} from event {named.since} on" for named in keys.public_keys),
        f"The private key is {'encrypted' if keys.encrypted else 'not encrypted (see SIFU_PASSPHRASE)'}.",
    )
