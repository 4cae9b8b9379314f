"""The Python API: train, plan, forget, verify, in the shape of the command line."""

from sifu.api.backups import restore
from sifu.api.run import Run
from sifu.api.start_run import open_run, train
from sifu.launch.spec_files import load_spec
from sifu.requests.outcome import Outcome
from sifu.verify.certificate_file import verify_certificate
from sifu.verify.verification import Verification, verify_run

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
