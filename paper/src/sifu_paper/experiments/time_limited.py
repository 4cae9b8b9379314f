"""Limited time: a share of the rounds that training took."""

from __future__ import annotations

from sifu_paper.experiment import Experiment
from sifu_paper.figures import draw_limits
from sifu_paper.unlearning import run_requests

EXPERIMENT = Experiment(
    title="Limited time",
    question="With 25, 33 or 50 % of the rounds of training, how far is each method from a full retraining?",
    paper_figure="figure 1",
    run=run_requests,
    draw=draw_limits,
    grid={"limit": (0.25, 0.33, 0.5)},
    unlimited=("scratch",),
)
