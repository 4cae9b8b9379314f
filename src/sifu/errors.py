"""What can go wrong, as sentences with a stable exit code.

Every message names the thing, the value found and what to do about it.
"""

from __future__ import annotations


class SifuError(Exception):
    """Base of every error a user can cause or meet; `exit_code` is what the command line returns."""

    exit_code = 1


class SifuWarning(UserWarning):
    """Something that looks like a mistake and is done all the same."""


class InputError(SifuError):
    """A bad argument, spec, data set or model: nothing was changed."""

    exit_code = 2


class NoSpaceError(InputError):
    """A disk or quota is full: what was asked for was not done, and is not to blame."""


class MissingPackageError(InputError):
    """An optional package that is needed is not installed."""


class MissingExtensionError(InputError):
    """A run, certificate or spec uses a method or key of a package that is not installed."""

    exit_code = 5


class UnusableSamplesError(InputError):
    """Samples that a feature map cannot take: of another shape, not finite, or too large."""


class RoundRejectedError(InputError):
    """A round produced values that must not touch the model (NaN, Inf): the last good state stays."""


class VerificationError(SifuError):
    """A recorded claim does not recompute."""

    exit_code = 3


class NotCertifiableError(SifuError):
    """The request cannot be certified as asked: nothing was changed."""

    exit_code = 4


class NoClientResponseError(SifuError):
    """Clients that are needed are not there: nothing was changed, and the same command continues when they are."""


class RunDamagedError(SifuError):
    """The run folder is damaged, of a newer schema, or not a run."""

    exit_code = 5


class DiskError(SifuError):
    """The disk failed to read or write: what was recorded before stays, and the same command continues."""

    exit_code = 5


class RunBusyError(SifuError):
    """Another process is writing to the run."""

    exit_code = 5


def install_extra(name: str) -> str:
    """Return how to install an extra: from the repository or from a wheel, because no package index has it.

    >>> install_extra("onnx")
    "run pip install '.[onnx]' in sifu's repository, or pip install 'FILE.whl[onnx]' with its wheel"
    """
    return f"run pip install '.[{name}]' in sifu's repository, or pip install 'FILE.whl[{name}]' with its wheel"


EXTRAS = {
    "torch": "train",
    "matplotlib": "report",
    "flwr": "flower",
    "triton": "gpu",
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client", "authlib", "joserfc", "httpx"), "console"),
}
"""Packages that only an extra installs, with the name of that extra."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return the sentence that says which extra a command needs; None if the missing module belongs to no extra.

    >>> missing_extra(ModuleNotFoundError(name="torch.nn")).partition(":")[0]
    'this command needs torch, which is not installed'
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"this command needs {package}, which is not installed: {install_extra(EXTRAS[package])}"
