"""Validation of JSON values against the schemas that the API publishes: the keywords of OpenAPI 3.1 that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sifu.errors import InputError

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
}
_WORDS = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "number": "a number",
    "integer": "a whole number",
}


def check_body(schema: Mapping[str, Any], body: Any) -> None:
    """Refuse a body that does not match its schema; the error names the first mismatch.

    Raises:
        InputError: If the body does not match the schema.
    """
    problem = next(problems(schema, body, "the body"), None)
    if problem:
        raise InputError(problem)


def problems(schema: Mapping[str, Any], value: Any, name: str) -> Iterator[str]:
    """Yield a sentence for everything in `value` that the schema forbids; sentences call the value `name`."""
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
        yield f"{name} is {_WORDS[kind]}, found {_short(value)}"
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
    if isinstance(value, bool) or not isinstance(value, _TYPES[kind]):
        return False
    return kind != "integer" or not isinstance(value, float) or value.is_integer()


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _short(value: Any) -> str:
    return repr(value)[:60]
