"""`sifu flower`: writes an app to start a federation on Flower with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sifu.cli.options import Format, FormatOption

flower = typer.Typer(
    name="flower", help="Federations on Flower, see docs/flower.md.", no_args_is_help=True, rich_markup_mode="rich"
)


@flower.command("new")
def new_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write the app into.")],
    run: Annotated[
        Path | None, typer.Option("--run", help="Its run folder.", show_default="DIR-run, beside the app")
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
    from sifu.cli.flower_template import default_run, write_app
    from sifu.cli.output import tell

    files = write_app(folder, run or default_run(folder), insecure)
    tell(
        format,
        {"app": str(folder), "files": files},
        f"Wrote {', '.join(files)} into {folder}. Next: read {folder / 'README.md'}",
    )
