"""Load test of the console: the effect of many viewers on a training on this machine.

    python benchmarks/console_load.py --viewers 200 --out benchmarks/results/console_load.json

One training runs all the time. Meanwhile, windows of `--seconds` alternate: in every other one the console is stopped
(SIGSTOP), in the others it serves `--viewers` people, each of whom loads the page of the run, keeps its stream open and
loads the page again every half minute. The rounds of a window with viewers are compared with the mean of the windows
before and after it, so that a drift of the machine cancels. The viewers run on the same machine and use some of its
time, too. On a shared machine, use the processor time of a round, which others do not affect, and the console's share
of a core.

In the last window a request is filed, the console is killed with every viewer connected, and the training runs to its
end: every round must be recorded once, the request must be in the ledger, and the run must verify.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from sifu.console.tokens import TokenFile, state_folder
from sifu_paper.provenance import provenance

SPEC = """
[data]
clients = 160
samples_per_client = 10
[local]
steps = {steps}
[stop]
target = 0.0
max_rounds = 1000000
evaluate_every = 10
"""
PAGE_EVERY = 30.0
"""Seconds between two loads of the page by one viewer."""
ARRIVE_WITHIN = 2.0
"""Seconds over which the viewers arrive."""


@dataclass
class Seen:
    """Responses to the viewers of one window."""

    pages: list[float] = field(default_factory=list)
    messages: int = 0
    failures: list[str] = field(default_factory=list)


def sifu(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of sifu in a separate process."""
    return subprocess.Popen([sys.executable, "-m", "sifu.cli.main", *arguments], stdout=subprocess.DEVNULL)


def processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process, as counted by the kernel."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rounds_of(folder: Path) -> int:
    """Return the number of nodes that the run has recorded."""
    connection = sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)
    try:
        return int(connection.execute("SELECT COUNT(*) FROM nodes").fetchone()[0])
    finally:
        connection.close()


async def load_page(port: int, secret: str, path: str) -> float:
    """Return the seconds until the whole page is loaded."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode())
    answer = await reader.read(-1)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer[:60].decode(errors="replace"))
    return time.perf_counter() - started


async def listen(port: int, secret: str, path: str, seen: Seen) -> None:
    """Read a stream until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n\r\n".encode())
        while chunk := await reader.read(1 << 16):
            seen.messages += chunk.count(b"data: ")
    finally:
        writer.close()


async def viewer(number: int, count: int, port: int, secret: str, run: str, until: float, seen: Seen) -> None:
    """Act as one person: load the page, keep its stream open, and load the page again from time to time."""
    await asyncio.sleep(ARRIVE_WITHIN * number / count)
    stream: asyncio.Task[None] | None = None
    try:
        seen.pages.append(await load_page(port, secret, f"/runs/{run}"))
        stream = asyncio.create_task(listen(port, secret, f"/runs/{run}/stream", seen))
        again = time.monotonic() + PAGE_EVERY * (0.5 + number / count)
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 1.0))
            if time.monotonic() >= again:
                seen.pages.append(await load_page(port, secret, f"/runs/{run}"))
                again += PAGE_EVERY
            if stream.done():
                raise RuntimeError("the stream ended")
    except (OSError, RuntimeError) as error:
        seen.failures.append(str(error))
    finally:
        if stream is not None:
            stream.cancel()


async def watch(viewers: int, port: int, secret: str, run: str, seconds: float) -> Seen:
    """Run all viewers of a window."""
    seen, until = Seen(), time.monotonic() + seconds
    await asyncio.gather(
        *(viewer(number, viewers, port, secret, run, until, seen) for number in range(viewers)), return_exceptions=True
    )
    return seen


