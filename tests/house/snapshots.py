"""Snapshots of the public interface as text: the names of `import sifu` and the help of every command.

    python tests/house/snapshots.py --write

rewrites both snapshots. Run it after an intended change, and read the difference before committing it.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sifu

WIDTH = 100
FOLDER = Path(__file__).resolve().parent


def public_api() -> str:
    """Return every exported name with its signature, and for a class its fields, properties and methods."""
    lines: list[str] = []
    for name in sorted(sifu.__all__):
        lines += [*_described(name, getattr(sifu, name)), ""]
    lines.append("keys of a spec and their defaults")
    lines += [f"    {key} = {value!r}" for key, value in _flat(sifu.Spec().to_mapping())]
    return "\n".join(lines) + "\n"


def _described(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
        if not issubclass(value, BaseException) or "__init__" in vars(value):
            yield f"    {_signature('__init__', value.__init__)}"
        if typing.is_typeddict(value):
            yield from (f"    key {key}: {_annotation(kind)}" for key, kind in typing.get_type_hints(value).items())
            return
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                yield f"    field {field.name}: {_annotation(field.type)}"
        ours = {name for base in value.__mro__ if base.__module__.startswith("sifu") for name in vars(base)}
        for member in sorted(ours):  # members of a base in another package are left out
            if not member.startswith("_") and not hasattr(Exception, member):
                yield from _member(member, inspect.getattr_static(value, member), value)
    elif callable(value):
        yield f"def {_signature(name, value)}"
    elif inspect.ismodule(value):
        yield f"module {name}"
    else:
        yield f"{name}: {type(value).__name__}"


def _member(name: str, member: Any, owner: type) -> Iterator[str]:
    if isinstance(member, property):
        yield f"    property {name}: {_annotation(inspect.signature(member.fget).return_annotation)}"  # type: ignore[arg-type]
    elif isinstance(member, staticmethod | classmethod):
        yield f"    {type(member).__name__} {_signature(name, getattr(owner, name))}"
    elif callable(member):
        yield f"    def {_signature(name, member)}"
    elif not dataclasses.is_dataclass(owner) or name not in {field.name for field in dataclasses.fields(owner)}:
        yield f"    constant {name} = {member!r}"


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return `name(arguments) -> result`, with annotations as written, without module paths."""
    signature = inspect.signature(function)
    shown = []
    star_seen = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            star_seen = True
        if parameter.kind is parameter.KEYWORD_ONLY and not star_seen:
            shown.append("*")
            star_seen = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        typed = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        shown.append(f"{stars}{parameter.name}{typed}{default}")
    result = "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    joined = f"{name}({', '.join(shown)}){result}"
    if len(joined) <= WIDTH:
        return joined
    return f"{name}(\n" + "".join(f"        {argument},\n" for argument in shown) + f"    ){result}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    plain = isinstance(value, str | int | float | bool | tuple | None)
    return repr(value) if plain else "..."


def _flat(mapping: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command and group by its name on the command line, hidden ones included, as new objects."""
    from typer.main import get_command

    from sifu.cli.main import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for inner, child in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{name} {inner}", child)

    yield from walk("sifu", get_command(app))


def command_help() -> str:
    """Return the declarations of each command and its parameters, without Typer's layout."""
    pages = []
    for name, command in commands():
        panel = getattr(command, "rich_help_panel", None)
        heading = f"$ {name}" + (f"    [{panel}]" if isinstance(panel, str) else "")
        pages.append(
            "\n".join([heading, *_wrapped(command.help or "", 4), *map(_parameter, _ours(command.params))]) + "\n"
        )
    return "\n".join(pages)


def _ours(parameters: list[Any]) -> list[Any]:
    return [parameter for parameter in parameters if parameter.name not in {"install_completion", "show_completion"}]


def _parameter(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = parameter.name.upper()
    default = parameter.default
    marks = ["required"] if parameter.required else []
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        marks.append(f"default {getattr(default, 'value', default)}")
    if parameter.multiple:
        marks.append("repeatable")
    if getattr(parameter, "hidden", False):
        marks.append("hidden")
    head = (
        f"    {names}"
        + (f" {parameter.metavar}" if parameter.metavar else "")
        + (f" ({', '.join(marks)})" if marks else "")
    )
    return "\n".join([head, *_wrapped(getattr(parameter, "help", None) or "", 8)])


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.replace("\\[", "[").split()), WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent
    )


SNAPSHOTS: dict[str, Callable[[], str]] = {"public_api.txt": public_api, "command_help.txt": command_help}


def difference(name: str) -> str:
    """Return the changes since the snapshot was written; empty if there are none."""
    path = FOLDER / name
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return "\n".join(difflib.unified_diff(before, SNAPSHOTS[name]().splitlines(), "recorded", "now", lineterm=""))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/house/snapshots.py --write")
    for name, make in SNAPSHOTS.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
