"""Advice before training: what forgetting would cost with each option of training."""

from sifu.advice.advisor import Advice, advise

__all__ = ["Advice", "advise"]
