"""Train four sites in NVIDIA FLARE's simulator, forget one of them, and verify: `python job.py FOLDER [head]`."""

import sys
from pathlib import Path

from controller import ForgettingController
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

import sifu

SITES = [f"site-{number}" for number in range(1, 5)]
SPEC = {
    "local": {"rate": 0.1, "steps": 1},
    "regularity": {"kind": "assumed", "factor": 1.0},  # nothing is known of the sites' training
    "stop": {"max_rounds": 3, "target": 0.0},
}
HEAD = {
    "model": {"kind": "ridge", "outputs": 2},  # solved from the sites' masked statistics
    "features": {"kind": "random_fourier", "count": 16},
}


def serve(folder: Path, head: bool) -> None:
    """Run one job: it creates the run, or continues it and executes its requests."""
    job, samples = FedJob(name="forgetting"), dict.fromkeys(SITES, 20)
    shapes, spec = ({"x": [4]}, HEAD) if head else ({"w": [4]}, SPEC)
    job.to_server(ForgettingController(str(folder / "run"), samples, shapes, spec))
    for site in SITES:
        script = str(Path(__file__).with_name("head_client.py" if head else "client.py"))
        job.to(ScriptRunner(script=script, framework=FrameworkType.NUMPY), site)
    job.simulator_run(str(folder / "workspace"), threads=len(SITES))  # with fewer, sites lose the keys of their masks


if __name__ == "__main__":
    folder, head = Path(sys.argv[1]).absolute(), sys.argv[2:] == ["head"]
    serve(folder, head)
    run = sifu.open_run(folder / "run")
    run.request(["site-2"], "case-1", method="auto" if head else "scratch")
    serve(folder, head)
    print(run.outcomes()[0], "verified:", run.verify().holds)
