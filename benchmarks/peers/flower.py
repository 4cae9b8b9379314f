"""Flower's simulation: a ServerApp and a ClientApp on ray actors; `--threads` is the number of cores per actor."""

from __future__ import annotations

import logging
import os
import sys
import time

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers.contest import Stopwatch, at_the_actor, first_network, main, train_client
from peers.workloads import Workload

PULL_SECONDS = 0.002
"""Polling interval of the server in seconds; Flower's default of 0.1 s would be most of a round."""


def client_app(path: str, threads: int) -> ClientApp:
    """Return an app that trains the client of its partition with torch's SGD."""
    app = ClientApp()

    @app.query()
    def which(message: Message, context: Context) -> Message:
        partition = ConfigRecord({"partition": int(context.node_config["partition-id"])})
        return Message(RecordDict({"config": partition}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        workload, module = at_the_actor(path, threads)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        client, seen = int(context.node_config["partition-id"]), type(module).seen
        train_client(
            module, torch.from_numpy(workload.x[client]), torch.from_numpy(workload.y[client]), workload.setting
        )
        metrics = MetricRecord({"num-examples": len(workload.y[client]), "seen": type(module).seen - seen})
        return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def server_app(workload: Workload, watch: Stopwatch) -> ServerApp:
    """Return an app with scheduled clients and Flower's own FedAvg aggregation."""
    app = ServerApp()
    seen = 0
    watch.count_with(lambda: seen)

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        nonlocal seen
        grid.pull_interval = PULL_SECONDS
        while len(node_ids := list(grid.get_node_ids())) < workload.setting.clients:
            time.sleep(PULL_SECONDS)
        queries = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in node_ids]
        answers = list(grid.send_and_receive(queries))
        nodes = {int(answer.content["config"]["partition"]): answer.metadata.src_node_id for answer in answers}
        strategy, arrays = FedAvg(fraction_evaluate=0.0), ArrayRecord(first_network(workload).state_dict())
        while True:
            messages = [
                Message(RecordDict({"arrays": arrays}), dst_node_id=nodes[client], message_type="train")
                for client in workload.participants(watch.rounds)
            ]
            replies = list(grid.send_and_receive(messages))
            seen += sum(int(reply.content["metrics"]["seen"]) for reply in replies)
            arrays, _ = strategy.aggregate_train(watch.rounds + 1, replies)
            if not watch.round_done(lambda arrays=arrays: [value.numpy() for value in arrays.values()]):
                return

    return app


def run(workload: Workload, watch: Stopwatch, threads: int) -> None:
    """Run `run_simulation` on ray, with as many actors as cores allow."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cores = os.cpu_count() or 1
    run_simulation(
        server_app(workload, watch),
        client_app(os.path.abspath(sys.argv[1]), threads),
        workload.setting.clients,
        backend_config={
            "client_resources": {"num_cpus": threads, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "logging_level": logging.ERROR, "log_to_driver": False},
        },
    )


if __name__ == "__main__":
    main(run, ["flwr", "ray", "torch"])
