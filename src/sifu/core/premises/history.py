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
    if accounting == "round":
        return Premise("accounting", "met", "Weights are those of the rounds that really happened.")
    statement = "Population accounting under-states sensitivity; it can be compared, never certified."
    return Premise("accounting", "failed", statement)


def counterfactual_premise(independent: bool, *, apart: bool = False) -> Premise:
    """Whether the same schedule without the client is the law of training without it.

    Clients on machines of their own (`apart`) may be absent or late; that none of them makes another so is not seen.
    """
    if independent and apart:
        return Premise(
            "counterfactual",
            "trusted",
            "Clients are drawn independently of each other, so the same schedule without the client is the law of "
            "training without it; that nobody's absence or delay depends on another client is trusted.",
        )
    if independent:
        return Premise(
            "counterfactual",
            "met",
            "Clients take part independently of each other, so the same schedule without the client is the law of "
            "training without it.",
        )
    return Premise(
        "counterfactual",
        "assumed",
        "Rounds sample a fixed number of clients: the certificate compares with the same schedule, the "
        "client's slots left empty, not with a world where others filled them.",
    )


def replies_premise(left_out: int) -> tuple[Premise, ...]:
    """Which replies are refused depends on clients' data, so the schedule does too; said only where it happened."""
    if left_out == 0:
        return ()
    return (
        Premise(
            "replies",
            "assumed",
            "Some clients' replies were refused and left out; the certificate compares with a world in which the same "
            "ones were left out.",
            f"{left_out} replies left out",
        ),
    )


def record_premises(history: RecordHistory) -> tuple[Premise, ...]:
    """Releases that this record knows nothing of are charged to nobody; said wherever there may be some.

    That a backup ends with an anchor shows that nothing is missing up to there. It cannot show that the run it was made
    of did not go on: both would then spend the same budget.
    """
    if history.older:
        statement = (
            "The run was restored from a backup that may not have been its latest state; models released in between "
            "are not counted."
        )
    elif history.complete:
        statement = (
            "The run was restored from a backup; it is assumed that the run it was made of released nothing more, "
            "since that would not be counted here."
        )
    else:
        return signed_late_premise(history)
    return (Premise("record", "assumed", statement), *signed_late_premise(history))


def groups_record_premises(history: RecordHistory) -> tuple[Premise, ...]:
    """A merge spends no budget, so releases that are not counted do not matter to it; who was in a group does.

    docs/theory.md, section 15.2.
    """
    if not (history.older or history.complete):
        return signed_late_premise(history)
    statement = (
        "The run was restored from a backup; that the merged models of groups never held the clients is what the "
        "restored record says, and is trusted."
    )
    return (Premise("record", "trusted", statement), *signed_late_premise(history))


def signed_late_premise(history: RecordHistory) -> tuple[Premise, ...]:
    """Until an event is signed whoever can write to the folder can change it; said only where it happened."""
    if not history.vouched:
        return ()
    statement = (
        "Some events were written without the operator's key, and the operator vouched for them afterwards; that "
        "nobody changed them in between is trusted."
    )
    return (Premise("signatures", "trusted", statement),)


def outside_premises(facts: TrainingFacts) -> Iterator[Premise]:
    """What the theorems do not speak of, item by item; what decides whether a round counts has a name of its own."""
    for what in facts.outside:
        capitalised = f"{what[0].upper()}{what[1:]}"
        if decides_rounds(what):
            yield Premise(
                "schedule",
                "assumed",
                f"{capitalised} lets one client decide which rounds and answers count; the certificate compares "
                "with a world in which the same ones counted.",
            )
        else:
            yield Premise(
                "outside the theory", "assumed", f"{capitalised} is outside the theorem and assumed harmless."
            )
