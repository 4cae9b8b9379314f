"""Reader of specs: a TOML file with overrides from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sifu.core.spec import Spec
from sifu.errors import InputError

LARGEST_SPEC_BYTES = 1 << 20
LONGEST_OVERRIDE = 4000


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Return the checked spec in the TOML file `path`, with `overrides` (each `key=value`) applied."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"cannot read the spec {path}: it is not a regular file. Write one with: sifu init")
        if path.stat().st_size > LARGEST_SPEC_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes; a spec has at most {LARGEST_SPEC_BYTES}")
        mapping = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the spec {path}: {error.strerror}. Write one with: sifu init {path}") from error
    except (ValueError, RecursionError) as error:  # also raised for numbers with thousands of digits
        raise InputError(f"{path} is not valid TOML: {error}") from error
    return Spec.from_mapping(with_overrides(mapping, overrides))


def with_overrides(mapping: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `mapping` with each `section.key=value` set; values are TOML, or plain text if that fails."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in mapping.items()}
    for override in overrides:
        name, equals, text = override.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts) or len(parts) > 2:
            raise InputError(f"--set {override!r} is not understood: write section.key=value, e.g. local.rate=0.1")
        if len(text) > LONGEST_OVERRIDE:
            raise InputError(f"--set {name[:60]}: a value of {len(text)} characters is too long for a spec")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        target = result
        if len(parts) == 2:
            section = result.setdefault(parts[0], {})
            if not isinstance(section, dict):
                raise InputError(f"--set {override!r}: {parts[0]} is not a section of the spec")
            target = section
        target[parts[-1]] = value
    return result
