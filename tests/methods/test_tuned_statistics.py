"""Client statistics through tuned networks: sent and kept as rows or sums, and sent again by remaining clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sifu
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.core.spec import Spec
from sifu.engines.sim import embedded_heads
from sifu.store.files import SALT_BYTES
from sifu.store.reader import RunReader
from sifu.theory.closed_form.blocks import Part, drop, parts_through, words_of_part
from sifu.theory.merging import group_of
from tuned_runs import CLIENTS, GROUPS, blocks_of, check, clients_of, groups_of, open_own, spec_of, whole_sum, without


@pytest.fixture(params=["rows", "statistics"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the form that statistics of clients are sent and kept in."""
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: request.param == "rows")
    return str(request.param)


def test_a_part_holds_no_number_that_went_through_another_network(form: str, tmp_path: Path) -> None:
    """In two federations that differ only in the data of group 0, only the parts that name group 0 differ."""
    clients, trained = clients_of(), tmp_path / "run"
    sifu.train(spec_of(), run=trained, clients=clients)
    key = RunReader(trained).value("group_key")
    other = [
        replace(client, y=np.zeros_like(client.y)) if group_of(bytes.fromhex(key), client.name, GROUPS) == 0 else client
        for client in clients
    ]
    sifu.train(spec_of(), run=tmp_path / "other", clients=other)
    stays = next(n for n, client in enumerate(clients) if client is other[n])
    words: list[dict[Part | None, bytes]] = []
    for folder in (trained, tmp_path / "other"):
        with RunReader(folder) as reader:
            rows = [row for row in reader.statistics().values() if row.clients == (stays,) and not row.is_sum]
        words.append({row.part: (folder / "statistics" / row.file).read_bytes()[:-SALT_BYTES] for row in rows})
    pairs = form == "statistics"
    assert words[0].keys() == {part for part in parts_through(range(GROUPS)) if pairs or len(part) < 2}
    different = {part for part in words[0] if words[0][part] != words[1][part]}
    assert different == ({(0,), (0, 1), (0, 2)} if pairs else {(0,)})


def test_rows_and_statistics_give_the_same_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums agree after training, a request, a rebuilt network and another request, in blocks and in a merge."""
    for tune in ("blocks", "merge"):
        sums: dict[bool, list[str]] = {}
        for rows in (True, False):
            folder = tmp_path / f"{tune} {rows}"
            monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples, rows=rows: rows)
            run = sifu.train(spec_of(features={"tune": tune}), run=folder, clients=clients_of())
            sums[rows] = [whole_sum(folder).digest()]
            for step in (
                lambda run: run.forget(["client-003"], "gone"),
                lambda run: run.rebuild(),
                lambda run: run.forget(["client-004"], "next"),
            ):
                step(run)
                sums[rows].append(whole_sum(folder).digest())
            check(folder)
            with RunReader(folder) as reader:
                assert {row.is_rows for row in reader.statistics().values() if not row.is_sum} == {rows}
        assert sums[True] == sums[False]


def test_a_client_with_kept_statistics_goes_on_sending_them(
    never: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run from before rows existed, a rebuilt network adds statistics, the form already kept."""
    folder = tmp_path / "old"
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: False)
    sifu.train(spec_of(), run=folder, clients=clients_of())
    monkeypatch.undo()
    run = open_own(folder)
    run.forget(["client-003"], "gone")
    assert run.rebuild() == 1
    check(folder)
    assert whole_sum(folder) == whole_sum(never)
    with RunReader(folder) as reader:
        assert not any(row.is_rows for row in reader.statistics().values())


def test_a_rebuilt_group_comes_back_with_one_round_of_statistics(never: Path, form: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    run = sifu.train(spec_of(), run=own, clients=clients_of())
    run.forget(["client-003"], "gone")
    with RunReader(own) as reader:
        before = {file: row for file, row in reader.statistics().items() if not row.is_sum}
    assert run.rebuild() == 1
    check(own)
    (hit,) = groups_of(own, ["client-003"])
    with RunReader(own) as reader:
        rows = {file: row for file, row in reader.statistics().items() if not row.is_sum}
        solve = next(event.content["solve"] for event in reversed(reader.events()) if "solve" in event.content)
        fixed = recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout)
    # Only its rows and columns are sent; files already kept stay unchanged.
    came = {file: row for file, row in rows.items() if file not in before}
    assert all(rows[file] == before[file] for file in before)
    assert came
    assert all(hit in (row.part or ()) for row in came.values())
    sent = sum(words_of_part(fixed, blocks_of(own), part) for part in parts_through(range(GROUPS)) if hit in part)
    samples = sum(len(client.y) for client in without(clients_of(), ["client-003"]))
    expected = 4 * blocks_of(own).block * samples if form == "rows" else 8 * sent * (CLIENTS - 1)
    assert (solve["asked"], solve["bytes_sent"]) == (CLIENTS - 1, expected)
    # Statistics through the rebuilt network are those of a federation that never had the client.
    assert whole_sum(own) == whole_sum(never)
    (outcome,) = run.forget(["client-004"], "next")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 0)
    check(own)


def test_only_sums_are_kept_where_the_spec_says_so_and_those_who_stay_send_again(tmp_path: Path) -> None:
    spec = spec_of(keep={"statistics": "sum"})
    run = sifu.train(spec, run=tmp_path / "run", clients=clients_of())
    (outcome,) = run.forget(["client-003"], "gone")
    assert (outcome.level, outcome.cost.rounds) == ("exact", 1)
    sifu.train(spec, run=tmp_path / "never", clients=without(clients_of(), ["client-003"]))
    hit = groups_of(tmp_path / "run", ["client-003"])
    assert whole_sum(tmp_path / "run") == drop(whole_sum(tmp_path / "never"), blocks_of(tmp_path / "never"), hit)
    check(tmp_path / "run")
