"""Client that answers the tasks of a `sifu.ServerLoop` for closed-form heads.

client = sifu.LoopClient("hospital-a", x, y)                    # keep the object: it holds the keys of masked sums
reply = client.answer(task.models["hospital-a"], task.instructions["hospital-a"])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Position
from sifu.engines.masks import counted_words, mask, mask_context, new_secret, public_part
from sifu.engines.plans import KEY, MASKED, ROW_FEATURES, ROW_TARGETS, WORDS, Instruction, Origin
from sifu.engines.ready import ReadyClient
from sifu.errors import InputError
from sifu.theory.arrays import Words
from sifu.theory.closed_form import Rows


@dataclass
class _Prepared:
    """Words prepared for a masked sum; `secret` is None once the words have been sent."""

    place: tuple[Position, str]
    words: Words
    origin: Origin
    secret: bytes | None = None


class LoopClient:
    """Client of a server loop, with its data.

    Args:
        name: Name of the client in the server loop.
        x: Samples, of shape (n, ...), as for training in one process.
        y: Labels or targets, one per sample.
        cache: Folder for features of the samples.
        masked_only: True to refuse to send unmasked statistics.
    """

    def __init__(
        self, name: str, x: Any, y: Any, *, cache: str | Path | None = None, masked_only: bool = False
    ) -> None:
        self._client, self._masked_only = ReadyClient(name, x, y, cache), masked_only
        self._prepared: _Prepared | None = None

    def answer(self, arrays: Mapping[str, NDArray[Any]], instruction: Mapping[str, Any]) -> Any:
        """Return the reply to a task.

        Args:
            arrays: The client's entry in `Task.models`.
            instruction: The client's entry in `Task.instructions`; it may have been encoded as JSON and decoded.

        Returns:
            Named arrays and plain values, for example the correct predictions and the summed loss of an evaluation.

        Raises:
            InputError: If the kind of the task is unknown, or the client refuses or is unable to answer.
        """
        kind, told = instruction.get("kind"), Instruction.of_values(instruction)
        if kind == "evaluate":
            return self._client.evaluate(dict(arrays), told)[1:]
        if kind == "prepare":
            return self._prepare(told)
        if kind == "masked":
            return self._send_masked(told, dict(zip(instruction["clients"], instruction["keys"], strict=True)))
        if kind != "statistics":
            raise InputError(f"unknown task kind {kind!r}: use the same version of sifu as the server")
        if self._masked_only:
            raise InputError("this client sends masked statistics only: the server must use masked_statistics=True")
        statistics, origin = self._client.statistics(told)
        if isinstance(statistics, Rows):
            return {ROW_FEATURES: statistics.features, ROW_TARGETS: statistics.targets, **asdict(origin)}
        return {WORDS: statistics.words, **asdict(origin)}

    def _prepare(self, told: Instruction) -> dict[str, Any]:
        """Prepare the statistics for a masked sum, reusing them if the sum is repeated; return a new public key."""
        place, kept = (told.position, told.plan), self._prepared
        if kept is None or kept.place != place:
            statistics, origin = self._client.statistics(told)
            self._prepared = kept = _Prepared(place, counted_words(statistics), origin)
        kept.secret = new_secret()
        return {KEY: public_part(kept.secret).hex(), **asdict(kept.origin)}

    def _send_masked(self, told: Instruction, keys: Mapping[int, str]) -> dict[str, Any]:
        """Return the prepared words, masked with the keys of all participants; refuse to send them twice."""
        kept, place = self._prepared, told.position
        if kept is None or kept.place != (place, told.plan) or kept.secret is None:
            raise InputError(
                f"no statistics are prepared for round {place.branch}.{place.round}: this client was restarted, or has "
                "sent them already"
            )
        secret, kept.secret = kept.secret, None  # no task can make this client mask twice with one key
        public = {client: bytes.fromhex(key) for client, key in keys.items()}
        context = mask_context(place, of_statistics=True)
        return {MASKED: mask(np.asarray(kept.words), secret, told.client, public, context)}
