"""Proposal of a spec for a table (`sifu init --from`), from its header and the types of its columns.

Constants are never fitted to the rows. Entries that the operator
must confirm from another source are marked CHECK.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sifu.data.table import CSV_ENDINGS, ENDINGS, first_row, read_columns, separator_of, some, table_files
from sifu.data.table_coding import TableCoding, TableFile
from sifu.data.table_keys import MOST_WORDS, join_names, quoted
from sifu.data.table_values import is_missing, looks_like_a_date, looks_like_a_number, whole_number
from sifu.errors import InputError, SifuWarning

FEW_WORDS = 20
"""Largest number of distinct values in a column that is proposed as a category."""
MOST_CODES = 8
MOSTLY = 0.9
"""Smallest fraction of numbers for a column to count as numeric; its other values are proposed as missing."""
SEVERAL_WORDS = 4
"""Smallest number of words for a value to count as a sentence."""
MANY_ROWS = 20
"""Number of rows above which a column with a different whole number in every row is taken as an identity."""
CLIENTS = re.compile(r"client|hospital|site|cent(re|er)|institution|bank|branch|clinic|facility|provider|device", re.I)
IDENTITIES = re.compile(r"id|(.*[_ ])?(id|identifier|mrn)|patient([_ ]?(no|number))?|subject|record", re.I)
LABELS = re.compile(r"label|target|y|class|outcome|diagnosis|disease|num|species|died|default|churn", re.I)


@dataclass(frozen=True)
class Proposal:
    """Text of a spec, and one remark for each item that the operator still has to check."""

    text: str
    checks: tuple[str, ...]


def propose_spec(
    path: Path,
    *,
    label: str = "",
    client: str = "",
    identity: str = "",
    header: Sequence[str] = (),
    text: str = "",
    model: str = "",
) -> Proposal:
    """Propose a spec for the table at `path`.

    Args:
        path: File, or folder with one file per client.
        label: Column of the label. If empty, it is guessed by name.
        client: Column of the client. If empty, it is guessed by name.
        identity: Column that identifies a row. If empty, it is guessed by name.
        header: Names of the columns of a file without a header line.
        text: Free-text column to predict from; all other columns are then left out.
        model: Folder, or name on the hub, of the language model that reads this column.
    """
    if bool(text) != bool(model):
        raise InputError(
            "--text COLUMN and --text-model FOLDER belong together: the column of texts, and the Hugging Face model "
            f"that reads them; found {'--text' if text else '--text-model'} alone"
        )
    files = table_files(path) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} has no file that ends in {', '.join(ENDINGS)}")
    skipped = [file.name for file in sorted(path.iterdir()) if file not in files] if path.is_dir() else []
    if skipped:
        warnings.warn(
            f"{path} also holds {some(skipped)}: only visible files that end in {', '.join(ENDINGS)} are read",
            SifuWarning,
            stacklevel=2,
        )
    first = files[0]
    if not header and first.suffix.lower() in CSV_ENDINGS and first.is_file():
        fields = first_row(first)
        if any(looks_like_a_number(field.strip()) or (field.strip() and is_missing(field)) for field in fields):
            raise InputError(
                f"the first line of {first} holds values, not names of columns: name all {len(fields)} columns with "
                "--columns A,B,..."
            )
    separator = separator_of(first) if first.suffix.lower() in CSV_ENDINGS and first.is_file() else ","
    coding = TableCoding(label, header=tuple(header), separator=separator)
    tables = [read_columns(file, coding) for file in files]
    return _proposal(path, _Roles.guess(tables, label, client, identity, path.is_dir(), text), coding, model)


@dataclass(frozen=True)
class _Column:
    """Content of a column: the count of each distinct value, without missing values, and the number of all rows."""

    words: Counter[str]
    non_numeric: Counter[str]
    """Count of each value that is not a number."""
    rows: int
    is_unique: bool
    """True if no value is missing and no value occurs twice within a file."""

    @classmethod
    def read(cls, parts: Sequence[Sequence[Any]], commas: bool) -> _Column:
        """Return the column made of `parts`, one per file; each distinct value is examined once."""
        counts = [Counter("" if value is None else str(value) for value in part) for part in parts]
        words = Counter[str]()
        for value, count in sum(counts[1:], counts[0]).items():
            if not is_missing(value):
                words[whole_number(value)] += count
        non_numeric = Counter({word: count for word, count in words.items() if not looks_like_a_number(word, commas)})
        rows = sum(map(len, parts))
        is_unique = words.total() == rows and all(
            len(count) == len(part) for count, part in zip(counts, parts, strict=True)
        )
        return cls(words, non_numeric, rows, is_unique)

    @property
    def numbers(self) -> int:
        """Number of rows that hold a number."""
        return self.words.total() - self.non_numeric.total()

    @property
    def sorted_words(self) -> list[str]:
        """Distinct values: numbers in ascending order, then other strings in alphabetical order."""
        return sorted(self.words, key=lambda word: (float(word) if looks_like_a_number(word) else math.inf, word))

    @property
    def are_codes(self) -> bool:
        """True if the values look like codes: few, but at least three, distinct small integers."""
        return 2 < len(self.words) <= MOST_CODES and all(word.isdecimal() and int(word) < 100 for word in self.words)

    @property
    def are_sentences(self) -> bool:
        """True if most distinct values have at least `SEVERAL_WORDS` words."""
        return 2 * sum(len(word.split()) >= SEVERAL_WORDS for word in self.non_numeric) > len(self.words)

    @property
    def is_mostly_numbers(self) -> bool:
        """True if the column has many distinct numbers and few other values."""
        different = len(self.words) - len(self.non_numeric)
        return different > FEW_WORDS and self.numbers >= MOSTLY * self.words.total()

    @property
    def is_identity(self) -> bool:
        """True if every row has a different whole number and there are more than `MANY_ROWS` rows."""
        return self.is_unique and self.rows > MANY_ROWS and all(map(str.isdecimal, self.words))


@dataclass
class _Roles:
    """Role of each column."""

    columns: dict[str, _Column]
    label: str
    client: str
    identity: str
    numbers: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)
    free_text_columns: list[str] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    """Further columns with a different whole number in every row."""
    text: str = ""
    """Free-text column that is the only feature, or an empty string if there is none."""

    @classmethod
    def guess(
        cls, tables: Sequence[TableFile], label: str, client: str, identity: str, folder: bool, text: str
    ) -> _Roles:
        names = list(tables[0].columns)
        for table in tables[1:]:
            if set(names) != set(table.columns):
                odd = ", ".join(sorted(set(names) ^ set(table.columns)))[:400]
                raise InputError(f"{tables[0].name} and {table.name} have different columns: {odd}")
        for name in filter(None, (label, client, identity, text)):
            if name not in names:
                raise InputError(f"{tables[0].name} has no column {name!r}; it has {', '.join(names)[:400]}")
        if not client and not folder:
            client = next((name for name in names if CLIENTS.fullmatch(name) and name != label), "")
            if not client:
                raise InputError(
                    f"which column of {tables[0].name} names the client (hospital, site) of each row? Give it with "
                    f"--client-column; it has {', '.join(names)[:400]}"
                )
        commas = tables[0].decimal_commas
        columns = {name: _Column.read([table.columns[name] for table in tables], commas) for name in names}
        named = identity or next((name for name in names if IDENTITIES.fullmatch(name) and name != client), "")
        rest = [name for name in names if name not in (client, named, text)]
        label = label or next((name for name in rest if LABELS.fullmatch(name)), rest[-1])
        alike = [name for name in rest if name != label and columns[name].is_identity]
        roles = cls(columns, label, client, named or next(iter(alike), ""), text=text)
        if text:
            return roles
        roles.identities = [name for name in alike if name != roles.identity]
        for name in rest:
            if name not in (label, roles.identity, *roles.identities):
                roles._kind_of(name).append(name)
        return roles

    def _kind_of(self, name: str) -> list[str]:
        """Return the list for the column's kind: numbers, categories, dates, or too many values for categories."""
        column = self.columns[name]
        if column.are_codes:
            return self.categories
        if not column.non_numeric:
            return self.numbers
        if all(map(looks_like_a_date, column.words)):
            return self.dates
        if column.is_mostly_numbers:
            return self.numbers
        return self.categories if len(column.words) <= FEW_WORDS else self.free_text_columns

    @property
    def classes(self) -> list[str]:
        """Classes of the label, or an empty list if the label is a number to predict."""
        column = self.columns[self.label]
        numbers = column.words.keys() - column.non_numeric.keys()
        few = len(column.words) <= (FEW_WORDS if numbers else MOST_WORDS) and not any("." in word for word in numbers)
        return column.sorted_words if few else []

    @property
    def gaps(self) -> list[str]:
        """Features with missing values, and numeric features with non-numeric values."""
        return [
            name
            for name in (*self.numbers, *self.categories)
            if self.columns[name].words.total() < self.columns[name].rows or self.non_numeric_values(name)
        ]

    def non_numeric_values(self, name: str) -> Counter[str]:
        """Return the counts of non-numeric values in a numeric column; for other columns, the result is empty."""
        return self.columns[name].non_numeric if name in self.numbers else Counter()

    def checks(self) -> Iterator[str]:
        """Yield one remark for each item that the operator has to check."""
        yield f"label: column {self.label!r}" + (f", classes {', '.join(self.classes)}" if self.classes else "")
        yield f"client: {f'column {self.client!r}' if self.client else 'one file per client'}"
        if self.identity:
            yield f"identity: column {self.identity!r}; it is never a feature"
        if self.text:
            yield f"text: column {self.text!r}, the only feature; the other columns are left out"
            yield "model: no client's data may have shaped its weights"
        for name in self.identities:
            yield f"ignored: {name!r} has a different whole number in every row, like an identity"
        for name in self.free_text_columns:
            if self.columns[name].are_sentences:
                yield f"text: {name!r} holds sentences; to predict from them, add --text {name!r} --text-model FOLDER"
            elif not self.identity and self.columns[name].is_unique:
                yield f"identity: {name!r} differs in every row; if it identifies a row, add --id-column {name!r}"
        for name in self.numbers:
            if non_numeric := self.non_numeric_values(name):
                texts = [f"{text[:40]!r} ({count})" for text, count in non_numeric.most_common()]
                yield (
                    f"missing: {name!r}: {self.columns[name].numbers} of {self.columns[name].rows} are numbers; the "
                    f"others: {some(texts)}; they are proposed as missing"
                )
        unscaled = [name for name in self.numbers if not set(self.columns[name].words) <= {"0", "1"}]
        if unscaled:
            yield (
                f"scale: add COLUMN=MIDDLE,SPREAD for {some(unscaled)} from a source other than the clients' data, or "
                "leave them out with ignore"
            )
        if self.categories:
            yield f"categories: list every value that {some(self.categories)} can take, seen or not"
        if self.gaps:
            yield f"missing: values are missing in {some(self.gaps)}; the fillers are constants of yours"
        if self.dates or self.free_text_columns:
            yield f"ignored: {some([*self.dates, *self.free_text_columns])} (dates or free text)"


