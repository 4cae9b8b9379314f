"""Whole experiments as one program on a GPU: many runs (lanes) with many clients each, round after round."""
