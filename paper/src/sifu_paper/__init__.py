"""The paper's experiments as data, an interruptible runner, and figures that depend only on the results."""
