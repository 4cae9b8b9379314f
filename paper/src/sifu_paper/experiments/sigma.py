"""The size of the noise, in multiples of the paper's."""

from __future__ import annotations

from sifu_paper.experiment import Experiment
from sifu_paper.figures import draw_sigmas
from sifu_paper.unlearning import run_requests

EXPERIMENT = Experiment(
    title="The size of the noise",
    question="What does sigma change? Too little noise should act like Scratch, too much like Last.",
    paper_figure="appendix, figure on the noise",
    run=run_requests,
    draw=draw_sigmas,
    methods=("sifu", "last", "scratch"),
    requests=3,
    grid={"sigma_factor": (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)},
    fine_models=True,
)
