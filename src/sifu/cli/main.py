"""The command `sifu`. Heavy imports happen inside the commands, so that `--help` is fast."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, TextIO

import typer

from sifu.cli.checks import audit, verify
from sifu.cli.console_commands import add_console_commands
from sifu.cli.federation_commands import clients, flower
from sifu.cli.options import answering, option, runs_of_this_command
from sifu.cli.output import Answer, Format, harmless, print_json
from sifu.cli.request_commands import certificate, requests
from sifu.cli.runs import (
    demo,
    evaluate,
    export,
    init,
    join,
    methods,
    predict,
    rebuild,
    release,
    report,
    status,
    train,
)
from sifu.cli.unlearning import forget, plan, request
from sifu.cli.upkeep import backup, doctor, key, purge, restore
from sifu.core.allowed_code import allow_code
from sifu.errors import SifuError, SifuWarning, missing_extra
from sifu.version import __version__

app = typer.Typer(
    name="sifu",
    help="Let a federation forget a client, and prove it.\n\n"
    "Start with [bold]sifu demo[/]; then: init, train, plan, forget, verify, report.\n\n"
    "Exit codes: 0 done, 1 unexpected, 2 bad input, 3 verification failed, 4 cannot be certified as requested "
    "(nothing was changed), 5 the run is damaged or in use.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
PANELS: dict[str, tuple[typer.Typer | Callable[..., Answer | None], ...]] = {
    "Start here": (demo, init, train, join, status, evaluate, report, export, predict),
    "Forget a client": (plan, request, requests, forget, release, certificate, methods, rebuild),
    "Prove it": (verify, audit),
    "Keep the run safe": (purge, backup, restore, key),
    "Federations": (clients, flower, doctor),
}
for panel, commands in PANELS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(answering(command))
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
            "File or program that receives the run's signed heads (or set SIFU_WITNESS).",
            metavar="FILE|PROGRAM",
        ),
    ] = None,
    new_run: Annotated[
        bool, option("Accept another run than before in the folder, or a copy of a run.", "--new-run")
    ] = False,
    code: Annotated[
        list[str] | None,
        option(
            "Function of yours that a spec may run (features.module); others are refused.",
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
    from sifu.api.run_search import overdue_of

    for run in dict.fromkeys(runs_of_this_command):
        late = overdue_of(run)
        if late:
            named = ", ".join(f"{request.request} (since {request.deadline[:10]})" for request in late[:3])
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            sys.stderr.write(harmless(f"sifu: overdue in {run}: {named}{more}. See sifu requests list --overdue\n"))


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
