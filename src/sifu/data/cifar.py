"""CIFAR-10 and CIFAR-100 as published: pickled batches, in a folder or in the official tar.gz.

A pickle is a program, and a stranger's pickle a stranger's program. So this reader knows five names only
and answers each with a record of its own that merely keeps what it is told; numpy's own unpickling code
is never reached, and the arrays are rebuilt here from bytes whose count was checked.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.dataset import Dataset
from sifu.errors import InputError

LARGEST_BATCH = 512 << 20
"""The largest official batch (CIFAR-100's train) has 155 MB."""

IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """Where one of the two sets keeps what."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str


LAYOUTS = {
    "cifar10": Layout(
        archive="cifar-10-python.tar.gz",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        meta="batches.meta",
        labels="labels",
        names="label_names",
    ),
    "cifar100": Layout(
        archive="cifar-100-python.tar.gz",
        folder="cifar-100-python",
        train=("train",),
        test=("test",),
        meta="meta",
        labels="fine_labels",
        names="fine_label_names",
    ),
}


def find(name: str, folder: Path) -> Path | None:
    """The folder with the batches or the archive, whichever `folder` is or holds; None when neither."""
    layout = LAYOUTS[name]
    for place in (folder, folder / layout.folder):
        if all((place / file).is_file() for file in (*layout.train, *layout.test, layout.meta)):
            return place
    archive = folder / layout.archive
    return archive if archive.is_file() else None


def read_cifar(name: str, place: Path) -> Dataset:
    """CIFAR-10 or CIFAR-100 (fine labels) from a folder of batches or from the official archive."""
    layout = LAYOUTS[name]
    wanted = (*layout.train, *layout.test, layout.meta)
    batches = _from_folder(place, wanted) if place.is_dir() else _from_archive(place, layout, wanted)
    records = {file: restricted_load(content, f"{place}: {file}") for file, content in batches.items()}
    names = records[layout.meta].get(layout.names)
    if not isinstance(names, list) or not names or not all(isinstance(label, str) for label in names):
        raise InputError(f"{place}: {layout.meta} has no list of strings {layout.names!r}; get it again")
    splits = []
    for files in (layout.train, layout.test):
        parts = [_images_and_labels(records[file], layout.labels, f"{place}: {file}") for file in files]
        splits.append(np.concatenate([part[0] for part in parts]))
        splits.append(np.concatenate([part[1] for part in parts]))
    x_train, y_train, x_test, y_test = splits
    return Dataset(name, x_train, y_train, x_test, y_test, tuple(names))


def _from_folder(folder: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    contents = {}
    for file in wanted:
        path = folder / file
        try:
            _check_size(path.stat().st_size, str(path))
            contents[file] = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error}); extract the official archive again") from error
    return contents


def _from_archive(archive: Path, layout: Layout, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """The wanted members, read in memory: nothing of an archive is ever written to the disk."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                folder, _, file = member.name.removeprefix("./").partition("/")
                if folder != layout.folder or file not in wanted or not member.isfile():
                    continue
                _check_size(member.size, f"{archive}: {member.name}")
                stream = tar.extractfile(member)
                contents[file] = b"" if stream is None else stream.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"{archive} cannot be read ({error}); it is damaged or cut off: get it again") from error
    missing = [file for file in wanted if file not in contents]
    if missing:
        raise InputError(f"{archive} has no {layout.folder}/{missing[0]}; it is not the official archive")
    return contents


def _check_size(size: int, what: str) -> None:
    if size > LARGEST_BATCH:
        raise InputError(f"{what} has {size} bytes; an official batch has at most {LARGEST_BATCH}")


def _images_and_labels(
    record: dict[str, Any], labels_key: str, what: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = record.get("data"), record.get(labels_key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != IMAGE_BYTES:
        shape = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise InputError(f"{what} has data of shape {shape}, not (N, {IMAGE_BYTES}); get it again")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise InputError(f"{what} has no list of whole numbers {labels_key!r}; get it again")
    if len(labels) != len(images):
        raise InputError(f"{what} has {len(images)} images but {len(labels)} labels; get it again")
    if any(not 0 <= label < 100 for label in labels):
        raise InputError(f"{what} has labels from {min(labels)} to {max(labels)}; 0 to 99 at most were expected")
    pixels = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), np.array(labels, dtype=np.int64)


def restricted_load(content: bytes, what: str) -> dict[str, Any]:
    """The dictionary in a pickle of plain values and byte arrays; any other pickle is an InputError."""
    try:
        _check_memo(content, what)
        loaded = _RestrictedUnpickler(content, what).load()
    except InputError:
        raise
    except Exception as error:
        # Damaged pickles raise nearly anything: UnpicklingError, EOFError, KeyError, OverflowError...
        kind = type(error).__name__
        raise InputError(f"{what} is no readable batch ({kind}: {error}); get it again") from error
    if not isinstance(loaded, dict):
        raise InputError(f"{what} holds a {type(loaded).__name__}, not a dictionary; get it again")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): _plain(value, what)
        for key, value in loaded.items()
    }


def _check_memo(content: bytes, what: str) -> None:
    """Refuse slots beyond the file's own length: the unpickler fills its table up to the largest one."""
    import pickletools

    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(content):
            raise InputError(f"{what} keeps a value in slot {argument}, which no official batch needs; get it again")


def _plain(value: Any, what: str) -> Any:
    """A value of a batch with records turned into arrays and Python 2 text into str."""
    if isinstance(value, list):
        return [item.decode("latin1") if isinstance(item, bytes) else item for item in value]
    to_array = getattr(value, "to_array", None)
    return value if to_array is None else to_array(what)


class _RestrictedUnpickler(pickle.Unpickler):
    """Answers the names of an array of bytes with harmless records and refuses every other name."""

    def __init__(self, content: bytes, what: str) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._what = what
        self._allowed = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise InputError(
                f"{self._what} asks for {module}.{name}, which no official batch needs: it was not run; do not "
                "trust this file and get it again"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise InputError(f"{self._what} refers to an object outside itself ({pid!r}); get it again")


def _stand_ins() -> dict[tuple[str, str], Callable[..., Any]]:
    """Fresh records for every file, because a pickle may write attributes on whatever it was handed."""

    class DType:
        def __init__(self, code: Any, *_flags: Any) -> None:
            self.code = code.decode("latin1") if isinstance(code, bytes) else code

        def __setstate__(self, _state: Any) -> None:
            """Byte order and the like say nothing about bytes."""

    class Array:
        state: Any = None

        def __setstate__(self, state: Any) -> None:
            self.state = state

        def to_array(self, what: str) -> NDArray[np.uint8]:
            match self.state:
                case (_, (int(rows), int(columns)), DType(code="u1"), order, bytes() | str() as content):
                    raw = content.encode("latin1") if isinstance(content, str) else content
                    if rows >= 0 and columns >= 0 and len(raw) == rows * columns:
                        shape = (columns, rows) if order else (rows, columns)
                        array = np.frombuffer(raw, dtype=np.uint8).reshape(shape)
                        return array.T if order else array
            raise InputError(f"{what} holds an array that is not two axes of bytes with all its content")

    def reconstruct(*_arguments: Any) -> Array:
        return Array()

    def encode(text: Any, encoding: Any = "latin1") -> bytes:
        # Python 3 writes bytes this way in the old protocols.
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise InputError(f"a batch encodes {type(text).__name__} as {encoding!r}; only text as latin1 is read")
        return text.encode("latin1")

    return {
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): DType,
        ("_codecs", "encode"): encode,
    }
