"""Downloads with a function instead of the network: they leave a complete, correct file under its name, or none."""

from __future__ import annotations

import hashlib
import io
import urllib.request

import pytest

from sifu.errors import InputError
from sifu_paper.data import download
from sifu_paper.data.download import OFFICIAL, OfficialFile, download_official, fetch, file_checksum

CONTENT = bytes(range(256)) * 4096  # 1 MiB: several chunks
CHECKSUM = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
URL = "https://example.org/file.bin"


class Reply(io.BytesIO):
    def __init__(self, content=CONTENT, announced=None, fail_after=None, error=None):
        super().__init__(content)
        self.headers = {} if announced is None else {"Content-Length": str(announced)}
        self.fail_after, self.error = fail_after, error

    def read(self, size=-1, /):
        if self.fail_after is not None and self.tell() >= self.fail_after:
            raise self.error
        return super().read(size)


def test_a_right_file_gets_its_name_and_progress_is_told(tmp_path):
    calls = []
    target = tmp_path / "new" / "file.bin"
    reply = Reply(announced=len(CONTENT))
    fetch(URL, target, CHECKSUM, lambda done, total: calls.append((done, total)), opener=lambda url: reply)
    assert target.read_bytes() == CONTENT
    assert calls[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert list(target.parent.iterdir()) == [target]
    assert reply.closed


def test_an_unknown_length_is_told_as_zero(tmp_path):
    calls = []
    fetch(URL, tmp_path / "f", CHECKSUM, lambda *call: calls.append(call), opener=lambda url: Reply())
    assert calls[-1] == (len(CONTENT), 0)


def test_md5_is_understood(tmp_path):
    checksum = "md5:" + hashlib.md5(CONTENT).hexdigest()
    assert file_checksum(fetch(URL, tmp_path / "f", checksum, opener=lambda url: Reply()), checksum) == checksum


@pytest.mark.parametrize("before", [None, b"an older file"])
def test_a_wrong_checksum_leaves_everything_as_it_was(tmp_path, before):
    target = tmp_path / "file.bin"
    if before is not None:
        target.write_bytes(before)
    wrong = Reply(CONTENT[:-1] + b"x")
    checksum = hashlib.sha256(wrong.getvalue()).hexdigest()
    with pytest.raises(InputError, match=f"has checksum sha256:{checksum}, but {CHECKSUM} is published"):
        fetch(URL, target, CHECKSUM, opener=lambda url: wrong)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if before is None else [before])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_an_interruption_leaves_no_file_at_all(tmp_path, error):
    reply = Reply(fail_after=2 * download.CHUNK, error=error)
    with pytest.raises(type(error)):
        fetch(URL, tmp_path / "file.bin", CHECKSUM, opener=lambda url: reply)
    assert not list(tmp_path.iterdir())


def test_an_interruption_in_the_progress_callback_leaves_no_file(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(URL, tmp_path / "file.bin", CHECKSUM, stop, opener=lambda url: Reply())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(fail_after=download.CHUNK, error=ConnectionResetError("reset by peer")), "reset by peer"),
        (Reply(CONTENT[:1000], announced=len(CONTENT)), "broke off after 1000 of 1048576 bytes"),
        (Reply(announced=1 << 40), "more than 1073741824 bytes"),
    ],
)
def test_a_failing_connection_is_an_input_error_without_a_file(tmp_path, reply, message):
    with pytest.raises(InputError, match=message):
        fetch(URL, tmp_path / "file.bin", CHECKSUM, opener=lambda url: reply)
    assert not list(tmp_path.iterdir())


def test_an_endless_reply_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LARGEST_DOWNLOAD", 1000)
    with pytest.raises(InputError, match="more than 1000 bytes"):
        fetch(URL, tmp_path / "file.bin", CHECKSUM, opener=lambda url: Reply())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["http://example.org/f", "ftp://example.org/f", "file:///etc/passwd", "f"])
def test_only_https_is_fetched(tmp_path, url):
    with pytest.raises(InputError, match="https only"):
        fetch(url, tmp_path / "f", CHECKSUM, opener=lambda url: pytest.fail("was opened"))


def test_a_redirect_away_from_https_is_not_followed(monkeypatch):
    handlers = []

    class Opener:
        def open(self, request, timeout):
            return Reply()

    monkeypatch.setattr(urllib.request, "build_opener", lambda *given: handlers.extend(given) or Opener())
    download.open_https(URL)
    redirect = handlers[0]().redirect_request
    request = urllib.request.Request(URL)
    with pytest.raises(InputError, match=r"redirects to http://evil\.example/f, which is not https"):
        redirect(request, None, 302, "Found", {}, "http://evil.example/f")
    assert redirect(request, None, 302, "Found", {}, "https://mirror.example/f").full_url == "https://mirror.example/f"


def test_a_checksum_of_another_kind_is_refused(tmp_path):
    with pytest.raises(InputError, match="'crc32:00' is not understood"):
        fetch(URL, tmp_path / "f", "crc32:00", opener=lambda url: Reply())


def test_an_unwritable_folder_is_an_input_error(tmp_path):
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be written"):
        fetch(URL, tmp_path / "taken" / "f", CHECKSUM, opener=lambda url: Reply())


@pytest.fixture
def two_mirrors(monkeypatch):
    places = ("https://first.example/", "https://second.example/")
    monkeypatch.setitem(OFFICIAL, "mnist", (OfficialFile("file.bin", places, CHECKSUM),))


@pytest.mark.usefixtures("two_mirrors")
def test_the_second_place_is_tried_and_right_files_are_kept(tmp_path):
    urls = []

    def opener(url):
        urls.append(url)
        return Reply(b"damaged") if "first" in url else Reply()

    assert download_official("mnist", tmp_path, opener=opener) == tmp_path
    assert urls == ["https://first.example/file.bin", "https://second.example/file.bin"]
    download_official("mnist", tmp_path, opener=opener)
    assert len(urls) == 2
    (tmp_path / "file.bin").write_bytes(b"damaged on the disk")
    download_official("mnist", tmp_path, opener=opener)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.usefixtures("two_mirrors")
def test_when_all_places_fail_each_is_named(tmp_path):
    def opener(url):
        raise OSError("no route to host")

    with pytest.raises(InputError, match=r"first\.example.*no route.*second\.example"):
        download_official("mnist", tmp_path, opener=opener)


def test_celeba_says_which_files_to_put_where(tmp_path):
    with pytest.raises(InputError, match=r"licence.*img_align_celeba\.zip, list_attr.* into .*celeba"):
        download_official("celeba", tmp_path / "celeba")
    with pytest.raises(InputError, match="'digits' has no official download"):
        download_official("digits", tmp_path)


def test_every_official_file_has_https_places_and_a_full_digest():
    lengths = {"sha256": 64, "md5": 32}
    for files in OFFICIAL.values():
        for file in files:
            algorithm, _, digest = file.checksum.partition(":")
            assert len(digest) == lengths[algorithm]
            assert int(digest, 16)
            assert all(place.startswith("https://") and place.endswith("/") for place in file.folders)
