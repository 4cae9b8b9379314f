"""Three requests in a row, on every data set and by every method."""

from __future__ import annotations

from sifu_paper.experiment import Experiment
from sifu_paper.figures import draw_methods
from sifu_paper.unlearning import run_requests

EXPERIMENT = Experiment(
    title="Three requests in a row",
    question="How many rounds does each method take to forget ten clients, three times in a row, and what does the "
    "model still know of them?",
    paper_figure="appendix, figure SIFU",
    run=run_requests,
    draw=draw_methods,
    requests=3,
)
