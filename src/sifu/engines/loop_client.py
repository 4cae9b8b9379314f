"""Client that answers the tasks of a `sifu.ServerLoop` for closed-form heads and tuned networks.

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
from sifu.engines.masked_updates import prepared_update
from sifu.engines.masks import counted_words, mask, mask_context, networks_digest, new_secret, public_part
from sifu.engines.plans import KEY, MASKED, NETWORK, ROW_FEATURES, ROW_TARGETS, WORDS, Arrays, Instruction, Origin
from sifu.engines.ready import ReadyClient
from sifu.errors import InputError
from sifu.theory.arrays import Words
from sifu.theory.closed_form import Rows


@dataclass
class _Prepared:
    """Words prepared for a masked sum; `secret` is None once the words have been sent.

    For statistics, `origin` is set, and `networks` is the digest of the networks that computed their features.
    """

    place: tuple[Position, str]
    words: Words
    secret: bytes | None = None
    networks: str = ""
    origin: Origin | None = None


class LoopClient:
    """Client of a server loop, with its data.

    Args:
        name: Name of the client in the server loop.
        x: Samples, of shape (n, ...), as for training in one process.
        y: Labels or targets, one per sample.
        cache: Folder for features of the samples.
        masked_only: True to refuse to send unmasked statistics or models.
    """

    def __init__(
        self, name: str, x: Any, y: Any, *, cache: str | Path | None = None, masked_only: bool = False
    ) -> None:
        self._client, self._masked_only = ReadyClient(name, x, y, cache), masked_only
        self._prepared: dict[str, _Prepared] = {}

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
        kind, model, networks = instruction.get("kind"), dict[str, NDArray[Any]](), dict[int, Arrays]()
        for name, array in arrays.items():
            group, _, parameter = name.removeprefix(NETWORK).partition(".")
            if kind not in ("train", "prepare_train") and name.startswith(NETWORK):
                networks.setdefault(int(group), {})[parameter] = array
            else:
                model[name] = array
        told = Instruction.of_values(instruction, networks)
        if kind == "evaluate":
            return self._client.evaluate(model, told)[1:]
        if kind == "prepare":
            return self._prepare(told)
        if kind == "prepare_train":
            return self._prepare_update(model, told, instruction)
        if kind in ("masked", "masked_train"):
            return self._send_masked(kind, told, dict(zip(instruction["clients"], instruction["keys"], strict=True)))
        if kind not in ("train", "statistics"):
            raise InputError(f"unknown task kind {kind!r}: use the same version of sifu as the server")
        if self._masked_only:
            what = "updates" if kind == "train" else "statistics"
            raise InputError(f"this client sends masked {what} only: the server must use masked_{what}=True")
        if kind == "train":
            return self._client.train(model, told)[0]
        statistics, origin = self._client.statistics(told)
        if isinstance(statistics, Rows):
            return {ROW_FEATURES: statistics.features, ROW_TARGETS: statistics.targets, **asdict(origin)}
        return {WORDS: statistics.words, **asdict(origin)}

    def _prepare(self, told: Instruction) -> dict[str, Any]:
        """Prepare the statistics for a masked sum, reusing them if the sum is repeated; return a new public key."""
        place, networks = (told.position, told.plan), networks_digest(told.networks)
        kept = self._prepared.get("masked")
        if kept is None or kept.origin is None or (kept.place, kept.networks) != (place, networks):
            statistics, origin = self._client.statistics(told)
            kept = _Prepared(place, counted_words(statistics), networks=networks, origin=origin)
            self._prepared["masked"] = kept
        assert kept.origin is not None  # statistics always have an origin
        kept.secret = new_secret()
        return {KEY: public_part(kept.secret).hex(), **asdict(kept.origin)}

    def _prepare_update(self, model: Arrays, told: Instruction, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Train, keep the update for a masked sum, and return a new public key."""
        trained, samples = self._client.train(model, told)
        _, words = prepared_update(model, trained, samples, numbers)
        secret = new_secret()
        if words is None:
            self._prepared.pop("masked_train", None)
        else:
            self._prepared["masked_train"] = _Prepared((told.position, told.plan), words, secret)
        return {KEY: public_part(secret).hex(), "samples": samples, "fits": words is not None}

    def _send_masked(self, kind: str, told: Instruction, keys: Mapping[int, str]) -> dict[str, Any]:
        """Return the prepared words, masked with the keys of all participants; refuse to send them twice."""
        kept, place = self._prepared.get(kind), told.position
        if kept is None or kept.place != (place, told.plan) or kept.secret is None:
            what = "statistics are" if kind == "masked" else "update is"
            raise InputError(
                f"no {what} prepared for round {place.branch}.{place.round}: this client was restarted, or has sent "
                f"{'them' if kind == 'masked' else 'it'} already"
            )
        secret, kept.secret = kept.secret, None  # no task can make this client mask twice with one key
        public = {client: bytes.fromhex(key) for client, key in keys.items()}
        context = mask_context(place, of_statistics=kind == "masked")
        return {MASKED: mask(np.asarray(kept.words), secret, told.client, public, context)}
