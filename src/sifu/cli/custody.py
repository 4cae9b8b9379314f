"""Commands that look after a run: erase for good, back up, anchor, keys, and the record of requests."""

from __future__ import annotations

from dataclasses import asdict

from sifu.cli.options import Format, FormatOption, RunArgument


def purge(run: RunArgument, format: FormatOption = Format.text) -> None:
    """Erase for good what still holds a part of the forgotten; says what remains and why.

    Applies the strict rule to everyone forgotten so far, also where retention paper kept models for later requests,
    and leaves nothing of it in the database's free pages, its log or temporary files.
    """
    from rich.markup import escape

    from sifu.api import Run
    from sifu.cli.output import out, print_json

    done = Run(run).purge()
    if format is Format.json:
        print_json(asdict(done))
        return
    out.print(
        f"Erased {len(done.models)} models and {len(done.updates)} files of updates, {done.bytes / 1e6:.2f} MB; "
        "the database was written anew."
    )
    if not done.complete:
        out.print("[yellow]Another process is reading the run: its log still holds old pages. Purge again later.[/]")
    out.print("What remains, and why:")
    for what, why in done.remains:
        out.print(f"  {escape(what)}: {escape(why)}.")
