"""Sections of a spec as frozen dataclasses. `sifu init` writes the comment of each field next to its key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sifu.choices import Approval, Retention
from sifu.core.replies import OnRejection

RIDGE = "ridge"
"""Model kind that is solved in closed form."""

LINEAR_KINDS = ("softmax", "logistic", "least_squares")
HEAD_KINDS = (*LINEAR_KINDS, RIDGE)
"""Kinds of models with one matrix of weights, trained or solved."""
ROW_KINDS = (*HEAD_KINDS, "mlp")
"""Kinds of models whose samples are rows of numbers, not images."""

IMAGE_FEATURES = ("pretrained", "transformers", "module")
"""Feature maps that networks compute from images with values in [0, 1]; the last two may also take other samples."""

TF32: Final = "tf32"
"""Value of `model.dtype` for float32 models whose products have factors of 10 bits of mantissa."""

PRETRAINED = ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
"""Values of `features.model` with `features.kind = "pretrained"`; the first one is the default."""


def key(default: Any, comment: str) -> Any:
    """Return a dataclass field with a default and the comment of its key."""
    return field(default=default, metadata={"comment": comment})


@dataclass(frozen=True)
class DataSpec:
    """The data, and their distribution over clients."""

    name: Literal["digits", "npz", "table", "python", "flower", "server loop"] = key(
        "digits", "digits, npz or table; sifu writes the others where clients come from a program or from Flower"
    )
    clients: int = key(160, "how many clients the data is spread over")
    samples_per_client: int = key(10, "samples of each client; 0 spreads everything evenly")
    partition: Literal["auto", "given", "iid", "one_class", "dirichlet"] = key(
        "auto", "given (by your file), iid, one_class, dirichlet (see alpha); auto: given or iid"
    )
    alpha: float = key(0.1, "concentration of the dirichlet partition; small is unequal")
    normalise: Literal["unit", "standard"] = key("unit", "digits: unit scales to [0, 1]; standard also centres")
    file: str = key("", "the file of npz; of table a CSV or Parquet file, or a folder with one file per client")
    label: str = key("label", "table: the column of the label")
    text: str = key("", "table: the column of texts, for features.kind = transformers; other columns are left out")
    client: str = key("", "table: the column that names the client of each row; empty with one file per client")
    id: str = key("", "table: the column that identifies a row (a patient's number); never a feature")
    classes: str = key(
        "", "table: the values of the label in order, A,B,C or NAME=A|B,...; empty if labels are numbers"
    )
    categories: str = key("", "table: the values of categories, COLUMN=A,B; COLUMN=C,D, one feature per value")
    scale: str = key("", "table: constants of columns of numbers, COLUMN=MIDDLE,SPREAD; ...: (value - MIDDLE) / SPREAD")
    missing: str = key(
        "", "table: fillers of missing values, COLUMN=NUMBER; CATEGORY=; add |TEXT for a text that means missing"
    )
    ignore: str = key("", "table: columns to leave out, A,B")
    header: str = key("", "table: names of all columns, for CSV files that have no header line")
    separator: str = key(",", "table: the character between the fields of a CSV file")
    encoding: str = key("utf-8", "table: the encoding of CSV files, by the name that Python gives it")
    columns: str = key("", "table: filled in by training, the columns that are features in their order")
    held_out: float = key(0.0, "table: share of each client's rows that is kept for testing, by data.id or content")
    test_file: str = key("", "table: a file with rows for testing instead")
    preprocessing: Literal["unknown", "fixed"] = key(
        "unknown", "own data only: fixed declares that no client's data shaped it (no mean or scale of the data)"
    )


@dataclass(frozen=True)
class ModelSpec:
    """The model."""

    kind: Literal["softmax", "logistic", "least_squares", "mlp", "cnn", "ridge", "python"] = key(
        "softmax",
        "softmax, logistic, least_squares (can be proven); ridge (in closed form: exact, one round, see [ridge]); mlp, "
        "cnn (with noise conditional at best)",
    )
    outputs: int = key(0, "classes or outputs; 0 takes the data set's own, or counts the labels of your own data")
    init: Literal["zeros", "random"] = key("zeros", "zeros or random; linear models only")
    dtype: Literal["float64", "float32", "tf32"] = key(
        "float64",
        "float64 can be proven; float32 is conditional at best with noise; tf32 is float32 with products of 10 bits, "
        "for convolutional networks of a spec, on a GPU with sifu-kernels",
    )
    module_is_pure: bool = key(
        False,
        "declares that modules and losses of your own (features.module, or given in Python) compute from their inputs "
        "and parameters alone; without it, certificates assume so and are conditional at best",
    )

    @property
    def array_dtype(self) -> Literal["float64", "float32"]:
        """Element type of arrays."""
        return "float32" if self.dtype == TF32 else self.dtype


@dataclass(frozen=True)
class FeaturesSpec:
    """Public features for a linear model, the same for all clients and independent of their data."""

    kind: Literal["none", "random_fourier", "pretrained", "transformers", "module"] = key(
        "none",
        "none (the inputs), random_fourier (rows), pretrained (images, extra pretrained), transformers (images or "
        "texts, extra transformers), module (a torch module of your own)",
    )
    model: str = key(
        "",
        "pretrained: efficientnet-lite0, -lite1 or -lite2, empty is -lite0; transformers: a folder with a model of "
        "Hugging Face, or its name on the hub",
    )
    seed: int = key(0, "seed of the map; part of the spec, so anybody can draw the same map")
    layers: int | Literal["deep", "last"] = key(
        "deep", "networks: last (the last layer), deep (the blocks before it as well), or a number of those blocks"
    )
    size: int = key(
        0,
        "pretrained: pixels of a side that smaller images are enlarged to, 0 is 224; transformers: pixels of a side, 0 "
        "is the model's own, or tokens of a text, 0 is 128",
    )
    count: int = key(
        0,
        "number of features of random_fourier (even), 0 is 512; of networks after projection, 0 is all",
    )
    module: str = key("", "module: package.file:function, which returns a torch module with fixed, public weights")
    cache: str = key("", "folder to keep features in, on the clients' side; no request erases it; empty keeps none")
    norm: float = key(10.0, "largest length of a sample's features; ridge shortens plain inputs to it, too")
    bandwidth: float = key(1.0, "random_fourier: width of the kernel, in units of the inputs")


@dataclass(frozen=True)
class RidgeSpec:
    """The head in closed form, for model.kind = "ridge"."""

    task: Literal["classification", "multi_label", "regression"] = key(
        "classification", "classification, multi_label (rows of 0 and 1), regression"
    )
    regularisation: float | Literal["auto"] = key(
        "auto",
        'r of lambda = r trace(G)/(k+1); "auto" is cross-validation from the remaining clients\' sums, '
        "and 0.01 on more than 4096 features",
    )
    shift: float = key(0.5, "regression: subtracted from every target; multi_label: 0.5, the middle between 0 and 1")
    scale: float = key(1.0, "regression: divides every target; targets may lie up to 8 scales from shift")


@dataclass(frozen=True)
class LocalSpec:
    """Local training of a client in a round."""

    rate: float | Literal["auto"] = key("auto", "limit of each client's step; auto: its own safe step alone")
    steps: int = key(10, "local gradient steps K of each round")
    batch: int = key(0, "mini-batch size; 0 is the whole data of the client")
    momentum: float = key(0.0, "heavy-ball momentum, reset each round")
    weight_decay: float = key(0.0, "coupled weight decay on every parameter; makes losses strongly convex")


@dataclass(frozen=True)
class ServerSpec:
    """The server's part in a round: averaging, participation, and handling of replies."""

    participation: str = key("all", "all, poisson(RATE), or fixed(COUNT) (conditional at best)")
    rejected: OnRejection = key(
        "stop", "when a reply is refused (NaN, wrong shape...): stop, leave out that reply, or drop the round"
    )
    update_bound: float = key(0.0, "refuse updates of a larger norm, which bounds every Psi beforehand; 0 is off")
    wait: str = key(
        "all",
        "a round on Flower closes when all have answered, 80% or 4 of them (conditional at best), or after 30s",
    )


