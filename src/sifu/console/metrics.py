"""Metrics in the format of Prometheus: counts and times of every run, and nothing of any client."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator

from sifu.console.desk import Desk, RunAtDesk
from sifu.errors import SifuError
from sifu.requests.deadlines import pending_requests
from sifu.store.clock import time_of

STATES = ("received", "verified", "planned", "running", "done", "refused", "withdrawn", "posted")
METRICS = {
    "sifu_readable": ("gauge", "0 where the run cannot be read: damaged, or signed with another key."),
    "sifu_rounds_total": ("counter", "Rounds that were run, in all branches."),
    "sifu_incidents_total": ("counter", "Absences and other incidents in rounds."),
    "sifu_refused_replies_total": ("counter", "Replies of clients that were refused."),
    "sifu_clients": ("gauge", "Clients that the run knows."),
    "sifu_at_work": ("gauge", "1 while a process writes to the run."),
    "sifu_accuracy": ("gauge", "Accuracy of the current model on the active clients' training data."),
    "sifu_held_out_accuracy": ("gauge", "Accuracy of the current model on held-out rows."),
    "sifu_requests": ("gauge", "Requests by state."),
    "sifu_requests_overdue": ("gauge", "Requests that should be done by now."),
    "sifu_seconds_to_deadline": ("gauge", "Seconds to the next deadline; negative when it is over."),
    "sifu_last_verification_timestamp_seconds": ("gauge", "When this console last verified the run."),
    "sifu_last_verification_holds": ("gauge", "1 if it held, 0 if something was wrong."),
}
"""Every metric: its type and what it says."""


def render_metrics(desk: Desk) -> str:
    """The text that Prometheus reads."""
    values: dict[str, list[tuple[str, float]]] = {name: [] for name in METRICS}
    for run in desk.every_run().values():
        try:
            figures = list(_of_run(run, desk))
        except SifuError:
            figures = [("sifu_readable", "", 0.0)]
        for name, labels, value in figures:
            values[name].append((f'{{run="{run.key}",name="{_escaped(run.name)}"{labels}}}', value))
    lines = []
    for name, (kind, words) in METRICS.items():
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value:.10g}" for labels, value in values[name]]
    return "\n".join(lines) + "\n"


def _of_run(run: RunAtDesk, desk: Desk) -> Iterator[tuple[str, str, float]]:
    live = run.live()
    now = datetime.datetime.now(datetime.UTC)
    with run.run.reader() as reader, reader.snapshot():
        ((rounds,),) = reader.query("SELECT COUNT(*) FROM nodes WHERE kind = 'round'")
        ((incidents,),) = reader.query(
            "SELECT COALESCE(SUM(json_array_length(payload, '$.incidents')), 0) FROM events WHERE kind = 'incidents'"
        )
        ((refused,),) = reader.query("SELECT COUNT(*) FROM rejections")
        states = Counter(row.status for row in reader.requests())
        pending = pending_requests(reader, now)
    states["posted"] = sum(row.status == "posted" for row in pending)
    yield "sifu_readable", "", 1.0
    yield "sifu_rounds_total", "", float(rounds)
    yield "sifu_incidents_total", "", float(incidents)
    yield "sifu_refused_replies_total", "", float(refused)
    yield "sifu_clients", "", float(live.clients)
    yield "sifu_at_work", "", float(live.at_work)
    if live.accuracy is not None:
        yield "sifu_accuracy", "", live.accuracy
    if live.held_out is not None and live.held_out.accuracy is not None:
        yield "sifu_held_out_accuracy", "", live.held_out.accuracy
    for state in STATES:
        yield "sifu_requests", f',state="{state}"', float(states[state])
    yield "sifu_requests_overdue", "", float(live.overdue)
    if pending:
        yield "sifu_seconds_to_deadline", "", (time_of(pending[0].deadline) - now).total_seconds()
    verified = desk.verifications().get(run.key)
    if verified:
        yield "sifu_last_verification_timestamp_seconds", "", time_of(str(verified["time"])).timestamp()
        yield "sifu_last_verification_holds", "", float(bool(verified["holds"]))


def _escaped(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return printable.replace("\\", "\\\\").replace('"', '\\"')
