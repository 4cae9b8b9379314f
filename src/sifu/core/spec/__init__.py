"""The spec of a run: what is trained on what, and the promises it must be able to keep.

`sections` has a frozen dataclass for each section, whose fields carry their own comment; `run_spec` puts them together,
refuses what is wrong by the name of its key, and writes the file of `sifu init`.
"""

from sifu.core.spec.run_spec import Spec, commented_toml
from sifu.core.spec.sections import IMAGE_FEATURES, LINEAR_KINDS, DataSpec, ModelSpec, StopSpec

__all__ = ["IMAGE_FEATURES", "LINEAR_KINDS", "DataSpec", "ModelSpec", "Spec", "StopSpec", "commented_toml"]
