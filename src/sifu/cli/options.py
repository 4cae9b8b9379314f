"""Options that several commands share, including the terms of a request."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sifu.choices import Device, SigmaChoice, Term, TermsGiven, terms_on_offer
from sifu.cli.output import Answer, Format
from sifu.errors import InputError


def answering(command: Callable[..., Any]) -> Callable[..., None]:
    """Let Typer call a command that returns an `Answer`, and print the answer; leave other commands unchanged.

    The command gets the option `--format`. A parameter `terms: TermsGiven` becomes an option for each term; the command
    receives only the terms that are given.
    """
    signature = inspect.signature(command, eval_str=True)
    if signature.return_annotation is not Answer:
        return command
    takes_terms, options = False, list[inspect.Parameter]()
    for parameter in signature.parameters.values():
        of_terms = parameter.annotation is TermsGiven
        takes_terms |= of_terms
        options += TERM_PARAMETERS if of_terms else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    last = inspect.Parameter("format", inspect.Parameter.KEYWORD_ONLY, default=Format.text, annotation=FormatOption)

    @functools.wraps(command)
    def printing(*, format: Format, **values: Any) -> None:
        Answer.format = format
        if takes_terms:
            given = {parameter.name: values.pop(parameter.name) for parameter in TERM_PARAMETERS}
            values["terms"] = {name: value for name, value in given.items() if value is not None}
        answer = command(**values)
        answer.print(format)
        if answer.code:
            raise typer.Exit(answer.code)

    shown: Any = printing
    shown.__signature__ = inspect.Signature([*options, last])
    shown.__annotations__ = {parameter.name: parameter.annotation for parameter in (*options, last)}
    return shown  # type: ignore[no-any-return]


class Commands(typer.Typer):
    """A group of commands that prints the `Answer` that a command returns."""

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name=name, help=help, no_args_is_help=True, rich_markup_mode=None)

    def command(self, name: str) -> Callable[[Callable[..., Any]], Any]:  # type: ignore[override]
        """Register a command."""
        register = super().command(name)
        return lambda command: register(answering(command))


def option(help: str, *flags: str, **more: Any) -> Any:
    """Return an option; its flag is the parameter's name unless `flags` are given."""
    return typer.Option(*flags, help=help, **more)


def argument(metavar: str | None, help: str, **more: Any) -> Any:
    """Return a positional argument."""
    return typer.Argument(metavar=metavar, help=help, **more)


runs_of_this_command: list[Path] = []
"""Run folders given to this command; when it ends, it lists their overdue requests."""


def collect_run(folder: Path | None) -> Path | None:
    """Add a run folder to `runs_of_this_command`, and return it."""
    if folder is not None:
        runs_of_this_command.append(folder)
    return folder


AllOption = Annotated[bool, option("Full output, longer than a screen.", "--all")]
FormatOption = Annotated[Format, option("json prints one JSON object.", "--format", show_default=False)]
RunArgument = Annotated[Path, argument("DIR", "The run folder.", callback=collect_run)]
RequestArgument = Annotated[str, argument("ID", "The request.")]
ActorOption = Annotated[str | None, option("Name of the person acting (or set SIFU_ACTOR).", "--actor")]
SetOption = Annotated[list[str] | None, option("Override a key of the spec.", "--set", metavar="KEY=VALUE")]
PublicKeyOption = Annotated[
    str | None, option("The operator's public key (hex), from a source other than the run.", "--public-key")
]
RunOption = Annotated[Path | None, option("Folder of the run.", "--run")]
RequestOption = Annotated[str | None, option("Only this request.", "--request", metavar="ID")]
ID = option("Id of the request.", "--id", metavar="ID")
ClientsOption = Annotated[str | None, option("Clients to forget.", "--clients", "--client", metavar="A,B")]
NAME = option("The client's name.", "--name", metavar="NAME")
NameOption = Annotated[str, NAME]
HeadsOption = Annotated[
    list[Path] | None, option("File of signed heads kept elsewhere, a certificate or a bundle; repeatable.", "--head")
]
PublicOption = Annotated[bool, option("The form for the public, without confidential data.", "--public")]
ModuleOption = Annotated[
    str | None, option("Module of yours: the model or its features.", "--module", metavar="PACKAGE.FILE:FUNCTION")
]
OutputOption = Annotated[Path | None, option("File or folder to write.", "--output", metavar="PATH")]
DeviceOption = Annotated[Device, option("auto uses a GPU if there is one and it is faster.", "--device")]


def _parse_sigma(text: str) -> Any:
    from sifu.core.request_terms import parse_sigma

    return parse_sigma(text)


def _complete_method(start: str) -> list[str]:
    from sifu.core.method_info import METHOD_INFOS

    return [name for name in ("auto", *METHOD_INFOS) if name.startswith(start)]


def _option(name: str, kind: Any, about: Term) -> Any:
    flag = f"--{name.replace('_', '-')}"
    if kind is SigmaChoice:
        return Annotated[str | None, option(about.help, flag, metavar="auto|X", parser=_parse_sigma)]
    return Annotated[
        kind | None,
        option(
            about.help,
            flag,
            show_default=about.default or True,
            autocompletion=_complete_method if name == "method" else None,
        ),
    ]


TERM_PARAMETERS = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, term.kind, term.about)
    )
    for name, term in terms_on_offer().items()
    if name != "records"
]
"""An option for each term of a request. The value of an option that is not given is None: the run's spec decides."""


def flags(terms: Any) -> str:
    """Return the options that set these terms: `--epsilon, --sigma`."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in terms)


def client_names(clients: str) -> list[str]:
    """Return the names in `--clients A,B`."""
    return [name.strip() for name in clients.split(",") if name.strip()]


RecordsOption = Annotated[
    str | None,
    option(
        "Forget records of one client, which stays: identities (data.id) or row numbers from 0; a file has one per "
        "line.",
        "--records",
        metavar="FILE|A,B",
    ),
]


def read_records(text: str, by_identity: bool) -> list[int | str]:
    """Return the records that `--records` names; the run checks later that the client has them.

    >>> read_records("P0001,P0002", by_identity=True), read_records("3,5", by_identity=False)
    (['P0001', 'P0002'], [3, 5])
    """
    path = Path(text)
    # A list may be longer than a file name, for which `Path.is_file` raises an error.
    entries = _lines(path) if os.path.isfile(text) else [(f"{entry!r}", entry) for entry in text.split(",")]
    records = [_record(where, entry.strip(), by_identity) for where, entry in entries if entry.strip()]
    if not records:
        raise InputError(f"--records {text[:80]!r} names no record: write one per line in a file, or A,B,...")
    return records


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file: write one record per line") from error
    return [(f"line {number} of {path}", re.split(r"(?:^|\s)#", line)[0]) for number, line in enumerate(lines, start=1)]


def _record(where: str, entry: str, by_identity: bool) -> int | str:
    if by_identity:
        return entry
    if not (entry.isascii() and entry.isdecimal() and len(entry) < 16):
        raise InputError(
            f"{where} is {entry[:40]!r}, which is neither an existing file nor a row number counted from 0; to name "
            "records by identity, the spec needs data.id"
        )
    return int(entry)
