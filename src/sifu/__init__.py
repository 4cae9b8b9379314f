"""sifu: lets a federation forget a client, and prove it.

    import sifu

    run = sifu.train(spec, run="my-run")        # FedAvg with tracking; continues an unfinished run
    print(run.plan(["client-007"]))             # what a request would do; changes nothing
    outcome = run.forget(["client-007"])        # roll back, add noise, retrain, certify
    run.verify()                                # recompute every claim, offline

Importing this package loads nothing heavy; torch comes in when something is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sifu.version import __version__

if TYPE_CHECKING:
    from sifu.api import Run, load_spec, open_run, train
    from sifu.core.spec import Spec

__all__ = ["Run", "Spec", "__version__", "load_spec", "open_run", "train"]


def __getattr__(name: str) -> Any:
    if name == "Spec":
        from sifu.core.spec import Spec

        return Spec
    if name in __all__:
        from sifu import api

        return getattr(api, name)
    raise AttributeError(f"module 'sifu' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
