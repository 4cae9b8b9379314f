"""Metrics of a run: one line for each evaluation in CSV, JSON lines, or events for TensorBoard."""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from sifu.errors import InputError
from sifu.run.run_view import ACTIVE
from sifu.store.reader import RunReader


@dataclass(frozen=True)
class MetricRow:
    """An evaluation on the active clients' training data.

    `step` only ever grows, also over rollbacks; `round` counts within the current work, which is the first training
    where `request` is empty, and otherwise the retraining for that request.
    """

    run: str
    step: int
    time: str
    request: str
    branch: int
    round: int
    accuracy: float
    loss: float
    samples: int


COLUMNS = tuple(MetricRow.__dataclass_fields__)
VALUES = ("accuracy", "loss")
"""What is drawn as a curve."""


def rows_after(reader: RunReader, step: int) -> list[MetricRow]:
    """The evaluations of later steps, in their order."""
    run = reader.value("run")
    rows = reader.query(
        "SELECT n.node, n.request_order, n.branch, n.position, e.accuracy, e.loss, e.samples "
        "FROM evaluations e JOIN nodes n ON n.node = e.node WHERE e.node > ? AND e.subset = ? ORDER BY n.node",
        (step, ACTIVE),
    )
    if not rows:
        return []
    requests = {row.request_order: row.request for row in reader.requests() if row.request_order is not None}
    times = _times_after(reader, step)
    return [
        MetricRow(
            run, int(node), times.get(int(node), ""), requests.get(order, ""), int(branch), int(position),
            float(accuracy), float(loss), int(samples),
        )
        for node, order, branch, position, accuracy, loss, samples in rows
    ]  # fmt: skip


def _times_after(reader: RunReader, step: int) -> dict[int, str]:
    """When each later step was recorded; the latest events are read first, and none that is older than needed."""
    times: dict[int, str] = {}
    for time, sealed in reader.connection.execute(
        "SELECT time, content FROM events JOIN sealed USING (seq) ORDER BY seq DESC"
    ):
        recorded = json.loads(sealed).get("evaluations")
        nodes = [int(row["node"]) for row in recorded or () if row.get("subset") == ACTIVE]
        times |= dict.fromkeys(nodes, str(time))
        if nodes and min(nodes) <= step:
            break
    return times


BEFORE_THE_FIRST = -1


class MetricsFile(ABC):
    """A file that rows are added to, each once."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        content = path.read_bytes() if path.exists() else b""
        whole = self.whole(content)
        self.last_step = self.last(content[:whole]) if whole else BEFORE_THE_FIRST
        if whole < len(content):
            os.truncate(path, whole)

    @abstractmethod
    def whole(self, content: bytes) -> int:
        """How many bytes of a file are whole entries."""

    @abstractmethod
    def last(self, content: bytes) -> int:
        """The step of the last entry."""

    @abstractmethod
    def entries(self, rows: Sequence[MetricRow], beginning: bool) -> bytes:
        """Rows as they are written; `beginning` of a file."""

    def append(self, rows: Sequence[MetricRow]) -> None:
        """Add rows that follow what is there."""
        if not rows:
            return
        beginning = not self.path.exists() or self.path.stat().st_size == 0
        with self.path.open("ab") as stream:
            stream.write(self.entries(rows, beginning))
        self.last_step = rows[-1].step

    def refuse(self, what: str) -> InputError:
        """A file that is not of this run or not of this kind."""
        return InputError(f"{self.path} {what}: name another file for the metrics of this run")


class CsvFile(MetricsFile):
    """One line an evaluation, the names of the columns in the first."""

    def whole(self, content: bytes) -> int:
        return content.rfind(b"\n") + 1

    def last(self, content: bytes) -> int:
        rows = list(csv.reader(io.StringIO(content.decode("utf-8", "replace"))))
        if not rows or tuple(rows[0]) != COLUMNS:
            raise self.refuse("is not a file of metrics")
        if len(rows) == 1:
            return BEFORE_THE_FIRST
        row = dict(zip(COLUMNS, rows[-1], strict=False))
        if row.get("run") != self.run or not row.get("step", "").isdigit():
            raise self.refuse("belongs to another run")
        return int(row["step"])

    def entries(self, rows: Sequence[MetricRow], beginning: bool) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            ([COLUMNS] if beginning else []) + [astuple(row) for row in rows]
        )
        return text.getvalue().encode()


class JsonLinesFile(MetricsFile):
    """One JSON object a line."""

    def whole(self, content: bytes) -> int:
        return content.rfind(b"\n") + 1

    def last(self, content: bytes) -> int:
        try:
            row = json.loads(content.splitlines()[-1])
            step, run = int(row["step"]), row["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise self.refuse("is not a file of metrics") from error
        if run != self.run:
            raise self.refuse("belongs to another run")
        return step

    def entries(self, rows: Sequence[MetricRow], beginning: bool) -> bytes:
        return b"".join(json.dumps(dict(zip(COLUMNS, astuple(row), strict=True))).encode() + b"\n" for row in rows)


class TensorBoardFile(MetricsFile):
    """Events as TensorBoard reads them: TFRecord frames, each a protocol buffer with one scalar per value.

    A frame is its length, a checksum of that, the bytes, and a checksum of those. The run's id is in the file's first
    event, where TensorBoard expects the version.
    """

    def whole(self, content: bytes) -> int:
        return max((end for end, _ in _frames(content)), default=0)

    def last(self, content: bytes) -> int:
        events = [event for _, event in _frames(content)]
        if events[0] != self._first():
            raise self.refuse("belongs to another run, or is not a file of metrics")
        return max((_step(event) for event in events[1:]), default=BEFORE_THE_FIRST)

    def entries(self, rows: Sequence[MetricRow], beginning: bool) -> bytes:
        frames = [_frame(self._first())] if beginning else []
        for row in rows:
            when = datetime.datetime.fromisoformat(row.time).timestamp() if row.time else 0.0
            summary = b"".join(
                _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", getattr(row, name))) for name in VALUES
            )
            frames.append(_frame(b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(row.step) + _field(5, summary)))
        return b"".join(frames)

    def _first(self) -> bytes:
        return b"\x09" + struct.pack("<d", 0.0) + _field(3, b"brain.Event:2") + _field(4, self.run.encode())


def _frame(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", _masked(length)) + content + struct.pack("<I", _masked(content))


def _frames(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Whole frames: where each ends, and what it holds."""
    at = 0
    while at + 16 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length + 4
        if length > len(content) or end > len(content):
            return
        event = content[at + 12 : at + 12 + length]
        if struct.unpack_from("<I", content, end - 4)[0] != _masked(event):
            return
        yield end, event
        at = end


def _step(event: bytes) -> int:
    """Field 2 of an event, which follows the eight bytes of its time."""
    step, shift, at = 0, 0, 10
    while at < len(event):
        step |= (event[at] & 0x7F) << shift
        if event[at] < 0x80:
            break
        shift, at = shift + 7, at + 1
    return step


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """
    >>> _varint(300).hex()
    'ac02'
    """
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


def crc32c(content: bytes) -> int:
    """The checksum of RFC 3720.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(content: bytes) -> int:
    """As TFRecord stores it, so that a checksum of checksums means something."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
