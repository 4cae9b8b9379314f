"""What a purged run still holds that follows from the data of the forgotten, place by place.

`sifu purge --format json` prints the list for a run, and docs/store.md (section 5b) has it for people. A test compares
it with two worlds that differ in one record of the forgotten client: what differs on disk is in the list, or random.
"""

from __future__ import annotations

from dataclasses import dataclass

from sifu.core.spec import RIDGE


@dataclass(frozen=True)
class KeptFigure:
    """Figures that a guess of the forgotten data can still be held against.

    `place` is table.column, or events.KIND and the path of a key in the payload (`*`: of any kind).
    """

    place: str
    what: str
    why: str


_PSI = "certificates recompute Psi from it"
_LEVEL = "certificates recompute levels from it"
_PLANS = "later plans use it"
_TIES = "it ties tables to the ledger"
KEPT_FIGURES = (
    KeptFigure("participation.drift", "how far each client's model was from the mean, round by round", _PSI),
    KeptFigure("nodes.mean_shift", "how far a round moved the model", _PSI),
    KeptFigure("nodes.factor_sum", "the sum of the clients' contraction factors", _PSI),
    KeptFigure("nodes.factor_max", "the largest contraction factor", _PSI),
    KeptFigure("nodes.averagedness_sum", "the sum of the clients' averagedness", _PSI),
    KeptFigure("nodes.averagedness_max", "the largest averagedness", _PSI),
    KeptFigure("nodes.rounding", "a bound of rounding errors, by the size of the model", _PSI),
    KeptFigure("nodes.noise_std", "sigma, chosen by Psi", _PSI),
    KeptFigure("nodes.distance", "how far the model was from the initial one", _PLANS),
    KeptFigure("clients.smoothness", "the largest curvature of a client's loss", _LEVEL),
    KeptFigure("clients.curvature", "the smallest curvature of a client's loss", _LEVEL),
    KeptFigure("run.facts", "the local rate, where the spec leaves it to sifu", "rounds are replayed with it"),
    KeptFigure("run.local_rates", "the local rates that were found anew", "rounds are replayed with it"),
    KeptFigure("run.spec", "the same in the merged spec", "rounds are replayed with it"),
    KeptFigure("run.clients_digest", "digest of the table of clients", _TIES),
    KeptFigure("models.psi_max", "the largest Psi of a client at a model", _PLANS),
    KeptFigure("requests.noise_std", "sigma, chosen by Psi", _PSI),
    KeptFigure("requests.source_node", "the node a request went back to, chosen by Psi", _PSI),
    KeptFigure("requests.wanted_node", "the same, had every model been kept", _PSI),
    KeptFigure("charges.psi", "what the noise had to hide", _PSI),
    KeptFigure("charges.charge", "what that cost", _PSI),
    KeptFigure("certificates.content.body", "Psi, sigma, charges, budgets and nodes", "they are signed"),
    KeptFigure("events.*.rows.digest", "digest of nodes and participations", _TIES),
    KeptFigure("events.*.run", "the local rate and the digest of clients, as above", _TIES),
    KeptFigure("events.*.models.psi_max", "as models.psi_max, also of erased models", _TIES),
    KeptFigure("events.rolled back.choice", "as the columns of requests", _TIES),
    KeptFigure("events.rolled back.charges", "as charges", _TIES),
    KeptFigure("events.rolled back.auto.ways", "levels and predicted rounds of each method", "the choice is checked"),
    KeptFigure("events.request planned", "source node and sigma of a plan", "it is the history of the request"),
)
"""Of runs that are trained in rounds."""
COUNTS = (
    KeptFigure("samples", "how many samples each client had, in tables and payloads", "weights follow from it"),
    KeptFigure("rounds", "how many rounds training took", "the history is made of them"),
    KeptFigure("requests.terms", "row numbers of forgotten records", "they leave the rows out of data read again"),
)
"""Of every run: numbers of things, never their content."""
RANDOM = (
    "*.nonce", "*.digest", "*.sealed", "*.signature", "*.commitment", "*.salt", "*.hash", "*.head", "*.time",
    "*.public_key", "*.run", "*.received", "*.carried_out", "*.finished", "*.issued", "*.sum", "*.sample_digests",
    "*.commitments.*", "events.request done.certificates.*", "run.head", "file head", "file salts.json",
    "file operator.key", "file models/*", "file statistics/*", "file updates/*",
)  # fmt: skip
"""Places that differ between any two runs: random bytes and times, digests of salted content, files of those who
stay."""


def kept_figures(model_kind: str) -> tuple[KeptFigure, ...]:
    """What is left after a purge; of a head in closed form it is numbers of things alone."""
    return COUNTS if model_kind == RIDGE else (*KEPT_FIGURES, *COUNTS)
