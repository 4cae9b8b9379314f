"""Errors with messages for users and stable exit codes.

Every message says what is wrong, the value found and what to do about it.
"""

from __future__ import annotations


class SifuError(Exception):
    """Base class of all errors that users can see; `exit_code` is the exit code of the command line."""

    exit_code = 1


class SifuWarning(UserWarning):
    """Warning about a probable mistake that does not stop the command."""


class InputError(SifuError):
    """Error for a bad argument, spec, data set or model; nothing was changed."""

    exit_code = 2


class NoSpaceError(InputError):
    """Error for a full disk or quota; the operation was not done, although its input is valid."""


class UnusableSamplesError(InputError):
    """Error for samples that a feature map cannot process: of a wrong shape, not finite, or too large."""


class IdInUseError(InputError):
    """A request was filed under the id of another request."""


class RoundRejectedError(InputError):
    """Error for a round with values that must not enter the model (NaN, Inf); the last good state is kept."""


class VerificationError(SifuError):
    """Error for a recorded claim that recomputation does not confirm."""

    exit_code = 3


class NotCertifiableError(SifuError):
    """Error for a request that cannot be certified as demanded; nothing was changed."""

    exit_code = 4


class NoClientResponseError(SifuError):
    """Error for clients that do not respond; nothing was changed, and the same command resumes once they do."""


class RunDamagedError(SifuError):
    """Error for a run folder that is damaged, of a newer schema, or not a run."""

    exit_code = 5


class DiskError(SifuError):
    """Error for a disk that fails to read or write; earlier records are intact, and the same command resumes."""

    exit_code = 5


class RunBusyError(SifuError):
    """Error for a run that another process is writing to."""

    exit_code = 5


def install_extra(name: str) -> str:
    """Return the instruction for installing an extra from the repository or a wheel; sifu is on no package index.

    >>> install_extra("onnx")
    "run pip install '.[onnx]' in sifu's repository, or pip install 'FILE.whl[onnx]' with its wheel"
    """
    return f"run pip install '.[{name}]' in sifu's repository, or pip install 'FILE.whl[{name}]' with its wheel"


EXTRAS = {
    "torch": "train",
    "matplotlib": "report",
    "flwr": "flower",
}
"""Packages that only an extra installs, with the name of that extra."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return a hint that says which extra a command needs, or None if the missing module belongs to no extra.

    >>> missing_extra(ModuleNotFoundError(name="torch.nn")).partition(":")[0]
    'this command needs torch, which is not installed'
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"this command needs {package}, which is not installed: {install_extra(EXTRAS[package])}"
