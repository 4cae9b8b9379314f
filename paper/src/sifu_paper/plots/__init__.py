"""Figures of the experiments, in the style of the library (`sifu.plots.style`)."""
