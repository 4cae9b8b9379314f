"""Engines without a run folder, clients from a spec, and what a run's record says."""

from sifu.core.layout import ModelLayout, Vector
from sifu.core.method_info import METHOD_INFOS
from sifu.core.round import keyed_generator
from sifu.core.round_stream import RoundsWanted, stream_group_rounds
from sifu.core.spec import RIDGE, ModelSpec, StopSpec
from sifu.core.spec.run_spec import number_of_groups, rounds_apart
from sifu.core.spec.sections import GroupsSpec
from sifu.engines.sim import LocalTraining, SimulatedFederation
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.engines.sim.lanes import lane_engines
from sifu.requests.certification import solves
from sifu.run.clients_and_engine import (
    clients_from_spec,
    engine_from_spec,
    held_out_from_spec,
    known_outputs,
    preprocessing_of,
    takes_rows,
)
from sifu.run.devices import check_choice, on_device, why_no_gpu
from sifu.run.training import Progress, ProgressCallback
from sifu.store.files import room_to_write, sync_folder, write_atomically
from sifu.store.reader import RunReader

__all__ = [
    "METHOD_INFOS",
    "RIDGE",
    "ClosedFormFederation",
    "GroupsSpec",
    "LocalTraining",
    "ModelLayout",
    "ModelSpec",
    "Progress",
    "ProgressCallback",
    "RoundsWanted",
    "RunReader",
    "SimulatedFederation",
    "StopSpec",
    "Vector",
    "check_choice",
    "clients_from_spec",
    "engine_from_spec",
    "held_out_from_spec",
    "keyed_generator",
    "known_outputs",
    "lane_engines",
    "number_of_groups",
    "on_device",
    "preprocessing_of",
    "room_to_write",
    "rounds_apart",
    "solves",
    "stream_group_rounds",
    "sync_folder",
    "takes_rows",
    "why_no_gpu",
    "write_atomically",
]
