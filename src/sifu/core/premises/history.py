"""What happened in the rounds and to their record: who took part, what was left out, what the theorems do not cover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sifu.core.premises.premise import Premise
from sifu.theory.facts import TrainingFacts, decides_rounds
from sifu.theory.history import Accounting


@dataclass(frozen=True)
class RecordHistory:
    """What happened to the record before a certificate: how often it was restored from a backup that ends with the
    anchor that was kept elsewhere (`complete`), or from one that may be older than the run was; and how often the
    operator vouched for events that were written without a signature."""

    complete: int = 0
    older: int = 0
    vouched: int = 0


UNBROKEN = RecordHistory()


def accounting_premise(accounting: Accounting) -> Premise:
    """Only weights of rounds that happened bound anything."""
    return Premise("accounting", "met" if accounting == "round" else "failed")


def counterfactual_premise(independent: bool, *, apart: bool = False) -> Premise:
    """Whether the same schedule without the client is the law of training without it.

    Clients on machines of their own (`apart`) may be absent or late; that none of them makes another so is not seen.
    """
    if not independent:
        return Premise("counterfactual", "assumed")
    return Premise("counterfactual", "trusted" if apart else "met")


def replies_premise(left_out: int) -> tuple[Premise, ...]:
    """Which replies are refused depends on clients' data, so the schedule does too; said only where it happened."""
    if left_out == 0:
        return ()
    return (Premise("replies", "assumed", confidential={"replies_left_out": left_out}),)


def record_premises(history: RecordHistory) -> tuple[Premise, ...]:
    """Releases that this record knows nothing of are charged to nobody; said wherever there may be some.

    That a backup ends with an anchor shows that nothing is missing up to there. It cannot show that the run it was made
    of did not go on: both would then spend the same budget.
    """
    if not (history.older or history.complete):
        return signed_late_premise(history)
    case = "older" if history.older else "complete"
    return (Premise("record", "assumed", case), *signed_late_premise(history))


def groups_record_premises(history: RecordHistory) -> tuple[Premise, ...]:
    """A merge spends no budget, so releases that are not counted do not matter to it; who was in a group does.

    docs/theory.md, section 15.2.
    """
    if not (history.older or history.complete):
        return signed_late_premise(history)
    return (Premise("record", "trusted"), *signed_late_premise(history))


def signed_late_premise(history: RecordHistory) -> tuple[Premise, ...]:
    """Until an event is signed whoever can write to the folder can change it; said only where it happened."""
    return (Premise("signatures", "trusted"),) if history.vouched else ()


def outside_premises(facts: TrainingFacts) -> Iterator[Premise]:
    """What the theorems do not speak of, item by item; what decides whether a round counts has a name of its own."""
    for what in facts.outside:
        name = "schedule" if decides_rounds(what) else "outside the theory"
        yield Premise(name, "assumed", values={"what": what})
