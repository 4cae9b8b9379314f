"""Metrics of a run in MLflow: one MLflow run for each run of ours, found again by its tag."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from sifu.errors import InputError
from sifu.report.metrics.rows import VALUES, MetricRow

TAG = "sifu.run"
MOST_AT_ONCE = 400
"""Rows of a batch; MLflow takes a thousand metrics at once."""


class MlflowLog:
    """Adds rows to an experiment of MLflow, where MLFLOW_TRACKING_URI says; what is there already is not sent again."""

    def __init__(self, experiment: str, run: str, name: str, client: Any = None) -> None:
        self._client = client if client is not None else _client()
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing else self._client.create_experiment(experiment)
        runs = self._client.search_runs([number], filter_string=f"tags.`{TAG}` = '{run}'")
        if runs:
            self._run = runs[0].info.run_id
        else:
            self._run = self._client.create_run(number, tags={TAG: run, "mlflow.runName": name}).info.run_id
        history = self._client.get_metric_history(self._run, VALUES[0])
        self.last_step = max((int(metric.step) for metric in history), default=-1)

    def append(self, rows: Sequence[MetricRow]) -> None:
        """Send rows that follow what is there."""
        metric = _metric_class()
        for start in range(0, len(rows), MOST_AT_ONCE):
            batch = rows[start : start + MOST_AT_ONCE]
            metrics = [
                metric(name, getattr(row, name), _milliseconds(row), row.step) for row in batch for name in VALUES
            ]
            self._client.log_batch(self._run, metrics=metrics)
            self.last_step = batch[-1].step


def _milliseconds(row: MetricRow) -> int:
    return int(1000 * datetime.datetime.fromisoformat(row.time).timestamp()) if row.time else 0


def _client() -> Any:
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise InputError("to log to MLflow, install it: pip install 'sifu[mlflow]'") from error
    return MlflowClient()


def _metric_class() -> Any:
    from mlflow.entities import Metric

    return Metric
