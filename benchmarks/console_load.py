"""How many people may watch a run: viewers of the console beside a training, on this machine.

    python benchmarks/console_load.py --viewers 200

Trains a run twice for the same number of rounds: alone, and beside a console that `--viewers` people watch (each an
open stream, and an answer of the API every few seconds). Prints the seconds of both, how much slower the second was,
and how long answers took. In the end the console is killed, and the run must verify.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from sifu.console.tokens import TokenFile, state_folder

SPEC = """
[data]
clients = 160
samples_per_client = 10
[local]
steps = {steps}
[stop]
target = 0.0
max_rounds = {rounds}
evaluate_every = 10
"""


def train(folder: Path, spec: Path) -> subprocess.Popen[bytes]:
    """`sifu train` in a process of its own."""
    command = [sys.executable, "-m", "sifu.cli.main", "train", str(spec), "--run", str(folder), "--format", "json"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def seconds_of_rounds(folder: Path) -> float:
    """From the first to the last round of a run, by its own record."""
    import datetime

    from sifu.store.reader import RunReader

    with RunReader(folder) as reader:
        times = [event.time for event in reader.events() if event.kind in ("run created", "training done")]
    first, last = (datetime.datetime.fromisoformat(text) for text in (times[0], times[-1]))
    return (last - first).total_seconds()


async def watch(address: str, secret: str, run: str, training: subprocess.Popen[bytes], answers: list[float]) -> int:
    """One viewer: a stream that stays open, and a page from time to time; returns how many messages came."""
    messages = 0
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60.0) as client:

        async def stream() -> None:
            nonlocal messages
            async with client.stream("GET", f"/runs/{run}/stream") as answer:
                async for line in answer.aiter_lines():
                    messages += line.startswith("data:")

        watching = asyncio.create_task(stream())
        while training.poll() is None:
            started = time.perf_counter()
            (await client.get(f"/api/v1/runs/{run}")).raise_for_status()
            answers.append(time.perf_counter() - started)
            await asyncio.sleep(5.0)
        watching.cancel()
    return messages


async def watch_all(
    address: str, secret: str, run: str, viewers: int, training: subprocess.Popen[bytes]
) -> dict[str, object]:
    """All viewers at once."""
    answers: list[float] = []
    results = await asyncio.gather(
        *(watch(address, secret, run, training, answers) for _ in range(viewers)), return_exceptions=True
    )
    failed = [result for result in results if isinstance(result, BaseException)]
    ordered = sorted(answers)
    return {
        "viewers": viewers,
        "viewers_that_failed": len(failed),
        "first_failure": repr(failed[0])[:200] if failed else None,
        "messages": sum(result for result in results if isinstance(result, int)),
        "pages": len(answers),
        "page_median_ms": round(1000 * statistics.median(ordered), 1) if ordered else None,
        "page_99_percent_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 1) if ordered else None,
    }


def wait_until_it_answers(address: str) -> None:
    """The console needs a moment to start."""
    for _ in range(300):
        try:
            httpx.get(f"{address}/login")
            return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit("the console does not answer")


def main() -> None:
    """Measure, and print one JSON object."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--viewers", type=int, default=200)
    arguments.add_argument("--rounds", type=int, default=1500)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--port", type=int, default=8797)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "desk"
        folder.mkdir()
        spec = Path(name) / "spec.toml"
        spec.write_text(SPEC.format(rounds=options.rounds, steps=options.steps))
        train(folder / "alone", spec).wait()
        alone = seconds_of_rounds(folder / "alone")
        _, secret = TokenFile(state_folder(folder)).create("load", ["auditor"])
        command = [sys.executable, "-m", "sifu.cli.main", "serve", str(folder), "--port", str(options.port)]
        console = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{options.port}"
        wait_until_it_answers(address)
        training = train(folder / "watched", spec)
        while not (folder / "watched" / "run.db").exists():
            time.sleep(0.05)
        time.sleep(4.0)  # until the console has found it
        headers = {"Authorization": f"Bearer {secret}"}
        runs = httpx.get(f"{address}/api/v1/runs", headers=headers, timeout=60.0).json()["runs"]
        key = next(row["run"] for row in runs if row["name"] == "watched")
        measured = asyncio.run(watch_all(address, secret, key, options.viewers, training))
        console.kill()
        training.wait()
        watched = seconds_of_rounds(folder / "watched")
        from sifu.api import verify_run

        print(
            json.dumps(
                measured
                | {
                    "seconds_alone": alone,
                    "seconds_watched": watched,
                    "slower_by_percent": round(100 * (watched / alone - 1), 1),
                    "verifies_after_the_console_was_killed": verify_run(folder / "watched").holds,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
