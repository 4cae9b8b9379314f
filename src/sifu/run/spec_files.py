"""Specs from TOML files with overrides, and warnings about what looks like a mistake in a spec or in data."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.spec import Spec
from sifu.errors import InputError, SifuWarning
from sifu.theory.participation import Participation

LARGEST_SPEC_BYTES = 1 << 20
LONGEST_OVERRIDE = 4000


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """The spec in the TOML file `path` with `overrides` (each `key=value`) on top, checked."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"cannot read the spec {path}: it is not a regular file. Write one with: sifu init")
        if path.stat().st_size > LARGEST_SPEC_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes; a spec has at most {LARGEST_SPEC_BYTES}")
        mapping = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the spec {path}: {error.strerror}. Write one with: sifu init {path}") from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise InputError(f"{path} is not valid TOML: {error}") from error
    return Spec.from_mapping(with_overrides(mapping, overrides))


def with_overrides(mapping: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`mapping` with each `section.key=value` set; values are TOML, or plain text where that fails."""
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


def data_warnings(spec: Spec, clients: Sequence[Any]) -> list[str]:
    """A sentence for each thing that someone would want to know before training."""
    sentences = []
    participation = Participation.parse(spec.server.participation)
    if participation.kind == "fixed" and participation.count > len(clients):
        sentences.append(
            f"server.participation = {spec.server.participation!r}, but there are {len(clients)} clients: all of them "
            'take part in every round. Write "all", which can be proven'
        )
    empty = [client.name for client in clients if not np.any(client.x)]
    if len(empty) == len(clients):
        sentences.append("every feature of every client is 0: there is nothing to learn from. Check how they were made")
    elif empty:
        sentences.append(f"all features of {len(empty)} of {len(clients)} clients are 0, the first is {empty[0]!r}")
    labels = [np.asarray(client.y) for client in clients]
    if all(y.dtype.kind in "biu" and y.ndim == 1 for y in labels):
        seen = {int(label) for y in labels for label in (y.min(), y.max())}
        if len(seen) == 1:
            sentences.append(f"all labels are the same class, {seen.pop()}: there is nothing to tell apart")
    return sentences


def warn_of_data(spec: Spec, clients: Sequence[Any]) -> None:
    """Say so as a warning, which the command line prints as a sentence."""
    for sentence in data_warnings(spec, clients):
        warnings.warn(sentence, SifuWarning, stacklevel=3)
