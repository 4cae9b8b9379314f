"""Runs repeated from their record, with and without some clients, by code independent of our bounds."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

import sifu
from random_journeys import (
    MASKED,
    Journey,
    normals_of,
    without_rows,
)
from sifu.core.engine import Engine, Position, RoundResult
from sifu.data import ClientData
from sifu.errors import RoundRejectedError
from sifu_verifier.paths import path_to
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.tensors import tensors_of

Vector = np.ndarray


class CounterfactualRuns:
    """Run folder that can be executed again, with or without some clients."""

    def __init__(self, journey: Journey) -> None:
        self.journey = journey
        self.record = RunFolder(journey.folder)
        self.spec = sifu.Spec.from_mapping(self.record.spec)
        done = [row for row in self.record.requests.values() if row["status"] == "done"]
        self.done: list[dict[str, Any]] = sorted(done, key=lambda row: row["request_order"])

    @cached_property
    def given(self) -> dict[str, ClientData]:
        """Samples that each client first joined with, by name."""
        return {client.name: client for client in self.journey.clients}

    @cached_property
    def held(self) -> list[tuple[str, frozenset[int]]]:
        """Owner and rows of each client number in the record; a client that joined again has fewer rows."""
        joined = [parsed(event) for event in self.record.tables["events"] if event["kind"] == "client joined"]
        request_of = {content["client"]: content.get("request") for content in joined}
        held: dict[str, tuple[str, frozenset[int]]] = {}
        for _, row in sorted(self.record.clients.items()):
            name = row["name"]
            if request_of.get(name) is None:
                held[name] = (name, frozenset(range(len(self.given[name].y))))
                continue
            request = self.record.requests[request_of[name]]
            (before,) = json.loads(request["clients"])
            owner, rows = held[before]
            held[name] = (owner, rows - set(json.loads(request["records"])))
        return list(held.values())

    @cached_property
    def data(self) -> list[ClientData]:
        """Samples of every client number in the record."""
        data = []
        for number, (owner, rows) in enumerate(self.held):
            whole = self.given[owner]
            gone, name = set(range(len(whole.y))) - rows, self.record.clients[number]["name"]
            data.append(without_rows(whole, gone, name) if gone else whole)
        return data

    def rows_in(self, node: int) -> set[tuple[str, int]]:
        """Return every row (owner, index) that took part in training on the path to a node."""
        there = {client for step in path_to(self.record, node) for client in self.record.rounds[step]}
        return {(owner, row) for client in there for owner, rows in [self.held[client]] for row in rows}

    @cached_property
    def engine(self) -> Engine:
        """The engine of the run."""
        return self.journey.engine(self.spec, self.data)

    @cached_property
    def engine_without_gate(self) -> Engine:
        """The engine without refusals: the counterfactual leaves out the replies that the run refused, no others."""
        server = replace(self.spec.server, update_bound=0.0, rejected="stop")
        return self.journey.engine(replace(self.spec, server=server), self.data)

    def engine_with_other_data(self, clients: Collection[int], *, other_counts: bool = False) -> Engine:
        """Return the engine of a federation in which `clients` hold other samples, optionally of another count."""
        generator = np.random.default_rng(self.journey.seed + 1)
        data = list(self.data)
        for client in clients:
            own = data[client]
            count = len(own.y) if not other_counts else len(own.y) + int(generator.integers(1, 6))
            x, y = (
                generator.normal(size=(count, *own.x.shape[1:])) * 2.0,
                np.resize(generator.permutation(own.y), count),
            )
            data[client] = ClientData(own.name, x, y)
        return self.journey.engine(self.spec, data)

    def engine_without(self, clients: Collection[int]) -> Smaller | None:
        """Return the engine of a federation that never had `clients`, or None if random draws would change.

        Participants and batches are drawn by client number, and the remaining clients would be renumbered.
        """
        drawn = self.spec.local.batch or str(self.spec.server.participation) != "all"
        if drawn and self.journey.family != "closed form":
            return None
        stays = [client for client in range(len(self.data)) if client not in clients]
        engine = self.journey.engine(self.spec, [self.data[client] for client in stays])
        return Smaller(engine, stays) if engine.layout == self.engine.layout else None

    def models(
        self, engine: Engine | Smaller, gone: Collection[int], wanted: Iterable[int], *, may_diverge: bool = False
    ) -> dict[int, Vector | None]:
        """Return models of the wanted nodes and their ancestors in the counterfactual without `gone`.

        Models made by a heuristic, and all that follow from them, are None. A counterfactual without some clients
        `may_diverge` although the recorded run did not: its models are None from there on, at infinite distance.
        """
        models: dict[int, Vector | None] = {}
        for node in self._needed(wanted):
            try:
                models[node] = self._model(engine, set(gone), node, models)
            except (OtherParticipantsError, RoundRejectedError):
                if not may_diverge:
                    raise
                models[node] = None
        return models

    def _needed(self, wanted: Iterable[int]) -> list[int]:
        needed, waiting = set(), list(wanted)
        parts: dict[int, list[int]] = {}
        for row in self.record.tables["merges"]:
            parts.setdefault(row["node"], []).append(row["source_node"])
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                parent = self.record.nodes[node]["parent"]
                waiting += parts.get(node, []) + ([] if parent is None else [parent])
        return sorted(needed)

    def _model(
        self, engine: Engine | Smaller, gone: set[int], number: int, models: dict[int, Vector | None]
    ) -> Vector | None:
        node = self.record.nodes[number]
        kind, dtype = node["kind"], engine.layout.dtype
        before = None if node["parent"] is None else models[node["parent"]]
        if kind == "initial":
            before = engine.initial_model(node["branch"])
        if before is None:
            return None
        if kind in ("initial", "noise"):
            if node["noise_std"] == 0.0:
                return before
            noise = normals_of(self.journey.seed, node["request_order"]).standard_normal(before.size)
            return (before.astype(np.float64) + node["noise_std"] * noise).astype(dtype)
        if kind == "round":
            there = [client for client in sorted(self.record.rounds[number]) if client not in gone]
            return self._round(engine, before, Position(node["branch"], node["position"] - 1), there)
        if kind == "group":
            row, earlier = self.record.groups[number], self.record.groups.get(node["parent"])
            members = np.array([client for client in row["members"] if client not in gone], dtype=np.int64)
            model = before
            for place in range(earlier["rounds"] if earlier else 0, row["rounds"]):
                if members.size:
                    model = engine.run_round(model, Position(node["branch"], place), members).model
            return model
        total, weight = np.zeros(engine.layout.size), 0.0
        for part in sorted((row for row in self.record.tables["merges"] if row["node"] == number), key=_group):
            source = models[part["source_node"]]
            members = self.record.groups[part["source_node"]]["members"]
            samples = float(sum(self.record.clients[c]["samples"] for c in members if c not in gone))
            if source is None:
                return None
            total, weight = total + samples * source.astype(np.float64), weight + samples
        return self._moved_on(engine, total / weight).astype(dtype) if weight else before

    def _moved_on(self, engine: Engine | Smaller, mean: Vector) -> Vector:
        """Scale a merge beyond the mean of its groups by a fixed factor (docs/theory.md, section 15.4)."""
        fresh = engine.initial_model(0).astype(np.float64)
        moved = fresh + 1.25 * (mean - fresh)
        stays = (moved < 0.0) & (mean >= 0.0) & (fresh >= 0.0)
        return np.where(stays, mean, moved)

    def _round(self, engine: Engine | Smaller, model: Vector, position: Position, there: list[int]) -> Vector:
        if not there:
            return model
        result = engine.run_round(model, position, np.array(there, dtype=np.int64))
        if result.participants.tolist() != there:
            refused = {rejection.client: rejection.reason for rejection in result.rejections if rejection.left_out}
            what = f"{position}: {result.participants.tolist()} took part, {there} are recorded; refused: {refused}"
            raise OtherParticipantsError(what) if refused else AssertionError(what)
        return result.model

    def on_disk(self) -> dict[int, Vector]:
        """Return the models in the folder."""
        number = {"float64": "<f8", "float32": "<f4"}[self.record.facts["dtype"]]
        names, vectors = json.loads(self.record.entries["layout"])["names"], {}
        for row in self.record.tables["models"]:
            tensors = tensors_of((self.journey.folder / "models" / f"{row['node']}.safetensors").read_bytes(), number)
            vectors[row["node"]] = np.concatenate([tensors[name] for name in names])
        return vectors

    def same(self, model: Vector, other: Vector) -> bool:
        """Return whether two models agree bit for bit, or up to rounding for masked rounds, which are repeated without
        masks.

        Rounding also differs before a client joined again, because these rounds are repeated with more clients in a
        batch.
        """
        if self.journey.family == MASKED or (self.journey.gone and self.journey.family != "closed form"):
            return self.close(model, other)
        return np.array_equal(model.astype(np.float64), other)

    def close(self, model: Vector, other: Vector) -> bool:
        """Return whether two models agree up to rounding: layouts of computations depend on all clients' counts."""
        if self.journey.family == "closed form":
            return np.array_equal(model, other)
        atol = 1e-4 if self.record.facts["dtype"] == "float32" else 1e-9
        return bool(np.allclose(model, other, rtol=atol, atol=atol))

    def touches(self, clients: Collection[int], node: int) -> bool:
        """Return whether one of `clients` took part in a round on the path to a node."""
        return any(set(clients) & set(self.record.rounds[step]) for step in path_to(self.record, node))

    def chains_of(self, request: dict[str, Any]) -> list[list[int]]:
        """Return, for each client of a request, all its numbers up to then."""
        number = {row["name"]: client for client, row in self.record.clients.items()}
        asking = [number[name] for name in json.loads(request["clients"])]
        return [
            [other for other in range(client + 1) if self.held[other][0] == self.held[client][0]] for client in asking
        ]

    def clients_of(self, request: dict[str, Any]) -> set[int]:
        """Return the numbers of a request's clients."""
        return {client for chain in self.chains_of(request) for client in chain}

    def rows_of(self, request: dict[str, Any]) -> set[tuple[str, int]]:
        """Return the rows (owner, index) of a request: the rows it names, or all that its clients ever had."""
        named = json.loads(request["records"])
        owners = {self.held[client][0] for client in self.clients_of(request)}
        return {(owner, row) for owner in owners for row in named or range(len(self.given[owner].y))}


class OtherParticipantsError(AssertionError):
    """Error of a repeated round whose participants differ from the record."""


class Smaller:
    """Engine of fewer clients that accepts the client numbers of the larger federation."""

    def __init__(self, engine: Engine, stays: Sequence[int]) -> None:
        self.layout, self.initial_model = engine.layout, engine.initial_model
        self._engine, self._stays = engine, np.array(stays)

    def run_round(self, model: Vector, position: Position, clients: np.ndarray) -> RoundResult:
        """Run a round of these clients."""
        result = self._engine.run_round(model, position, np.searchsorted(self._stays, clients))
        return replace(result, participants=self._stays[result.participants])


def parsed(event: dict[str, Any]) -> dict[str, Any]:
    """Return the content of an event."""
    content: dict[str, Any] = json.loads(event["payload"])
    return content


def _group(row: dict[str, Any]) -> int:
    return int(row["grp"])


@contextmanager
def must_not_diverge() -> Iterator[None]:
    """Raise an assertion error if a recorded round cannot be executed again."""
    try:
        yield
    except RoundRejectedError as error:
        raise AssertionError(f"a recorded round cannot be executed again: {error}") from error
