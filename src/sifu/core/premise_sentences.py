"""Sentences of premises, by name and case; certificates contain names, cases and values instead.

A sentence may be reworded at any time (then raise `certificate_words.WORDING`). A case keeps its meaning forever and is
never removed, because issued certificates refer to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AS_STATED = "as stated"
"""Case of a premise whose method provides its own sentence as the value `statement`."""
SENTENCES: dict[str, dict[str, str]] = {
    "accounting": {
        "met": "Weights are those of the rounds that really happened.",
        "failed": "Population accounting under-states sensitivity; it can be compared, never certified.",
    },
    "arithmetic": {
        "met": "Local steps ran in float64; a bound on their rounding is added to the sensitivity.",
        "beyond": "The sensitivity is beyond the range in which rounding is bounded; it is assumed not to matter.",
        "assumed": "Rounding of the {dtype} local steps is not bounded and is assumed not to matter.",
    },
    "budget": {
        "met": "Over all rounds the clients took part in, training reached epsilon {reached}, within the one asked "
        "for.",
        "failed": "Over all rounds the clients took part in, training reached epsilon {reached}, more than the "
        "{epsilon:g} asked for.",
    },
    "calibration": {
        "met": "Exact calibration of the Gaussian mechanism (Balle & Wang 2018).",
        "assumed": "Classical calibration inside its range (epsilon < 1), not the exact one.",
        "failed": "Classical calibration is proven for epsilon < 1 only; it was used at epsilon = {epsilon:g}.",
    },
    "clipping": {
        "met": "Every client's update was scaled to a norm of at most {clip:g} and noise of {noise:g} times that was "
        "added to it, in float64, in every round; this bounds a client's part whatever the model is.",
    },
    "counterfactual": {
        "met": "Clients take part independently of each other, so the same schedule without the client is the law of "
        "training without it.",
        "trusted": "Clients are drawn independently of each other, so the same schedule without the client is the law "
        "of training without it; that no client's absence or delay depends on another client is trusted.",
        "assumed": "Rounds sample a fixed number of clients: the certificate compares with the same schedule, the "
        "client's slots left empty, not with a world where others filled them.",
    },
    "deterministic device": {
        "trusted": "Networks were tuned on a GPU, in batches whose shape follows from the plan and the client. In "
        "every round repeated trainings gave the same bits; that the recorded GPU, driver and libraries also give the "
        "same bits for the same operations without the forgotten clients is trusted.",
    },
    "engine": {
        "trusted": "Clients train on machines of their own; that what they send follows from the model they are "
        "handed and from their own data alone is trusted.",
        "assumed": "The engine is not sifu's own; it is assumed that a round follows from its model, its place and its "
        "participants' data alone, and that nothing else passes from round to round.",
    },
    "features": {
        "met": "The features are drawn from a seed in the spec; no client's data shaped them.",
        "trusted": "The features are those of a public network; the operator declares that no client's data shaped it.",
    },
    "grouping": {
        "met": "A keyed hash of its name put each client into one of {count} groups; the key was fixed when the run "
        "was created, no client's data had a part in it, and without the forgotten there would be as many groups.",
        "assumed": "The number of groups, {count}, was set by rule from how many clients there are, and would be "
        "another one without the forgotten; the certificate compares with a world that has as many groups.",
    },
    "held-out rows": {
        "assumed": "Rows for testing were drawn by their number, so without the forgotten records others would have "
        "been drawn; the certificate compares with a world in which the same rows were.",
    },
    "history": {
        "met": "Every step of the history is a round that was counted, or was made from such steps alone.",
        "failed": "A model made from stored updates lies on the history; no noise was counted for what went into it.",
    },
    "honest reports": {
        "trusted": "Sample counts, drifts and smoothness bounds are those the engine computed or the clients "
        "reported; they are trusted.",
        "counts": "Sample counts and who took part are as recorded; they are trusted.",
    },
    "hyper-parameters": {
        "labels": "The number of outputs was counted from all clients' labels; it is assumed to be the same without "
        "the forgotten clients.",
        "given": "Hyper-parameters were given by the operator; that clients' data did not decide them is trusted.",
        "others": "The local rate is the one clients' smoothness bounds set; without the forgotten clients it would "
        "be the same.",
        "forgotten": "The local rate is the one clients' smoothness bounds set and would be another one without the "
        "forgotten clients; what it reveals of them is assumed not to matter.",
        "anew": "The local rate was found anew, by the rule of the spec, from the smoothness bounds of those who stay.",
        "fixed": "Outputs, precision and the rule for lambda are fixed in the spec; lambda follows from the sum of "
        "those who stay.",
    },
    "identity": {
        "trusted": "Clients are known by the public keys of their nodes; the operator's list says whose key is whose.",
        "operator": "The operator's program authenticated the clients, as the operator states (for example by mutual "
        "TLS); that is trusted.",
        "claimed": "Clients were known by the names they claimed; it is assumed that each was who it said it was, and "
        "that no forgotten client came back under another name.",
        "unknown": "How clients were told apart is not known; it is assumed that each was who it said it was, and "
        "that no forgotten client came back under another name.",
    },
    "initial model": {
        "met": "The initial model is drawn from the seed; no client's data shaped it.",
        "trusted": "The operator's own program makes the model; that no client's data shaped the initial one, and "
        "that nothing but its parameters passes from round to round, is trusted.",
        "assumed": "Where the initial model comes from is not known; it is assumed that no client's data shaped it.",
    },
    "layout": {
        "assumed": "On a GPU every client is padded to the largest of all, so without the forgotten clients rounding "
        "may differ in the last bits; it is assumed that training does not amplify that. On a CPU the bits are the "
        "same.",
        "device": "Networks were tuned on a GPU, with the same operations on the same data with and without the "
        "forgotten clients; it is assumed that a GPU then gives the same bits. On a CPU it does.",
    },
    "method": {
        "failed": "{method} is a heuristic: nothing bounds what the model it makes still holds of the clients.",
    },
    "module": {
        "trusted": "A module of the operator's own computes with clients' data. Each client began with a fresh copy of "
        "it and with fixed states of the random generators, repeated computations gave the same bits, and variables "
        "that its code shares between copies did not change; that nothing else (files, the clock, other processes, "
        "state inside libraries) carries one client's data to another is trusted.",
        "one copy": "A module of the operator's own computes with clients' data, in one copy for all clients. When it "
        "was tried, it changed neither its attributes nor variables that its code shares; that nothing carries one "
        "client's data to another is trusted.",
    },
    "noise": {
        "met": "The noise was drawn from the operating system's entropy and added in float64.",
        "seeded": "The noise came from a seeded generator, so anyone with the seed can remove it.",
        "failed": "Where the noise came from is not known.",
    },
    "noise size": {
        "assumed": "The size of the noise was chosen from the influence of the forgotten clients (sigma auto); what "
        "it reveals of them is assumed not to matter.",
        "trusted": "The size of the noise was given; that it was not found from the data of the forgotten clients, as "
        "a plan with sigma auto finds it, is trusted.",
    },
    "outside the theory": {
        "assumed": "{what} is outside the theorem and assumed harmless.",
    },
    "preprocessing": {
        "met": "Preprocessing uses fixed constants; no client's data shaped it.",
        "trusted": "The operator declares that no client's data shaped preprocessing.",
        "assumed": "The data were prepared before they were handed over; it is assumed that the forgotten clients' "
        "data did not shape that.",
    },
    "record": {
        "older": "The run was restored from a backup that may not have been its latest state; models released in "
        "between are not counted.",
        "complete": "The run was restored from a backup; it is assumed that the run it was made of released nothing "
        "more, since that would not be counted here.",
        "trusted": "The run was restored from a backup; that the merged models of groups never held the clients is "
        "what the restored record says, and is trusted.",
    },
    "regularity": {
        "assumed": "Every local step is taken to expand distances by at most B = {factor:g}; nothing proves this for "
        "the model trained here.",
        "not smooth": "The loss is taken to be smooth; the model is not known to be.",
        "strongly convex": "The local losses are strongly convex (weight decay) and smooth, with every client's "
        "smoothness bounded from above.",
        "convex": "The local losses are convex and smooth, every client's smoothness is bounded from above, and the "
        "local rate is within the range where no step expands distances.",
        "smooth": "The local losses are smooth with every client's smoothness bounded from above; the local rate is "
        "beyond the range certified as convex, so distances may grow.",
        "clipped": "The local losses are smooth with every client's smoothness bounded from above. Each step's "
        "gradient is clipped to a norm of at most {clip:g}, which keeps this bound; but a clipped step is not a "
        "convex one, so distances may grow.",
    },
    "replies": {
        "assumed": "Some clients' replies were refused and left out; the certificate compares with a world in which "
        "the same ones were left out.",
    },
    "rounds apart": {
        "met": "Every merged group trained apart for {rounds} rounds, fixed before training; its model never saw a "
        "common round.",
        "moved on": "Every merged group trained apart for {rounds} rounds, fixed before training; its model never saw "
        "a common round. The mean was moved on from the fresh model by a factor of {stretch:g}, fixed before "
        "training, too.",
        "tuned blocks": "Every group tuned the public network apart for {rounds} rounds, fixed before training, and no "
        "network was tuned by several groups. Each gives {block} numbers (0: all of its output) of the features, by a "
        "projection from a seed in the spec.",
        "tuned merge": "Every group tuned the public network apart for {rounds} rounds, fixed before training, and no "
        "network was tuned by several groups. Their mean is moved on from the public one by a factor of {stretch:g}, "
        "fixed before training, too.",
    },
    "schedule": {
        "assumed": "{what} lets one client decide which rounds and answers count; the certificate compares with a "
        "world in which the same ones counted.",
    },
    "signatures": {
        "trusted": "Some events were written without the operator's key, and the operator vouched for them "
        "afterwards; that they were not changed in between is trusted.",
    },
    "statistics": {
        "trusted": "Statistics that no data can have were refused; otherwise clients are trusted to have sent their "
        "own.",
        "masked": "Statistics were masked: a sum that no data can have was refused, single clients' could not be "
        "checked; clients are trusted to have sent their own.",
    },
    "training noise": {
        "met": "The clients took part in no round, so no noise depends on them.",
        "failed": "The noise of an average depends on who took part: without the client it would have another size, "
        "which the models themselves show. What that tells is not bounded.",
    },
    "tuning": {
        "trusted": "Rates, steps and which layers are tuned were given by the operator; that clients' data did not "
        "decide them is trusted.",
    },
}


def sentence(name: str, case: str, values: Mapping[str, Any]) -> str:
    """Return the sentence of a premise in the current wording."""
    text = "{statement}" if case == AS_STATED else SENTENCES.get(name, {}).get(case)
    if text is None:
        raise ValueError(
            f"there is no sentence for the premise {name!r}, case {case!r}: add it to SENTENCES, or give the sentence "
            f"as the value 'statement' of case {AS_STATED!r}"
        )
    words = text.format(**values)
    return f"{words[0].upper()}{words[1:]}"
