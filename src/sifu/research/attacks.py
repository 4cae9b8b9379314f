"""Membership inference and relearning, for experiments that apply them to models of their own."""

from sifu.audit.membership import ShadowScores, lira, relearn_rounds
from sifu.engines.sim.models import HeadScorer, Samples, Scorer, stacked

__all__ = ["HeadScorer", "Samples", "Scorer", "ShadowScores", "lira", "relearn_rounds", "stacked"]
