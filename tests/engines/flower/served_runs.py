"""Federations in memory on Flower's messages: nodes with keys, and the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flower_federation import HASTY, grid_of, small_spec
from memory_grid import MemoryGrid

import sifu
from sifu.choices import Level
from sifu.core.spec import Spec, commented_toml
from sifu.engines.flower.exchange import Patience
from sifu.requests.client_list import ask_for_change, fingerprint_of_file
from sifu.run.clients_and_engine import clients_from_spec
from sifu.run.psi_of_everyone import track_everyone
from sifu.run.run_view import RunView
from sifu.run.training import Progress
from sifu.server.flower_app import serve_on_flower
from sifu.server.flower_settings import Settings


def new_key(folder: Path, name: str) -> tuple[Path, bytes]:
    """Return a new node key: its .pub file, as written by ssh-keygen, and the PEM that SuperLink registers."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    path = folder / f"{name}.pub"
    path.write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return path, key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Federation:
    """Nodes with keys, the client list and the settings of the server."""

    def __init__(
        self, folder: Path, spec: Spec, *, keyed: bool = True, data: list | None = None, **settings: object
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.run_folder, self.spec = folder, folder / "run", spec
        self.data = list(clients_from_spec(spec)) if data is None else data
        self.grid: MemoryGrid = grid_of(self.data)
        self.nodes = dict(zip([client.name for client in self.data], self.grid.apps, strict=True))
        (folder / "spec.toml").write_text(commented_toml(spec))
        if keyed:
            for client in self.data:
                path, pem = new_key(folder, client.name)
                self.grid.keys[self.nodes[client.name]] = pem
                ask_for_change(self.run_folder, {"do": "add", "name": client.name, "key": fingerprint_of_file(path)})
        self.settings = Settings(str(self.run_folder), str(folder / "spec.toml"), not keyed, wait=0.2, **settings)  # type: ignore[arg-type]

    def serve(
        self,
        at_round: dict[tuple[str, int], object] | None = None,
        level: Level | None = None,
        patience: Patience = HASTY,
    ) -> list[str]:
        """Run the server; `at_round` maps (phase, rounds) to a function that is called right after that round."""
        waiting = dict(at_round or {})

        def progress(update: Progress) -> None:
            act = waiting.pop((update.phase, update.rounds), None)
            if act:
                act()  # type: ignore[operator]

        return serve_on_flower(self.grid, self.settings, patience=patience, progress=progress, level=level)

    def contacted(self) -> set[str]:
        """Return the clients that were sent a message since the grid's list was last cleared."""
        names = {node: name for name, node in self.nodes.items()}
        return {names.get(message.metadata.dst_node_id, "stranger") for message in self.grid.sent}


SPEC = small_spec(data={"clients": 12, "samples_per_client": 12}, stop={"max_rounds": 14, "target": 0.0})


def psi_of(folder: Path, node: int | None = None) -> np.ndarray:
    """Return Psi at a node, for all clients together."""
    reader = sifu.open_run(folder).reader()
    try:
        view = RunView(reader, tip=node)
        return track_everyone(view).total(np.arange(len(view.clients)))
    finally:
        reader.close()
