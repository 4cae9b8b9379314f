"""The paper's experiments as data, a runner that can be interrupted, and figures that read the results only."""
