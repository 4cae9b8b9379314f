"""Erasures by purges (docs/store.md, section 5)."""

from __future__ import annotations

from sifu_verifier.paths import path_to
from sifu_verifier.psi import psi_along
from sifu_verifier.run_folder import RunFolder


def check_purges(run: RunFolder) -> None:
    """Check that each purge erased exactly the data with influence that no later noise covers (section 5)."""
    for moment in run.purges:
        active, held, at = path_to(run, int(moment["tip"])), set(), f"event {moment['seq']}"
        run.agree(f"{at}: subjects", moment["payload"]["subjects"], moment["known"])
        for i in moment["known"]:
            psi, covered, order = psi_along(run, active, run.subjects[i]), False, run.owner[i]["request_order"]
            for n in active:
                row = run.nodes[n]
                noised = row["kind"] == "initial" or (row["kind"] == "noise" and row["noise_std"] > 0)
                covered = covered or (row["request_order"] >= order and noised)
                held |= {n} if psi[n] > 0 and not covered else set()
        models = [n for n in sorted(moment["models"]) if n in held and n != active[-1]]
        run.agree(f"{at}: models purged", moment["payload"].get("dropped_models", []), models)
