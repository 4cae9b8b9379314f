"""The theory page and the code agree: every cited section, function, test, equation and number exists."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/theory.md"
PAPER = ROOT.parent / "shared" / "paper" / "sifu.tex"
NUMBER = r"\d+(?:\.\d+)?"
CITATION = re.compile(rf"docs/theory\.md, sections? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)")
OLD_NAME = "DES" + "IGN"
EQUATIONS = {
    "eq:FedAvg_server_aggregation": 5,
    "eq:model_sensitivity": 6,
    "eq:delta": 7,
    "eq:def_Psi": 9,
    "eq:psi_star": 11,
    "eq:T_IFU": 12,
    "eq:def_Psi_extended": 15,
    "eq:def_Psi_extended_set": 16,
    "eq:theta_T_zeta": 17,
    "n_u+1": 18,
    "eq:H_recc": 19,
    "eq:def_f_example": 20,
    "eq:B1": 26,
    "eq:B2": 27,
    "eq:B3": 28,
    "eq:boundB": 29,
    "eq:boundB2": 30,
    "eq:recurrence": 32,
}
"""Labels in the paper and the equation numbers that this repository cites."""
LAST_EQUATION = 40


@functools.cache
def page() -> str:
    return (ROOT / PAGE).read_text(encoding="utf-8")


@functools.cache
def sections() -> frozenset[str]:
    return frozenset(re.findall(rf"^##+ ({NUMBER})\.? ", page(), flags=re.M))


@functools.cache
def texts() -> dict[str, str]:
    """Return every other text of the repository: tracked files, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    if listed == [""]:  # not a checkout but an unpacked source archive
        tops = ("src", "tests", "docs", "paper")
        listed = [str(path.relative_to(ROOT)) for top in tops for path in (ROOT / top).rglob("*")]
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg")
    names = [name for name in listed if name.endswith(kinds) and (ROOT / name).is_file()]
    here = Path(__file__).resolve()
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).resolve() != here}


def bad_citations(text: str) -> list[str]:
    """Return citations of a section that does not exist, or of the page without a section."""
    flat = re.sub(r"\s*\n\s*(?:#\s*)?", " ", text)  # a citation may continue on the next line
    cited = [number for match in CITATION.finditer(flat) for number in re.findall(NUMBER, match[1])]
    missing = [f"section {number}" for number in cited if number not in sections()]
    without = len(re.findall(r"docs/theory\.md", flat)) - len(CITATION.findall(flat))
    return missing + ["the page without a section"] * without


@functools.cache
def rows() -> tuple[tuple[str, ...], ...]:
    """Return the statements of section 16: number, statement, section, paper, functions, tests."""
    table = page().split("\n| # | statement |")[1].splitlines()[2:]
    return tuple(tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table if line.startswith("|"))


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def defined_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def resolve(name: str) -> object:
    """Return the object with this dotted name: the longest importable module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name and not name.startswith(error.name):
                raise  # a missing library, not a wrong name
            continue
        for part in parts[length:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


def test_every_citation_points_to_a_section() -> None:
    code = {name: text for name, text in texts().items() if name.endswith(".py")}
    assert {name: bad for name, text in code.items() if (bad := bad_citations(text))} == {}
    assert sum(len(CITATION.findall(text)) for text in code.values()) >= 50


def test_control_a_wrong_citation_is_caught() -> None:
    assert bad_citations("as in docs/theory.md, section 4.1, and docs/theory.md,\n    section 5.99") == ["section 5.99"]
    assert bad_citations("docs/theory.md, sections 3.1 and 99") == ["section 99"]
    assert bad_citations("see docs/theory.md") == ["the page without a section"]
    assert bad_citations("docs/theory.md, sections 8.2 and 9.1") == []


def test_the_page_cites_its_own_sections() -> None:
    for group in re.findall(rf"(?<!paper's )\bsections? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)", page()):
        for number in re.findall(NUMBER, group):
            # Sections of other works are cited with their author.
            assert number in sections() or f"Higham 2002, section {number}" in page(), number


def test_sections_are_numbered_without_gaps() -> None:
    tops = [int(number) for number in re.findall(r"^## (\d+)\. ", page(), flags=re.M)]
    assert tops == list(range(1, len(tops) + 1))
    for top in tops:
        inner = [int(number) for number in re.findall(rf"^### {top}\.(\d+) ", page(), flags=re.M)]
        assert inner == list(range(1, len(inner) + 1))


def test_links_lead_to_headings() -> None:
    headings = re.findall(r"^##+ (.+)$", page(), flags=re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name, text in texts().items():
        if name.endswith(".md"):
            target = r"\]\((?:docs/|\.\./)?theory\.md#([^)]+)\)" if name != PAGE else r"\]\(#([^)]+)\)"
            assert set(re.findall(target, text)) <= anchors, name


def test_no_page_outside_the_repository_is_cited() -> None:
    assert [name for name, text in texts().items() if re.search(rf"\b{OLD_NAME}\b", text)] == []


def test_statements_are_numbered_without_gaps() -> None:
    assert [row[0] for row in rows()] == [str(number) for number in range(1, len(rows()) + 1)]
    assert len(rows()) >= 50
    for row in rows():
        assert len(row) == 6, row
        assert row[2] in sections(), row


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_function_and_test_of_a_statement_exists(row: tuple[str, ...]) -> None:
    functions, tests = names_in(row[4]), names_in(row[5])
    assert functions
    assert tests
    for test in tests:
        path, _, name = test.partition("::")
        assert name in defined_in(path), test
    for function in functions:
        if function.startswith("sifu.engines.flower"):
            pytest.importorskip("flwr")
        assert resolve(function) is not None


def test_control_a_name_that_is_not_there_is_caught() -> None:
    with pytest.raises(AttributeError):
        resolve("sifu.theory.tracking.no_such_function")
    with pytest.raises(ModuleNotFoundError):
        resolve("no_such_package.module")


def test_equations_of_the_paper_are_within_range() -> None:
    cited = [int(number) for row in rows() for number in re.findall(r"\((\d+)\)", row[3])]
    assert cited
    assert all(1 <= number <= LAST_EQUATION for number in cited)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not here")
def test_the_papers_labels_have_the_numbers_we_cite() -> None:
    source = re.sub(r"(?<!\\)%.*", "", PAPER.read_text(encoding="utf-8"))
    numbers, count = {}, 0
    for match in re.finditer(r"\\begin\{(equation|align)\}(.*?)\\end\{\1\}", source, flags=re.S):
        count += 1  # every `align` of the paper is a single line
        numbers |= dict.fromkeys(re.findall(r"\\label\{(.*?)\}", match[2]), count)
    assert {label: numbers[label] for label in EQUATIONS} == EQUATIONS
    assert count == LAST_EQUATION


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page(), flags=re.S | re.M)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE, PAGE, 0)
    result = doctest.DocTestRunner().run(examples)
    assert result.attempted >= 7
    assert result.failed == 0


@pytest.mark.parametrize("number", ["0.04058", "0.248", "24.75"])
def test_figures_in_the_text_are_computed(number: str) -> None:
    from sifu.theory.calibration import delta_reached, exact_multiplier

    truth = {
        "0.04058": delta_reached(10, 0.31075),
        "0.248": delta_reached(10, exact_multiplier(10, 0.01) / 2**0.5),
        "24.75": (100 - 1) / (5 - 1),
    }[number]
    assert number in page()
    assert f"{truth:.{len(number.split('.')[1])}f}" == number
