"""The report page: self-contained, escaped, complete, and available in every state of a run."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, SMALL

import sifu
from sifu.core.certificate_words import words_of
from sifu.errors import InputError
from sifu.report import collect, write_report
from sifu.report.page import page_path
from sifu.store.writer import RunWriter

FIGURE_NAMES = {"history", "psi", "accuracy"}
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Parsed page: its elements, its text, and whether every element is closed in order."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page_of(folder: Path, output: Path) -> tuple[str, Page]:
    content = write_report(folder, output).read_text(encoding="utf-8")
    return content, Page(content)


@pytest.fixture(scope="session")
def busy_page(busy_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Page]:
    folder = tmp_path_factory.mktemp("busy-report")
    return folder, *page_of(busy_run, folder)


def test_the_page_fetches_nothing_and_runs_nothing(busy_page: tuple[Path, str, Page]) -> None:
    _, content, page = busy_page
    assert "http:" not in content
    assert "https:" not in content
    assert "@import" not in content
    assert "@font-face" not in content
    for tag, attributes in page.elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"url\((?!#)", content)


def test_the_page_forbids_itself_to_fetch_or_run_anything(busy_page: tuple[Path, str, Page]) -> None:
    _, text, _ = busy_page
    assert text.count('http-equiv="Content-Security-Policy"') == 1
    assert "default-src 'none'" in text.split("<style>")[0]


def test_the_page_names_every_request_its_level_and_its_clients(
    busy_run: Path, busy_page: tuple[Path, str, Page]
) -> None:
    _, _, page = busy_page
    data = collect(busy_run)
    assert [request.request for request in data.requests] == ["first", "strict", "fresh", "fourth", "later"]
    assert {request.level for request in data.requests} == {"proven", "exact", None}
    ids = {attributes.get("id") for _, attributes in page.elements}
    for request in data.requests:
        assert f"request-{request.request}" in ids
        assert request.request in page.text
        assert (request.level or "waiting") in page.text
        for client in request.clients:
            assert client in page.text
    for request in data.done:
        assert request.certificate is not None
        words = request.certificate.words
        for sentence in (*words.not_covered, *words.promise, *(premise.statement for premise in words.premises)):
            assert sentence in page.text


def test_what_failed_comes_before_what_is_trusted_or_assumed(
    busy_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sifu.core import certificate_words as wording

    statuses = ("met", "assumed", "trusted", "failed", "met")

    def mixed(body: Any) -> Any:
        said = words_of(body)
        return replace(said, premises=[replace(said.premises[0], status=status) for status in statuses])

    monkeypatch.setattr(wording, "words_of", mixed)
    content, _ = page_of(busy_run, tmp_path / "page")
    articles = content.split("What it rests on</h4>")[1:]
    assert articles
    for article in articles:
        shown = re.findall(r'<li><span class="badge[^>]*>\s*(\w+)', article.split("What is not covered")[0])
        assert shown == ["failed", "trusted", "assumed", "met", "met"]


def test_a_head_in_closed_form_is_shown_without_rounds_noise_and_empty_figures(tmp_path: Path) -> None:
    clients = {f"c{k}": ([[0.1 * k, 0.2], [0.3, 0.1 * k]], [0, 1]) for k in range(4)}
    spec = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 2}}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    run.forget(["c1"])
    _, page = page_of(run.folder, tmp_path / "page")
    assert "certified as exact" in page.text
    for absent in ("Nothing to show", "At a glance", "earlier models are kept", "Participation", "rollback target"):
        assert absent not in page.text
    assert "Terms asked for" in page.text


def test_the_page_says_that_it_is_confidential_before_anything_else(busy_page: tuple[Path, str, Page]) -> None:
    _, content, page = busy_page
    assert page.text.index("Confidential") < page.text.index("Forgetting report · run")
    assert "sifu verify" in page.text
    assert '<html lang="en">' in content
    assert "GDPR" not in content


def test_the_figures_lie_beside_the_page_as_png_and_svg(busy_page: tuple[Path, str, Page]) -> None:
    folder, _, page = busy_page
    assert {path.name for path in folder.iterdir()} == {"index.html", "history.csv"} | {
        f"{name}.{kind}" for name in FIGURE_NAMES for kind in ("png", "svg")
    }
    for name in FIGURE_NAMES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (folder / f"{name}.svg").read_bytes()
    drawings = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(drawings) == 2 * len(FIGURE_NAMES)  # for wide and for narrow screens
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"] or "") > 60
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {attributes["href"] for tag, attributes in page.elements if tag == "use"}
    assert used <= {f"#{anchor}" for anchor in ids}


def test_hostile_names_stay_words(hostile_run: Path, tmp_path: Path) -> None:
    content, page = page_of(hostile_run, tmp_path)
    assert "<script" not in content
    assert HOSTILE in page.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in content
    assert r"$\frac{1}{0}$" in page.text
    assert "患者" in page.text
    for name in FIGURE_NAMES:
        drawing = (tmp_path / f"{name}.svg").read_text()
        assert "<script" not in drawing
        Page(drawing[drawing.index("<svg") :])


@pytest.mark.long
def test_the_same_run_gives_the_same_bytes(busy_run: Path, tmp_path: Path, busy_page: tuple[Path, str, Page]) -> None:
    folder, content, _ = busy_page
    again, _ = page_of(busy_run, tmp_path)
    assert again == content
    for name in FIGURE_NAMES:
        drawing = (folder / f"{name}.svg").read_bytes()
        assert drawing == (tmp_path / f"{name}.svg").read_bytes()
        assert b"date" not in drawing
        assert (folder / f"{name}.png").read_bytes() == (tmp_path / f"{name}.png").read_bytes()


def test_a_run_without_requests_has_a_report(plain_run: Path) -> None:
    page = write_report(plain_run)
    assert page == plain_run / "report" / "index.html"
    text = Page(page.read_text()).text
    assert "No client has asked to be forgotten. The model was trained for 6 rounds." in text
    assert page.stat().st_mode & 0o077 == 0


def test_an_unfinished_training_has_a_report(tmp_path: Path) -> None:
    class StopNowError(Exception):
        pass

    def interrupt(progress: object) -> None:
        if progress.rounds >= 2:  # type: ignore[attr-defined]
            raise StopNowError

    with pytest.raises(StopNowError):
        sifu.train(SMALL, run=tmp_path / "run", progress=interrupt)
    _, page = page_of(tmp_path / "run", tmp_path / "out")
    assert "Training has not finished: 2 rounds so far." in page.text


def test_an_unfinished_request_has_a_report_and_no_certificate(tmp_path: Path) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    run = sifu.train(SMALL, run=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.forget(["client-000"], sigma=20.0, progress=interrupt)
    _, page = page_of(tmp_path / "run", tmp_path / "out")
    assert "A request is being executed and is not certified yet." in page.text
    assert "Nothing is certified yet." in page.text
    assert "proven" not in page.text.replace("What was promised", "")


@pytest.mark.long
def test_a_report_is_written_while_another_process_writes(busy_run: Path, tmp_path: Path) -> None:
    before = (busy_run / "run.db").read_bytes()
    writer = RunWriter.open(busy_run)
    try:
        writer.connection.execute("BEGIN IMMEDIATE")
        writer.connection.execute("UPDATE run SET value = 'not committed' WHERE key = 'phase'")
        _, page = page_of(busy_run, tmp_path)
        writer.connection.execute("ROLLBACK")
    finally:
        writer.close()
    assert "4 requests, 5 clients forgotten" in page.text
    assert "not committed" not in page.text
    assert (busy_run / "run.db").read_bytes() == before


def test_nothing_is_written_to_the_database(busy_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    connect = sqlite3.connect

    def watched(*args: object, **options: object) -> sqlite3.Connection:
        connection = connect(*args, **options)  # type: ignore[call-overload]
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", watched)
    collect(busy_run)
    assert statements
    assert {statement.split()[0] for statement in statements} <= {"SELECT", "PRAGMA", "BEGIN", "COMMIT"}
    assert sum(statement.startswith("BEGIN") for statement in statements) == 1


def test_where_the_page_goes(plain_run: Path, tmp_path: Path) -> None:
    assert page_path(plain_run, None) == plain_run / "report" / "index.html"
    assert page_path(plain_run, tmp_path) == tmp_path / "index.html"
    assert write_report(plain_run, tmp_path / "new" / "mine.html") == tmp_path / "new" / "mine.html"
    assert (tmp_path / "new" / "mine-history.svg").exists()
    assert not list(tmp_path.rglob(".tmp-*"))


def test_what_cannot_be_done_is_a_sentence(plain_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        write_report(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        write_report(plain_run, tmp_path / "file" / "page.html")
