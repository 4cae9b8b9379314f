"""The printable page of the evidence, in plain words; jinja2 escapes everything that comes from a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sifu.core.guarantee import words_of
from sifu.core.method_info import method_info
from sifu.core.request_terms import terms_words
from sifu.core.wording import attacker_words, exact_words, forgotten_words, start_of, what_was_done, whom_words
from sifu.report.words import LEVEL_WORDS
from sifu.store.checkpoints import Checkpoint
from sifu.version import __version__


def render_evidence(
    body: Mapping[str, Any],
    *,
    deadline: str,
    finished: str,
    certificate_name: str,
    certificate_digest: str,
    public_key: str,
    checkpoint: Checkpoint,
    verified: Mapping[str, Any],
) -> str:
    """One page, for people: who asked what, what was done, what it is worth, and how to check it."""
    environment = Environment(
        loader=PackageLoader("sifu.report", "evidence"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: "".join(letter if letter.isprintable() else "\ufffd" for letter in str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("evidence.html").render(
        body=body,
        clients=forgotten_words(body["clients"], body["records"]),
        done=what_was_done(
            start_of(body["protection"], method_info(body["method"]).starts_from, float(body["sigma"])),
            float(body["sigma"]),
            whom_words(len(body["clients"]), body["records"]),
        ),
        terms=terms_words(body.get("terms", {})),
        level=LEVEL_WORDS[body["level"]],
        promise=_promise(body),
        words=words_of(body),
        deadline=deadline,
        in_time=finished <= deadline,
        finished=finished,
        certificate_name=certificate_name,
        certificate_digest=certificate_digest,
        public_key=public_key,
        checkpoint=checkpoint,
        verified=verified,
        version=__version__,
    )


def _promise(body: Mapping[str, Any]) -> str:
    if body["level"] == "none":
        return "Nothing is guaranteed: nobody can say how much of the data is still in the model."
    words = attacker_words(body["level"], body["attacker_true_positive_rate_at_1_percent"], body["scope"])
    if body["level"] == "exact":
        whom = whom_words(len(body["clients"]), None)
        return f"{exact_words(whom, body['method'], body['records'])}. {words}"
    return words
