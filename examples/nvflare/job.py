"""NVIDIA FLARE simulation that trains four sites, forgets one of them, and verifies: `python job.py FOLDER [head]`."""

import sys
from pathlib import Path

from controller import ForgettingController
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

import sifu

SITES = [f"site-{number}" for number in range(1, 5)]
SPEC = {
    "local": {"rate": 0.1, "steps": 1},
    "regularity": {"kind": "assumed", "factor": 1.0},  # the sites' training is unknown to sifu
    "stop": {"max_rounds": 3, "target": 0.0},
}
HEAD = {
    "model": {"kind": "ridge", "outputs": 2},  # solved from the sites' masked statistics
    "features": {"kind": "random_fourier", "count": 16},
}


def serve(folder: Path, head: bool) -> None:
    """Run one job, which creates the run, or continues it and executes its requests."""
    job, samples = FedJob(name="forgetting"), dict.fromkeys(SITES, 20)
    shapes, spec = ({"x": [4]}, HEAD) if head else ({"w": [4]}, SPEC)
    job.to_server(ForgettingController(str(folder / "run"), samples, shapes, spec))
    for site in SITES:
        script = str(Path(__file__).with_name("head_client.py" if head else "client.py"))
        job.to(ScriptRunner(script=script, framework=FrameworkType.NUMPY), site)
    # with fewer threads, sites lose the keys of their masks
    job.simulator_run(str(folder / "workspace"), threads=len(SITES))


if __name__ == "__main__":
    folder, head = Path(sys.argv[1]).absolute(), sys.argv[2:] == ["head"]
    serve(folder, head)
    run = sifu.open_run(folder / "run")
    run.request(["site-2"], "case-1", method="auto" if head else "scratch")
    serve(folder, head)
    print(run.outcomes()[0], "verified:", run.verify().holds)
