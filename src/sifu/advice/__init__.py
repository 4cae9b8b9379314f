"""Advice before training: the cost of forgetting for each option of training."""

from sifu.advice.advisor import Advice, advise

__all__ = ["Advice", "advise"]
