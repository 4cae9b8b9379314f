"""Provenance of a result: hardware, date, commit, command, versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sifu
from sifu import InputError

FILE = "bench.json"


def provenance(device: str, command: Sequence[str]) -> dict[str, Any]:
    """Return a description of this machine and this code."""
    import numpy
    import torch

    gpu = torch.cuda.get_device_name(0) if device == "cuda" else None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(command),
        "commit": commit(),
        "hardware": gpu or f"{processor()}, {os.cpu_count()} cores",
        "versions": {
            "sifu": sifu.__version__,
            "python": platform.python_version(),
            "numpy": numpy.__version__,
            "torch": torch.__version__,
        },
    }


def commit() -> str:
    """Return the commit of the code, with a + if it or the library has changed since; the version if there is no
    commit.
    """
    here, library = Path(__file__).resolve(), Path(sifu.__file__).resolve().parent
    try:
        _git(here.parent, "ls-files", "--error-unmatch", str(here))  # a copy may be inside another repository
        head = _git(here.parent, "rev-parse", "--short=10", "HEAD")
        changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no", "--", ".", str(library))
    except (OSError, subprocess.SubprocessError):
        return f"version {sifu.__version__}"
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


def processor() -> str:
    """Return the name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def record(folder: Path, settings: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Record what is run and where, or check that a folder to be continued has the same settings."""
    path = folder / FILE
    sessions: list[Any] = []
    if path.exists():
        earlier = read_record(folder)
        for key, value in settings.items():
            if earlier["asked"].get(key) != value:
                raise InputError(
                    f"{folder} was made with {key} = {earlier['asked'].get(key)!r}, now it is {value!r}: "
                    "use another --out, or the same settings to continue"
                )
        sessions = earlier["sessions"]
    content = {"asked": dict(settings), "sessions": [*sessions, dict(origin)]}
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content, indent=2), encoding="utf-8")
    os.replace(temporary, path)
    return content


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a results folder."""
    content: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return content
