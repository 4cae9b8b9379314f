"""Two observers: every statement names the observer it is about, and claims about the second one need a figure."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

import sifu
from sifu.choices import Level
from sifu.core.observers import NOT_PROTECTED, BeforeAfter, observers_in, observers_of

ROOT = Path(__file__).parents[2]
BODY = {"attacker_true_positive_rate_at_1_percent": 0.01}


@pytest.mark.parametrize("level", get_args(Level))
def test_whoever_kept_an_earlier_release_is_not_protected_from_at_any_level(level: str) -> None:
    observers = observers_in({**BODY, "level": level})
    assert NOT_PROTECTED in observers.kept_earlier
    assert "kept" not in observers.later_only
    assert observers.before_after is None


def test_only_a_stated_guarantee_gives_the_second_observer_a_figure() -> None:
    stated = observers_in({**BODY, "level": "exact", "before_after": {"epsilon": 1.0, "delta": 1e-5}})
    assert stated.before_after == BeforeAfter(1.0, 1e-5)
    assert "(1, 1e-05)" in stated.kept_earlier
    assert NOT_PROTECTED not in stated.kept_earlier
    assert observers_in({**BODY, "level": "exact", "before_after": None}) == observers_of("exact", 0.01)


def test_no_level_promises_that_guessing_is_all_without_saying_to_whom() -> None:
    assert observers_of("exact", 0.01).later_only.startswith("An observer who sees only the models released from")
    assert "guess" not in observers_of("proven", 0.7).later_only
    assert NOT_PROTECTED in observers_of("none", None).later_only


def test_plans_and_certificates_of_a_run_state_both(tmp_path: Path) -> None:
    spec = {"data": {"clients": 5, "samples_per_client": 30}, "model": {"kind": "ridge"}}
    run = sifu.train(spec, run=tmp_path / "run")
    plan = run.plan(["client-002"])
    (outcome,) = run.forget(["client-002"])
    assert (plan.level, outcome.level) == ("exact", "exact")
    certificate = run.certificate(outcome.request)
    for everything in (False, True):
        assert set(plan.observers.sentences) <= set(certificate.lines(everything))


def test_the_readme_and_the_guides_name_both_observers() -> None:
    for name in ("README.md", "docs/closed-form.md", "docs/dpo.md", "docs/security.md", "docs/audit.md"):
        assert NOT_PROTECTED in (ROOT / name).read_text(encoding="utf-8"), name
