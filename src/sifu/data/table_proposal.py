"""`sifu init --from`: a spec for a table, proposed from its header and the types of its columns.

Constants are never fitted to the rows. Where a column's name is familiar, a published range is proposed; everything
else that the operator must know from elsewhere is marked CHECK.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.data.table import CSV_ENDINGS, ENDINGS, first_row, read_columns, table_files
from sifu.data.table_coding import TableFile, is_missing, looks_like_a_date, looks_like_a_number, quoted, whole_number
from sifu.errors import InputError

FEW_WORDS = 20
"""A column with more different words than this is not proposed as a category."""
MOST_CODES = 8
MOST_NAMED = 12
"""Columns that a sentence names."""
PUBLISHED = {
    r"age(_?years)?": (50, 20),
    r"trestbps|sbp|systolic.*|ap_?hi|restingbp|blood_?pressure": (130, 20),
    r"dbp|diastolic.*|ap_?lo": (80, 10),
    r"chol(esterol)?|total_chol.*": (200, 50),
    r"thalach|max_?hr|heart_?rate|pulse": (140, 25),
    r"bmi|body_mass_index": (27, 6),
    r"glucose|blood_?sugar": (100, 30),
    r"weight(_kg)?": (75, 15),
    r"height(_cm)?": (170, 10),
    r"oldpeak": (1, 1),
    r"temperature|temp_c": (37, 1),
    r"creatinine": (1, 0.5),
    r"ha?emoglobin|hb": (14, 2),
}
"""Middle and spread of familiar measurements in adults, as textbooks have them; no file was looked at."""
CLIENTS = re.compile(r"client|hospital|site|cent(re|er)|institution|bank|branch|clinic|facility|provider|device", re.I)
IDENTITIES = re.compile(r"id|(.*[_ ])?(id|identifier|mrn)|patient([_ ]?(no|number))?|subject|record", re.I)
LABELS = re.compile(r"label|target|y|class|outcome|diagnosis|disease|num|species|died|default|churn", re.I)


@dataclass(frozen=True)
class Proposal:
    """The text of a spec, and what the operator still has to check, a sentence each."""

    text: str
    checks: tuple[str, ...]


def propose_spec(
    path: Path, *, label: str = "", client: str = "", identity: str = "", header: Sequence[str] = ()
) -> Proposal:
    """A spec for the table at `path`; columns that are not named are guessed by their names."""
    first = path
    if path.is_dir():
        files = table_files(path)
        if not files:
            raise InputError(f"{path} has no file that ends in {', '.join(ENDINGS)}")
        first = files[0]
    if not header and first.suffix.lower() in CSV_ENDINGS and first.is_file():
        fields = first_row(first)
        if any(looks_like_a_number(field.strip()) or (field.strip() and is_missing(field)) for field in fields):
            raise InputError(
                f"the first line of {first} holds values, not names of columns: name all {len(fields)} columns with "
                "--columns A,B,..."
            )
    tables = [read_columns(file, header) for file in ([first] if first is path else files)]
    return _proposal(path, _Roles.guess(tables, label, client, identity, path.is_dir()), header)


@dataclass(frozen=True)
class _Roles:
    """Which column is what."""

    label: str
    client: str
    identity: str
    classes: list[str]
    numbers: list[str]
    categories: dict[str, list[str]]
    dates: list[str]
    wordy: list[str]
    gaps: list[str]
    flags: list[str]
    """Numbers that are 0 or 1, which need no constants."""
    unlike: list[str]
    """Free texts of which no two rows have the same, where no column is the identity yet."""

    @classmethod
    def guess(cls, tables: Sequence[TableFile], label: str, client: str, identity: str, folder: bool) -> _Roles:
        columns = {name: [value for table in tables for value in table.columns[name]] for name in tables[0].columns}
        for name in filter(None, (label, client, identity)):
            if name not in columns:
                raise InputError(f"{tables[0].name} has no column {name!r}; it has {', '.join(columns)[:400]}")
        if not client and not folder:
            client = next((name for name in columns if CLIENTS.fullmatch(name) and name != label), "")
            if not client:
                raise InputError(
                    f"which column of {tables[0].name} says whose a row is? Name it with --client; it has "
                    f"{', '.join(columns)[:400]}"
                )
        identity = identity or next((name for name in columns if IDENTITIES.fullmatch(name) and name != client), "")
        rest = [name for name in columns if name not in (client, identity)]
        label = label or next((name for name in rest if LABELS.fullmatch(name)), rest[-1])
        commas = tables[0].decimal_commas
        numbers, categories, dates, wordy, gaps = [], dict[str, list[str]](), [], [], []
        flags = [name for name in rest if set(_words(columns[name])) <= {"0", "1"}]
        for name in (name for name in rest if name != label):
            words = _words(columns[name])
            if any(is_missing(value) for value in columns[name]):
                gaps.append(name)
            if _published(name) is None and _are_codes(words):
                categories[name] = words
            elif all(looks_like_a_number(word, commas) for word in words):
                numbers.append(name)
            elif words and all(looks_like_a_date(word) for word in words):
                dates.append(name)
            elif len(words) <= FEW_WORDS:
                categories[name] = words
            else:
                wordy.append(name)
        classes = _words(columns[label])
        if len(classes) > FEW_WORDS or any("." in word for word in classes):
            classes = []
        unlike = [name for name in wordy if not identity and len(_words(columns[name])) == len(columns[name])]
        return cls(label, client, identity, classes, numbers, categories, dates, wordy, gaps, flags, unlike)


def _proposal(path: Path, roles: _Roles, header: Sequence[str]) -> Proposal:
    scales = {name: scale for name in roles.numbers if (scale := _published(name)) is not None}
    unscaled = [name for name in roles.numbers if name not in scales]
    ignored = [*roles.dates, *roles.wordy]
    checks = [f"label: column {roles.label!r}" + (f", classes {', '.join(roles.classes)}" if roles.classes else "")]
    checks.append(f"client: {f'column {roles.client!r}' if roles.client else 'one file per client'}")
    if roles.identity:
        checks.append(f"identity: column {roles.identity!r}; it is never a feature")
    for name in roles.unlike:
        checks.append(f"identity: {name!r} has another text in every row; if it identifies a row, say --id {name!r}")
    if scales:
        checks.append(f"scale: published ranges by the names of {', '.join(scales)}")
    unscaled = [name for name in unscaled if name not in roles.flags]
    if unscaled:
        checks.append(
            f"scale: no published range is known for {_some(unscaled)}; add COLUMN=MIDDLE,SPREAD from a source "
            "other than the clients' data, or leave them out with ignore"
        )
    if roles.categories:
        checks.append(f"categories: list every word that {_some(tuple(roles.categories))} can have, seen or not")
    if roles.gaps:
        checks.append(f"missing: values are missing in {_some(roles.gaps)}; the fillers are constants of yours")
    if ignored:
        checks.append(f"ignored: {_some(ignored)} (dates or free text)")
    filled = [f"{quoted(name)}={scales.get(name, (0, 1))[0]:g}" for name in roles.gaps if name in roles.numbers]
    filled += [f"{quoted(name)}=" for name in roles.gaps if name in roles.categories]
    constants = [f"{quoted(name)}={middle:g},{spread:g}" for name, (middle, spread) in scales.items()]
    words = [f"{quoted(name)}={_word_list(listed)}" for name, listed in roles.categories.items()]
    regression = ["", "[ridge]", 'task = "regression"', "shift = 0.0  # CHECK: middle of the target"]
    regression += ["scale = 1.0  # CHECK: spread of the target"]
    lines = [
        f"# A spec for {path.name}, proposed from its header and types. Lines marked CHECK are yours to confirm:",
        "# constants and lists must be known without looking at the clients' rows, or a client leaves a trace in them.",
        '# When they are, set preprocessing = "fixed"; until then no certificate is exact.',
        "",
        "[data]",
        'name = "table"',
        'partition = "given"',
        f"file = {_toml(str(path))}",
        f"label = {_toml(roles.label)}  # CHECK",
        f"client = {_toml(roles.client)}  # CHECK",
        *([f"id = {_toml(roles.identity)}  # CHECK"] if roles.identity else []),
        *([f"header = {_toml(', '.join(map(quoted, header)))}"] if header else []),
        *([f"classes = {_toml(_word_list(roles.classes))}  # CHECK, in their order"] if roles.classes else []),
        f"scale = {_lines(constants)}  # CHECK",
        f"categories = {_lines(words)}  # CHECK",
        f"missing = {_lines(filled)}  # CHECK",
        f"ignore = {_toml(', '.join(map(quoted, ignored)))}  # CHECK",
        "held_out = 0.2  # share of each client's rows that is kept for testing",
        'preprocessing = "unknown"  # CHECK: "fixed" once everything above is known from elsewhere',
        "",
        "[model]",
        'kind = "ridge"  # in closed form: a client is forgotten exactly, in no round',
        *(regression if not roles.classes else []),
    ]  # fmt: skip
    return Proposal("\n".join(lines) + "\n", tuple(checks))


def _some(names: Sequence[str]) -> str:
    """Names in a sentence, of many the first few."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _published(name: str) -> tuple[float, float] | None:
    plain = re.sub(r"\([^)]*\)|[%?]", "", name).strip()  # without a unit
    return next((scale for pattern, scale in PUBLISHED.items() if re.fullmatch(pattern, plain, re.I)), None)


def _words(values: Sequence[Any]) -> list[str]:
    """The different texts that are not missing, numbers by size."""
    words = {whole_number(value) for value in values if not is_missing(value)}
    return sorted(words, key=lambda word: (float(word) if looks_like_a_number(word) else float("inf"), word))


def _are_codes(words: Sequence[str]) -> bool:
    """Whether a column of numbers looks like a code: a few small whole numbers, and more than 0 and 1."""
    return 2 < len(words) <= MOST_CODES and all(word.isdecimal() and int(word) < 100 for word in words)


def _word_list(words: Sequence[str]) -> str:
    return ",".join(map(quoted, words))


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lines(entries: Sequence[str]) -> str:
    """A text of one entry per line, as TOML writes it."""
    if not entries:
        return '""'
    return '"""\n' + "".join(f"{_toml(entry)[1:-1]}\n" for entry in entries) + '"""'
