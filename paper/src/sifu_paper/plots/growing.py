"""Speed-ups in growing federations: at the automatic sigma, and at the best one tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sifu_paper.plots.courses import Course, matching_scratch
from sifu_paper.plots.speed import SpeedUp, speed_up_of

AUTOMATIC = "auto"


@dataclass(frozen=True)
class Setting:
    """Requests of one shape at one epsilon in a federation of one size.

    `automatic` is the result for a user. `hindsight` is the best of `tried` sigmas, chosen after all of them were run,
    so no user can achieve it; it is None if only the automatic sigma was run. It uses the draws that every sigma has,
    which may be fewer than the automatic one's.
    """

    requests: str
    epsilon: str
    clients: int
    automatic: SpeedUp | None
    hindsight: SpeedUp | None
    tried: int
    levels: tuple[str, ...]


def settings_of(courses: Sequence[Course]) -> list[Setting]:
    """Return every setting of SIFU that was run, by requests, epsilon and clients."""
    scratch_of = matching_scratch(courses)
    grouped: dict[tuple[str, str, int], dict[str, list[Course]]] = {}
    for course in courses:
        if course.first["method"] == "sifu" and scratch_of(course) is not None:
            key = (course.variant["requests"], course.variant["epsilon"], int(course.variant["clients"]))
            grouped.setdefault(key, {}).setdefault(course.variant["sigma_scale"], []).append(course)
    settings = []
    for (requests, epsilon, clients), by_sigma in grouped.items():
        speeds = {sigma: speed_up_of((run, scratch_of(run)) for run in runs) for sigma, runs in by_sigma.items()}
        shared = set.intersection(*({run.first["seed"] for run in runs} for runs in by_sigma.values()))
        alike = [
            speed_up_of((run, scratch_of(run)) for run in runs if run.first["seed"] in shared)
            for runs in by_sigma.values()
        ]
        levels = sorted({row["level"] for runs in by_sigma.values() for run in runs for row in run.rows})
        settings.append(
            Setting(
                requests,
                epsilon,
                clients,
                speeds.get(AUTOMATIC),
                min(alike, key=lambda speed: speed.rank) if shared and set(speeds) != {AUTOMATIC} else None,
                len(speeds),
                tuple(levels),
            )
        )
    return sorted(settings, key=lambda setting: (setting.requests, float(setting.epsilon), setting.clients))
