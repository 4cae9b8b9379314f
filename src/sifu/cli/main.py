"""The command `sifu`. Heavy imports happen inside the commands, so that `--help` is fast."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, TextIO

import typer
import typer.core
from typer.core import TyperGroup

from sifu.cli.checks import audit, verify
from sifu.cli.console_commands import add_console_commands
from sifu.cli.federation_commands import clients, flower
from sifu.cli.options import answering, option, runs_of_this_command
from sifu.cli.output import Answer, Format, harmless, print_json
from sifu.cli.request_commands import certificate, decide, requests
from sifu.cli.runs import demo, evaluate, export, init, join, predict, report, status, train, update
from sifu.cli.unlearning import forget, plan, request
from sifu.cli.upkeep import backup, key, purge, restore
from sifu.core.allowed_code import allow_code
from sifu.errors import SifuError, SifuWarning, missing_extra
from sifu.version import __version__

SECTIONS: dict[str, tuple[typer.Typer | Callable[..., Answer | None], ...]] = {
    "Train and use a model": (demo, init, train, join, evaluate, status, export, predict, report),
    "Forget a client": (plan, request, requests, decide, forget, update),
    "Prove it, and keep the run safe": (certificate, verify, audit, purge, backup, restore, key),
    "Federations and the console": (clients, flower),
}
FORMER = {
    "advise": "sifu plan SPEC",
    "doctor": "sifu --version",
    "evidence": "sifu certificate --bundle",
    "methods": "sifu plan --help",
    "rebuild": "sifu update",
    "release": "sifu update",
}
"""Commands of sifu 0.2, each with the command that replaces it."""


typer.core.HAS_RICH = False  # Typer's own pages take four times as long to import, and longer than a screen to read


class Sections(TyperGroup):
    """All commands, listed in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands without blank lines in between, so that they fit a screen, then the options."""
        width = max(map(len, self.commands))
        for section, group in itertools.groupby(self.commands.values(), lambda command: command.rich_help_panel):  # type: ignore[attr-defined]
            formatter.write_heading(section)
            with formatter.indentation():
                formatter.write_dl(
                    [(str(command.name).ljust(width), command.get_short_help_str(SHORT_HELP)) for command in group]
                )
        formatter.write_heading("Options")
        shown = [parameter for parameter in self.get_params(ctx) if parameter.name != "show_completion"]
        with formatter.indentation():
            formatter.write_dl(list(filter(None, (parameter.get_help_record(ctx) for parameter in shown))))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command to run; refuse a command of sifu 0.2 with the one that replaces it."""
        if args[0] in FORMER:
            ctx.fail(f"{args[0]} was a command of sifu 0.2: use {FORMER[args[0]]}")
        return super().resolve_command(ctx, args)


SHORT_HELP = 64
"""Characters of a command's first sentence in the list of all commands."""
app = typer.Typer(
    name="sifu",
    cls=Sections,
    help="Let a federation forget a client, and prove it. Start with: sifu demo",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for section, commands in SECTIONS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=section)
        else:
            app.command(rich_help_panel=section)(answering(command))
add_console_commands(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sifu {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, option("Show the version and exit.", "--version", callback=_show_version, is_eager=True)
    ] = False,
    witness: Annotated[
        list[str] | None,
        option(
            "Receiver of the signed heads (or SIFU_WITNESS).",
            metavar="FILE|PROGRAM",
        ),
    ] = None,
    new_run: Annotated[bool, option("Accept another run in a folder, or a copy.", "--new-run")] = False,
    code: Annotated[
        list[str] | None,
        option(
            "Function of yours that a spec may run.",
            "--allow-code",
            metavar="FILE:FUNCTION",
        ),
    ] = None,
) -> None:
    """Apply the options that precede the command."""
    if code:
        allow_code(*code)
    if new_run:
        os.environ["SIFU_NEW_RUN"] = "1"
    if witness:
        os.environ["SIFU_WITNESS"] = "\n".join(witness)


def main() -> None:
    """Run the command `sifu`."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run the command line of `app` and exit; an error becomes a message and a stable exit code."""
    # The format must be known even if the command line cannot be parsed.
    separate = any(pair == ("--format", "json") for pair in itertools.pairwise(sys.argv[1:]))
    Answer.format = Format.json if separate or "--format=json" in sys.argv[1:] else Format.text
    runs_of_this_command.clear()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(standalone_mode=False)
    except SifuError as error:
        _fail(_with_notes(error, str(error)), error.exit_code)
    except typer.Exit as exit_error:
        _leave(exit_error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _leave(INTERRUPTED)
    except Exception as error:
        # Typer's parser refused the command line; its exception class moved between its releases.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            if Answer.format is Format.json:
                _fail(error.format_message(), 2)  # type: ignore[attr-defined]
            error.show()
            sys.exit(2)
        if os.environ.get("SIFU_DEBUG"):
            raise
        if isinstance(error, ModuleNotFoundError) and (sentence := missing_extra(error)) is not None:
            _fail(sentence, 2)
        if isinstance(error, OSError):
            _fail_on_file(error)
        sentence = f"unexpected {type(error).__name__}: {error} (set SIFU_DEBUG=1 for the traceback)"
        _fail(_with_notes(error, sentence), 1)
    else:
        _leave(code if isinstance(code, int) else 0)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write only the message of sifu's own warnings, and other warnings as Python does."""
    ours = issubclass(category, SifuWarning)
    text = f"sifu: warning: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(harmless(text))


INTERRUPTED = 130
WRONG_PATH = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EROFS}
    | {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY}
)
"""Error codes of the operating system for an unusable path."""


def _leave(code: int) -> None:
    """Exit with this code; print a message for Ctrl-C, which Typer reports only by its code."""
    if code == 0:
        _say_what_is_overdue()
    if code == INTERRUPTED:
        _fail("interrupted: every finished round is saved; run the same command again to continue", code)
    sys.exit(code)


def _say_what_is_overdue() -> None:
    """Write to stderr which runs of this command have overdue requests."""
    if not runs_of_this_command:
        return
    from sifu.api import pending_requests

    for run in dict.fromkeys(runs_of_this_command):
        try:
            late = [request for request in pending_requests(run) if request.overdue]
        except (SifuError, OSError, ValueError):  # reported elsewhere
            continue
        if late:
            named = ", ".join(f"{request.request} (since {request.deadline[:10]})" for request in late[:3])
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            sys.stderr.write(harmless(f"sifu: overdue in {run}: {named}{more}. See sifu requests DIR --overdue\n"))


def _with_notes(error: BaseException, sentence: str) -> str:
    """Return an error's message, followed by the error's notes."""
    notes = getattr(error, "__notes__", ())
    return " ".join([f"{sentence}." if notes and not sentence.endswith(".") else sentence, *notes])


def _fail_on_file(error: OSError) -> None:
    """Exit with an error message for a wrong path, a full disk or a disk error; return for any other error."""
    what = os.fsdecode(error.filename) if error.filename else "a file"
    if error.errno in WRONG_PATH and error.filename:
        _fail(f"cannot use {what}: {error.strerror}. Check the path, and that this account may write there", 2)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        _fail(f"no space left to change {what}: free some and run the command again; nothing was lost", 2)
    if error.errno == errno.EIO:
        _fail(
            f"the disk failed to read or write {what} (Input/output error): check the disk and run the command again; "
            "earlier records are intact",
            5,
        )


def _fail(sentence: str, code: int) -> None:
    if Answer.format is Format.json:
        print_json({"error": sentence, "exit_code": code})
    sys.stderr.write(f"sifu: {harmless(sentence)}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
