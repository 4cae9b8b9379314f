"""Ten different first requests."""

from __future__ import annotations

from sifu_paper.experiment import Experiment
from sifu_paper.figures import draw_methods
from sifu_paper.unlearning import run_requests

EXPERIMENT = Experiment(
    title="Ten different first requests",
    question="Does it matter which ten clients ask?",
    paper_figure="appendix, figure on the requests",
    run=run_requests,
    draw=draw_methods,
    grid={"set": tuple(range(10))},
)
