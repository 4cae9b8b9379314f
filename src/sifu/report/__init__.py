"""The report of a run: one self-contained HTML page with its figures, made from the record.

    from sifu.report import write_report

    write_report(Path("my-run"))              # my-run/report/index.html, and the figures as files

To draw a figure alone, `collect` a run, then pass the data to `draw` of an entry of `sifu.report.figures.FIGURES`.
"""

from sifu.report.collect import collect
from sifu.report.page import write_report
from sifu.report.run_data import ReportData

__all__ = ["ReportData", "collect", "write_report"]
