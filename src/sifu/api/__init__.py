"""The Python API: train, plan, forget, verify, in the shape of the command line."""

from sifu.api.run import Outcome, Run, open_run, train
from sifu.api.spec_files import load_spec

__all__ = ["Outcome", "Run", "load_spec", "open_run", "train"]
