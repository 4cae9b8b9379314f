"""The Python API: train, plan, forget, verify, in the shape of the command line."""

from sifu.api.certificate_file import verify_certificate
from sifu.api.custody import restore
from sifu.api.entry import open_run, train
from sifu.api.outcome import Outcome
from sifu.api.run import Run
from sifu.api.spec_files import load_spec
from sifu.api.verification import Verification, verify_run

__all__ = [
    "Outcome",
    "Run",
    "Verification",
    "load_spec",
    "open_run",
    "restore",
    "train",
    "verify_certificate",
    "verify_run",
]
