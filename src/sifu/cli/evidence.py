"""`sifu evidence`: what a client, its lawyer or an authority is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sifu.cli.options import Format, FormatOption, RequestArgument, RunArgument


def evidence(
    run: RunArgument,
    request: RequestArgument,
    output: Annotated[Path, typer.Option("--out", "--output", help="The zip file to write.", metavar="FILE.zip")],
    format: FormatOption = Format.text,
) -> None:
    """Write the evidence of a finished request into one file to hand over; needs the key. Exit code 3 if it is wrong.

    The public certificate, a signed statement, signed heads of the ledger, a page to print, and all that is needed to
    check it again without you. Nothing of other clients, no private key. The run is verified first.
    """
    from sifu.cli.output import tell
    from sifu.report import write_evidence

    path = write_evidence(run, request, output)
    tell(
        format,
        {"evidence": str(path), "request": request},
        f"Wrote {path}. It may be handed out: it holds nothing of other clients and no private key.",
    )