def call(port: int, secret: str, path: str, body: bytes | None = None) -> dict[str, object]:
    """Return an answer of the JSON API."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Authorization": f"Bearer {secret}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, object] = json.loads(answer.read())
        return content


def wait_until_it_answers(port: int) -> None:
    """Wait until the console answers, because it needs a moment to start."""
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/login", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the console does not answer")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Alternate windows during one training, then kill the console and check the run."""
    from sifu.api import verify_run
    from sifu.store.inbox import messages
    from sifu.store.reader import RunReader

    spec, run = folder / "spec.toml", folder / "desk" / "watched"
    spec.write_text(SPEC.format(steps=options.steps))
    run.parent.mkdir()
    _, secret = TokenFile(state_folder(run.parent)).create("load", ["auditor", "operator"])
    training = sifu("train", str(spec), "--run", str(run), "--format", "json")
    console = sifu("serve", str(run.parent), "--port", str(options.port))
    try:
        wait_until_it_answers(options.port)
        while not (run / "run.db").exists() or rounds_of(run) < 20:
            time.sleep(0.1)
        time.sleep(4.0)  # until the console has searched for runs again
        listed = call(options.port, secret, "/api/v1/runs")["runs"]
        key = next(row["run"] for row in listed if row["name"] == "watched")  # type: ignore[attr-defined]
        speeds: list[float] = []
        costs: list[float] = []
        console_shares: list[float] = []
        watched: list[Seen] = []
        for window in range(2 * options.windows + 1):
            crowd = window % 2 == 1
            console.send_signal(signal.SIGCONT if crowd else signal.SIGSTOP)
            time.sleep(1.0)
            before, started = rounds_of(run), time.monotonic()
            computed, served = processor_seconds(training), processor_seconds(console)
            if crowd:
                watched.append(asyncio.run(watch(options.viewers, options.port, secret, key, options.seconds)))
            else:
                time.sleep(options.seconds)
            rounds, seconds = rounds_of(run) - before, time.monotonic() - started
            speeds.append(rounds / seconds)
            costs.append(1000.0 * (processor_seconds(training) - computed) / rounds)
            if crowd:
                console_shares.append((processor_seconds(console) - served) / seconds)
            told = f"window {window}: {speeds[-1]:.1f} rounds a second, {costs[-1]:.2f} ms of a processor each"
            print(told + (" with viewers" if crowd else ""), flush=True)
        console.send_signal(signal.SIGCONT)
        body = json.dumps({"clients": ["client-007"], "request": "before-the-kill"}).encode()
        call(options.port, secret, f"/api/v1/runs/{key}/requests", body)
        killer = subprocess.Popen(["sh", "-c", f"sleep 5; kill -9 {console.pid}"])
        asyncio.run(watch(options.viewers, options.port, secret, key, 6.0))
        killer.wait()
        time.sleep(1.0)
        training.send_signal(signal.SIGINT)  # it stops after its round
        training.wait()
    finally:
        for process in (console, training):
            process.kill()
            process.wait()
    ratios = [
        2.0 * speeds[window] / (speeds[window - 1] + speeds[window + 1]) for window in range(1, len(speeds) - 1, 2)
    ]
    dearer = [2.0 * costs[window] / (costs[window - 1] + costs[window + 1]) for window in range(1, len(costs) - 1, 2)]
    pages = sorted(seconds for seen in watched for seconds in seen.pages)
    verification = verify_run(run)
    with RunReader(run) as reader:
        received = {row.request for row in reader.requests()} | {message.id for message in messages(run)}
    return {
        "viewers": options.viewers,
        "seconds_a_window": options.seconds,
        "rounds_a_second": [round(speed, 1) for speed in speeds],
        "slower_by_percent_in_each_watched_window": [round(100 * (1 / ratio - 1), 1) for ratio in ratios],
        "slower_by_percent_median": round(100 * (1 / statistics.median(ratios) - 1), 1),
        "processor_ms_a_round": [round(cost, 2) for cost in costs],
        "rounds_dearer_by_percent_median": round(100 * (statistics.median(dearer) - 1), 1),
        "console_share_of_a_core_median": round(statistics.median(console_shares), 2),
        "viewers_that_failed": sum(len(seen.failures) for seen in watched),
        "first_failure": next((seen.failures[0] for seen in watched if seen.failures), None),
        "messages_a_viewer_and_second": round(
            sum(seen.messages for seen in watched) / (options.viewers * options.seconds * len(watched)), 2
        ),
        "pages": len(pages),
        "page_median_ms": round(1000 * statistics.median(pages), 1),
        "page_99_percent_ms": round(1000 * pages[int(0.99 * (len(pages) - 1))], 1),
        "request_filed_before_the_kill_is_there": "before-the-kill" in received,
        "verifies_after_the_kill": verification.holds,
    }


def main() -> None:
    """Measure, print one JSON object, and write it to `--out`."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--viewers", type=int, default=200)
    arguments.add_argument("--windows", type=int, default=4, help="number of windows with viewers")
    arguments.add_argument("--seconds", type=float, default=20.0, help="seconds per window")
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--port", type=int, default=8797)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measured = measure(options, Path(name))
    content = provenance("cpu", ["python", *sys.argv]) | measured
    text = json.dumps(content, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
