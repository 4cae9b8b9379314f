"""Policy for the erasure of figures: a purge keeps the figures that the run's certificates depend on.

If every request was exact and started from a fresh model, no certificate is recomputed from discarded rounds, so a
purge erases the figures of these rounds. Certificates of requests that added noise depend on discarded rounds. The
figures of these rounds are then erased only if the operator asks for it (`sifu purge --figures`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sifu.core.ledger import SEALED
from sifu.core.method_info import method_info
from sifu.core.spec import Spec
from sifu.store.erased_figures import not_recomputed
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables


def _why_never_purged(first: Mapping[str, Any], run: Collection[str]) -> str:
    """Return the reason (a clause) why the figures of this run can never be purged, or "" if there is none."""
    spec = first["run"]["spec"]
    if SEALED not in first:
        return "the run was made when digests of rounds had no salt"
    if first["run"]["asked"].get("local", {}).get("rate", "auto") == "auto" != spec["local"]["rate"]:
        return "the run was made when automatic local rates, found from everyone's data, were recorded in the open"
    return "the list of clients has what each reported of its data" if "reported" in run else ""


def keeps_figures(
    first: Mapping[str, Any],
    requests: Collection[RequestRow],
    run: Collection[str],
    *,
    by_choice: bool = False,
) -> str:
    """Return why a purge keeps the figures of rounds, as a clause, or an empty string if it erases them.

    Args:
        first: Payload of the first event.
        requests: Rows of the executed requests whose figures still exist.
        run: Keys in the table `run`.
        by_choice: True if the operator accepts that certificates with noise can no longer be recomputed.
    """
    if why := _why_never_purged(first, run):
        return why
    if not requests:
        return "no client was forgotten yet"
    if by_choice:
        if why := Spec.from_mapping(first["run"]["spec"]).regime.why_figures_stay:
            return why
        needed = {row.method for row in requests if method_info(row.method).figures == "needed"}
        if needed or any(row.level in (None, "none") for row in requests):
            named = f" ({', '.join(sorted(needed))})" if needed else ""
            return f"a request was executed without a guarantee, or by a method whose figures must stay{named}"
    elif any(row.level != "exact" or method_info(row.method).figures != "unused" for row in requests):
        return "certificates of requests that are not exact, or that started from a trained model, depend on them"
    return ""


def erases_more_by_choice(reader: RunReader) -> bool:
    """Return whether `sifu purge --figures` would erase more than a plain purge.

    A plain purge keeps the figures of noise certificates. In runs trained in rounds it also keeps the list of kept
    models, although the list depends on Psi, because certificates name the erased models.
    """
    erased = not_recomputed(reader)
    recomputed = any(row.noise_node is not None and row.request not in erased for row in reader.requests())
    return bool(why_figures_stay(reader)) or (recomputed and not why_figures_stay(reader, by_choice=True))


def why_figures_stay(reader: RunReader, tables: ReplayedTables | None = None, *, by_choice: bool = False) -> str:
    """Return the result of `keeps_figures` for the current state of a run, or for the earlier state in `tables`."""
    tables = tables or ReplayedLedger.of(reader).tables
    first, run = reader.payload(1), [str(key) for (key,) in tables.rows["run"]]
    executed = [row for row in tables.read("requests") if row.noise_node is not None]
    erased = not_recomputed(reader)
    left = [row for row in executed if row.request not in erased]
    if executed and not left:
        return _why_never_purged(first, run)
    return keeps_figures(first, left, run, by_choice=by_choice)
