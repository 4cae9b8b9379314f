"""Writer of the certificates that `test_kept_certificates.py` verifies permanently.

Run it for a new format only: `python tests/verify/kept_certificates.py`. The files of earlier formats stay. It needs
`tests` on the path, as under pytest.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sifu
from run_tools import spec_for
from sifu.requests.certification import FORMAT

KEPT = Path(__file__).with_name("kept_certificates")
SHORT = {"stop": {"max_rounds": 5}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sifu-proven": (spec_for("sifu", **SHORT), {"method": "sifu", "sigma": 2.0}),
    "sifu-joint-strict": (
        spec_for("sifu", **SHORT),
        {"method": "sifu", "sigma": 2.0, "unit": "joint", "retention": "strict"},
    ),
    "sifu-latest-conditional": (
        spec_for("sifu", server={"participation": "fixed(4)"}, **SHORT),
        {"method": "sifu", "sigma": 2.0, "scope": "latest"},
    ),
    "sifu-assumed": (
        spec_for("sifu", regularity={"kind": "assumed", "factor": 1.0}, **SHORT),
        {"method": "sifu", "sigma": 2.0, "calibration": "classical", "epsilon": 0.5},
    ),
    **{method: (spec_for(method, **SHORT), {"method": method}) for method in ("scratch", "groups", "closed_form")},
    "records": (spec_for("scratch", **SHORT), {"method": "scratch", "records": [1, 3]}),
}


def main() -> None:
    """Make one request of each kind and write both forms of its certificate."""
    target = KEPT / FORMAT
    target.mkdir(parents=True)
    for name, (spec, terms) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = sifu.train(spec, run=Path(folder) / "run")
            clients = ["client-001"] if "records" in terms else ["client-001", "client-002"]
            (outcome,) = run.forget(clients, name, level="none", **terms)
            print(name, outcome.level)
            for form in ("public", "auditor"):
                shutil.copy(Path(folder) / "run" / "certificates" / f"{name}.{form}.json", target)


if __name__ == "__main__":
    main()
