"""Sentences of premises, by name and case; certificates contain the names, cases and values instead of sentences.

A sentence may be reworded at any time. A case keeps its meaning forever and is
never removed, because issued certificates refer to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SENTENCES: dict[str, dict[str, str]] = {
    "arithmetic": {
        "met": "Local steps ran in float64, and a bound on their rounding errors is added to the sensitivity.",
        "beyond": "The sensitivity exceeds the range in which rounding errors are bounded; they are assumed to be "
        "negligible.",
        "assumed": "Rounding errors of the {dtype} local steps are not bounded; they are assumed to be negligible.",
    },
    "counterfactual": {
        "met": "Clients take part independently of each other, so the same schedule without the client has the "
        "distribution of training without it. The schedule includes the number of rounds, which depends on all clients "
        "if training stops at a target accuracy.",
        "trusted": "Clients are drawn independently of each other, so the same schedule without the client has the "
        "distribution of training without it. The schedule includes the number of rounds, which depends on all clients "
        "if training stops at a target accuracy. It is trusted that no client's absence or delay depends on another "
        "client.",
        "assumed": "Every round draws a fixed number of clients. The certificate compares with the same schedule in "
        "which the client's places stay empty, not with a federation in which other clients fill them.",
    },
    "deterministic device": {
        "trusted": "Rounds or features were computed on a GPU, in a layout that no other client changes. Some were "
        "computed twice, with the same bits. It is trusted that the recorded GPU, driver and libraries also "
        "give the same bits for the same operations without the forgotten clients.",
    },
    "engine": {
        "trusted": "Clients train on their own machines. It is trusted that a reply depends only on the model that the "
        "client received and on its own data.",
        "assumed": "The engine is not part of sifu. It is assumed that a round depends only on its model, its position "
        "and its participants' data, and that no other state is kept between rounds.",
    },
    "features": {
        "met": "The features are drawn from a seed in the spec; no client's data influenced them.",
        "trusted": "The features come from a public network; the operator declares that no client's data influenced "
        "it.",
    },
    "grouping": {
        "met": "A keyed hash of its name assigned each client to one of {count} groups. The key was fixed when the run "
        "was created; no client's data influenced the key or the number of groups.",
    },
    "honest reports": {
        "trusted": "Sample counts, drifts and expansions were computed by the engine or reported by the "
        "clients; they are trusted.",
    },
    "hyper-parameters": {
        "labels": "The number of outputs was counted from the labels of all clients; it is assumed to be the same "
        "without the forgotten clients.",
        "given": "The operator set the hyperparameters; it is trusted that clients' data did not decide them.",
        "own": "Every client limits its own steps by its own data; the spec fixes all other hyperparameters.",
        "fixed": "The spec fixes the outputs, the precision and the rule for lambda; lambda follows from the sum over "
        "the remaining clients.",
    },
    "identity": {
        "trusted": "Clients are identified by the public keys of their nodes; the operator's list assigns each key to "
        "a client.",
        "operator": "The operator states that its program authenticated the clients (for example by mutual TLS); this "
        "is trusted.",
        "claimed": "Clients were identified by the names they claimed. It is assumed that each claimed its own name, "
        "and that no forgotten client came back under another name.",
        "unknown": "It is not known how clients were identified. It is assumed that each was who it claimed to be, and "
        "that no forgotten client came back under another name.",
    },
    "initial model": {
        "met": "The initial model is drawn from the seed; no client's data influenced it.",
        "trusted": "The operator's own program creates the model. It is trusted that no client's data influenced it.",
        "assumed": "The origin of the initial model is not known; it is assumed that no client's data influenced it.",
    },
    "layout": {
        "assumed": "Rounds were computed on a GPU. It is assumed that without the forgotten clients they would have "
        "had the same bits, as on a CPU.",
    },
    "module": {
        "met": "Modules of the operator consist of layers of public libraries, without hooks or a loss of its own.",
        "trusted": "The operator declares that {functions} computes from its inputs and parameters alone.",
        "assumed": "It is assumed that modules of the operator compute from their inputs and parameters alone.",
    },
    "noise": {
        "trusted": "It is trusted that the operator drew the noise from the operating system's entropy, added it in "
        "float64, and released no model or head without it.",
        "given": "The noise came from a generator that the caller gave, so anyone who repeats its draws can remove it.",
        "failed": "The source of the noise is not known.",
    },
    "outside the theory": {
        "assumed": "{what} is outside the theorem and is assumed to be harmless.",
    },
    "preprocessing": {
        "met": "Preprocessing uses fixed constants; no client's data influenced it.",
        "trusted": "The operator declares that no client's data influenced the preprocessing.",
        "assumed": "The data were preprocessed before sifu received them; it is assumed that the forgotten clients' "
        "data did not influence the preprocessing.",
    },
    "record": {
        "assumed": "The run was restored from a backup. It is assumed that the original run released no further "
        "models after that backup, because they are not counted here.",
        "trusted": "The run was restored from a backup. It is trusted that the merged models of groups never included "
        "the clients, as the restored record states.",
    },
    "regularity": {
        "assumed": "Every local step is assumed to expand distances by at most B = {factor:g}; nothing proves this for "
        "this model.",
        "not smooth": "The loss is assumed to be smooth; this model is not known to be.",
        "strongly convex": "The local losses are strongly convex (weight decay) and smooth. Every client limits its "
        "steps by its own smoothness, so its steps of a round bring two models closer.",
        "convex": "The local losses are convex and smooth. Every client limits its steps by its own smoothness, so "
        "none of them expands distances.",
    },
    "replies": {
        "assumed": "Some clients' replies were refused and left out. The certificate compares with a federation in "
        "which the same replies were left out.",
    },
    "rounds apart": {
        "moved on": "Every merged group trained separately for {rounds} rounds, a number fixed before training; its "
        "model took part in no common round. The difference of the mean from the fresh model was multiplied by "
        "{stretch:g}, which was also fixed before training.",
    },
    "schedule": {
        "assumed": "{what} lets one client decide which rounds and replies count. The certificate compares with a "
        "federation in which the same rounds and replies counted.",
    },
    "signatures": {
        "trusted": "Some events that file or decide requests were written without the operator's key. It is trusted "
        "that nobody changed them before the next signature.",
    },
    "statistics": {
        "trusted": "Statistics that no data can have were refused; otherwise it is trusted that each client sent its "
        "own.",
        "masked": "Statistics were masked. A sum that no data can have was refused, but single clients' statistics "
        "could not be checked; it is trusted that each client sent its own.",
    },
}


def sentence(name: str, case: str, values: Mapping[str, Any]) -> str:
    """Return the sentence of a premise."""
    text = SENTENCES.get(name, {}).get(case)
    if text is None:
        raise ValueError(f"there is no sentence for the premise {name!r}, case {case!r}: add it to SENTENCES")
    words = text.format(**values)
    return f"{words[0].upper()}{words[1:]}"
