"""`sifu-bench`: the paper's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sifu.cli.main import run_app

bench = typer.Typer(name="sifu-bench", no_args_is_help=True, pretty_exceptions_enable=False)


@bench.callback()
def experiments() -> None:
    """Run the paper's experiments."""


def main() -> None:
    """Run the command line."""
    run_app(bench)


@bench.command("download")
def download_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, fashion_mnist, cifar10 or cifar100.")],
    data: Annotated[Path | None, typer.Option(help="Folder with data files (or set SIFU_DATA).")] = None,
) -> None:
    """Fetch the official files of a public data set; existing files are kept."""
    from sifu.cli.output import out
    from sifu_paper.data.public import download

    out.print(f"The files of {name} are in {download(name, data)}")
