"""Checks that an engine trains as the record of a run says, because certificates describe the recorded training.

Every fact of the training is compared (docs/theory.md, section 12.1). An engine may have stronger guarantees than the
recorded engine, since certificates then claim less than they could. An engine with weaker guarantees or different
training is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sifu.core.engine import Engine
from sifu.core.premises import MeasuredRegularity
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.run.devices import facts_of
from sifu.store.reader import Remainder, RunReader, joined_remainders, remainder_to_join
from sifu.store.record_check import check_record
from sifu.store.salts import (
    SALTS_FILE,
    WITHOUT_SALTS,
    obsolete_clients,
    read_salts,
    recorded_digests,
    salted_sample_digest,
)
from sifu.theory.facts import (
    BY_PARTICIPANTS,
    MODULE_KNOWN,
    MODULE_NOT_DECLARED,
    ON_A_GPU,
    ON_A_REPEATING_GPU,
    UNKNOWN,
    ClientProfile,
    TrainingFacts,
)

_OTHER = "the clients' data are not those the run was made with: {} clients, {} recorded, first difference at {}"
MEANING = {
    "local_rate": "local.rate",
    "momentum": "local.momentum",
    "weight_decay": "local.weight_decay",
    "batch_size": "local.batch",
    "participation": "server.participation",
    "dtype": "model.dtype",
    "module": "a module of yours that is",
    "trainer": "the trainer",
    "engine": "an engine whose rounds follow from",
}
"""Spec key or phrase that error messages use for a fact, by default the fact's name."""


@dataclass(frozen=True)
class BuiltEngine:
    """An engine with the known facts about its clients' data.

    Attributes:
        engine: The engine itself.
        sample_digests: Digest of each client's samples, or None if a given engine does not expose them.
        unusable: Reason for each client whose data are missing or changed, by index; such data are not compared.
    """

    engine: Engine
    sample_digests: Sequence[str] | None = None
    unusable: Mapping[int, str] = field(default_factory=dict)


def check_continues(reader: RunReader, built: BuiltEngine, newcomers: bool = False) -> dict[int, str]:
    """Check that an engine continues a run with its original settings; `newcomers` may follow the recorded clients.

    Returns:
        The clients whose data changed, with the reason; only work that needs their data must be refused.

    Raises:
        InputError: If the training, the model or the list of clients differs.
    """
    engine, others = built.engine, ("outside", "rounding_bounded", "module", "engine")
    names, facts = [field.name for field in fields(TrainingFacts) if field.name not in others], facts_of(engine)
    recorded_facts = reader.facts
    _check_facts(reader.folder, recorded_facts, facts, names)
    layout = reader.layout
    if layout != engine.layout:
        raise InputError(
            f"the model is not the one the run was made with: its parameters are {engine.layout.names} of shapes "
            f"{engine.layout.shapes}, recorded {layout.names} of {layout.shapes}"
        )
    recorded = reader.clients()
    # After a client rejoined with fewer records, its earlier data are not needed: the source may have dropped some.
    before = {item.before for item in joined_remainders(reader)}
    before |= {row.before for row in (remainder_to_join(reader),) if row is not None}
    more = len(engine.clients) - len(recorded)
    different = [a.name for a, b in zip(recorded, engine.clients, strict=False) if a.name != b.name]
    if different or more < 0 or (more > 0 and not newcomers):
        raise InputError(_OTHER.format(len(engine.clients), len(recorded), different[0] if different else "the end"))
    skipped = before.union(built.unusable, obsolete_clients(reader))
    unusable = {
        client: _OTHER.format(len(engine.clients), len(recorded), a.name)
        for client, (a, b) in enumerate(zip(recorded, engine.clients, strict=False))
        if client not in skipped and not _same_client(a, b)
    }
    if built.sample_digests is None:
        _check_nothing_is_recorded(reader)
    else:
        without = {client for client in before if recorded[client].samples != engine.clients[client].samples}
        unusable |= _other_samples(reader, built, built.sample_digests, {*without, *unusable, *built.unusable})
    if unusable:
        return unusable
    # A run begun on a GPU may continue on the CPU.
    on_a_gpu = recorded_facts.get("engine") in (ON_A_GPU, ON_A_REPEATING_GPU)
    if not (on_a_gpu and facts.engine == BY_PARTICIPANTS):
        _check_facts(reader.folder, reader.facts, facts, ["engine"])
    # If the data changed, the engine may be unable to bound rounding errors. This check comes last, so that changed
    # data are reported first.
    if not (facts.module in ("", MODULE_KNOWN) or reader.facts["module"] == MODULE_NOT_DECLARED):
        _check_facts(reader.folder, reader.facts, facts, ["module"])
    if reader.facts.get("rounding_bounded", UNKNOWN):
        _check_facts(reader.folder, reader.facts, facts, ["rounding_bounded"])
    return unusable