def _proposal(path: Path, roles: _Roles, coding: TableCoding, model: str) -> Proposal:
    header = coding.header
    filled = []
    for name in roles.gaps:
        filler = "0" if name in roles.numbers else ""
        filled.append("|".join((f"{quoted(name)}={filler}", *map(quoted, sorted(roles.non_numeric_values(name))))))
    words = [f"{quoted(name)}={_word_list(roles.columns[name].sorted_words)}" for name in roles.categories]
    regression = [
        "",
        "[ridge]",
        'task = "regression"',
        "shift = 0.0  # CHECK: middle of the target",
        "scale = 1.0  # CHECK: spread of the target",
    ]
    features = [
        'scale = ""  # CHECK: COLUMN=MIDDLE,SPREAD for every column of numbers, from a published source',
        f"categories = {_lines(words)}  # CHECK",
        f"missing = {_lines(filled)}  # CHECK",
        f"ignore = {_toml(join_names([*roles.identities, *roles.dates, *roles.free_text_columns]))}  # CHECK",
    ]
    network = [
        "",
        "[features]",
        'kind = "transformers"',
        f"model = {_toml(model)}  # CHECK: no client's data shaped it",
        "size = 128  # tokens of a text that are read",
    ]
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
        *([f"header = {_toml(join_names(header))}"] if header else []),
        *([f"separator = {_toml(coding.separator)}"] if coding.separator != "," else []),
        *([f"classes = {_toml(_word_list(roles.classes))}  # CHECK, in their order"] if roles.classes else []),
        *(features if not roles.text else [f"text = {_toml(roles.text)}  # the only feature"]),
        "held_out = 0.2  # share of each client's rows that is kept for testing",
        'preprocessing = "unknown"  # CHECK: "fixed" once everything above is known from elsewhere',
        "",
        "[model]",
        'kind = "ridge"  # in closed form: a client is forgotten exactly, without a round of training',
        *(network if roles.text else []),
        *(regression if not roles.classes else []),
    ]  # fmt: skip
    return Proposal("\n".join(lines) + "\n", tuple(roles.checks()))


def _word_list(words: Sequence[str]) -> str:
    return ",".join(map(quoted, words))


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lines(entries: Sequence[str]) -> str:
    """Return entries as a multi-line TOML string, one entry per line."""
    if not entries:
        return '""'
    return '"""\n' + "".join(f"{_toml(entry)[1:-1]}\n" for entry in entries) + '"""'
