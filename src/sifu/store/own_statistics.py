"""Statistics or rows of single clients, stored in files, from which a closed-form head can be solved again.

A file of rows holds the features of a client's samples in fixed point, row by row, and then their targets
(docs/store.md, section 5a).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.errors import InputError, RunDamagedError
from sifu.store.statistics_files import StatisticsRow, read_numbers, read_statistics, write_file
from sifu.theory.closed_form import FixedPoint, Rows, Statistics


@dataclass(frozen=True)
class OwnStatistics:
    """Files with the statistics or rows of single clients.

    Attributes:
        fixed: Fixed-point format of the numbers.
        rows: File of each client.
    """

    fixed: FixedPoint
    rows: Mapping[int, StatisticsRow]

    @staticmethod
    def among(stored: Iterable[StatisticsRow], fixed: FixedPoint) -> OwnStatistics:
        """Return the clients' own statistics among `stored` files."""
        return OwnStatistics(fixed, {row.clients[0]: row for row in stored if not row.is_sum})

    def read(self, folder: Path, client: int) -> Statistics | Rows:
        """Return a client's statistics or rows, read from a checked file.

        Raises:
            RunDamagedError: If the file is missing, changed, or inconsistent.
        """
        row, fixed = self.rows[client], self.fixed
        if not row.is_rows:
            return read_statistics(folder, row, fixed)
        numbers, features = read_numbers(folder, row, fixed, of_rows=True), row.samples * fixed.features
        try:
            rows = Rows(
                fixed,
                numbers[:features].reshape(row.samples, fixed.features),
                numbers[features:].reshape(row.samples, fixed.outputs),
            )
            rows.check("the file")
        except (InputError, ValueError) as error:
            raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error}") from error
        return rows

    @staticmethod
    def write(folder: Path, node: int, client: int, statistics: Statistics | Rows) -> dict[str, Any]:
        """Write the statistics or rows that a client sent, and return the row of the file; see `write_file`."""
        if isinstance(statistics, Rows):
            numbers = np.concatenate([statistics.features.ravel(), statistics.targets.ravel()])
            return write_file(folder, f"{node}.{client}.rows", node, [client], statistics, numbers)
        return write_file(folder, f"{node}.{client}", node, [client], statistics, statistics.words)
