"""Metrics of a run for other people's tools: CSV, JSON lines, TensorBoard, MLflow.

Everything is read from the ledger, so a file never disagrees with it, and what was missed is added at the next look.
"""

from sifu.report.metrics.log import COLUMNS, MetricsLog, rows_after, write_metrics

__all__ = ["COLUMNS", "MetricsLog", "rows_after", "write_metrics"]
