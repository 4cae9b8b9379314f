"""Spec of a run: the data, the model, its training, and the guarantees that requests need.

`sections` has a frozen dataclass for each section, with a comment for each field. `run_spec` combines the sections,
refuses invalid keys by name, and writes the file of `sifu init`.
"""

from sifu.core.spec.run_spec import Spec, commented_toml
from sifu.core.spec.sections import IMAGE_FEATURES, LINEAR_KINDS, DataSpec, ModelSpec, StopSpec

__all__ = ["IMAGE_FEATURES", "LINEAR_KINDS", "DataSpec", "ModelSpec", "Spec", "StopSpec", "commented_toml"]
