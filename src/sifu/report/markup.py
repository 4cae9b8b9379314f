"""Small pieces of HTML. `text` is the one door through which words of a run come into the page."""

from __future__ import annotations

import html
from collections.abc import Sequence


class Markup(str):
    """HTML that is already safe."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Escaped, unless it is markup of ours already; letters that cannot be shown become visible marks."""
    if isinstance(value, Markup):
        return value
    shown = "".join(one if one.isprintable() else "\ufffd" for one in str(value))
    return Markup(html.escape(shown))


def badge(word: str) -> Markup:
    """A coloured word; its class is the word itself when it is one of ours."""
    known = ("met", "assumed", "failed", "exact", "proven", "conditional", "none")
    label = "no guarantee" if word == "none" else word
    return Markup(f'<span class="badge{" " + word if word in known else ""}">{text(label)}</span>')


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """A table that scrolls by itself on a narrow screen; a head that begins with # holds numbers."""
    classes = [' class="number"' if head.startswith("#") else "" for head in heads]
    head = "".join(f'<th scope="col"{c}>{text(h.lstrip("#"))}</th>' for h, c in zip(heads, classes, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{c}>{text(v)}</td>" for v, c in zip(row, classes, strict=True)) + "</tr>" for row in rows
    )
    return Markup(
        f'<div class="scroll"><table class="data"><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )
