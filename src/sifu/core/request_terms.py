"""Terms of a request: the clients to forget, the budget and the method."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from sifu.choices import Level, Retention, SigmaChoice, terms_on_offer
from sifu.core.ledger import canonical_json
from sifu.core.operator_words import rows_words
from sifu.errors import InputError
from sifu.theory.calibration import check_deliverable, check_noise, exact_multiplier

AUTO = "auto"
"""Placeholder for a method that is chosen when the request is executed."""
LARGEST_FIGURE = 10**9
"""Largest whole number that a term may be."""


@dataclass(frozen=True)
class Terms:
    """Terms of one request.

    `to_mapping` returns the terms in the form used by inbox messages and the ledger; `from_mapping` parses this form:

    >>> terms = Terms(("client-007",), 10.0, 0.01, sigma=0.5)
    >>> terms.to_mapping()["sigma"]
    '0.5'
    >>> Terms.from_mapping(terms.to_mapping()) == terms
    True

    Attributes:
        clients: Names of the clients.
        epsilon: Budget epsilon.
        delta: Budget delta.
        sigma: Standard deviation of the noise, or `auto`.
        retention: Rule for models from before the rollback.
        method: Name of a method, or `auto` to choose one when the request is executed.
        level: Lowest accepted level; None means `conditional`.
        records: Rows of the client's data to forget, counted from 0 in the data it first joined with. The client keeps
            its other rows. If empty, clients are forgotten completely.
        before_after: Required budget "EPSILON,DELTA" against observers who kept earlier releases (`release.noise`), or
            None for no requirement.
    """

    clients: tuple[str, ...]
    epsilon: float
    delta: float
    sigma: SigmaChoice = "auto"
    retention: Retention = "paper"
    method: str = AUTO
    level: Level | None = None
    records: tuple[int, ...] = ()
    before_after: str | None = None

    def __post_init__(self) -> None:
        if not self.clients:
            raise InputError("the request names no client: give at least one, for example --clients client-007")
        nameless = [name for name in self.clients if not isinstance(name, str)]
        if nameless:
            raise InputError(f"client names must be strings, found {nameless[0]!r}")
        if repeated := _repeated(self.clients):
            raise InputError(f"the request names {', '.join(repeated[:5])} more than once: name each client once")
        if not isinstance(self.method, str):
            raise InputError(f"the method's name must be a string, found {self.method!r}")
        for name in ("epsilon", "delta", "sigma"):
            value: object = getattr(self, name)
            if name == "sigma" and value == "auto":
                continue
            if not _is_number(value):
                raise InputError(f"{name} must be a number{' or auto' if name == 'sigma' else ''}, found {value!r}")
            if isinstance(value, int) and abs(value) > LARGEST_FIGURE:
                raise InputError(f"{name} is a number of {value.bit_length()} bits, which is too large")
        check_deliverable(self.epsilon, self.delta)
        if self.sigma != "auto":
            check_noise(self.sigma)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"{name} must be {' or '.join(choices)}, found {getattr(self, name)!r}")
        if self.level is not None and self.level not in get_args(Level):
            raise InputError(f"the least level must be one of {', '.join(get_args(Level))}, found {self.level!r}")
        odd = [row for row in self.records if type(row) is not int or row < 0]
        if odd:
            raise InputError(f"records must be row numbers counted from 0, found {odd[0]!r}")
        if twice := _repeated(self.records):
            raise InputError(f"row {twice[0]} is named {self.records.count(twice[0])} times: name each row once")
        if self.records and len(self.clients) != 1:
            raise InputError(f"records need exactly one client, but {len(self.clients)} clients are named")
        _ = self.before_after_budget

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any]) -> Terms:
        """Parse the terms from plain values; refuse unknown terms, and missing terms that have no default.

        `sigma` may be a string, as in the ledger.
        """
        unknown = sorted(str(name) for name in set(mapping) - set(TERMS))
        if unknown:
            raise InputError(f"unknown term {', '.join(unknown)}; a request takes {', '.join(sorted(TERMS))}")
        missing = [name for name in ("clients", "epsilon", "delta") if name not in mapping]
        if missing:
            raise InputError(f"a request needs {', '.join(missing)}")
        clients, sigma = mapping["clients"], mapping.get("sigma", "auto")
        if not isinstance(clients, list | tuple):
            raise InputError(f"clients must be a list of names, found {clients!r}")
        records = mapping.get("records", ())
        if isinstance(records, str) or not isinstance(records, Sequence):
            raise InputError(f"records must be a list of row numbers, found {records!r}")
        rows = tuple(sorted(records)) if all(type(row) is int for row in records) else tuple(records)
        read = {"clients": tuple(clients), "sigma": parse_sigma(sigma), "records": rows}
        figures = {name: float(mapping[name]) for name in FIGURES if type(mapping.get(name)) is int}
        return Terms(**{**mapping, **read, **figures})

    def to_mapping(self) -> dict[str, Any]:
        """Return the terms as plain values for JSON; `sigma` is a string, so that 1 and 1.0 give the same value."""
        sigma = self.sigma if self.sigma == "auto" else str(float(self.sigma))
        return asdict(self) | {"clients": list(self.clients), "sigma": sigma, "records": list(self.records)}

    def digest(self, request: str) -> str:
        """Return the digest that an approval of `request` signs: SHA-256 of the canonical JSON of its terms and id."""
        terms = self.to_mapping() | {"request": request}
        return hashlib.sha256(canonical_json(terms)).hexdigest()

    @property
    def before_after_budget(self) -> tuple[float, float] | None:
        """Required (epsilon, delta) against observers of all releases, or None if there is no requirement.

        >>> Terms(("a",), 10.0, 0.01, before_after="3,1e-5").before_after_budget
        (3.0, 1e-05)
        """
        if self.before_after is None:
            return None
        try:
            epsilon, delta = map(float, str(self.before_after).split(","))
        except ValueError:
            raise InputError(f"before_after must be EPSILON,DELTA, found {self.before_after!r}") from None
        check_deliverable(epsilon, delta)
        return epsilon, delta

    @property
    def multiplier(self) -> float:
        """Noise multiplier s(epsilon, delta)."""
        return exact_multiplier(self.epsilon, self.delta)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _repeated(values: Sequence[Any]) -> list[Any]:
    return sorted(value for value, times in Counter(values).items() if times > 1)


FIGURES = ("epsilon", "delta")
"""Terms that canonical JSON may write as whole numbers; they are read as floats."""
CHOICES = {name: offered.choices for name, offered in terms_on_offer().items() if offered.choices and name != "level"}
"""Allowed values of each term that has a fixed list of values."""
TERMS: tuple[str, ...] = tuple(term.name for term in fields(Terms))
"""Names of all terms, clients first."""

BUDGET_TERMS = ("epsilon", "delta", "sigma")
"""Terms of the budget; they have no meaning if the client did not influence the model and no noise was added."""
ROUND_TERMS = ("retention",)
"""Terms of training in rounds; they have no meaning for a head in closed form."""


def terms_words(terms: Mapping[str, Any], *, without: Collection[str] = ()) -> str:
    """Return the terms that were given, except the clients, in one line.

    >>> terms_words({"epsilon": 10.0, "level": None, "clients": ["hospital-3"]})
    'epsilon 10'
    """
    offered = terms_on_offer()

    def word(name: str, value: Any) -> str:
        if name == "records":
            return rows_words(value)
        if isinstance(value, str) and value in (phrases := offered[name].about.words):
            return phrases[value]
        return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"

    given = {name for name, value in terms.items() if value is not None or name == "records"}
    shown = [name for name in TERMS[1:] if name in given and name not in without]
    return ", ".join(word(name, terms[name]) for name in shown)


def parse_sigma(sigma: Any) -> Any:
    """Parse a sigma given as a string: auto, or a number. Return other types unchanged; `Terms` checks them."""
    if not isinstance(sigma, str) or sigma == "auto":
        return sigma
    try:
        return float(sigma)
    except ValueError:
        raise InputError(f"sigma must be auto or a number, found {sigma!r}") from None


def is_request_id(request: object) -> bool:
    """Return whether `request` is a valid request id; ids become file names."""
    return isinstance(request, str) and bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", request))


def check_request_id(request: str) -> str:
    """Return `request` if it is a valid id; refuse it otherwise, because the id becomes a file name."""
    if not is_request_id(request):
        raise InputError(
            f"request id {request!r} cannot be used: write 1 to 64 letters, digits, dots, dashes or underscores, "
            "beginning with a letter or a digit"
        )
    return request
