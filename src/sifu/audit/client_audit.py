"""Checks that a leaving client can make without the operator's run (`sifu client-audit`).

The client has the models released before and after its request, its own data and its public certificate. The client can
check whether the certificate is complete and names the client, whether the model changed, and how both models perform
on the client's data. A single model does not show whether the client was forgotten, and the statements say so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.certificate_words import exact_words
from sifu.core.layout import ModelLayout
from sifu.core.observers import observers_in
from sifu.data.npz import read_arrays
from sifu.errors import InputError
from sifu.export.description import description_path, read_description
from sifu.store.files import read_plain
from sifu.store.witnesses import check_heads, read_witness
from sifu.verify.bundle import verify_certificate

CANNOT_SHOW = (
    "Accuracy on your data says little: a model that never saw you may be as good on it, and forgetting does not "
    "mean being bad at it. What was promised is that the model would look the same without you.",
    "One released model cannot prove or disprove that. The operator's run can be replayed with and without you (sifu "
    "audit DIR); ask for that, or for the report of an auditor who did it.",
)


@dataclass(frozen=True)
class ModelOnOwnData:
    """Performance of a released model on the client's own data."""

    accuracy: float
    loss: float


@dataclass
class ClientAudit:
    """Findings of a client: `problems` lists errors, `statements` describes all other results."""

    client: str
    request: str
    level: str
    epsilon: float
    delta: float
    public_key: str
    samples: int = 0
    before: ModelOnOwnData | None = None
    after: ModelOnOwnData | None = None
    distance: float | None = None
    sigma: float = 0.0
    committed: bool | None = None
    statements: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if there is no problem."""
        return not self.problems


def audit_client(
    client: str,
    certificate: str | Path,
    *,
    before: str | Path | None = None,
    after: str | Path | None = None,
    data: str | Path | None = None,
    public_key: str | None = None,
    nonce: str | None = None,
    witnesses: Sequence[str | Path] = (),
    model: Any = None,
    kind: str = "auto",
) -> ClientAudit:
    """Check a certificate and two released models from the client's side.

    Args:
        client: Name of the client.
        certificate: File of the public certificate.
        before: Model released before the request.
        after: Model released after the request.
        data: npz file with x (model inputs as floats, prepared as for training) and y.
        public_key: The operator's published key, which must have signed the certificate.
        nonce: Nonce that opens the certificate's commitment to the model after, if the operator discloses it.
        witnesses: Files of checkpoints kept by this client's node or others; contradicting heads show a fork.
        model: Model of `engines.sim`. By default, a linear model is read from the file.
        kind: Loss of the linear model; `auto` means softmax, or logistic for one output and labels.
    """
    checked = verify_certificate(certificate, public_key)
    body = checked.content["body"]
    audit = ClientAudit(client, public_key=checked.public_key, **_figures(body, Path(certificate)))
    problems, statements = audit.problems, audit.statements
    problems += [f"certificate: {problem}" for problem in checked.problems]
    named = body.get("clients")
    # For a string, `in` would accept every substring.
    if not isinstance(named, list) or client not in named:
        problems.append(f"certificate: it does not name {client!r}, it names {str(named)[:200]}")
    statements += _promise(body) if checked.holds else ["The certificate does not hold: it promises nothing."]
    if body.get("form") == "auditor":
        statements.append(
            "This is the auditor's copy: it holds figures that depend on the clients' data and is not meant for you."
        )
    if public_key is None:
        statements.append(
            f"The signature holds for the key {checked.public_key[:16]}.... The file does not show whose key that is: "
            "compare it with the one that the operator published (--public-key)."
        )
    if witnesses:
        heads = [(Path(path), checkpoint) for path in witnesses for checkpoint in read_witness(Path(path))]
        own = read_witness(Path(certificate)) if checked.holds else []
        problems.extend(check_heads([(Path(certificate), checkpoint) for checkpoint in own] + heads))
        kept_keys = {checkpoint.public_key for _, checkpoint in heads if checkpoint.run == body.get("run")}
        if public_key is None and kept_keys and checked.public_key not in kept_keys:
            problems.append(
                f"key: the certificate is signed with {checked.public_key}, and the heads that were kept with "
                f"{', '.join(sorted(kept_keys))}: ask for the signed change of keys, and give the published key"
            )
        statements.append(
            f"{len(heads)} signed heads of the ledger, kept elsewhere, were compared with the certificate."
        )
    arrays = {name: _read(path) for name, path in (("before", before), ("after", after)) if path is not None}
    if nonce is not None and after is None:
        raise InputError("--nonce needs the later model, whose commitment it opens: give --after FILE too")
    if "before_after" in body and after is not None:
        statements.append(
            "The certificate commits to the solved head, which stays with the operator; a release with noise cannot be "
            "matched with it."
        )
    elif nonce is not None:
        audit.committed = _opens(Path(str(after)), nonce, body["commitments"]["final_model"])
        if not audit.committed:
            problems.append("model after: it is not the one the certificate commits to")
    elif after is not None:
        statements.append(
            "Whether this model is the certified one cannot be told, because its commitment is salted. Ask the "
            "operator for the nonce of final_model (--nonce)."
        )
    if before is not None:
        _check_is_from_before(Path(before), body, nonce, problems, statements)
    if len(arrays) == 2:
        audit.distance = _distance(arrays["before"], arrays["after"])
        if audit.distance == 0.0 and body["level"] != "none":
            problems.append("models: before and after are the same model, so no request was executed between them")
    if data is not None:
        on_models, audit.samples = _on_own_data(arrays, data, model, kind)
        audit.before, audit.after = on_models.get("before"), on_models.get("after")
    if audit.before and audit.after:
        statements.append(_change(audit.before, audit.after))
    statements += CANNOT_SHOW
    return audit


def _figures(body: dict[str, Any], certificate: Path) -> dict[str, Any]:
    """Return the request, level, epsilon, delta and sigma of a certificate; refuse a file that lacks them."""
    try:
        figures = {name: float(body[name]) for name in ("epsilon", "delta", "sigma")}
        texts = {name: body[name] for name in ("request", "level")}
        if not all(isinstance(text, str) for text in (*texts.values(), body["commitments"]["final_model"])):
            raise TypeError("a text is missing")
        float(body.get("attacker_true_positive_rate_at_1_percent") or 0.0)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{certificate} is not a sifu certificate: {type(error).__name__} {error}") from error
    return texts | figures


def _promise(body: dict[str, Any]) -> list[str]:
    """Return the guarantee of a valid certificate, and its meaning for each of the two observers."""
    if body["level"] == "none":
        promise = "The certificate promises nothing (level none)."
    elif body["level"] == "exact":
        promise = f"The certificate says: {exact_words('you', body['method'], body['records'])}."
    else:
        promise = f"The certificate promises ({body['epsilon']:g}, {body['delta']:g})."
    return [promise, *observers_in(body).sentences]


def _read(path: str | Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(read_plain(Path(path), links=True)))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from error


def _opens(path: Path, nonce: str, commitment: str) -> bool:
    """Return whether the nonce opens a commitment to a file: SHA-256(nonce || SHA-256(file))."""
    try:
        salt = bytes.fromhex(nonce)
    except ValueError as error:
        raise InputError(f"the nonce must be hexadecimal digits, found {nonce[:20]!r}") from error
    return hashlib.sha256(salt + hashlib.sha256(path.read_bytes()).digest()).hexdigest() == commitment


def _check_is_from_before(
    before: Path, body: dict[str, Any], nonce: str | None, problems: list[str], statements: list[str]
) -> None:
    """Check that a model can be from before the request, by its description and the certificate's commitment."""
    if nonce is not None and _opens(before, nonce, body["commitments"]["final_model"]):
        problems.append("model before: it is the model that the certificate released after the request")
    if not description_path(before).exists():
        statements.append(
            "Whether the model before was released before your request cannot be told from the file alone: keep the "
            f"{description_path(before).name} that sifu export writes next to it."
        )
        return
    description = read_description(description_path(before))
    released = description.get("released")
    if description["sha256"] != hashlib.sha256(before.read_bytes()).hexdigest() or not isinstance(released, dict):
        problems.append("model before: it is not the file that its description names")
        return
    time, received = str(released.get("time")), str(body.get("received"))
    if released.get("run") != body.get("run"):
        problems.append("model before: by its description it is from another run than the certificate")
    elif time > received:
        problems.append(
            f"model before: by its description it was released on {time}, after your request was received ({received})"
        )
    else:
        statements.append(
            f"By its description, which the operator wrote, the model before was released on {time}, and your request "
            f"was received on {received}."
        )


