"""Snapshots of the public interface: every change is noticed (see snapshots.py)."""

from __future__ import annotations

import pytest
from snapshots import SNAPSHOTS, commands, difference

from run_tools import Command


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_surface_is_as_recorded(name: str) -> None:
    changed = difference(name)
    assert not changed, f"if this was meant, run `python tests/house/snapshots.py --write`:\n{changed}"


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a change of the interface is noticed."""
    make = SNAPSHOTS[name]
    monkeypatch.setitem(SNAPSHOTS, name, lambda: make().replace("client", "clients", 1))
    assert difference(name).count("\n+") == 2


def test_every_page_of_help_names_every_option(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendered help page of each command names every option of its parser."""
    monkeypatch.setenv("COLUMNS", "200")
    for name, command in commands():
        page = cli(*name.split()[1:], "--help")
        assert page.code == 0, name
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in options if option not in page.out] == [], name
