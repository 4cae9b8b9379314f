"""A certificate in plain words, its figures behind a fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sifu.plots.style import counted
from sifu.report.data import Request
from sifu.report.markup import Markup, badge, table, text
from sifu.report.words import LEVEL_WORDS, attacker_words, moment, percent, promise, rounds_words, status_words

MOST_NAMES = 12
MOST_SUBJECTS = 20
STATES = {"running": "in progress", "refused": "refused", "withdrawn": "withdrawn"}
"""What a request without a certificate is called; any other waits."""


def certificate_article(one: Request, *, folded: bool = False) -> str:
    """One request: what was promised to whom, on which premises, what is not covered, what was erased."""
    level = one.level if one.done else None
    state = badge(level) if level else badge(STATES.get(one.status, "waiting"))
    head = (
        f'<article id="request-{text(one.request)}"><div class="top"><h3>{text(one.request)}</h3>{state}'
        f'<time datetime="{text(one.received)}">asked {text(moment(one.received))}</time></div>'
        f'<p class="who">{text(counted(len(one.clients), "client"))}: {text(names(one.clients))}</p>'
    )
    body = one.certificate
    if body is None:
        return head + f"<p>{text(status_words(one))}</p></article>"
    return head + "".join(
        (
            f"<p>{text(LEVEL_WORDS.get(one.level or 'none', ''))}</p>",
            f"<h4>What is promised</h4><p>{text(promise(one))}</p>",
            f"<p>{text(attacker_words(one))}</p>" if attacker_words(one) else "",
            "<h4>What it rests on</h4>" + _premises(body.get("premises", []), folded=folded),
            "<h4>What is not covered</h4>" + _not_covered(body.get("not_covered", []), folded=folded),
            "<h4>What was erased, and what remains</h4>" + _erased(one, body),
            f"<details><summary>Technical figures of {text(one.request)}</summary>{_technical(one, body)}</details>",
            "</article>",
        )
    )


def names(clients: Sequence[str], most: int = MOST_NAMES) -> str:
    """Some names, and how many more there are."""
    more = len(clients) - most
    return ", ".join(clients[:most]) + (f" and {more:,} more (all are in the certificate)" if more > 0 else "")


def _premises(premises: Sequence[Mapping[str, Any]], *, folded: bool) -> str:
    """What does not simply hold first; what does may be folded away, never the rest."""
    ranks = {"failed": 0, "assumed": 1, "met": 2}
    ordered = sorted(premises, key=lambda one: ranks.get(str(one.get("status")), 0))
    plainly = [one for one in ordered if one.get("status") == "met"]
    if not folded or not plainly:
        return _badged(ordered)
    rest = [one for one in ordered if one.get("status") != "met"]
    summary = f"{counted(len(plainly), 'premise')} met"
    return (_badged(rest) if rest else "") + f"<details><summary>{summary}</summary>{_badged(plainly)}</details>"


def _badged(premises: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(
        f"<li>{badge(str(one.get('status', '')))}<span><b>{text(str(one.get('name', '')).capitalize())}.</b> "
        f"{text(one.get('statement', ''))}</span></li>"
        for one in premises
    )
    return f'<ul class="premises">{items}</ul>'


def _not_covered(sentences: Sequence[str], *, folded: bool) -> str:
    items = _list(sentences)
    return f"<details><summary>{counted(len(sentences), 'limit')}</summary>{items}</details>" if folded else items


def _list(sentences: Sequence[str]) -> str:
    return '<ul class="plain">' + "".join(f"<li>{text(one)}</li>" for one in sentences) + "</ul>"


def _erased(one: Request, body: Mapping[str, Any]) -> str:
    erased, remaining = len(body.get("erased_nodes", [])), len(body.get("remaining_nodes", []))
    return _list(
        [
            f"{one.erased_words} Erased: {counted(erased, 'model')}."
            if erased
            else "No model had to be erased: none lay after the point training went on from.",
            f"{one.remains_words} Kept from before: {counted(remaining, 'model')}."
            if remaining
            else "No earlier model remains.",
            "Copies outside the run folder, such as backups and models handed out before, are not reached from here.",
        ]
    )


def _technical(one: Request, body: Mapping[str, Any]) -> str:
    models = body.get("models", {})
    pairs: list[tuple[str, object]] = [
        ("The guarantee as signed", body.get("guarantee", "")),
        ("Noise σ", _number(body.get("sigma"))),
        *_training_noise(body.get("training_noise")),
        ("Noise multiplier s", _number(body.get("noise_multiplier"))),
        ("Ψ* = σ/s", _number(body.get("psi_star"))),
        ("Ψ at the model gone back to", _number(body.get("psi"))),
        ("δ really reached", _number(body.get("delta_reached"))),
        ("Calibration", body.get("calibration", "")),
        ("Accounting", body.get("accounting", "")),
        ("Participation", body.get("participation", "")),
        ("Compared with", body.get("counterfactual", "")),
        ("Unit, scope, retention", f"{one.unit}, {one.scope}, {body.get('retention', '')}"),
        ("Noise drawn from", body.get("noise_source", "")),
        ("Nodes: gone back to, noised, final", _nodes(body)),
        ("Rounds", rounds_words(one)),
        ("Accuracy of the forgotten, before and after", _pair(one.forgotten_before, one.forgotten_after)),
        ("Accuracy of who remains, before and after", _pair(one.remaining_before, one.remaining_after)),
        ("Received, carried out, issued", _times(body)),
        ("Ledger event", f"{body.get('ledger', {}).get('seq', '')}"),
        ("Versions", ", ".join(f"{name} {value}" for name, value in body.get("versions", {}).items())),
    ]
    long = [
        *((f"Commitment, {name.replace('_', ' ')}", row.get("commitment", "")) for name, row in models.items()),
        ("Head of the ledger then", body.get("ledger", {}).get("head", "")),
        ("Signature", one.signature),
    ]
    rows = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in pairs)
    rows += "".join(f'<tr><th scope="row">{text(n)}</th><td class="long">{text(v)}</td></tr>' for n, v in long)
    return (
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
        + _subjects("Clients of this request", body.get("subjects", []))
        + _subjects("Clients forgotten earlier that this noise was charged to", body.get("earlier_subjects", []))
    )


def _training_noise(noise: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """Both accountings of noise in training."""
    if not noise:
        return []
    return [
        ("Updates clipped to, noise a multiple of it", f"{_number(noise.get('clip'))}, {_number(noise.get('noise'))}"),
        ("ε of all rounds together, which counts", _number(noise.get("epsilon_composed"))),
        ("ε of one round, as the paper counts", _number(noise.get("epsilon_one_round"))),
    ]


def _subjects(caption: str, subjects: Sequence[Mapping[str, Any]]) -> str:
    if not subjects:
        return ""
    rows = [
        (
            names(one.get("clients", []), 4),
            _number(one.get("psi")),
            _number(one.get("charge")),
            _number(one.get("budget")),
        )
        for one in subjects[:MOST_SUBJECTS]
    ]
    more = len(subjects) - MOST_SUBJECTS
    note = f"<p>{more:,} more are in the certificate.</p>" if more > 0 else ""
    return Markup(table(caption, ("Clients", "#Ψ", "#Charge (Ψ/σ)²", "#Budget 1/s²"), rows) + note)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str("–" if value is None else value)


def _pair(before: float | None, after: float | None) -> str:
    return f"{percent(before)}, {percent(after)}"


def _nodes(body: Mapping[str, Any]) -> str:
    return ", ".join(str(body.get(key, "–")) for key in ("node", "noise_node", "final_node"))


def _times(body: Mapping[str, Any]) -> str:
    return " · ".join(str(body.get(key, "–")) for key in ("received", "carried_out", "issued"))
