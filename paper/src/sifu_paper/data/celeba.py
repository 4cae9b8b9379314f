"""CelebA as published: aligned faces in a zip or a folder, and three text files next to them.

Faces are resized from 178x218 to 64x64 (bilinear, no crop), and the label is the attribute Smiling. The person of each
face is kept, because each person belongs to a single client of this set.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sifu import InputError
from sifu.data import Dataset
from sifu.theory.arrays import Array

SIDE = 64
ATTRIBUTE = "Smiling"
CLASSES = ("not_smiling", "smiling")
ARCHIVE = "img_align_celeba.zip"
IMAGES = "img_align_celeba"
ATTRIBUTES = "list_attr_celeba.txt"
IDENTITIES = "identity_CelebA.txt"
PARTITIONS = "list_eval_partition.txt"
FILES = (ARCHIVE, ATTRIBUTES, IDENTITIES, PARTITIONS)

LARGEST_TEXT = 64 << 20
LARGEST_JPEG = 4 << 20
LARGEST_SIDE = 4096
MOST_IMAGES = 300_000
"""Limit on the number of images; the full set has 202,599 (2.5 GB at 64x64 as bytes) and 27 MB of text."""

PARTITION_NUMBERS = (0, 2)
"""Training and test parts of the official partition; 1 is its validation part and is not used."""


def find(folder: Path) -> Path | None:
    """Return `folder` if it contains the three text files and the images (zip or folder), else None."""
    texts = all((folder / file).is_file() for file in (ATTRIBUTES, IDENTITIES, PARTITIONS))
    images = (folder / ARCHIVE).is_file() or (folder / IMAGES).is_dir()
    return folder if texts and images else None


def read_celeba(folder: Path) -> Dataset:
    """Read training and test faces, sorted by person, then by image; the clients are the people."""
    smiling, identity = _read_attribute(folder / ATTRIBUTES), _read_numbers(folder / IDENTITIES)
    partition = _read_numbers(folder / PARTITIONS)
    for table, file in ((smiling, ATTRIBUTES), (identity, IDENTITIES)):
        used = [name for name, part in partition.items() if part in PARTITION_NUMBERS]
        missing = [name for name in used if name not in table]
        if missing:
            raise InputError(
                f"{PARTITIONS} lists {missing[0]} and {len(missing) - 1} more images that {file} does not; "
                "take all text files from the same release"
            )
    splits: list[list[Array]] = []
    with _image_opener(folder) as open_image:
        for number in PARTITION_NUMBERS:
            names = [name for name, part in partition.items() if part == number]
            names.sort(key=lambda name: (identity[name], name))
            images = np.empty((len(names), SIDE, SIDE, 3), dtype=np.uint8)
            for row, name in enumerate(names):
                images[row] = _decode(open_image, name, folder)
            columns = (np.array([table[name] for name in names], dtype=np.int64) for table in (smiling, identity))
            splits.append([images, *columns])
    (x_train, y_train, people), (x_test, y_test, others) = splits
    return Dataset("celeba", x_train, y_train, x_test, y_test, CLASSES, people, client_test=others)


def _read_text(path: Path) -> list[list[str]]:
    """Return the words of each line that is not empty."""
    try:
        if path.stat().st_size > LARGEST_TEXT:
            raise InputError(f"{path} has {path.stat().st_size} bytes; at most {LARGEST_TEXT} are read")
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as plain text ({error}); get it again") from error
    if len(lines) > MOST_IMAGES + 2:
        raise InputError(f"{path} has {len(lines)} lines; at most {MOST_IMAGES} images are read")
    return lines


def _read_numbers(path: Path) -> dict[str, int]:
    """Read lines such as `000001.jpg 2880` as name and number."""
    numbers = {}
    for line in _read_text(path):
        if len(line) != 2 or not line[1].isdigit():
            raise InputError(f"{path} has the line {' '.join(line)!r}; an image name and a number were expected")
        numbers[_checked_name(line[0], path)] = int(line[1])
    return numbers


def _read_attribute(path: Path) -> dict[str, int]:
    """Read the column Smiling of the attribute table as 0 or 1: a count, a line of names, then lines of -1 and 1."""
    lines = _read_text(path)
    if len(lines) < 2 or len(lines[0]) != 1 or not lines[0][0].isdigit():
        raise InputError(f"{path} does not start with a count and a line of attribute names; get it again")
    names, rows = lines[1], lines[2:]
    if ATTRIBUTE not in names:
        raise InputError(f"{path} has no attribute {ATTRIBUTE}; it has {', '.join(names[:40])}")
    if int(lines[0][0]) != len(rows):
        raise InputError(f"{path} announces {lines[0][0]} images but lists {len(rows)}; it is cut off: get it again")
    column, values = 1 + names.index(ATTRIBUTE), {}
    for line in rows:
        if len(line) != 1 + len(names) or line[column] not in ("-1", "1"):
            raise InputError(f"{path} has a bad line for {line[0]!r}: {len(names)} values of -1 or 1 were expected")
        values[_checked_name(line[0], path)] = int(line[column] == "1")
    return values


def _checked_name(name: str, path: Path) -> str:
    # The name becomes part of a path, so it must not lead out of the folder.
    if "/" in name or "\\" in name or name.startswith("."):
        raise InputError(f"{path} names an image {name!r}, which is not a bare file name")
    return name


@contextmanager
def _image_opener(folder: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """Yield a function that opens an image by its name, in the folder of images or in the zip."""
    images = folder / IMAGES
    if images.is_dir():
        images = images / IMAGES if (images / IMAGES).is_dir() else images
        yield lambda name: (images / name).open("rb")
        return
    archive = folder / ARCHIVE
    try:
        file = zipfile.ZipFile(archive)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{archive} cannot be read ({error}); it is damaged or cut off: get it again") from error
    with file:
        members = {Path(member).name: member for member in file.namelist() if member.endswith(".jpg")}
        yield lambda name: file.open(members[name])


def _decode(open_image: Callable[[str], IO[bytes]], name: str, folder: Path) -> NDArray[np.uint8]:
    try:
        with open_image(name) as stream:
            content = stream.read(LARGEST_JPEG + 1)
    except KeyError as error:
        raise InputError(f"{folder / ARCHIVE} has no image {name}; get the full archive") from error
    except Exception as error:  # a damaged member raises zlib, zip, struct or end-of-file errors
        raise InputError(f"image {name} cannot be read ({error}); get {ARCHIVE} in {folder} again") from error
    if len(content) > LARGEST_JPEG:
        raise InputError(f"image {name} has more than {LARGEST_JPEG} bytes; it is not CelebA's")
    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            if max(image.size) > LARGEST_SIDE:
                raise InputError(f"image {name} has {image.size[0]}x{image.size[1]} pixels; CelebA's have 178x218")
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"image {name} is not a readable jpeg ({error}); get it again") from error
    return np.asarray(small, dtype=np.uint8)
