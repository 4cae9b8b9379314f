"""An event before it is recorded, with everything that becomes durable, or goes away, together with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sifu.store.files import model_path
from sifu.store.projection import EvaluationRow, NewModel, NewRows
from sifu.store.statistics_files import NewUpdates, statistics_path, updates_path
from sifu.theory.facts import ClientProfile


@dataclass(frozen=True)
class NewEvent:
    """What `RunWriter.record` writes in one transaction.

    `statistics` are rows of files that are there already (`store.statistics_files`). `certificates` are by request and
    form. `joined` is a client that the run knows from now on, `joined_digest` that of its samples. `for_good` also
    takes what is dropped out of the free pages and the log of the database, and erases the report.
    """

    kind: str
    payload: Mapping[str, Any]
    rows: NewRows = field(default_factory=NewRows)
    models: Sequence[NewModel] = ()
    dropped_models: Sequence[int] = ()
    updates: Sequence[NewUpdates] = ()
    dropped_updates: Sequence[str] = ()
    statistics: Sequence[dict[str, Any]] = ()
    dropped_statistics: Sequence[str] = ()
    evaluations: Sequence[EvaluationRow] = ()
    certificates: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    joined: ClientProfile | None = None
    joined_digest: str | None = None
    for_good: bool = False

    def content(self) -> dict[str, Any]:
        """The payload with what is known before anything is written."""
        parts = {
            "dropped_models": [int(node) for node in self.dropped_models],
            "dropped_updates": list(self.dropped_updates),
            "statistics": list(self.statistics),
            "dropped_statistics": list(self.dropped_statistics),
            "evaluations": [asdict(row) for row in self.evaluations],
        }
        return {**self.payload, **{name: part for name, part in parts.items() if part}}

    def certificate_texts(self) -> dict[tuple[str, str], str]:
        """The certificates as they are stored."""
        return {key: json.dumps(value, indent=1, sort_keys=True) for key, value in self.certificates.items()}

    def new_files(self, folder: Path) -> set[Path]:
        """Files that are in the run once this is recorded; some may be there already."""
        return {
            *(model_path(folder, model.node) for model in self.models),
            *(updates_path(folder, updates.file) for updates in self.updates),
            *(statistics_path(folder, row["file"]) for row in self.statistics),
        }

    def dropped_files(self, folder: Path) -> list[Path]:
        """Files that go once this is recorded."""
        return [
            *(model_path(folder, node) for node in self.dropped_models),
            *(updates_path(folder, file) for file in self.dropped_updates),
            *(statistics_path(folder, file) for file in self.dropped_statistics),
        ]
