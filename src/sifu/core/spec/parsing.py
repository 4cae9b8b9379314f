"""Plain values into the dataclasses of a spec: unknown keys and wrong types are refused by name."""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from sifu.core.ledger import LARGEST_INTEGER
from sifu.errors import InputError


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of a section's keys; finding them evaluates our own annotations, once."""
    return typing.get_type_hints(kind)


def parse(whole: type[Any], mapping: Any) -> Any:
    """`mapping` as the dataclass `whole`, section by section."""
    return _parse(whole, mapping, "", whole)


def _parse(kind: type[Any], mapping: Any, prefix: str, whole: type[Any]) -> Any:
    if not isinstance(mapping, Mapping):
        raise InputError(f"{prefix.rstrip('.') or 'the spec'} must be a table of keys, found {mapping!r}")
    hints = _hints(kind)  # type: ignore[arg-type]
    names = {entry.name for entry in fields(kind)}
    values = {}
    for key, value in mapping.items():
        if key not in names:
            raise InputError(f"unknown key {prefix}{key!s} in the spec{_nearest_hint(prefix, str(key), kind, whole)}")
        hint = hints[key]
        values[key] = (
            _parse(hint, value, f"{prefix}{key}.", whole)
            if isinstance(hint, type) and is_dataclass(hint)
            else _cast(hint, value, prefix + key)
        )
    return kind(**values)


def _nearest_hint(prefix: str, key: str, kind: type[Any], whole: type[Any]) -> str:
    """A sentence with the nearest known keys, here or in another section."""
    here = [prefix + entry.name for entry in fields(kind)]
    everywhere = [
        f"{section.name}.{entry.name}"
        for section in fields(whole)
        if section.name != "seed"
        for entry in fields(_hints(whole)[section.name])  # type: ignore[arg-type]
    ]
    near = [name for name in everywhere if name.split(".")[1] == key] or difflib.get_close_matches(
        prefix + key, here, n=1
    )
    near = near or difflib.get_close_matches(prefix + key, everywhere, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(sorted(here))}"


def _cast(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type `hint` says, or a sentence."""
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint) and not isinstance(value, bool):
            return value
        options = ", ".join(map(str, typing.get_args(hint)))
        near = difflib.get_close_matches(str(value), [str(choice) for choice in typing.get_args(hint)], n=1)
        raise InputError(
            f"{name} must be one of {options}; found {value!r}" + (f", did you mean {near[0]}?" if near else "")
        )
    alternatives = typing.get_args(hint)
    if alternatives:  # a number or a word
        if isinstance(value, str):
            words = next(alternative for alternative in alternatives if typing.get_origin(alternative) is Literal)
            if value in typing.get_args(words):
                return value
            raise InputError(f"{name} must be a number or {typing.get_args(words)[0]!r}, found {value!r}")
        return _cast(float, value, name)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) < 1e308:
            raise InputError(f"{name} must be a finite number, found {str(value)[:40]}")
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > LARGEST_INTEGER:
            raise InputError(f"{name} must be a whole number up to 2^53, which JSON in every language can hold")
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    words_for = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    raise InputError(f"{name} must be {words_for[hint]}, found {value!r} ({type(value).__name__})")
