"""Examples in docstrings (`>>>`) as code instead of quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FencedDoctests(griffe.Extension):
    """Puts each example of a docstring into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"(^|\n\n)(>>> .*?)(?=\n\n|\Z)", r"\1```pycon\n\2\n```", obj.docstring.value, flags=re.DOTALL
            )
