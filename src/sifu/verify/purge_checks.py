"""Checks that each purge erased the data that the rules select, and that no erased data came back."""

from __future__ import annotations

from collections.abc import Iterator

from sifu.core.ledger import Event
from sifu.requests import figures_policy
from sifu.requests.erasure import ToPurge, to_purge
from sifu.run.run_view import RunView
from sifu.store import erased_figures, sealed
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables


def check_purges(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each purge that did not erase the models and updates that the rule selects.

    Purges before an erasure of all figures are skipped, because their events no longer name the erased files.
    """
    erasure = erased_figures.erasure_of_all(reader.events())
    for event, before in ReplayedLedger.of(reader).moments():
        if event.kind != sealed.PURGED or (erasure is not None and event.seq < erasure.seq):
            continue
        content, by_choice = event.content, sealed.ALL_FIGURES in event.content
        subjects = {row.subject for row in before.read("subjects")}
        purged = ToPurge(tuple(content.get("dropped_models", [])), tuple(content.get("dropped_updates", [])))
        if by_choice:
            left = before.model_nodes - set(purged.models)
            kept = erased_figures.kept_nodes(reader, before.tip, by_choice=True)
            too_much = left - kept - {before.tip, reader.path(before.tip)[0].node}
            told = sorted(left) == content[sealed.ALL_FIGURES]["models"] and before.tip in left
            if too_much or not told or len(purged.updates) < len(before.rows["updates"]):
                yield f"purge at event {event.seq}: it left models {sorted(left)} or updates, against the rule"
            yield from _check_all_figures(reader, event, before)
        else:
            stored = {row.file: row.node for row in before.read("updates")}
            wanted = to_purge(RunView(reader, tip=before.tip), before.model_nodes, stored, subjects)
            if purged != wanted:
                yield f"purge at event {event.seq}: it erased {purged}, the rule says {wanted}"
        if content["subjects"] != sorted(subjects):
            yield f"purge at event {event.seq}: it names subjects {content['subjects']}, not {sorted(subjects)}"
        erased = content.get(erased_figures.FIGURES_ERASED, False)
        if erased != (by_choice or not figures_policy.why_figures_stay(reader, before)) and "kept_rows" in content:
            yield f"purge at event {event.seq}: it records figures_erased = {erased}, which contradicts the rule"
        if erased:
            path = erased_figures.kept_nodes(reader, before.tip, by_choice=by_choice)
            last = content["kept_rows"]["last"]
            for figures in erased_figures.figures_that_came_back(reader, path, last, before.forgotten):
                yield f"purge at event {event.seq}: it erased the figures of {figures}, and they are there again"


def _check_all_figures(reader: RunReader, event: Event, before: ReplayedTables) -> Iterator[str]:
    """Yield a problem if an erasure of all figures is unsigned, or contradicts the record."""
    said, previous = event.content[sealed.ALL_FIGURES], reader.events()[event.seq - 2]
    executed_before = {row.request for row in before.read("requests") if row.noise_node is not None}
    executed = [row for row in reader.requests() if row.request in executed_before]
    expected = {
        "verified": f"{previous.seq}:{previous.hash.hex()}",
        "requests": [row.request for row in executed],
        "certificates": erased_figures.erased_certificates(executed),
    }
    if {key: said.get(key) for key in expected} != expected or event.signature is None:
        yield f"purge at event {event.seq}: its statement on all figures is not signed, or differs from the record"