@dataclass(frozen=True)
class StopSpec:
    """Stop rule of training and retraining."""

    target: float = key(0.95, "stop at this accuracy on the active clients' data; 0 runs max_rounds")
    min_rounds: int = key(1, "never stop before this many rounds")
    max_rounds: int = key(2000, "always stop after this many rounds")
    evaluate_every: int = key(1, "rounds between evaluations")


@dataclass(frozen=True)
class GroupsSpec:
    """Groups of clients that train separately before they merge (method groups: exact forgetting for any model)."""

    count: int = key(0, "how many groups train separately at first; 0: none")
    rounds: int = key(0, "rounds that groups train separately, fixed beforehand; they count towards stop.max_rounds")


@dataclass(frozen=True)
class PrivacySpec:
    """Default guarantee of a request."""

    epsilon: float = key(10.0, "budget epsilon; 1 is strong, 10 is weak")
    delta: float = key(0.01, "budget delta")
    sigma: float | Literal["auto"] = key("auto", 'noise; "auto" chooses it at the request, from recorded scalars')
    retention: Retention = key("paper", "paper keeps models from before the rollback; strict erases them too")


@dataclass(frozen=True)
class ReleaseSpec:
    """Noise on every release of a head in closed form, against observers who compare releases."""

    noise: float = key(0.0, "standard deviation of the noise, fixed before training; 0 is off")
    delta: float = key(1e-5, "certificates state epsilon at this delta")


