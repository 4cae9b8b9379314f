"""One premise of a certificate, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["met", "trusted", "assumed", "failed"]


@dataclass(frozen=True)
class Premise:
    """One premise: its name, whether it holds, and a sentence. `detail` may hold figures that depend on
    clients' data; it stands in the auditor's copy only."""

    name: str
    status: Status
    statement: str
    detail: str = ""
