"""The commands `serve` and `token`, which the distribution sifu-console brings."""

from __future__ import annotations

import importlib

import typer

from sifu.cli.options import answering
from sifu.errors import InputError

PACKAGE, PANEL = "sifu_console", "Federations and the console"
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_console_commands(app: typer.Typer) -> None:
    """Add `serve` and `token`; without sifu-console, both only say how to install it."""
    try:
        commands = importlib.import_module(f"{PACKAGE}.commands")
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        for name in ("serve", "token"):
            app.command(name, rich_help_panel=PANEL, context_settings=ANYTHING)(_say_what_to_install)
    else:
        app.command(rich_help_panel=PANEL)(answering(commands.serve))
        app.add_typer(commands.token, rich_help_panel=PANEL)


def _say_what_to_install() -> None:
    """Not installed: run pip install ./console in sifu's repository."""
    raise InputError(
        "sifu-console is not installed: run pip install ./console in sifu's repository, beside sifu itself"
    )
