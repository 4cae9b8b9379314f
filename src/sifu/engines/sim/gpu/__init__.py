"""Rounds of a run on a GPU, in captured graphs."""
