"""A spec as a TOML file with a comment beside every key."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from sifu.core.spec.run_spec import Spec


def commented_toml(spec: Spec) -> str:
    """The spec as TOML with a comment beside every key: what `sifu init` writes."""
    lines = [f"seed = {spec.seed}  # {_comment(Spec, 'seed')}"]
    for section in fields(Spec):
        value = getattr(spec, section.name)
        if not is_dataclass(value):
            continue
        heading = (type(value).__doc__ or "").strip().splitlines()[0]
        lines += ["", f"[{section.name}]  # {heading}"]
        keys = [
            (f"{entry.name} = {_toml_value(getattr(value, entry.name))}", _comment(type(value), entry.name))
            for entry in fields(value)
        ]
        width = max(len(text) for text, _ in keys)
        lines += [f"{text:<{width}}  # {comment}" for text, comment in keys]
    return "\n".join(lines) + "\n"


def _comment(kind: type[Any], name: str) -> str:
    return next(str(entry.metadata["comment"]) for entry in fields(kind) if entry.name == name)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only DEL must be escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
