"""What forms and the JSON API accept, as models of pydantic, which also describe the API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from sifu.choices import Decision, TermsGiven, terms_on_offer
from sifu.errors import InputError

MOST_CLIENTS = 10_000
DEADLINE_DAYS = 30
LARGEST_ROW = 2**53 - 1
"""Largest whole number that JSON represents exactly."""
SEPARATORS = re.compile(r"[,;|\t\r\n]")
_ROW_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")


def _record(value: int | str) -> int | str:
    """Return a row number or an identity; one with leading zeros, or too many digits, cannot be a row number."""
    return int(value) if isinstance(value, str) and _ROW_NUMBER.fullmatch(value) else value


class Body(BaseModel):
    """Body of a request: fields have exactly the types described, and there are no others."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def check_text(cls, body: Any) -> Any:
        """Refuse text that UTF-8 cannot represent, such as half of a surrogate pair."""
        json.dumps(body, ensure_ascii=False, default=str).encode()
        return body


Record = Annotated[Annotated[int, Field(le=LARGEST_ROW)] | str, AfterValidator(_record)]
Records = Annotated[list[Record], Field(min_length=1)]  # an empty list does not mean all records
TERMS: Any = {
    name: (Records if term.kind == Sequence[int | str] else term.kind, Field(None, description=term.about.help))
    for name, term in terms_on_offer().items()
}
TermsSent: Any = create_model(
    "Terms", __base__=Body, __doc__="Terms; those left out come from the run's spec.", **TERMS
)
Clients = Annotated[list[str], Field(min_length=1, max_length=MOST_CLIENTS)]


class Filed(Body):
    """A new request."""

    clients: Clients
    request: str | None = Field(None, description="Your own id; the same again changes nothing.")
    deadline_days: int = Field(DEADLINE_DAYS, ge=0)
    terms: TermsSent = Field(default_factory=TermsSent)


class Decided(Body):
    """A decision on a request."""

    request: str
    decision: Decision
    reason: str = ""
    terms: str = Field("", description="The terms_digest of the request that you saw; an approval needs it.")


class Chosen(Body):
    """A request to execute."""

    request: str


class Compared(Body):
    """Clients to forget, for a comparison of the methods."""

    clients: Clients
    terms: TermsSent = Field(default_factory=TermsSent)


class Problem(BaseModel):
    """The reason why something was refused."""

    error: str


def first_mismatch(errors: Sequence[Any]) -> str:
    """Return a sentence on the first of pydantic's errors, which begins with the field."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
    sentence = f"{where}: {first['msg']}, found {first.get('input')!r:.60}"
    return sentence.encode(errors="backslashreplace").decode()


def terms_in_form(fields: Mapping[str, str]) -> TermsGiven:
    """Return the terms in the fields of a form; empty ones are left out, because the run's spec determines them."""
    given: dict[str, Any] = {name: fields[name] for name in terms_on_offer() if fields.get(name)}
    if "records" in given:
        given["records"] = _records_in(given["records"])
    try:
        terms: TermsGiven = TermsSent.model_validate(given, strict=False).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise InputError(first_mismatch(error.errors())) from error
    return terms


def _records_in(text: str) -> list[str]:
    """Split a list of records at the usual separators; spaces separate row numbers but may be part of an identity."""
    parts = [part.strip() for part in SEPARATORS.split(text) if part.strip()]
    return [word for part in parts for word in (part.split() if part.replace(" ", "").isdecimal() else [part])]
