"""Policy for the erasure of figures: a purge keeps the figures that the run's certificates depend on.

If every request was exact and started from a fresh model, no certificate is recomputed from the rounds that were cut
off, so a purge erases their figures. Certificates of requests that added noise depend on these figures, which are then
erased only if the operator asks for it (`sifu purge --figures`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from sifu.core.ledger import SEALED
from sifu.core.method_info import method_info
from sifu.core.spec import Spec
from sifu.store.erased_figures import not_recomputed
from sifu.store.events_check import ReplayedLedger, ReplayedTables
from sifu.store.reader import RunReader


def _tied(first: Mapping[str, Any], run: Collection[str]) -> str:
    """Return the reason why no purge can ever erase figures of this run; empty if there is none.

    The reason is a clause that completes a sentence.
    """
    spec = first["run"]["spec"]
    if SEALED not in first:
        return "the run was made when digests of rounds had no salt"
    if spec["privacy"]["noise"] == "seeded":
        return "the salts of erased models follow from the seed (privacy.noise = seeded)"
    if first["run"]["asked"].get("local", {}).get("rate", "auto") == "auto" != spec["local"]["rate"]:
        return "the run was made when automatic local rates, found from everyone's data, were recorded in the open"
    if spec["keep"]["gram_clients"]:
        return "the run keeps Gram matrices (keep.gram_clients)"
    return "the list of clients has what each reported of its data" if "reported" in run else ""


def keeps_figures(
    first: Mapping[str, Any],
    requests: Collection[Mapping[str, Any]],
    run: Collection[str],
    *,
    by_choice: bool = False,
) -> str:
    """Return why a purge keeps the figures of rounds, as the end of a sentence; empty if it erases them.

    Args:
        first: Payload of the first event.
        requests: Rows of the executed requests whose figures still exist.
        run: Keys of the run table.
        by_choice: True if the operator accepts that certificates by noise can no longer be recomputed.
    """
    if why := _tied(first, run):
        return why
    if not requests:
        return "no client was forgotten yet"
    if by_choice:
        if why := Spec.from_mapping(first["run"]["spec"]).regime.why_figures_stay():
            return why
        needed = {row["method"] for row in requests if method_info(row["method"]).figures == "needed"}
        if needed or any(request.get("level") in (None, "none") for request in requests):
            named = f" ({', '.join(sorted(needed))})" if needed else ""
            return f"a request was executed without a guarantee, or by a method whose figures must stay{named}"
    elif any(row.get("level") != "exact" or method_info(row["method"]).figures != "unused" for row in requests):
        return "certificates of requests that are not exact, or that started from a trained model, depend on them"
    return ""


def erases_more_by_choice(reader: RunReader) -> bool:
    """Return whether `sifu purge --figures` would erase more than a plain purge.

    A plain purge keeps the figures of noise certificates. In runs trained in rounds it also keeps the list of models
    that were kept: the list depends on Psi, and certificates name the erased models.
    """
    erased = not_recomputed(reader)
    recomputed = any(row.noise_node is not None and row.request not in erased for row in reader.requests())
    return bool(why_figures_stay(reader)) or (recomputed and not why_figures_stay(reader, by_choice=True))


def why_figures_stay(reader: RunReader, tables: ReplayedTables | None = None, *, by_choice: bool = False) -> str:
    """Return the result of `keeps_figures` for the current state of a run, or for the earlier state in `tables`."""
    first = json.loads(reader.query("SELECT payload FROM events WHERE seq = 1")[0][0])
    rows = ReplayedLedger.of(reader).tables if tables is None else tables.rows
    run = [str(key) for (key,) in rows["run"]]
    requests = {str(key): row for (key,), row in rows["requests"].items() if row.get("noise_node") is not None}
    erased = not_recomputed(reader)
    left = [row for request, row in requests.items() if request not in erased]
    if requests and not left:
        return _tied(first, run)
    return keeps_figures(first, left, run, by_choice=by_choice)