def _distance(model: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    if {name: value.shape for name, value in model.items()} != {name: value.shape for name, value in other.items()}:
        raise InputError(
            "the models before and after have different parameters: they do not belong to the same federation"
        )
    gaps = [np.linalg.norm(model[name].astype(np.float64) - other[name].astype(np.float64)) for name in model]
    return float(np.linalg.norm(gaps))


def _on_own_data(
    arrays: dict[str, dict[str, np.ndarray]], data: str | Path, model: Any, kind: str
) -> tuple[dict[str, ModelOnOwnData], int]:
    stored = read_arrays(Path(data))
    if "x" not in stored or "y" not in stored:
        raise InputError(f"{data} must have the arrays x and y; it has {', '.join(sorted(stored)) or 'none'}")
    x, y = stored["x"], stored["y"]
    if x.dtype.kind != "f" or x.ndim < 2 or y.shape[:1] != x.shape[:1] or x.shape[0] == 0:
        raise InputError(
            f"{data} has x of type {x.dtype} and shape {x.shape} and y of shape {y.shape}: one row per sample is "
            "needed, as floats, prepared as for training"
        )
    measure = _measure_linear if model is None else _measure
    return {name: measure(parameters, x, y, model or kind) for name, parameters in arrays.items()}, int(x.shape[0])


def _measure(parameters: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, model: Any) -> ModelOnOwnData:
    """Measure a model of `engines.sim`, which needs torch."""
    from sifu.engines.sim.scorers import Samples, Scorer

    dtype = str(next(iter(parameters.values())).dtype)
    layout: ModelLayout = model.layout(dtype)
    vector = layout.flatten(parameters)
    samples, scorer = Samples(x, y.astype(np.int64) if model.objective.labels else y), Scorer(model, dtype)
    return ModelOnOwnData(scorer.accuracy(vector, samples), float(np.mean(scorer.losses(vector, samples))))


def _measure_linear(parameters: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, kind: str) -> ModelOnOwnData:
    """Measure a linear model with numpy alone: a client needs no torch."""
    weight = parameters.get("weight")
    if set(parameters) != {"weight", "bias"} or weight is None or weight.ndim != 2:
        raise InputError(
            f"the model has the parameters {', '.join(sorted(parameters))}, not those of a linear model: audit it "
            "from Python with sifu.audit.audit_client(..., model=...)"
        )
    features, outputs = weight.shape
    inputs = x.reshape(x.shape[0], -1).astype(np.float64)
    if inputs.shape[1] != features:
        raise InputError(f"the model takes {features} features, the samples have {inputs.shape[1]}")
    if kind == "auto":
        kind = "least_squares" if y.dtype.kind not in "biu" else "logistic" if outputs == 1 else "softmax"
    scores = inputs @ weight.astype(np.float64) + parameters["bias"].astype(np.float64)
    if kind == "least_squares":
        gaps = scores - y.astype(np.float64).reshape(scores.shape)
        return ModelOnOwnData(float("nan"), float(np.mean(0.5 * np.sum(gaps**2, axis=1))))
    if kind not in ("logistic", "softmax") or (kind == "logistic") != (outputs == 1):
        raise InputError(
            f"kind must be auto, softmax (two outputs or more), logistic (one) or least_squares, found {kind!r} for a "
            f"model with {outputs} outputs"
        )
    classes = max(2, outputs)
    if not 0 <= y.min() <= y.max() < classes:
        raise InputError(f"labels must lie in 0..{classes - 1}, found {int(y.max())}")
    if outputs == 1:  # logistic is softmax over the scores 0 and z
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    labels, largest = y.astype(np.int64).reshape(-1), scores.max(axis=1)
    right = scores[np.arange(len(labels)), labels]
    losses = np.log(np.exp(scores - largest[:, None]).sum(axis=1)) + largest - right
    return ModelOnOwnData(float(np.mean(scores.argmax(axis=1) == labels)), float(np.mean(losses)))


def _change(before: ModelOnOwnData, after: ModelOnOwnData) -> str:
    if after.loss > before.loss:
        return (
            f"Your loss rose from {before.loss:.4g} to {after.loss:.4g}: the model fits your data less than before, "
            "as is usual when a client is forgotten. It is a sign, not a proof."
        )
    return (
        f"Your loss did not rise ({before.loss:.4g} before, {after.loss:.4g} after). That alone does not contradict "
        "the certificate: the other clients' data may teach the model what yours did."
    )
