"""Metrics for Prometheus: counts and times of every run, and nothing of any client."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sifu.console.desk import Desk
from sifu.console.run_at_desk import RunAtDesk
from sifu.errors import SifuError
from sifu.requests.approvals import pending_requests
from sifu.store.clock import time_of

STATES = ("received", "verified", "planned", "running", "done", "refused", "withdrawn", "posted")
METRICS = {
    "sifu_readable": "0 where the run cannot be read: damaged, or signed with another key.",
    "sifu_rounds_total": "Rounds that were run, in all branches.",
    "sifu_incidents_total": "Absences and other incidents in rounds.",
    "sifu_refused_replies_total": "Replies of clients that were refused.",
    "sifu_clients": "Clients that the run knows.",
    "sifu_at_work": "1 while a process writes to the run.",
    "sifu_accuracy": "Accuracy of the current model on the active clients' training data.",
    "sifu_held_out_accuracy": "Accuracy of the current model on held-out rows.",
    "sifu_requests": "Requests by state.",
    "sifu_requests_overdue": "Requests that should be done by now.",
    "sifu_seconds_to_deadline": "Seconds to the next deadline; negative when it is over.",
    "sifu_last_verification_timestamp_seconds": "When this console last verified the run.",
    "sifu_last_verification_holds": "1 if it held, 0 if something was wrong.",
}
"""Every metric and what it says; what ends in _total is a counter."""


class _AllRuns(Collector):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, words in METRICS.items():
            labels = ["run", "name", *(["state"] if name == "sifu_requests" else [])]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(name, words, labels=labels)
        for run in self._desk.every_run().values():
            try:
                figures = list(_of_run(run, self._desk))
            except SifuError:
                figures = [("sifu_readable", 0.0)]
            for name, value, *labels in figures:
                families[name].add_metric([run.key, run.name, *labels], value)
        return families.values()


def render_metrics(desk: Desk) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(_AllRuns(desk))


def _of_run(run: RunAtDesk, desk: Desk) -> Iterator[tuple[str, float] | tuple[str, float, str]]:
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
    yield "sifu_readable", 1.0
    yield "sifu_rounds_total", rounds
    yield "sifu_incidents_total", incidents
    yield "sifu_refused_replies_total", refused
    yield "sifu_clients", live.clients
    yield "sifu_at_work", live.at_work
    if live.accuracy is not None:
        yield "sifu_accuracy", live.accuracy
    if live.held_out is not None and live.held_out.accuracy is not None:
        yield "sifu_held_out_accuracy", live.held_out.accuracy
    for state in STATES:
        yield "sifu_requests", states[state], state
    yield "sifu_requests_overdue", live.overdue
    if pending:
        yield "sifu_seconds_to_deadline", (time_of(pending[0].deadline) - now).total_seconds()
    verified = desk.verifications().get(run.key)
    if verified:
        yield "sifu_last_verification_timestamp_seconds", time_of(str(verified["time"])).timestamp()
        yield "sifu_last_verification_holds", bool(verified["holds"])
