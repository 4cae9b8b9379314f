"""Watermarked clients: each client's images carry a mark of its own."""

from __future__ import annotations

from sifu_paper.experiment import Experiment
from sifu_paper.figures import draw_marks
from sifu_paper.unlearning import run_requests

EXPERIMENT = Experiment(
    title="Watermarked clients",
    question="Each client's images carry its own mark: does the mark go with the client, and at which price?",
    paper_figure="figure 2",
    run=run_requests,
    draw=draw_marks,
    settings={"watermark": 10, "partition": "dirichlet", "alpha": 1.0},
    requests=3,
    by_class=False,
)
