"""What the columns of the summaries mean, each defined once."""

from __future__ import annotations

from collections.abc import Iterable

COLUMNS = {
    "data": "the data set",
    "task": "data set, how it is spread over the clients, and how many take part in a round",
    "method": "the method; with the rules it was counted by where both were run, with its preset where runs were "
    "trained in several ways",
    "requests": "how many requests of how many clients: 10 is one request of ten clients, 10x3 are three of ten each, "
    "1x50 fifty of one each",
    "clients": "clients of the federation",
    "epsilon": "the epsilon each request asked for, at delta 0.01; of the field's metrics: what thresholds on a "
    "sample's margin show (NeurIPS 2023 unlearning challenge), median over the forgotten's samples, 0 is best",
    "sigma": "times the paper's sigma",
    "groups": "how many groups train apart (S)",
    "apart": "for how many rounds (R)",
    "merge": "how the groups are put together: their mean, or moved further from the fresh model",
    "leavers": "clients that leave at once",
    "seeds": "how many seeds; every row of a data set has the same ones, but for `groups`",
    "runs": "seeds times sets of clients that ask; every row of a data set has the same ones",
    "draws": "how many times the noise was drawn: single draws vary a lot",
    "rounds": "all requests together, calibration included; median over the runs that reached the target",
    "Scratch": "Scratch's rounds, median",
    "speed-up": "Scratch's rounds over the method's on the same seed, of the seeds on which both reached the target: "
    "median (least to largest), and how many runs did not reach it",
    "automatic": "the speed-up at the sigma that the planner chose before the request",
    "best in hindsight": "the speed-up at the best of the sigmas tried, chosen after all were run: nobody gets this",
    "tried": "how many sigmas the best in hindsight was chosen from, and over how many draws where some sigma has "
    "fewer than the automatic one",
    "sent": "bytes between server and clients: a model to each participant of a round and one back; mean",
    "kept": "what is kept beyond the current model for the next request; the largest of the requests, mean",
    "seconds": "of a request, mean, and on what; whatever else ran there at the time slowed it",
    "remaining": "accuracy on the training data of the clients that stay, after the last request; median over the runs "
    "that did not diverge, whether they reached the target or not",
    "test": "accuracy on test samples, which no client holds; median over the same runs",
    "forgotten": "accuracy on the training data of everyone forgotten; median over the same runs. Near Scratch's is "
    "good",
    "mark": "accuracy with the leaving clients' own marks less accuracy with fresh ones, after the request; near 0 is "
    "good; median",
    "level": "what is proven, and of how many requests: exact (the model never saw the clients), proven (epsilon and "
    "delta from measured premises), conditional (on a premise that is assumed, for example that nobody else would have "
    "taken the clients' places in their rounds), none; diverged: training did, and there is no model",
    "first training": "test accuracy of the first training with groups less that of plain training, in points; median",
    "models": "runs of the method, and as many of Scratch that it is held against",
    "KLoM forgotten": "KL divergence of margins from Scratch's, in nats, on the forgotten's samples: median over "
    "samples (95th percentile); 0 is best",
    "KLoM remaining": "the same on samples of the clients that stay, median",
    "KLoM test": "the same on test samples, median",
    "quality": "the challenge's forgetting quality, from 0.0002 to 1; 1 is best",
    "TPR at 1 % FPR": "how often an attack (U-LiRA) that is wrong about 1 % of Scratch's models tells the method's "
    "from them, on the forgotten's samples; 1 % is chance",
    "relearn": "rounds with the forgotten back until the model is as good on their data as before; near Scratch's is "
    "good",
    "gap forgotten": "accuracy on the forgotten's samples less Scratch's, in points of medians",
    "gap test": "accuracy on test samples less Scratch's, in points of medians",
    "setting": "the preset, of those that count by the paper's rules",
    "averaged over": "the data sets on which every run of SIFU reached the target",
    "SIFU saves": "1 - 1/speed-up of SIFU, mean over these data sets; the paper says 52 %",
    "control saves": "the same of Noisy Scratch, a fresh model plus the same noise; over these data sets, or those "
    "named, on which its runs always reached the target, too",
    "left": "what SIFU saves beyond the control, on the control's data sets",
    "honest saves": "the same of SIFU by our rules on the same training, on the seeds that it was run on: they may be "
    "fewer",
    "missed": "runs of SIFU that did not reach the target, of those that have Scratch beside them",
    "not trained": "data sets, and on how many seeds, whose training ended at its limit of rounds below the target",
    "trained as": "the preset; those that differ in their rules alone train alike",
    "target": "the accuracy on the clients' training data that ends training",
    "reached": "how many trainings reached it; no requests are carried out on the others",
    "rounds of training": "least to largest; those below the target ended at their limit",
    "accuracy": "on the clients' training data at the end of training, least to largest",
    "settings": "combinations of learning rate, momentum and steps",
    "measurements": "distances that were measured and are not zero",
    "above Psi (round)": "how many of them broke the bound with the weights of the round",
    "above Psi (population)": "how many of them broke the bound with population weights",
    "largest alpha/Psi (round)": "the largest distance over that bound; above 1 it is broken",
    "largest alpha/Psi (population)": "the same with population weights",
}
"""Limits of time add columns of their own: `remaining, 25 %` is explained beside its table."""


def definitions(names: Iterable[str]) -> list[str]:
    """The columns that occur, with their meaning, in the order above."""
    present = set(names)
    return [f"`{name}`: {meaning}" for name, meaning in COLUMNS.items() if name in present]
