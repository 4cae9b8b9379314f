"""Tools to run exported graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def answers_of_the_graph(path: Path, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of a graph by name, from onnx's reference evaluator and, if installed, from a runtime.

    Inputs are converted to the types that the graph declares.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    graph = onnx.load(path)
    types = {
        entry.name: onnx.helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
        for entry in graph.graph.input
    }
    assert set(types) == set(inputs)
    fed = {name: np.asarray(values).astype(types[name]) for name, values in inputs.items()}
    names = [entry.name for entry in graph.graph.output]
    answers = [ReferenceEvaluator(graph).run(None, fed)]
    try:
        import onnxruntime
    except ModuleNotFoundError:
        pass
    else:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        answers.append(session.run(None, fed))
    return [dict(zip(names, answer, strict=True)) for answer in answers]


def description_in(path: Path) -> Any:
    """Return the description in the metadata of a graph."""
    import onnx

    return json.loads(next(entry.value for entry in onnx.load(path).metadata_props if entry.key == "sifu"))