def check_remainder(reader: RunReader, built: BuiltEngine, remainder: Remainder) -> dict[int, str]:
    """Check that an engine continues a run, and that the client of `remainder` can rejoin with its remaining records.

    Returns:
        The clients whose data changed, with the reason (see `check_continues`).
    """
    engine = built.engine
    there, before = remainder.client < len(engine.clients), reader.clients()[remainder.before]
    if not there or engine.clients[remainder.client].name != remainder.name:
        raise InputError(
            f"{before.name} could not rejoin: the engine does not have its remaining records. Open the run with its "
            "clients' data (sifu.open_run(folder, clients=...)), not with an engine, and forget again"
        )
    profile = engine.clients[remainder.client]
    unusable = check_continues(reader, built, newcomers=True)
    MeasuredRegularity.of([profile], engine.facts, Spec.from_mapping(reader.spec))  # fail if Psi can never be tracked
    return unusable


def _check_nothing_is_recorded(reader: RunReader) -> None:
    """Refuse an engine without digests of its samples if the run has recorded digests of active clients."""
    gone = obsolete_clients(reader)
    recorded = [client for client in recorded_digests(reader) if client not in gone]
    if recorded:
        raise InputError(
            f"{reader.folder} recorded digests of the clients' samples, and this engine does not provide those of its "
            f"clients, {reader.clients()[recorded[0]].name!r} among them: open the run with clients=..., or let the "
            "engine inherit sifu.core.engine.ShowsSamples"
        )


def _other_samples(reader: RunReader, built: BuiltEngine, digests: Sequence[str], without: set[int]) -> dict[int, str]:
    """Return the remaining clients whose samples, or their order, changed since the run was created, with reasons."""
    clients, salts, gone = reader.clients(), read_salts(reader.folder), obsolete_clients(reader) | without
    unusable = {}
    for client, recorded in recorded_digests(reader).items():
        if client in gone:
            continue
        name = clients[client].name
        if client not in salts:
            check_record(reader)  # if the record was tampered with, report that first
            unusable[client] = (
                f"{reader.folder / SALTS_FILE} is missing or has no entry for client {name!r}, so its data cannot be "
                f"compared with those the run was made with: {WITHOUT_SALTS}"
            )
        elif recorded != salted_sample_digest(salts[client], digests[client]):
            unusable[client] = (
                f"the data of client {name!r} are not those the run was made with: the order of its samples changed, "
                "or samples or labels did. Put the data back as they were, in the same order: rows to be forgotten are "
                "named by their number"
            )
    return unusable


def _check_facts(folder: Path, recorded: dict[str, Any], facts: TrainingFacts, names: list[str]) -> None:
    strange = [what for what in facts.outside if what not in recorded["outside"]]
    if strange:
        raise InputError(
            f"{folder} was not started with {', '.join(strange)}, and its certificates would not state it: continue "
            "with the original settings"
        )
    if facts.features != recorded.get("features", ""):
        raise InputError(
            f"{folder} was started with the feature map {recorded.get('features', '')[:16] or 'none'}, this one is "
            f"{facts.features[:16] or 'none'}: the spec, the network's weights, its program or the samples' "
            "shape changed"
        )
    for name in names:
        before, now = recorded.get(name, UNKNOWN), _plain(getattr(facts, name, UNKNOWN))
        if before in (now, UNKNOWN):
            continue
        raise InputError(
            f"{folder} was started with {MEANING.get(name, name)} = {before!r}, the engine has {now!r}: certificates "
            "would describe a different training. Continue with the original settings, or in another folder"
        )


def check_as_specified(spec: Spec, facts: TrainingFacts) -> None:
    """Check that a given engine has the settings of its spec."""
    said = {
        "momentum": spec.local.momentum,
        "weight_decay": spec.local.weight_decay,
        "batch_size": spec.local.batch or None,
        "participation": str(facts.participation.parse(spec.server.participation)),
        "dtype": spec.model.dtype,
    }
    if spec.local.rate != "auto":
        said["local_rate"] = spec.local.rate
    for name, wanted in said.items():
        fact = _plain(getattr(facts, name))
        if fact != wanted:
            raise InputError(
                f"the spec says {MEANING[name]} = {wanted!r}, the engine has {fact!r}: make them equal, so that the "
                "run's record describes its training"
            )


def _plain(value: Any) -> Any:
    """Return a fact as it is recorded."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _same_client(recorded: ClientProfile, present: ClientProfile) -> bool:
    """Return whether two profiles are of the same client with the same data, up to rounding of the expansion."""
    plain = all(getattr(recorded, name) == getattr(present, name) for name in ("name", "samples", "local_steps"))
    a, b = recorded.expansion, present.expansion
    return plain and (a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9)))
