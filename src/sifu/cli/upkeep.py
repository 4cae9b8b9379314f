"""The commands `sifu purge|backup|restore|key`, which maintain a run folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.markup import escape

import sifu
from sifu.cli.options import HeadsOption, RunArgument, argument, option
from sifu.cli.output import Answer, out
from sifu.errors import InputError
from sifu.plots.style import byte_size, counted


def purge(run: RunArgument) -> Answer:
    """Erase data that still depends on forgotten clients, for good.

    Shows what remains, and why. Erases earlier kept models for everyone forgotten so far, as --retention strict does,
    even if their requests kept them for later ones, and cleans the database's free pages, its log and temporary files.
    """
    done = sifu.Run(run).purge()

    def show() -> None:
        gone = ", ".join((f"{counted(len(done.models), 'model')} ({byte_size(done.bytes)})", *done.besides))
        out.print(f"Erased {gone}; the database was rewritten.")
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
    """Write the whole run into one file. The ledger records that it was made."""
    head = sifu.Run(run).backup(file)
    return Answer(
        {"backup": str(file), "head": head},
        f"Wrote {file}. It is as confidential as the run, and holds the operator's key.",
    )


def restore(
    file: BackupArgument,
    run: Annotated[Path, argument("DIR", "A new folder for the run.")],
    heads: HeadsOption = None,
    certificates: Annotated[
        list[Path] | None,
        option("Certificate issued since the backup; its request is named, to be filed again.", "--certificate"),
    ] = None,
    accept_older: Annotated[
        bool, option("Restore the backup even if a later state is known.", "--accept-older")
    ] = False,
) -> Answer:
    """Restore a run folder from a backup.

    The ledger records this permanently. After a restore, certificates are at best conditional, except for fresh models,
    merged groups and heads in closed form: nothing can prove that the original run did not continue after the backup.
    """
    restored = sifu.restore(file, run, heads or (), certificates or (), accept_older)
    sentences = [
        f"Restored {run} as of event {restored.backup_head.split(':')[0]}; the ledger records this.",
        "Later certificates are at best conditional, except for fresh models, merged groups and heads in closed form: "
        "nothing can prove that the original run did not continue after the backup. Clients forgotten since then must "
        "be forgotten again.",
    ]
    return Answer(restored.to_mapping(), *sentences, *(f"{lost[0].upper()}{lost[1:]}." for lost in restored.requests))


def key(
    run: RunArgument,
    rotate: Annotated[bool, option("Replace the key; both keys sign the change.", "--rotate")] = False,
    brought: Annotated[
        Path | None, option("With --rotate: your own Ed25519 key (PEM).", "--key", show_default="a new key")
    ] = None,
) -> Answer:
    """Show the run's public keys, or replace the operator's key.

    SIFU_PASSPHRASE encrypts a new key at rest.
    """
    opened = sifu.Run(run)
    if rotate:
        public = opened.rotate_key(brought)
        return Answer({"public_key": public}, f"From now on, the run is signed with the key {public}. Publish it.")
    if brought is not None:
        raise InputError("--key belongs to --rotate: add it to replace the operator's key")
    keys = opened.keys()
    return Answer(
        keys.to_mapping(),
        *(f"{named.key} from event {named.since} on" for named in keys.public_keys),
        f"The private key is {'encrypted' if keys.encrypted else 'not encrypted (see SIFU_PASSPHRASE)'}.",
    )
