"""Metrics of the runs for Prometheus: counts and times of each run, without information about any client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from sifu.console.asking import Visit
from sifu.console.served_run import ServedRun
from sifu.console.service import ConsoleService
from sifu.errors import SifuError
from sifu.requests.deadlines import pending_requests
from sifu.store.clock import current_time, time_of

STATES = ("received", "verified", "planned", "running", "done", "refused", "withdrawn", "posted")
METRICS = {
    "sifu_readable": "0 where the run cannot be read: damaged, or signed with another key.",
    "sifu_rounds_total": "Rounds that were run, in all branches.",
    "sifu_incidents_total": "Absences and other incidents in rounds.",
    "sifu_refused_replies_total": "Replies of clients that were refused.",
    "sifu_clients": "Clients that the run knows.",
    "sifu_at_work": "1 while a process writes to the run.",
    "sifu_accuracy": "Accuracy on the active clients' training data: of the current model, during training of the last "
    "measured round.",
    "sifu_held_out_accuracy": "Accuracy of the current model on held-out rows.",
    "sifu_requests": "Requests by state.",
    "sifu_requests_overdue": "Requests that should be done by now.",
    "sifu_seconds_to_deadline": "Seconds to the next deadline; negative when it is over.",
    "sifu_last_verification_timestamp_seconds": "When this console last verified the run.",
    "sifu_last_verification_holds": "1 if it held, 0 if something was wrong.",
}
"""Help text of each metric. A name that ends in `_total` is a counter."""


class _AllRuns(Collector):
    def __init__(self, service: ConsoleService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, words in METRICS.items():
            labels = ["run", "name", *(["state"] if name == "sifu_requests" else [])]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(name, words, labels=labels)
        for run in self._service.every_run().values():
            try:
                figures = list(_of_run(run))
            except SifuError:
                figures = [("sifu_readable", 0.0)]
            for name, value, *labels in figures:
                families[name].add_metric([run.key, run.name, *labels], value)
        return families.values()


def _of_run(run: ServedRun) -> Iterator[tuple[str, float] | tuple[str, float, str]]:
    live = run.live()
    now = current_time()
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
    verified = run.jobs.verifications().get(run.key)
    if verified:
        yield "sifu_last_verification_timestamp_seconds", time_of(str(verified["time"])).timestamp()
        yield "sifu_last_verification_holds", bool(verified["holds"])


def metrics(visit: Visit) -> Response:
    """Return metrics for Prometheus; needs a token with the right to examine."""
    visit.who.demand("examine")
    return Response(generate_latest(_AllRuns(visit.service)), media_type="text/plain; version=0.0.4; charset=utf-8")
