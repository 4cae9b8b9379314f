"""Download of official files over https, checked before they get their final name.

A download goes to a temporary file next to its target, is synced to disk, compared with the published checksum, and
only then renamed: a file with the final name is always complete and correct.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu import InputError
from sifu_paper.data import celeba
from sifu_paper.data.idx import FILES

Progress = Callable[[int, int], None]
"""Callback with the bytes done and the total (0 if the server does not give it)."""

LARGEST_DOWNLOAD = 1 << 30
CHUNK = 1 << 18
TIMEOUT_SECONDS = 30.0


Opener = Callable[[str], Any]
"""Function from a URL to a stream with headers, like urllib's."""


@dataclass(frozen=True)
class OfficialFile:
    """Published file: its name, its URLs, and `algorithm:digest`."""

    name: str
    folders: tuple[str, ...]
    checksum: str


_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_FASHION = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)
_CIFAR = ("https://www.cs.toronto.edu/~kriz/",)


def _published(folders: tuple[str, ...], *checksums: str, names: tuple[str, ...] = ()) -> tuple[OfficialFile, ...]:
    files = names or [f"{file}.gz" for file in FILES]
    return tuple(OfficialFile(name, folders, checksum) for name, checksum in zip(files, checksums, strict=True))


# The checksums are SHA-256 if the community's loaders publish one (Keras, torchvision's prototypes; TensorFlow Datasets
# for CIFAR), else torchvision's MD5. CIFAR's were copied from public loaders, not computed from a downloaded archive.
OFFICIAL: dict[str, tuple[OfficialFile, ...]] = {
    "mnist": _published(
        _MNIST,
        "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion_mnist": _published(
        _FASHION,
        "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "md5:bef4ecab320f06d8554ea6380940ec79",
        "md5:25c81989df183df01b3e8a0aad5dffbe",
        "md5:bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "cifar10": _published(
        _CIFAR,
        "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        names=("cifar-10-binary.tar.gz",),
    ),
    "cifar100": _published(
        _CIFAR,
        "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        names=("cifar-100-binary.tar.gz",),
    ),
}


def download_official(
    name: str, folder: Path, progress: Progress | None = None, *, opener: Opener | None = None
) -> Path:
    """Download the official files of data set `name` to `folder`; keep correct files that exist."""
    if name == "celeba":
        raise InputError(
            "CelebA's licence does not let it be downloaded automatically; accept it at "
            f"https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html and put {', '.join(celeba.FILES)} into {folder}"
        )
    if name not in OFFICIAL:
        raise InputError(f"data set {name!r} has no official download; known are {', '.join(OFFICIAL)}")
    for file in OFFICIAL[name]:
        target = folder / file.name
        if not (target.is_file() and file_checksum(target, file.checksum) == file.checksum):
            failures = []  # try each place in turn; if all fail, report every failure
            for place in file.folders:
                try:
                    fetch(place + file.name, target, file.checksum, progress, opener=opener)
                    break
                except InputError as error:
                    failures.append(str(error))
            else:
                raise InputError(" ".join(failures))
    return folder


def fetch(
    url: str, target: Path, checksum: str, progress: Progress | None = None, *, opener: Opener | None = None
) -> Path:
    """Download `url` to `target` if its `checksum` (`sha256:...` or `md5:...`) matches; all or nothing."""
    if not url.lower().startswith("https://"):
        raise InputError(f"{url} is not fetched: downloads go over https only")
    digest = _new_digest(checksum)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary_name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise InputError(f"folder {target.parent} cannot be written ({error}); choose another one") from error
    temporary = Path(temporary_name)
    try:
        with os.fdopen(handle, "wb") as file:
            _copy(url, file, digest, progress, opener or open_https)
            file.flush()
            os.fsync(file.fileno())
        received = f"{digest.name}:{digest.hexdigest()}"
        if received != checksum:
            raise InputError(
                f"{url} has checksum {received}, but {checksum} is published; the file was deleted. Try again, or get "
                f"it by other means and put it into {target.parent}."
            )
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        # Also runs on Ctrl-C; after the rename there is nothing left to remove.
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return target


def _copy(url: str, file: Any, digest: Any, progress: Progress | None, opener: Opener) -> None:
    from http.client import HTTPException

    try:
        with contextlib.closing(opener(url)) as response:
            announced = str(response.headers.get("Content-Length") or "")
            total = int(announced) if announced.isdigit() else 0
            done = 0
            while chunk := response.read(CHUNK):
                done += len(chunk)
                if max(done, total) > LARGEST_DOWNLOAD:
                    raise InputError(f"{url} has more than {LARGEST_DOWNLOAD} bytes; no official file is so large.")
                file.write(chunk)
                digest.update(chunk)
                if progress is not None:
                    progress(done, total)
    except (OSError, HTTPException) as error:
        raise InputError(
            f"{url} could not be downloaded ({error}); check the connection, or get it by other means and put it "
            "where the data are looked for."
        ) from error
    if total and done != total:
        raise InputError(f"{url} broke off after {done} of {total} bytes; nothing was kept. Try again.")


def open_https(url: str) -> Any:
    """Open `url`, following redirects only to https; the system's certificates are checked."""
    import urllib.request

    class HttpsOnly(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
            if not newurl.lower().startswith("https://"):
                raise InputError(f"{url} redirects to {newurl}, which is not https; it was not followed.")
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    request = urllib.request.Request(url, headers={"User-Agent": "sifu"})
    return urllib.request.build_opener(HttpsOnly).open(request, timeout=TIMEOUT_SECONDS)


def file_checksum(path: Path, like: str) -> str:
    """Return `algorithm:digest` of a file, with the algorithm of the checksum `like`."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: _new_digest(like))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error})") from error
    return f"{digest.name}:{digest.hexdigest()}"


def _new_digest(checksum: str) -> Any:
    algorithm = checksum.partition(":")[0]
    if algorithm not in ("sha256", "md5"):
        raise InputError(f"checksum {checksum!r} is not understood: write sha256:DIGEST or md5:DIGEST")
    # MD5 identifies a published file here; it detects damage, and https protects against attackers.
    return hashlib.new(algorithm, usedforsecurity=False)


def _sync_folder(folder: Path) -> None:
    """Make the rename durable if folders can be synced (not on Windows)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