@dataclass(frozen=True)
class RequestsSpec:
    """Approval of requests."""

    approval: Approval = key(
        "none",
        "how many people must approve a request before it is executed: none, one or two; never the person who filed it",
    )


@dataclass(frozen=True)
class RegularitySpec:
    """Bound on the expansion of a round."""

    kind: Literal["measured", "assumed"] = key(
        "measured", "measured from the clients' data, or assumed (the certificate then says so)"
    )
    factor: float = key(1.0, "the assumed expansion B of one local step; the paper takes 1 for networks")


@dataclass(frozen=True)
class KeepSpec:
    """Models kept as rollback targets, and other stored data."""

    models: int = key(64, "at most this many models on disk")
    statistics: Literal["auto", "clients", "sum"] = key(
        "auto",
        "ridge: clients keeps each client's statistics, so forgetting asks no client; sum asks the remaining "
        "clients; auto is clients, on Flower sum",
    )

    @property
    def kept_statistics(self) -> Literal["clients", "sum"]:
        """Statistics that the run keeps; `auto`, which the engine normally resolves, counts as `clients`."""
        return "sum" if self.statistics == "sum" else "clients"


@dataclass(frozen=True)
class Sections:
    """Fields of a spec: its seed and its sections."""

    seed: int = key(1, "seeds data, participation and batches; never the certified noise")
    data: DataSpec = field(default_factory=DataSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    features: FeaturesSpec = field(default_factory=FeaturesSpec)
    ridge: RidgeSpec = field(default_factory=RidgeSpec)
    local: LocalSpec = field(default_factory=LocalSpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    groups: GroupsSpec = field(default_factory=GroupsSpec)
    privacy: PrivacySpec = field(default_factory=PrivacySpec)
    release: ReleaseSpec = field(default_factory=ReleaseSpec)
    requests: RequestsSpec = field(default_factory=RequestsSpec)
    regularity: RegularitySpec = field(default_factory=RegularitySpec)
    keep: KeepSpec = field(default_factory=KeepSpec)
