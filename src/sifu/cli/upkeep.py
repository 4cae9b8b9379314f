"""The commands `sifu doctor|purge|anchor|sign|timestamp|backup|restore|key`, which maintain a run folder."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
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


FIGURES_GO = """\
This permanently erases the figures that certificates depend on, after verifying the run one last time:
  - drifts, Psi, sigma, source nodes and charges of all requests so far, the list of kept models, and every stored
    model except the current and the initial one;
  - the auditor's certificates, and public ones whose sigma sifu chose: hand them out first;
  - so these certificates can never be recomputed again: only their signatures can be checked;
  - clients that took part so far can be forgotten only by training from scratch, until that has been done;
  - earlier backups still hold everything: destroy them."""

NO_MORE = "No certificate of this run depends on more figures: --figures erases nothing beyond sifu purge."


def purge(
    run: RunArgument,
    figures: Annotated[
        bool, option("Also erase the figures that certificates depend on; cannot be undone.", "--figures")
    ] = False,
    yes: Annotated[bool, option("With --figures, do not ask first.", "--yes")] = False,
) -> Answer:
    """Permanently erase stored data that still depends on forgotten clients; shows what remains and why.

    Erases earlier kept models for everyone forgotten so far, as --retention strict does, even if their requests kept
    them for later ones, and cleans the database's free pages, its log and temporary files.
    """
    from sifu.requests.figures_policy import erases_more_by_choice

    if figures and not yes:
        with sifu.Run(run).reader() as reader:
            erases_more = erases_more_by_choice(reader)
        typer.echo(FIGURES_GO if erases_more else NO_MORE, err=True)
        if erases_more and not typer.confirm("Erase them?", err=True):
            typer.echo("Nothing was erased.", err=True)
            raise typer.Exit
    done = sifu.Run(run).purge(figures=figures)

    def show() -> None:
        out.print(
            f"Erased {len(done.models)} models and {len(done.updates)} files of updates, {done.bytes / 1e6:.2f} MB; "
            "the database was rewritten."
        )
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


def anchor(run: RunArgument) -> Answer:
    """Print the head of the chain, to publish or keep elsewhere; sifu verify --anchor checks it later."""
    head = sifu.Run(run).anchor()
    return Answer({"anchor": head}, head)


def sign(
    run: RunArgument,
    clock: Annotated[
        bool, option("Confirm that the clock is right although it contradicts the last event.", "--clock")
    ] = False,
) -> Answer:
    """Vouch for events written without the operator's key, or for a run whose head file is missing.

    Every event is signed when it is written, if the key and its passphrase are available. Unsigned events block further
    writing until the operator confirms them; the ledger records permanently that they were signed later.
    """
    tail = sifu.Run(run).sign(clock=clock)
    if tail is None:
        return Answer({"signed": None}, "Every event has a signature.")
    return Answer({"signed": list(tail)}, f"Signed for events {tail[0]} to {tail[1]}, which had no signature.")


def timestamp(run: RunArgument) -> Answer:
    """Fetch RFC 3161 timestamps of the latest head and of certificates that have none yet.

    Name the authority before the command, sifu --timestamp URL timestamp DIR, or in SIFU_TIMESTAMP. Commands that write
    to a run fetch timestamps at their end; this command fetches the missing ones.
    """
    came = sifu.Run(run).timestamp()
    said = f"Fetched timestamps of {', '.join(came)}." if came else "Every certificate and the latest head have one."
    return Answer({"timestamps": came}, said)


BackupArgument = Annotated[Path, argument("FILE", "The backup file.")]


def backup(run: RunArgument, file: BackupArgument) -> Answer:
    """Write the whole run into one file; the ledger records that it was made."""
    head = sifu.Run(run).backup(file)
    return Answer(
        {"backup": str(file), "anchor": head},
        f"Wrote {file}. It is as confidential as the run, and holds the operator's key.",
        f"Keep this anchor elsewhere: {head}",
    )


def restore(
    file: BackupArgument,
    run: Annotated[Path, argument("DIR", "A new folder for the run.")],
    anchor: Annotated[str | None, option("Latest head kept elsewhere.", metavar="SEQ:HASH")] = None,
    certificates: Annotated[
        list[Path] | None,
        option("Certificate issued since the backup; its request is restored.", "--certificate"),
    ] = None,
    accept_older: Annotated[
        bool, option("Restore the backup even if the anchor shows a later state.", "--accept-older")
    ] = False,
    whole_clients: Annotated[
        bool,
        option("Forget whole clients where a certificate is about records that it does not name.", "--whole-clients"),
    ] = False,
) -> Answer:
    """Restore a run folder from a backup; the ledger records this permanently.

    After a restore, certificates are at best conditional, except for fresh models, merged groups and heads in closed
    form: no anchor can prove that the original run did not continue after the backup.
    """
    restored = sifu.restore(file, run, anchor, certificates or [], accept_older, whole_clients)
    sentences = [
        f"Restored {run} as of event {restored.backup_head.split(':')[0]}; the ledger records this.",
        "Later certificates are at best conditional, except for fresh models, merged groups and heads in closed form: "
        "no anchor can prove that the original run did not continue after the backup.",
    ]
    if not restored.complete:
        sentences.append(
            "Nothing proves that this was the latest state: clients forgotten since then must be forgotten again."
        )
    if restored.requests:
        sentences.append(
            f"Restored requests: {', '.join(restored.requests)}; {len(restored.erased)} models were erased. "
            f"Next: sifu forget {run}"
        )
    return Answer(restored.to_mapping(), *sentences)


key = Commands("key", "Show, replace or accept the operator's key.")


@key.command("rotate")
def rotate(
    run: RunArgument,
    brought: Annotated[Path | None, option("Your own Ed25519 key (PEM).", "--key", show_default="a new key")] = None,
) -> Answer:
    """Replace the operator's key; both keys sign the change. SIFU_PASSPHRASE encrypts the new key at rest."""
    public = sifu.Run(run).rotate_key(brought)
    return Answer({"public_key": public}, f"From now on, the run is signed with the key {public}. Publish it.")


@key.command("accept")
def accept(
    run: RunArgument,
    public_key: Annotated[str, argument("KEY", "Public key of the run (hex), as published.")],
) -> Answer:
    """Accept this key as the operator's even though another one is known here for the run or the folder.

    The key of every run is remembered at its first use (SIFU_KNOWN_KEYS). A new key that the old one did not sign stops
    every command. Before you accept a key, compare it with the one that the operator published.
    """
    from sifu.api.operator_key import accept_key

    accept_key(run, public_key)
    return Answer({"accepted": public_key}, f"From now on {run} must be signed with the key {public_key}.")


@key.command("show")
def show(run: RunArgument) -> Answer:
    """Show the public keys of the run, and whether the private key is encrypted at rest."""
    keys = sifu.Run(run).keys()
    return Answer(
        keys.to_mapping(),
        *(f"{named.key} from event {named.since} on" for named in keys.public_keys),
        f"The private key is {'encrypted' if keys.encrypted else 'not encrypted (see SIFU_PASSPHRASE)'}.",
    )
