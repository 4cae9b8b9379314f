"""Validation of JSON values against the API's published schemas, for the OpenAPI 3.1 keywords that they use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sifu.errors import InputError

_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "object": (dict, "an object"),
    "array": (list, "a list"),
    "string": (str, "a text"),
    "number": ((int, float), "a number"),
    "integer": ((int, float), "a whole number"),
}
"""Python types of each JSON type, and its name in error messages."""


def check_body(schema: Mapping[str, Any], body: Any) -> None:
    """Raise an InputError that names the first mismatch of a body with its schema."""
    for problem in problems(schema, body, "the body"):
        raise InputError(problem)


def problems(schema: Mapping[str, Any], value: Any, name: str) -> Iterator[str]:
    """Yield a message for each violation of the schema in `value`; the messages call the value `name`."""
    if "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
        yield f"{name} is one of {', '.join(map(str, schema['enum']))}, found {_short(value)}"
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{name} is {schema['const']}, found {_short(value)}"
    if "oneOf" in schema:
        choices = [list(problems(choice, value, name)) for choice in schema["oneOf"]]
        if sum(not found for found in choices) != 1:
            yield (
                " or ".join(found[0].partition(", found")[0] for found in choices if found) + f", found {_short(value)}"
            )
    kind = schema.get("type")
    if kind is not None and not _is(kind, value):
        yield f"{name} is {_TYPES[kind][1]}, found {_short(value)}"
        return
    if isinstance(value, dict):
        yield from _problems_of_object(schema, value, name)
    if isinstance(value, list):
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
        if not least <= len(value) <= most:
            yield f"{name} must have {least} to {most} entries, found {len(value)}"
        for number, entry in enumerate(value):
            yield from problems(schema.get("items", {}), entry, f"entry {number} of {name}")
    if "minimum" in schema and _is("number", value) and value < schema["minimum"]:
        yield f"{name} must be at least {schema['minimum']}, found {_short(value)}"


def _problems_of_object(schema: Mapping[str, Any], value: Mapping[str, Any], name: str) -> Iterator[str]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{name} must give {key}"
    for key, entry in value.items():
        if key in properties:
            yield from problems(properties[key], entry, key)
        elif schema.get("additionalProperties") is False:
            yield f"{name} has no field {_short(key)}: it may give {', '.join(sorted(properties)) or 'none'}"


def _is(kind: str, value: Any) -> bool:
    """Return whether a value has a JSON type; booleans are not numbers, and 3.0 is an integer."""
    if isinstance(value, bool) or not isinstance(value, _TYPES[kind][0]):
        return False
    return kind != "integer" or not isinstance(value, float) or value.is_integer()


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _short(value: Any) -> str:
    return repr(value)[:60]
