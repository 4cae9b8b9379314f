"""Train four sites in NVIDIA FLARE's simulator, forget one of them, and verify: `python job.py FOLDER`."""

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


def serve(folder: Path) -> None:
    """Run one job: it creates the run, or continues it and carries out its requests."""
    job = FedJob(name="forgetting")
    job.to_server(ForgettingController(str(folder / "run"), dict.fromkeys(SITES, 20), {"w": [4]}, SPEC))
    for site in SITES:
        script = str(Path(__file__).with_name("client.py"))
        job.to(ScriptRunner(script=script, framework=FrameworkType.NUMPY), site)
    job.simulator_run(str(folder / "workspace"), threads=2)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    serve(folder)
    run = sifu.open_run(folder / "run")
    run.request(["site-2"], "case-1", method="scratch")
    serve(folder)
    print(run.outcomes()[0], "verified:", run.verify().holds)
