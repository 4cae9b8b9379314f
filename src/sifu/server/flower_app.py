"""A Flower ServerApp that trains, forgets and certifies: an app's server file needs only `app = server_app()`.

All persistent state is in the run folder. After any interruption, a new `flwr run` of the same app continues, with the
same active and forgotten clients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sifu.api.spec_file import load_spec
from sifu.api.start_run import open_run
from sifu.choices import Level
from sifu.core.replies import Wait
from sifu.core.spec import Spec
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import Patience
from sifu.engines.ready import blueprint
from sifu.errors import InputError
from sifu.requests.worker import Tell
from sifu.run.training import Progress
from sifu.server.flower_clients import ClientRegistry
from sifu.server.flower_settings import MakeBlueprint, Settings
from sifu.server.server_loop import serve
from sifu.store.database import DATABASE
from sifu.store.release_files import released_model

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

log = logging.getLogger(__name__)


def server_app(make_blueprint: MakeBlueprint = blueprint) -> ServerApp:
    """Return the ServerApp. `OwnServer` describes servers for user-defined models."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = Settings.of(context.run_config)
        serve_on_flower(grid, settings, make_blueprint, progress=_tell_round, tell=_tell)

    return app


def _tell(line: str) -> None:
    """Print a line to the output of `flwr run`."""
    print(line, flush=True)


def _tell_round(progress: Progress) -> None:
    """Print a line for each round."""
    accuracy = "" if math.isnan(progress.accuracy) else f", accuracy {progress.accuracy:.1%}"
    _tell(f"{progress.phase}: {progress.rounds} rounds{accuracy}")


def serve_on_flower(
    grid: Grid,
    settings: Settings,
    make_blueprint: MakeBlueprint = blueprint,
    patience: Patience | None = None,
    progress: Callable[[Progress], None] | None = None,
    level: Level | None = None,
    tell: Tell = log.info,
    spec: Spec | None = None,
) -> list[str]:
    """Create or continue the run until all work is done; return the ids of the executed requests.

    Time limits and `spec` are those of the settings unless given. `level` is the minimum level of the certificates, by
    default that of each request.
    """
    folder = Path(settings.run)
    if spec is None:
        if not settings.spec:
            raise InputError("the app's config names no spec (a TOML file, see sifu init)")
        spec = load_spec(settings.spec)
    spec = settings.declared(spec)
    patience = replace(patience or settings.patience, wait=Wait.parse(spec.server.wait))
    registry = ClientRegistry(grid, settings, patience, spec, make_blueprint, tell)
    app, own = Path(settings.spec).parent, registry.own
    if settings.spec and (app / "pyproject.toml").exists() and folder.is_relative_to(app):
        log.warning(
            "the run folder %s lies in the app, and flwr run sends certificates and other files of it to every node: "
            "move it out of the app, and name the new place in the app's config",
            folder,
        )
    engine = registry.continue_run() if (folder / DATABASE).exists() else registry.begin_run()
    engine.show_checkpoints(ShownCheckpoint(folder))
    run = open_run(folder, engine=engine)
    run.engine()  # fail if the clients or the model differ from the run's
    if own is not None:
        engine.after_round = partial(own.after_round, tell) if own.evaluate_fn is not None else None
        engine.reporter, engine.evaluation_sample = own.reporter, own.evaluation_sample
    done = serve(
        run,
        engine,
        linger=settings.linger,
        lock_wait=settings.wait,
        level=level,
        progress=progress,
        tell=tell,
        after_mail=registry.update_keys,
        more_mail=registry.newcomer_waits,
    )
    if own is not None and own.save_model is not None:
        with run.reader() as reader:
            own.save_model(engine.record(released_model(reader)))
    return done
