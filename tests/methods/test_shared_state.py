"""Networks that keep state where copies of a module share it: refused, whichever client it acts on.

Repeating the training of a few clients does not reveal state that one client sets and another one reads. Comparing the
variables does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import sifu
import stateful_modules
from shared_state_modules import HARMLESS, LATCHED, SHARED, CopiesItself, Network, nothing_held  # noqa: F401  a fixture
from shared_state_runs import DOORS, OWN, clients_of, own_model
from sifu.errors import InputError
from sifu_verifier.run_folder import RunFolder


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", SHARED)
def test_state_that_clients_share_is_refused(
    what: str, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is refused before a round is recorded."""
    monkeypatch.setitem(stateful_modules.CLASSES, "shared", lambda: Network(SHARED[what]))
    stateful_modules.choose(stateful_modules.Kind("shared", "forward", "scale"))
    with pytest.raises(
        InputError, match=r"between clients|depends on other samples|no longer gives the same features|cannot be copied"
    ):
        DOORS[door](SHARED[what], tmp_path)
    if (tmp_path / "run").exists():
        assert [node["kind"] for node in RunFolder(tmp_path / "run").nodes.values()] in ([], ["initial"])


@pytest.mark.parametrize("what", LATCHED)
def test_a_latch_for_one_other_client_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="between clients"):
        own_model(LATCHED[what], tmp_path)


def test_a_module_whose_copies_are_itself_is_refused(tmp_path: Path) -> None:
    clients = {client.name: (client.x, client.y) for client in clients_of()}
    with pytest.raises(InputError, match=r"between clients|share their parameters"):
        sifu.train(OWN, run=tmp_path / "run", model=CopiesItself, clients=clients)


@pytest.mark.parametrize("what", HARMLESS)
def test_state_of_a_copy_and_constants_are_allowed(what: str, tmp_path: Path) -> None:
    """Negative control: state that no other client reads keeps the level `exact`."""
    run = own_model(HARMLESS[what], tmp_path)
    (outcome,) = run.forget(["client-4"], "gone", method="scratch")
    assert outcome.level == "exact"
